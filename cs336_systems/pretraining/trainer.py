"""The training run: steps, evaluations and checkpoints, from where the folder's newest checkpoint stands to the end.

    with joined("cuda") as rank:
        outcome = train(options, rank, RunConsole())

Every rank runs the same; the first keeps the log. Nothing in a step waits for the device: loss and norm are read when
the next step is queued (``deferred.py``), and a signal that one rank alone was sent is added up over the ranks in each
step and reaches all at the same one. A run that resumes is the run that was not interrupted: model, moments and the
place in the data are in the checkpoint, and the learning rate is a function of the step. Under caps on memory the step
is a streamed one (``capped.py``), and all the rest is the same.

Checkpoints are written while training goes on; one that is due while the one before is still being written waits for
that, and training with it. A run stops at the first step whose loss or gradient is not finite; no such step changes the
model. Ctrl-C, SIGTERM and a time limit end it after the step that runs, with a checkpoint.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.background_checkpoint import BackgroundSaver, Saved
from cs336_systems.distributed.checkpoint import resume_checkpoint
from cs336_systems.distributed.checkpoint_folder import locked, survey
from cs336_systems.distributed.peer_memory import mapped_bytes
from cs336_systems.distributed.process_group import Rank, on_rank_0
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.shards import wait_for_parameters
from cs336_systems.harness.memory import free_bytes
from cs336_systems.pretraining.agreement import Agreement, StoppedWaiting
from cs336_systems.pretraining.capped import CappedStep, planned_segments
from cs336_systems.pretraining.choice import Choice
from cs336_systems.pretraining.deferred import Deferred, Done
from cs336_systems.pretraining.loader import Sequences, evaluate
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import PreparedRun, introduction, predicted_segments, prepare, read_gpu_state
from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog, Sink, TensorBoard, WeightsAndBiases, read_run
from cs336_systems.pretraining.run_records import (
    Data,
    End,
    Evaluation,
    LoggedCheckpoint,
    LoggedStep,
    Memory,
    Session,
    changed_options,
)
from cs336_systems.pretraining.stop_requests import REASONS, StopRequests

NO_GAIN = "no gain"
"""The reason to end a run whose held-out loss does not fall any more, which all ranks know by themselves."""

_VALUES = ("loss", "norm", *REASONS)
"""Values of each step, read a step late; a reason to stop is the number of ranks that have it."""

_GPU_EVERY = 10
"""Steps between two looks at the GPU's state: some answers of NVML take a millisecond."""

_COPIES = 0.8
"""The share of free host memory that copies of checkpoints may take."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run, or of the part of it that this process has made.

    Attributes:
        steps: steps that were made, earlier processes included.
        reason: done, no gain, walltime, terminated or interrupted.
        complaint: why the last checkpoint could not be written.
        best_step: that of the checkpoint with the lowest held-out loss, if it was kept.
    """

    folder: Path
    first_step: int
    steps: int
    reason: str
    complaint: str | None
    best_step: int | None = None


class NonFiniteStep(RuntimeError):
    """A loss or a gradient is NaN or inf; the model is as it was before the step."""


class RankAlone(ValueError):
    """A fault of one rank's data, of which the others know nothing."""


def train(options: TrainOptions, rank: Rank, *sinks: Sink, agreement: Agreement | None = None) -> Outcome:
    """Make the steps that are still to be made; a collective.

    Args:
        sinks: to which the first rank tells what it also writes to the log.
        agreement: how this world of ranks trains one model with others; by default there are none.

    Raises:
        ValueError: options, data, folder, weights or device do not serve, or the run has made more steps already; one
            sentence, before anything is changed.
            From a run under way: its data hold an id that is no token; the steps before it are saved.
        RankAlone: the same where there are several ranks, on one of them; steps since the last checkpoint are lost.
        OSError: something cannot be read, or the log not be written.
        NonFiniteStep: a loss or a gradient is not finite; checkpoints are as they were.
    """
    ends_at = None if options.walltime is None else time.monotonic() + options.walltime
    return run_prepared(prepare(options, rank), rank, *sinks, ends_at=ends_at, agreement=agreement)


