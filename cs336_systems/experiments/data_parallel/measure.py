"""One training step on every rank of a data-parallel world: its time, what of it communication adds, what was sent.

**Exposed communication** is the time of a step less that of the same step without communication (``no_sync``), both of
the same replica in the same process, in turns: with, without, with. It is all that synchronising adds to a step. A
clock around the collectives would start while backward still runs and book backward's end as communication.
Recordings of both steps (``--trace``) say what it is made of:

    waited      only collectives run: what backward does not hide, waiting for slower ranks included
    slowed      what the step's other kernels take longer while collectives run beside them
    added       kernels that only the step with communication has: copies into buckets and out of them

Steps without communication let replicas drift apart, so parameters and optimizer state are made rank 0's again after
them. When all is measured, every parameter must be the same bits on every rank, or the cell fails.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from statistics import median

import torch
import torch.distributed as dist

from cs336_systems.distributed.buckets import broadcast_from_rank_0
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.data_parallel.cells import DataParallelCell
from cs336_systems.experiments.ranked import (
    EFFORT,
    Effort,
    PreparedStep,
    check_losses,
    largest,
    sent_metric,
    time_metrics,
)
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import WHOLE, PhaseTimes, time_phases_of_ranks
from cs336_systems.harness.fit import check_fit
from cs336_systems.harness.memory import PeakMeter
from cs336_systems.harness.record import Metric
from cs336_systems.profiling.communication import communication_metrics, record_phases_of_ranks
from cs336_systems.profiling.traces import kineto

LOCAL = "local"
"""Prefix of the metrics of the step without communication."""


def joined(rounds: list[PhaseTimes]) -> PhaseTimes:
    """The samples of all rounds, and the first one's warm-up."""
    samples = {name: [ms for times in rounds for ms in times.samples_ms[name]] for name in rounds[0].samples_ms}
    return PhaseTimes(samples, rounds[0].warmup_ms)


class PreparedReplica(PreparedStep):
    """Takes steps with and without communication."""

    def phases(self, *, communicate: bool = True) -> dict[str, Callable[[], None]]:
        phases = super().phases()
        if communicate:
            return phases
        no_sync: Callable[[], AbstractContextManager[None]] = self.step.model.no_sync  # type: ignore[assignment]

        def quietly(phase: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with no_sync():
                    phase()

            return run

        return {name: phase if name == "optimizer" else quietly(phase) for name, phase in phases.items()}

    def time(self, effort: Effort) -> tuple[list[PhaseTimes], PhaseTimes | None]:
        """Two rounds of steps with communication, or one of a single step; between them steps without it.

        A turn after the first has one round, and None without.
        """
        cell, again = self.cell, min(1, self.cell.warmup)

        def timed(steps: int, warmup: int, *, communicate: bool = True) -> PhaseTimes:
            return time_phases_of_ranks(self.phases(communicate=communicate), self.rank, warmup=warmup, steps=steps)

        if cell.repeat:
            return [timed(cell.steps, effort.warmup(cell))], None
        rounds = [timed(math.ceil(cell.steps / 2), cell.warmup)]
        local = timed(effort.local_steps or cell.steps, again, communicate=False)
        self.reunite()
        if second := cell.steps // 2:
            rounds.append(timed(second, again))
        return rounds, local

    def reunite(self) -> None:
        """Make parameters and optimizer state rank 0's."""
        states = chain.from_iterable(state.values() for state in self.step.optimizer.state.values())
        tensors = (state for state in states if isinstance(state, torch.Tensor) and state.device == self.rank.device)
        broadcast_from_rank_0(chain(self.step.model.parameters(), tensors))

    def check_replicas(self) -> None:
        """Raise on every rank unless all parameters are the same bits everywhere and all losses are finite."""
        differing = 0
        for parameter in self.step.model.parameters():
            bits = parameter.detach().reshape(-1).view(torch.uint8)
            of_rank_0 = bits.clone()
            dist.broadcast(of_rank_0, src=0)
            differing += not torch.equal(bits, of_rank_0)
        if found := int(largest(differing, self.rank)):
            raise RuntimeError(f"{found} parameters are not the same bits on all ranks after training")
        check_losses(self.step, self.rank)


def measure_data_parallel(cell: DataParallelCell, rank: Rank, *, effort: Effort = EFFORT) -> list[Metric]:
    """Everything about one cell; recordings are of rank 0.

    Raises:
        PredictedOutOfMemory: the eager model would not fit beside those of this machine's other ranks.
        RuntimeError: the replicas ended with different parameters.
        FloatingPointError: the loss is not finite.
    """
    check_fit(cell, rank=rank)
    meter = PeakMeter(rank.device)
    replica = PreparedReplica(cell, rank)
    rounds, without = replica.time(effort)
    sent = replica.sent() if cell.repeat == 0 else []
    replica.check_replicas()
    peak = meter.peak_bytes()

    metrics = time_metrics(joined(rounds), cell)
    if without is not None:
        metrics += [Metric(f"{LOCAL}_{name}", "ms", samples) for name, samples in without.samples_ms.items()]
        whole, local = [median(times.samples_ms[WHOLE]) for times in rounds], median(without.samples_ms[WHOLE])
        exposed = [step - local for step in whole]
        shares = [100 * gap / step for gap, step in zip(exposed, whole, strict=True)]
        metrics += [
            Metric("exposed", "ms, one value per round", exposed, derived=True),
            Metric("exposed_share", "% of the step", shares, derived=True),
            Metric("collectives", "per step", [len(sent)]),
            sent_metric(sent, cell.world_size),
        ]
    if peak is not None:
        metrics.append(Metric("peak_memory", "GiB, the most of any rank", [largest(peak / GIB, rank)]))
    if (path := effort.recording(cell)) is not None:
        local_path = path.with_name(f"{cell.name}-{LOCAL}.json.gz")
        model, first = replica.step.model, rank.rank == 0
        record_phases_of_ranks(replica.phases(), model, rank, path if first else None)
        record_phases_of_ranks(replica.phases(communicate=False), model, rank, local_path if first else None)
        if first:
            metrics += communication_metrics(kineto.read(path), kineto.read(local_path))
    return metrics
