"""The training run: steps, evaluations and checkpoints, from where the folder's newest checkpoint stands to the end.

    with joined("cuda") as rank:
        outcome = train(options, rank, RunConsole())

Every rank runs the same; the first keeps the log. Nothing in a step waits for the device: loss and norm are read when
the next step is queued (``deferred.py``), and a signal that one rank alone was sent is added up over the ranks in each
step and reaches all at the same one. A run that resumes is the run that was not interrupted: model, moments and the
place in the data are in the checkpoint, and the learning rate is a function of the step. Under caps on memory the step
is a streamed one (``capped.py``), and all the rest is the same.

    runs/first/
      log.jsonl                 the run's records (``run_records.py``)
      run.json, tokenizer.json  the model that is trained (``checkpoint.py``)
      step-00000200/            checkpoints (``distributed/checkpoint.py``)

Checkpoints are written while training goes on. One that is due while the one before is still being written waits for
that, and training with it: no checkpoint that was asked for is left out.

A run stops at the first step whose loss or gradient is not finite; no such step changes the model.
"""

import gc
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.distributed.arrivals import wait_for_parameters
from cs336_systems.distributed.background_checkpoint import BackgroundSaver, Saved
from cs336_systems.distributed.checkpoint import resume_checkpoint
from cs336_systems.distributed.process_group import Rank, on_rank_0
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.memory import free_bytes
from cs336_systems.pretraining.capped import CappedStep
from cs336_systems.pretraining.deferred import Deferred, Done
from cs336_systems.pretraining.evaluation import evaluate
from cs336_systems.pretraining.memory import actual_segments, planned_segments, predicted_segments
from cs336_systems.pretraining.nonfinite import NonFiniteStep, find_nonfinite, losses_of_ranks
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.preparation import PreparedRun, describe_device, prepare
from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog, Sink, read_run
from cs336_systems.pretraining.run_records import (
    Data,
    End,
    Evaluation,
    Light,
    LoggedCheckpoint,
    LoggedStep,
    Memory,
    Model,
    Session,
    changed_options,
)
from cs336_systems.pretraining.samplers import GpuSampler, QuantizationSampler
from cs336_systems.pretraining.signals import REASONS, StopRequests
from cs336_systems.pretraining.trackers import trackers_of

_VALUES = ("loss", "norm", *REASONS)
"""Values of each step, read a step late; a reason to stop is the number of ranks that have it."""

_LONG_WAIT_S = 1.0
"""Seconds of a save's wait for the save before from which on the log warns."""

_COPIES = 0.8
"""The share of free host memory that copies of checkpoints may take."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run, or of the part of it that this process has made.

    Attributes:
        steps: steps that were made, earlier processes included.
        reason: done, walltime, terminated or interrupted.
        complaint: why the last checkpoint could not be written.
    """

    folder: Path
    first_step: int
    steps: int
    reason: str
    complaint: str | None


class RankAlone(ValueError):
    """A fault of one rank's data, of which the others know nothing."""


def train(options: TrainOptions, rank: Rank, *sinks: Sink) -> Outcome:
    """Make the steps that are still to be made; a collective.

    Args:
        sinks: to which the first rank tells what it also writes to the log.

    Raises:
        ValueError: options, data, folder, weights or device do not serve, or the run has made more steps already; one
            sentence, before anything is changed.
            From a run under way: its data hold an id that is no token; the steps before it are saved.
        RankAlone: the same where there are several ranks, on one of them; steps since the last checkpoint are lost.
        OSError: something cannot be read, or the log not be written.
        NoneWhole: the folder has checkpoints, all of them damaged.
        NonFiniteStep: a loss or a gradient is not finite; checkpoints are as they were.
    """
    ends_at = None if options.walltime is None else time.monotonic() + options.walltime
    return run_prepared(prepare(options, rank), rank, *sinks, ends_at=ends_at)