def run_prepared(
    prepared: PreparedRun,
    rank: Rank,
    *sinks: Sink,
    ends_at: float | None = None,
    agreement: Agreement | None = None,
) -> Outcome:
    """``train`` for a run that is prepared, for callers that look at its model afterwards.

    Args:
        ends_at: when to save and end, by ``time.monotonic``.
    """
    agreement = agreement or Agreement()
    with ExitStack() as stack:
        stack.enter_context(prepared.loader)
        passed_over: list[str] = []
        stack.callback(agreement.leave)
        made, best, found = _resume(prepared, passed_over.append)
        stop = agreement.stop = stack.enter_context(StopRequests(ends_at))
        try:
            first_step = agreement.join(prepared, made)
        except StoppedWaiting:
            assert stop.asked is not None
            return Outcome(prepared.options.out, made, made, stop.asked, None)
        log = stack.enter_context(_open_log(prepared, first_step, agreement.folder(prepared.options.out), sinks, found))
        for sentence in passed_over:
            log.say(sentence, "warning")
        for record in introduction(prepared, rank):
            log.write(record)
        step, options = prepared.step, prepared.options
        keep: dict[str, Any] = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        saver = stack.enter_context(BackgroundSaver(options.out, step.model, step.optimizer, **keep))
        stack.callback(gc.unfreeze)  # also objects that the caller has frozen
        return _Run(prepared, rank, log, saver, first_step, best, agreement).to_the_end(stop)


@dataclass
class _Best:
    """The lowest held-out loss so far, after how many steps, and the evaluations since."""

    loss: float = math.inf
    step: int | None = None
    n_since: int = 0

    def look(self, step: int, loss: float) -> None:
        if loss < self.loss:
            self.loss, self.step, self.n_since = loss, step, 0
        else:
            self.n_since += 1


def _resume(prepared: PreparedRun, tell: Callable[[str], None]) -> tuple[int, _Best, Path | None]:
    """Take up the newest checkpoint that is whole; returns the steps that it has made, 0 if there is none, and it."""
    step, options = prepared.step, prepared.options
    groups: list[dict[str, Any]] = step.optimizer.param_groups
    asked = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    found = resume_checkpoint(prepared.origin, step.model, step.optimizer, tell=tell)
    if found is None:
        return 0, _Best(), None
    if found.step > prepared.n_steps:
        raise ValueError(f"{found.path} has made more than the {prepared.n_steps:,} steps that the run is to have")
    for group, hyperparameters in zip(step.optimizer.param_groups, asked, strict=True):
        group.update(hyperparameters)  # as this command has them, not the one that saved
    prepared.loader.load_state_dict(found.extra["loader"])
    if prepared.origin != options.out:  # whose best checkpoint is not in this run's folder
        return found.step, _Best(), found.path
    return found.step, _Best(**found.extra.get("best", {})), found.path


