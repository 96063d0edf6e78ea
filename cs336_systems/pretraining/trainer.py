"""The training run: steps, evaluations and checkpoints, from the folder's newest checkpoint to the end.

    with joined("cuda") as rank:
        outcome = train(options, rank, RunConsole())

All ranks run this; the first writes the log. No step waits for the device: the loss and norm of a step are read after
the next one is queued (``deferred.py``). A signal may reach only one rank, so each step sums the ranks' reasons to
stop, and all stop at the same step. A resumed run computes the same as an uninterrupted one: the checkpoint holds the
model, the moments and the position in the data, and the learning rate is a function of the step. Under memory limits
the step is streamed (``capped.py``); all else is the same.

Checkpoints are written in the background. If one is due while another is being written, training waits. A run stops at
the first step whose loss or gradient is not finite, and such a step does not change the model. Ctrl-C, SIGTERM and a
time limit end the run after the current step, with a checkpoint.
"""

import gc
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.background_checkpoint import BackgroundSaver, Saved
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
from cs336_systems.pretraining.resuming import Best, open_log, resume
from cs336_systems.pretraining.run_log import RunLog, Sink
from cs336_systems.pretraining.run_records import End, Evaluation, LoggedCheckpoint, LoggedStep, Memory
from cs336_systems.pretraining.stop_requests import REASONS, Outcome, StopRequests

NO_GAIN = "no gain"
"""The reason to end a run whose held-out loss no longer falls. It is not exchanged, as all ranks know the loss."""

_VALUES = ("loss", "norm", *REASONS)
"""Values that are read one step late; the value of a reason to stop is the number of ranks that have it."""

_GPU_EVERY = 10
"""Steps between two readings of the GPU's state: some calls of NVML take a millisecond."""

_COPIES = 0.8
"""The share of free host memory that copies of checkpoints may take."""


class NonFiniteStep(RuntimeError):
    """A loss or a gradient is NaN or inf; the model is as it was before the step."""


class RankAlone(ValueError):
    """One rank's data have a fault that the other ranks cannot see."""