def run_prepared(prepared: PreparedRun, rank: Rank, *sinks: Sink, ends_at: float | None = None) -> Outcome:
    """``train`` for a run that is prepared, for callers that look at its model afterwards.

    Args:
        ends_at: when to save and end, by ``time.monotonic``.
    """
    with ExitStack() as stack:
        stack.enter_context(prepared.loader)
        passed_over: list[str] = []
        first_step = _resume(prepared, passed_over.append)
        log = stack.enter_context(_open_log(prepared, first_step, sinks))
        for sentence in passed_over:
            log.say(sentence, "warning")
        _introduce(prepared, rank, log, first_step)
        stop = stack.enter_context(StopRequests(ends_at))
        sampled = rank.device if rank.rank == 0 else torch.device("cpu")  # which has no state to log
        gpu = stack.enter_context(GpuSampler(log, sampled))
        step, options = prepared.step, prepared.options
        keep: dict[str, Any] = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        saver = stack.enter_context(BackgroundSaver(options.out, step.model, step.optimizer, **keep))
        stack.callback(gc.unfreeze)  # also objects that the caller has frozen
        return _Run(prepared, rank, log, saver, first_step).to_the_end(stop, gpu)


def _resume(prepared: PreparedRun, tell: Callable[[str], None]) -> int:
    """Take up the newest checkpoint that is whole; returns the steps that it has made, 0 if there is none."""
    step, options = prepared.step, prepared.options
    groups: list[dict[str, Any]] = step.optimizer.param_groups
    asked = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    found = resume_checkpoint(options.out, step.model, step.optimizer, tell=tell)
    if found is None:
        return 0
    if found.step > prepared.n_steps:
        raise ValueError(f"{found.path} has made more than the {prepared.n_steps:,} steps that the run is to have")
    for group, hyperparameters in zip(step.optimizer.param_groups, asked, strict=True):
        group.update(hyperparameters)  # as this command has them, not the one that saved
    prepared.loader.load_state_dict(found.extra["loader"])
    return found.step


def _open_log(prepared: PreparedRun, first_step: int, sinks: Sequence[Sink]) -> RunLog:
    """The first rank's log, begun; other ranks' log goes nowhere; a collective, as it may fail there."""
    options = prepared.options
    logs, path = [RunLog()], options.out / LOG
    asked = Session(asdict(options), asdict(TrainOptions.default(options.device)), prepared.n_steps, first_step)

    def open_it() -> None:
        run = read_run(path) if path.exists() else None
        earlier = [step for step in (run.all(LoggedStep) if run else ()) if step.step < first_step]
        before = run.last(Session) if run and first_step else None
        data = run.last(Data) if run and first_step else None
        trackers = list(trackers_of(options, first_step))
        log = RunLog(LogFile.open(path, resume=True), *sinks, *trackers, earlier=earlier)
        try:
            log.write(asked)
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
    options, world_size = prepared.options, prepared.case.world_size
    epochs = prepared.loader.epochs_after(prepared.n_steps - first_step)
    was = f"a step has {prepared.tokens_per_step:,} tokens now and had {before:,} before step {first_step:,}"
    now = f"the {prepared.n_steps:,} steps of the run are {epochs:.2f} epochs"
    rows, rest = divmod(before, options.context_length * world_size)
    if rest:
        return f"{was}: {now}; {before:,} cannot be divided over {world_size} ranks"
    return f"{was}: {now}; --total-batch-tokens {before} --batch-size {math.gcd(rows, options.batch_size)} keeps them"


