"""The beginning of a training session: load the newest checkpoint, open the log, report what differs from before."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cs336_systems.distributed.checkpoint import resume_checkpoint
from cs336_systems.distributed.process_group import on_rank_0
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import PreparedRun
from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog, Sink, TensorBoard, WeightsAndBiases, read_run
from cs336_systems.pretraining.run_records import Data, Session, changed_options


@dataclass
class Best:
    """The lowest held-out loss so far, the step that had it, and the number of evaluations since."""

    loss: float = math.inf
    step: int | None = None
    n_since: int = 0

    def look(self, step: int, loss: float) -> None:
        if loss < self.loss:
            self.loss, self.step, self.n_since = loss, step, 0
        else:
            self.n_since += 1


def resume(prepared: PreparedRun, tell: Callable[[str], None]) -> tuple[int, Best, Path | None]:
    """Load the newest complete checkpoint; a collective.

    Args:
        tell: called with a sentence about each checkpoint that is skipped.

    Returns:
        The number of steps made, the best evaluation so far, and the checkpoint's folder; 0, none and None without one.

    Raises:
        ValueError: it has made more steps than the run is to have.
    """
    step, options = prepared.step, prepared.options
    groups: list[dict[str, Any]] = step.optimizer.param_groups
    asked = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    found = resume_checkpoint(prepared.origin, step.model, step.optimizer, tell=tell)
    if found is None:
        return 0, Best(), None
    if found.step > prepared.n_steps:
        raise ValueError(f"{found.path} has made more than the {prepared.n_steps:,} steps that the run is to have")
    for group, hyperparameters in zip(step.optimizer.param_groups, asked, strict=True):
        group.update(hyperparameters)  # this command's, not those of the one that saved
    prepared.loader.load_state_dict(found.extra["loader"])
    if prepared.origin != options.out:  # the best checkpoint is not in this run's folder
        return found.step, Best(), found.path
    return found.step, Best(**found.extra.get("best", {})), found.path


def open_log(prepared: PreparedRun, first_step: int, folder: Path, sinks: Sequence[Sink], found: Path | None) -> RunLog:
    """Open the log and write the session's first records; a collective. Only the first rank writes.

    Args:
        folder: the folder of the log.
        found: the checkpoint that the run resumes.
    """
    options, foreign = prepared.options, found is not None and prepared.origin != prepared.options.out
    logs, path = [RunLog()], folder / LOG
    asked = Session(asdict(options), asdict(TrainOptions.default(options.device)), prepared.n_steps, first_step)

    def open_it() -> None:
        earlier = found.parent / LOG if found is not None and foreign else path
        run = read_run(earlier) if earlier.exists() else None
        before = run.last(Session) if run and first_step else None
        data = run.last(Data) if run and first_step else None
        trackers: list[Sink] = [TensorBoard(folder, first_step)] if options.tensorboard else []
        if options.wandb is not None:
            trackers.append(WeightsAndBiases(folder, options.wandb, resume=first_step > 0))
        log = RunLog(LogFile(path), *sinks, *trackers)
        try:
            log.write(asked)
            if foreign:
                log.say(f"goes on from {found}")
            asked_before = before.options.get("resume_from") if before is not None else None
            if options.resume_from is not None and not foreign and str(options.resume_from) != asked_before:
                passed = f"--resume-from {options.resume_from} is passed over"
                log.say(f"{passed}: --out {options.out} has checkpoints of its own, and {found} is taken up", "warning")
            if before is not None and (changes := changed_options(before, asked)):
                log.say(f"unlike the session before: {changes}")
            if data is not None and data.tokens_per_step != prepared.tokens_per_step:
                log.say(_other_batch(data.tokens_per_step, prepared, first_step), "warning")
        except OSError:
            log.close()
            raise
        logs[0] = log

    on_rank_0(open_it)
    return logs[0]


def _other_batch(before: int, prepared: PreparedRun, first_step: int) -> str:
    """Return a warning that steps had ``before`` tokens until now, and the options that keep them."""
    options = prepared.options
    n_data = options.data_ranks(prepared.case.world_size) * options.worlds
    epochs = prepared.loader.epochs_after(prepared.n_steps - first_step)
    was = f"a step has {prepared.tokens_per_step:,} tokens now and had {before:,} before step {first_step:,}"
    now = f"the {prepared.n_steps:,} steps of the run are {epochs:.2f} epochs"
    rows, rest = divmod(before, options.context_length * n_data)
    if rest:
        return f"{was}: {now}; {before:,} cannot be divided over {n_data} ranks"
    return f"{was}: {now}; --total-batch-tokens {before} --batch-size {math.gcd(rows, options.batch_size)} keeps them"