def _open_log(
    prepared: PreparedRun, first_step: int, folder: Path, sinks: Sequence[Sink], found: Path | None
) -> RunLog:
    """The first rank's log, begun; other ranks' log goes nowhere; a collective, as it may fail there.

    Args:
        found: the checkpoint that the run has taken up.
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
    """A sentence on what changes in a run whose steps had ``before`` tokens, and how to keep it."""
    options, n_data = prepared.options, prepared.options.data_ranks(prepared.case.world_size)
    epochs = prepared.loader.epochs_after(prepared.n_steps - first_step)
    was = f"a step has {prepared.tokens_per_step:,} tokens now and had {before:,} before step {first_step:,}"
    now = f"the {prepared.n_steps:,} steps of the run are {epochs:.2f} epochs"
    rows, rest = divmod(before, options.context_length * n_data)
    if rest:
        return f"{was}: {now}; {before:,} cannot be divided over {n_data} ranks"
    return f"{was}: {now}; --total-batch-tokens {before} --batch-size {math.gcd(rows, options.batch_size)} keeps them"


class _Run:
    """A run under way."""

    def __init__(
        self,
        prepared: PreparedRun,
        rank: Rank,
        log: RunLog,
        saver: BackgroundSaver,
        first_step: int,
        best: _Best,
        agreement: Agreement,
    ) -> None:
        self._prepared, self._rank, self._log, self._saver = prepared, rank, log, saver
        self._agreement = agreement
        self._tokens: dict[int, int] = {}  # of steps that are not told yet
        self._due: set[str] = set()
        self._options, self._step = prepared.options, prepared.step
        self._best = best
        self._first_step = self._made = self._saved_step = first_step
        self._copies = prepared.options.save_every is not None  # before they are written
        self._complaint: str | None = None
        self._gpu_speaks = rank.rank == 0 and rank.device.type == "cuda"
        self._no_reason = torch.zeros(len(REASONS), device=rank.device)
        # A step's exchange of reasons to stop would otherwise come after its gathers of weights on NCCL's stream, and
        # whoever waits for it wait for these. Before the step it comes after those of the step before.
        self._sends_under_forward = rank.world_size > 1 and isinstance(prepared.step.optimizer, ShardedOptimizer)
        self._sends_under_forward |= agreement.on  # which tells the other worlds in the step
        self._reason: str | None = None  # to end, as all ranks know it

    def to_the_end(self, stop: StopRequests) -> Outcome:
        """Make the steps that are left, unless there is a reason to stop; raises as ``train``."""
        deferred = Deferred(self._rank.device, _VALUES)
        try:
            if self._made == 0 and self._agreement.first and self._prepared.evaluation is not None:
                self._evaluate(self._prepared.evaluation)
            while self._made < self._prepared.n_steps and self._reason is None:
                queued = self._queue_step(stop, deferred)
                self._tell_of_worlds()
                if queued is None:
                    continue
                self._tell(deferred.push(*queued), self._made - 1)
                if self._agreement.on and self._agreement.at_average:
                    self._tell(deferred.flush(), self._made)  # all worlds stop at one step
                self._look_at_memory()
                self._tell_saves(self._saver.finished())
                self._look_at_gpu()
                self._made = self._agreement.end(self._made)
                self._evaluate_and_save(deferred)
        except StoppedWaiting as error:
            self._reason = stop.asked
            self._log.say(str(error), "warning")
            self._save_alone()
        except NonFiniteStep as error:
            self._fail(error)
            raise
        except ValueError as error:  # of the data: tokens that no step has seen
            if self._agreement.on:
                self._fail(error)
                raise
            if self._rank.world_size > 1:
                self._fail(error)
                raise RankAlone(f"rank {self._rank.rank}: {error}") from error
            self._tell(deferred.flush(), self._made - 1)
            if self._options.save_every is not None and self._made > self._saved_step:
                self._save()
            self._fail(error)
            raise
        self._tell_saves(self._saver.wait())
        wait_for_parameters(self._step.model)  # for callers that look at them
        if isinstance(self._step, CappedStep) and (passed := self._step.passed()):
            self._log.say(passed, "warning")
        reason = self._reason if self._made < self._prepared.n_steps and self._reason else "done"
        self._log.write(End(self._made, reason))
        best = self._best.step if self._options.keep_best else None
        return Outcome(self._options.out, self._first_step, self._made, reason, self._complaint, best)

    def _fail(self, error: Exception) -> None:
        """Log why and where the run ends."""
        self._tell_saves(self._saver.wait())
        self._log.say(str(error), "error")
        self._log.write(End(self._made, "failed"))

    def _tell_of_worlds(self) -> None:
        for record in self._agreement.told():
            self._log.write(record)
        if self._agreement.hopeless:
            raise NonFiniteStep(self._agreement.hopeless)

    def _queue_step(self, stop: StopRequests, deferred: Deferred) -> list[Tensor] | None:
        """Give the device one step; returns ``_VALUES``, or None if the step does not count."""
        self._made = self._agreement.begin(self._made)
        if self._made >= self._prepared.n_steps:  # with the state of others
            return None
        rate = self._prepared.rate(self._made)
        for group in self._step.optimizer.param_groups:
            group["lr"] = rate
        batch = [self._prepared.own(each) for each in next(self._prepared.loader)]
        deferred.begin()
        before = self._exchange_reasons(stop) if self._sends_under_forward else None
        if before is not None and self._agreement.on:
            if before[1] is not None:
                before[1].wait()
            self._agreement.reasons = before[0]
        self._step(*batch)
        if not self._agreement.kept:
            return None
        if self._made == self._first_step:
            # Python's collector looks at later objects alone from here on. Most objects are of modules and stay, and
            # going through them takes 0.1 to 0.3 s in some step: longer than the host is ahead of a GPU.
            gc.collect()
            gc.freeze()
        reasons, exchange = before or self._exchange_reasons(stop)
        if self._agreement.on:
            reasons = self._agreement.reasons
        elif exchange is not None:
            exchange.wait()
        tokens = self._prepared.tokens_per_step // self._options.worlds
        self._tokens[self._made] = tokens * self._agreement.n_there
        guard = self._step.guard
        assert guard is not None and guard.loss is not None and guard.norm is not None
        return [guard.loss, guard.norm, *reasons]

    def _exchange_reasons(self, stop: StopRequests) -> tuple[Tensor, dist.Work | None]:
        """How many ranks have each of ``REASONS``, (n,), once the exchange is done, if there is one."""
        reasons, asked = self._no_reason, stop.asked
        if asked is not None:
            reasons = torch.tensor([float(reason == asked) for reason in REASONS], device=self._rank.device)
        if self._rank.world_size == 1:
            return reasons, None
        reasons = reasons.clone()
        return reasons, dist.all_reduce(reasons, async_op=True)

    def _look_at_memory(self) -> None:
        """Log the device's memory in the second step, the first with all states in place: the host knows it once that
        is queued. Reserve host memory for copies of these states."""
        if self._made == self._first_step and self._options.save_every is not None:
            budget = int(_COPIES * free_bytes(torch.device("cpu"))) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            if isinstance(self._step, CappedStep):
                budget = min(budget, self._step.choice.spare_host_bytes)
            if short := self._saver.reserve(budget):
                self._copies = False
                self._log.say(f"{short}: training will wait for checkpoints to be written", "warning")
        if isinstance(self._step, CappedStep):
            if self._made == self._first_step + 1:
                planned = planned_segments(self._step.choice, copies=self._copies)
                self._log.write(Memory(planned, self._step.in_use()))
        elif self._rank.device.type == "cpu":
            return
        elif self._made == self._first_step:
            torch.cuda.reset_peak_memory_stats(self._rank.device)
        elif self._made == self._first_step + 1:
            free, total = torch.cuda.mem_get_info(self._rank.device)
            peak = torch.cuda.max_memory_allocated(self._rank.device) + mapped_bytes(self._rank.device)
            planned = predicted_segments(self._prepared.case, total)
            self._log.write(Memory(planned, {"in all": peak, "free": free}))

    def _look_at_gpu(self) -> None:
        """Log the first rank's GPU beside every tenth step, which has been queued; a reading that fails is the last."""
        if not self._gpu_speaks or self._made % _GPU_EVERY:
            return
        import pynvml

        try:
            self._log.write(read_gpu_state(self._made, self._rank.device))
        except pynvml.NVMLError as error:
            self._log.say(f"the GPU's state is not in this log: {error}", "warning")
            self._gpu_speaks = False

    def _tell(self, done: Done | None, step: int) -> None:
        """Log a step that is done, and learn from it whether to stop; raises NonFiniteStep."""
        if done is None:
            return
        loss, norm = done.values["loss"], done.values["norm"]
        rate, tokens = self._prepared.rate(step), self._tokens.pop(step)
        self._log.write(LoggedStep(step, done.seconds, tokens, loss, norm, rate, done.around_seconds))
        self._reason = next((reason for reason in reversed(REASONS) if done.values[reason]), self._reason)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._made = step
            raise NonFiniteStep(f"step {step}: loss {loss:g}, norm {norm:g}: the model is as it was before")

    def _evaluate_and_save(self, deferred: Deferred) -> None:
        """Do what is due after this step; only then the host waits for the device."""
        options, done = self._options, self._made == self._prepared.n_steps
        for what, every in (("evaluation", options.evaluate_every), ("checkpoint", options.save_every)):
            if every is not None and (done or self._made % every == 0):
                self._due.add(what)
        if not self._agreement.at_average or not (self._due or done or self._reason is not None):
            return
        self._tell(deferred.flush(), self._made - 1)
        evaluates, saves = ("evaluation" in self._due, "checkpoint" in self._due)
        self._due.clear()
        if not self._agreement.first:  # which does it for all
            return
        if evaluates and self._prepared.evaluation is not None:
            self._evaluate(self._prepared.evaluation)
            saves = saves or (options.keep_best and self._best.step == self._made)
        if saves or (options.save_every is not None and self._reason is not None):
            self._save()
        deferred.restart()

    def _evaluate(self, sequences: Sequences) -> None:
        """Log the held-out loss; decide whether it is the best, and whether to go on."""
        began, batch = time.perf_counter(), self._prepared.evaluation_batch
        shared = self._options.evaluation_sequences, self._prepared.own, self._prepared.place
        with self._agreement.common_weights():
            found = {
                name: evaluate(self._step, part, self._rank, batch, *shared) for name, part in sequences.parts.items()
            }
        loss = sequences.mean({name: one for name, (one, _) in found.items()})
        tokens = sum(n for _, n in found.values())
        by_source = {}
        if len(found) > 1:
            epochs = self._prepared.loader.epochs()
            by_source = {name: {"loss": one, "epochs": epochs[name]} for name, (one, _) in found.items()}
        self._log.write(Evaluation(self._made, loss, tokens, time.perf_counter() - began, by_source))
        if self._made == 0:
            return  # of which there is no checkpoint
        self._best.look(self._made, loss)
        limit = self._options.stop_after_no_gain
        if limit is not None and self._best.n_since >= limit and self._reason is None:
            self._reason = NO_GAIN

    def _save(self) -> None:
        """Begin to write a checkpoint; if that fails, training goes on with the older ones."""
        extra: dict[str, Any] = {"loader": self._prepared.loader.state_dict()}
        if isinstance(self._step, CappedStep):
            extra["chunking"] = asdict(self._step.chunking)
        if isinstance(chosen := self._prepared.chosen, Choice):
            extra["chosen"] = chosen.saved
        extra["best"] = asdict(self._best)
        with self._agreement.saving():
            self._saver.save(self._made, extra, self._best.step if self._options.keep_best else None)
        self._saved_step = self._made
        self._tell_saves(self._saver.finished())

    def _save_alone(self) -> None:
        """Save where other worlds do not come, unless another that waits in vain has saved the same step by then."""
        if self._options.save_every is None or not self._agreement.at_average:
            return
        with ExitStack() as claim:

            def is_missing() -> bool:
                folder = claim.enter_context(locked(self._options.out))
                return all(stored.step != self._made for stored in survey(folder)[0])

            if on_rank_0(is_missing):
                self._save()
                self._tell_saves(self._saver.wait())

    def _tell_saves(self, saves: Sequence[Saved]) -> None:
        for one in saves:
            if one.path is None:
                self._complaint = f"no checkpoint of step {one.step}: {one.error}"
                self._log.say(self._complaint, "error")
                continue
            self._complaint = None
            self._log.write(LoggedCheckpoint(one.step, one.n_bytes, one.stall_seconds, one.seconds, one.waited_seconds))