def _introduce(prepared: PreparedRun, rank: Rank, log: RunLog, first_step: int) -> None:
    """Log device, model, data, memory and speed of light."""
    options, config, dataset = prepared.options, prepared.config, prepared.dataset
    device = describe_device(rank)
    log.write(device)
    if options.zero and rank.world_size == 1:
        log.say(f"--zero {options.zero} shards nothing on one rank: torchrun starts several", "warning")
    log.write(Model(config.name, config.n_parameters, config.context_length))
    split, tokenizer = dataset.manifest["splits"], dataset.manifest["tokenizer"]
    held_out = split["evaluation"]["tokens"] if "evaluation" in split else 0
    described = (str(dataset.folder), dataset.manifest["corpus"], tokenizer["name"], dataset.vocab_size)
    log.write(Data(*described, split["train"]["tokens"], held_out, prepared.tokens_per_step))
    dtype, recipe, hardware = prepared.step.precision.matmul_dtype, prepared.case.recipe, find_hardware(device.name)
    how: dict[str, Any] = {"dtype": dtype, "block_dtype": "fp8" if recipe.quantized else dtype}
    how |= {"n_stored_blocks": recipe.n_skipped, "n_devices": rank.world_size}
    light = speed_of_light(config, options.context_length, hardware, **how)
    if isinstance(prepared.step, CappedStep):
        log.write(Memory(planned_segments(prepared.step.choice, copies=options.save_every is not None)))
        for sentence in prepared.step.explanation():
            log.say(sentence)
    else:
        log.write(Memory(predicted_segments(prepared.case, device.memory_bytes)))
    parts = {name: asdict(part) for name, part in light.parts.items()}
    log.write(Light(parts, light.seconds_per_token))


def _freeze_objects() -> None:
    """Let Python's collector look at later objects alone, until ``gc.unfreeze``.

    Most objects are of modules and stay, and going through all of them takes 0.1 to 0.3 s in the middle of some step:
    longer than the host is ahead of a GPU. Ranks then wait for each other's, too (profiles/distributed.md).
    """
    gc.collect()
    gc.freeze()