def train(options: TrainOptions, rank: Rank, *sinks: Sink, agreement: Agreement | None = None) -> Outcome:
    """Make the remaining steps; a collective.

    Args:
        sinks: receive every record that the first rank writes to the log.
        agreement: how this world of ranks trains one model with other worlds; by default there are none.

    Raises:
        ValueError: options, data, folder, weights or device are unsuitable, or the run has made more steps already;
            then nothing was changed. Or the data hold an invalid token id; then the steps before it are saved.
        RankAlone: one of several ranks met such an id; steps since the last checkpoint are lost.
        OSError: a file cannot be read, or the log cannot be written.
        NonFiniteStep: a loss or a gradient is not finite; no checkpoint of that step is written.
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
    """``train`` for a prepared run, whose model the caller can look at afterwards.

    Args:
        ends_at: when to save and end, by ``time.monotonic``.
    """
    agreement = agreement or Agreement()
    with ExitStack() as stack:
        stack.enter_context(prepared.loader)
        passed_over: list[str] = []
        stack.callback(agreement.leave)
        made, best, found = resume(prepared, passed_over.append)
        stop = agreement.stop = stack.enter_context(StopRequests(ends_at))
        introduced = list(introduction(prepared, rank))  # its dry run takes a second: before other worlds wait for it
        try:
            first_step = agreement.join(prepared, made)
        except StoppedWaiting:
            assert stop.asked is not None
            return Outcome(prepared.options.out, made, made, stop.asked, None)
        log = stack.enter_context(open_log(prepared, first_step, agreement.folder(prepared.options.out), sinks, found))
        for sentence in passed_over:
            log.say(sentence, "warning")
        for record in introduced:
            log.write(record)
        step, options = prepared.step, prepared.options
        keep: dict[str, Any] = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        saver = stack.enter_context(BackgroundSaver(options.out, step.model, step.optimizer, **keep))
        stack.callback(gc.unfreeze)  # also unfreezes what the caller has frozen
        return _Run(prepared, rank, log, saver, first_step, best, agreement).to_the_end(stop)


class _Run:
    def __init__(
        self,
        prepared: PreparedRun,
        rank: Rank,
        log: RunLog,
        saver: BackgroundSaver,
        first_step: int,
        best: Best,
        agreement: Agreement,
    ) -> None:
        self._prepared, self._rank, self._log, self._saver = prepared, rank, log, saver
        self._agreement = agreement
        self._tokens: dict[int, int] = {}  # by step, until it is logged
        self._due: set[str] = set()
        self._options, self._step = prepared.options, prepared.step
        self._best = best
        self._first_step = self._made = self._saved_step = first_step
        self._copies = prepared.options.save_every is not None  # whether checkpoints are copied to the host first
        self._complaint: str | None = None
        self._gpu_speaks = rank.rank == 0 and rank.device.type == "cuda"
        self._no_reason = torch.zeros(len(REASONS), device=rank.device)
        # ShardedOptimizer's gathers of weights overlap the next forward. Reasons exchanged after the step would queue
        # behind them on NCCL's stream, and the host would wait; other worlds need the reasons during the step.
        sharded = rank.world_size > 1 and isinstance(prepared.step.optimizer, ShardedOptimizer)
        self._asks_before_step = sharded or agreement.on
        self._reason = self._no_gain()  # why to end, equal on all ranks; a run that ended with no gain ends again
        self._loss_before = math.inf  # held-out loss before training

    def to_the_end(self, stop: StopRequests) -> Outcome:
        """Make the remaining steps until there is a reason to stop; raises what ``train`` does."""
        deferred = Deferred(self._rank.device, _VALUES)
        try:
            if self._made == 0 and self._agreement.first and self._prepared.evaluation is not None:
                self._evaluate(self._prepared.evaluation)
            while self._made < self._prepared.n_steps and self._reason is None:
                queued = self._queue_step(stop, deferred)
                for record in self._agreement.told():
                    self._log.write(record)
                if self._agreement.hopeless:
                    raise NonFiniteStep(self._agreement.hopeless)
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
        except ValueError as error:  # the data hold an invalid token id
            several = self._rank.world_size > 1
            if not several and not self._agreement.on:
                self._tell(deferred.flush(), self._made - 1)
                if self._options.save_every is not None and self._made > self._saved_step:
                    self._save()
            self._fail(error)
            if several and not self._agreement.on:
                raise RankAlone(f"rank {self._rank.rank}: {error}") from error
            raise
        self._tell_saves(self._saver.wait())
        wait_for_parameters(self._step.model)  # callers may read them
        if isinstance(self._step, CappedStep) and (passed := self._step.passed()):
            self._log.say(passed, "warning")
        reason = self._reason if self._made < self._prepared.n_steps and self._reason else "done"
        best = self._best.step if self._options.keep_best else None
        if best is not None and self._loss_before < self._best.loss:
            lowest = f"the lowest held-out loss of a checkpoint, {self._best.loss:.4f} of step {best:,}"
            self._log.say(f"{lowest}, is above that before training, {self._loss_before:.4f}", "warning")
        self._log.write(End(self._made, reason))
        return Outcome(self._options.out, self._first_step, self._made, reason, self._complaint, best)

    def _fail(self, error: Exception) -> None:
        self._tell_saves(self._saver.wait())
        self._log.say(str(error), "error")
        self._log.write(End(self._made, "failed"))

    def _queue_step(self, stop: StopRequests, deferred: Deferred) -> list[Tensor] | None:
        """Queue one step on the device; return tensors for ``_VALUES``, or None if the step does not count."""
        self._made = self._agreement.begin(self._made)
        if self._made >= self._prepared.n_steps:  # the state was loaded from another world
            return None
        rate = self._prepared.rate(self._made)
        for group in self._step.optimizer.param_groups:
            group["lr"] = rate
        batch = [self._prepared.own(each) for each in next(self._prepared.loader)]
        deferred.begin()
        before = self._exchange_reasons(stop) if self._asks_before_step else None
        if self._agreement.on and before is not None:
            if before[1] is not None:
                before[1].wait()
            self._agreement.reasons = before[0]
        self._step(*batch)
        if not self._agreement.kept:
            return None
        if self._made == self._first_step:
            # Later garbage collections skip the objects that exist now. Most belong to modules and stay, and walking
            # them takes 0.1 to 0.3 s, longer than the host is ahead of the GPU.
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
        """Return (n reasons,) counts of the ranks with each of ``REASONS``, and the all-reduce to wait for, if any."""
        reasons, asked = self._no_reason, stop.asked
        if asked is not None:
            reasons = torch.tensor([float(reason == asked) for reason in REASONS], device=self._rank.device)
        if self._rank.world_size == 1:
            return reasons, None
        reasons = reasons.clone()
        return reasons, dist.all_reduce(reasons, async_op=True)

    def _look_at_memory(self) -> None:
        """Reserve host memory for checkpoints after the first step, and log the peak of the second, which has all
        states in place."""
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
        """Log the state of the first rank's GPU every ``_GPU_EVERY`` steps, until a reading fails."""
        if not self._gpu_speaks or self._made % _GPU_EVERY:
            return
        import pynvml

        try:
            self._log.write(read_gpu_state(self._made, self._rank.device))
        except pynvml.NVMLError as error:
            self._log.say(f"the GPU's state is not in this log: {error}", "warning")
            self._gpu_speaks = False

    def _tell(self, done: Done | None, step: int) -> None:
        """Log a finished step and apply its reasons to stop; raises NonFiniteStep."""
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
        """Evaluate and save if due; only then does the host wait for the device."""
        options, done = self._options, self._made == self._prepared.n_steps
        for what, every in (("evaluation", options.evaluate_every), ("checkpoint", options.save_every)):
            if every is not None and (done or self._made % every == 0):
                self._due.add(what)
        if not self._agreement.at_average or not (self._due or done or self._reason is not None):
            return
        self._tell(deferred.flush(), self._made - 1)
        evaluates, saves = ("evaluation" in self._due, "checkpoint" in self._due)
        self._due.clear()
        if not self._agreement.first:  # the first world does it for all
            return
        if evaluates and self._prepared.evaluation is not None:
            self._evaluate(self._prepared.evaluation)
            saves = saves or (options.keep_best and self._best.step == self._made)
        if saves or (options.save_every is not None and self._reason is not None):
            self._save()
        deferred.restart()

    def _evaluate(self, sequences: Sequences) -> None:
        """Measure and log the held-out loss, and record whether it is the best and whether to stop."""
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
            self._loss_before = loss
            return  # there is no checkpoint of step 0
        self._best.look(self._made, loss)
        self._reason = self._reason or self._no_gain()

    def _no_gain(self) -> str | None:
        limit = self._options.stop_after_no_gain
        return NO_GAIN if limit is not None and self._best.n_since >= limit else None

    def _save(self) -> None:
        """Start writing a checkpoint; if that fails, training goes on and older checkpoints stay."""
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
        """Save without the other worlds, unless another world has saved this step already."""
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