class _Run:
    """A run under way."""

    def __init__(self, prepared: PreparedRun, rank: Rank, log: RunLog, saver: BackgroundSaver, first_step: int) -> None:
        self._prepared, self._rank, self._log, self._saver = prepared, rank, log, saver
        self._options, self._step = prepared.options, prepared.step
        self._first_step = self._made = self._saved_step = first_step
        self._copies = prepared.options.save_every is not None
        """Whether checkpoints are copied before they are written."""
        self._complaint: str | None = None
        self._recent: deque[tuple[int, tuple[Tensor, Tensor], Tensor]] = deque(maxlen=2)
        """Steps with their batches and this rank's losses."""
        every = prepared.options.quantization_every if rank.rank == 0 else None
        self._quantization = QuantizationSampler(log, prepared.step.model, every)
        self._no_reason = torch.zeros(len(REASONS), device=rank.device)
        # A step's exchange of reasons to stop would otherwise come after its gathers of weights on NCCL's stream, and
        # whoever waits for it wait for these. Before the step it comes after those of the step before.
        self._sends_under_forward = rank.world_size > 1 and isinstance(prepared.step.optimizer, ShardedOptimizer)
        self._reason: str | None = None
        """Why to end, as all ranks know it."""

    def to_the_end(self, stop: StopRequests, gpu: GpuSampler) -> Outcome:
        """Make the steps that are left, unless there is a reason to stop; raises as ``train``."""
        deferred = Deferred(self._rank.device, _VALUES)
        try:
            while self._made < self._prepared.n_steps and self._reason is None:
                self._tell(deferred.push(*self._queue_step(stop, deferred)), self._made - 1)
                self._look_at_memory()
                self._tell_saves(self._saver.finished())
                gpu.step(self._made)
                self._made += 1
                if self._pauses():
                    self._tell(deferred.flush(), self._made - 1)
                    self._evaluate_or_save()
                    deferred.restart()
        except NonFiniteStep as error:
            self._fail(error)
            raise
        except ValueError as error:  # of the data: tokens that no step has seen
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
        return Outcome(self._options.out, self._first_step, self._made, reason, self._complaint)

    def _fail(self, error: Exception) -> None:
        """Log why and where the run ends."""
        self._tell_saves(self._saver.wait())
        self._log.say(str(error), "error")
        self._log.write(End(self._made, "failed"))

    def _queue_step(self, stop: StopRequests, deferred: Deferred) -> list[Tensor]:
        """Give the device one step; returns ``_VALUES``."""
        rate = self._prepared.rate(self._made)
        for group in self._step.optimizer.param_groups:
            group["lr"] = rate
        batch = next(self._prepared.loader)
        deferred.begin()
        before = self._exchange_reasons(stop) if self._sends_under_forward else None
        with self._quantization.step(self._made):
            loss = self._step(*batch)
        if self._made == self._first_step:
            _freeze_objects()
        self._recent.append((self._made, batch, loss))
        reasons, exchange = before or self._exchange_reasons(stop)
        if exchange is not None:
            exchange.wait()
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
            return
        if self._rank.device.type != "cuda":
            return
        if self._made == self._first_step:
            torch.cuda.reset_peak_memory_stats(self._rank.device)
        elif self._made == self._first_step + 1:
            total = torch.cuda.get_device_properties(self._rank.device).total_memory
            predicted = predicted_segments(self._prepared.case, total)
            self._log.write(Memory(predicted, actual_segments(self._step, predicted, total)))

    def _tell(self, done: Done | None, step: int) -> None:
        """Log a step that is done, and learn from it whether to stop; raises NonFiniteStep."""
        if done is None:
            return
        loss, norm = done.values["loss"], done.values["norm"]
        rate, tokens = self._prepared.rate(step), self._prepared.tokens_per_step
        self._log.write(LoggedStep(step, done.seconds, tokens, loss, norm, rate, done.around_seconds))
        self._quantization.tell(step)
        self._reason = next((reason for reason in reversed(REASONS) if done.values[reason]), self._reason)
        if math.isfinite(loss) and math.isfinite(norm):
            return
        if self._options.skip_nonfinite:
            self._log.say(f"step {step}: loss {loss:g}, norm {norm:g}: it changed nothing", "warning")
            return
        batch, own_loss = next((batch, own) for n, batch, own in self._recent if n == step)
        what = f"step {step}: loss {loss:g}{losses_of_ranks(own_loss)}, norm {norm:g}"
        where = find_nonfinite(self._step, *batch)
        self._made = step
        raise NonFiniteStep(f"{what}; the first tensor that is not finite is {where}; --skip-nonfinite passes over it")

    def _pauses(self) -> bool:
        """Whether the run evaluates or saves now: the host may wait for the device then."""
        ends = self._made == self._prepared.n_steps or self._reason is not None
        return ends or self._is_due(self._options.evaluate_every) or self._is_due(self._options.save_every)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self._made % every == 0

    def _evaluate_or_save(self) -> None:
        done = self._made == self._prepared.n_steps
        if self._prepared.evaluation is not None and (done or self._is_due(self._options.evaluate_every)):
            self._evaluate()
        ends = done or self._reason is not None
        if self._options.save_every is not None and (ends or self._is_due(self._options.save_every)):
            self._save()

    def _evaluate(self) -> None:
        prepared, limit = self._prepared, self._options.evaluation_sequences
        assert prepared.evaluation is not None
        clock = Deferred(self._rank.device, ("loss",))
        loss, tokens = evaluate(self._step, prepared.evaluation, self._rank, prepared.evaluation_batch, limit)
        clock.push(torch.tensor(loss))
        done = clock.flush()
        assert done is not None
        self._log.write(Evaluation(self._made, loss, tokens, done.seconds))

    def _save(self) -> None:
        """Begin to write a checkpoint; if that fails, training goes on with the older ones."""
        extra: dict[str, Any] = {"loader": self._prepared.loader.state_dict()}
        if isinstance(self._step, CappedStep):
            extra["chunking"] = asdict(self._step.chunking)
        self._saver.save(self._made, extra)
        self._saved_step = self._made
        self._tell_saves(self._saver.finished())

    def _tell_saves(self, saves: Sequence[Saved]) -> None:
        for one in saves:
            if one.path is None:
                self._complaint = f"no checkpoint of step {one.step}: {one.error}"
                self._log.say(self._complaint, "error")
                continue
            self._complaint = None
            self._log.write(LoggedCheckpoint(one.step, one.n_bytes, one.stall_seconds, one.seconds, one.waited_seconds))
            if one.waited_seconds >= _LONG_WAIT_S and one.step < self._prepared.n_steps:
                waited = f"step {one.step} waited {one.waited_seconds:.1f} s for the checkpoint before to be written"
                self._log.say(f"{waited}: --save-every {self._options.save_every} is too often", "warning")
