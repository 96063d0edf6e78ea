"""One training step on every rank of a data-parallel world: its time, what of it communication adds, what was sent.

**Exposed communication** is the step less the step without communication (``no_sync``), both of the same replica in the
same process, in turn: with, without, without, with. A clock around the collectives would start while backward still
runs and book backward's end as communication. It counts all that synchronising costs: waiting, the kernels that
collectives take from compute, copies into buckets, and waiting for the slowest rank.

Steps without communication let replicas drift apart, so parameters and optimizer state are made rank 0's again after
them. When all is measured, every parameter must be the same bits on every rank, or the cell fails.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.memory import peak_memory
from cs336_systems.distributed.buckets import broadcast_from_rank_0
from cs336_systems.distributed.ddp import DDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.clock import WHOLE
from cs336_systems.harness.memory import PeakMeter, free_bytes
from cs336_systems.harness.process import PredictedOutOfMemory
from cs336_systems.harness.ranks import time_phases_of_ranks
from cs336_systems.harness.record import Metric
from cs336_systems.harness.traffic import Traffic
from cs336_systems.profiling.rank_traces import communication_metrics, record_phases_of_ranks
from cs336_systems.profiling.traces import kineto
from cs336_systems.profiling.traces.queries import slowdown
from cs336_systems.training import TrainingSetup, assemble

GIB, MIB = 1024**3, 1024**2

TORCH = "torch"
"""The rung that is torch's own DDP."""

SIZED = ("bucketed", TORCH)
"""Rungs that take a bucket size."""

LADDER: dict[str, Callable[..., DDP]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
}

LOCAL = "local"
"""Prefix of the metrics of the step without communication."""


@dataclass(frozen=True)
class DataParallelCell:
    """One rung on one model; the fields are columns."""

    device: str
    ddp: str
    bucket_size_mb: float | None
    """Of the rungs that take one, else None."""
    communication_dtype: str
    size: str
    batch_size: int
    """Per rank."""
    context_length: int
    dtype: str
    compile: str
    optimizer: str
    world_size: int
    warmup: int
    steps: int
    seed: int

    @property
    def variant(self) -> str:
        return self.ddp

    @property
    def name(self) -> str:
        """In file names."""
        bucket = "" if self.bucket_size_mb is None else f"-{self.bucket_size_mb:g}mb"
        sent = "" if self.communication_dtype == "same" else f"-sent-{self.communication_dtype}"
        compiled = "-compiled" if self.compile == "on" else ""
        return f"{self.size}-{self.dtype}{compiled}-{self.ddp}{bucket}{sent}-{self.world_size}ranks"


def replicate(module: nn.Module, cell: DataParallelCell) -> nn.Module:
    """The module under the cell's rung. Buffers are constants in this model, so no rung broadcasts them.

    torch's DDP gets gradients as bucket views, as ours has them, and otherwise its defaults: its first bucket is 1 MiB.
    """
    bf16 = cell.communication_dtype == "bf16"
    if cell.ddp == TORCH:
        replica = nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=cell.bucket_size_mb, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        if bf16:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            replica.register_comm_hook(None, bf16_compress_hook)
        return replica
    sized = {"bucket_size_mb": cell.bucket_size_mb} if cell.ddp in SIZED else {}
    dtype = torch.bfloat16 if bf16 else None
    return LADDER[cell.ddp](module, communication_dtype=dtype, broadcast_buffers=False, **sized)


@dataclass
class _Samples:
    """Milliseconds by phase of the steps of one kind, over all rounds, and the median step of each round."""

    by_phase: dict[str, list[float]] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)


class PreparedReplica:
    """A cell's model, data and optimizer on this rank, ready to take steps with and without communication."""

    def __init__(self, cell: DataParallelCell, rank: Rank) -> None:
        self.cell, self.rank = cell, rank
        config = resolve_size(cell.size).at_context(cell.context_length)
        setup = TrainingSetup(
            config, PRECISIONS[cell.dtype], str(rank.device), cell.optimizer, cell.compile == "on", seed=cell.seed
        )
        self.step = assemble(setup)
        self.step.model = replicate(self.step.model, cell)
        generator = torch.Generator().manual_seed(cell.seed * 1009 + rank.rank + 1)
        shape = (cell.batch_size, cell.context_length)
        self.token_ids, self.targets = (
            torch.randint(config.vocab_size, shape, generator=generator).to(rank.device) for _ in range(2)
        )

    def phases(self, *, communicate: bool) -> dict[str, Callable[[], None]]:
        """Forward, backward and optimizer; backward holds whatever synchronising gradients adds to it."""
        model = self.step.model
        phases = self.step.phases("step", self.token_ids, self.targets)
        backward = phases["backward"]

        def backward_and_wait() -> None:
            backward()
            if isinstance(model, DDP):
                model.finish_gradient_synchronization()

        if communicate:
            return phases | {"backward": backward_and_wait}
        no_sync: Callable[[], AbstractContextManager[None]] = model.no_sync  # type: ignore[assignment]

        def quietly(phase: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with no_sync():
                    phase()

            return run

        return {name: phase if name == "optimizer" else quietly(phase) for name, phase in phases.items()}

    def time(self) -> tuple[_Samples, _Samples, list[float]]:
        """Samples with communication and without it, taken in turn, and the whole steps of the first warm-up."""
        with_it, without = _Samples(), _Samples()
        first, second = math.ceil(self.cell.steps / 2), self.cell.steps // 2
        few = min(1, self.cell.warmup)
        warmup_ms: list[float] = []
        for samples, warmup, steps in (
            (with_it, self.cell.warmup, first),
            (without, few, first),
            (without, few, second),
            (with_it, few, second),
        ):
            if not steps:
                continue
            phases = self.phases(communicate=samples is with_it)
            times = time_phases_of_ranks(phases, self.rank, warmup=warmup, steps=steps)
            warmup_ms = warmup_ms or times.warmup_ms
            for name, found in times.samples_ms.items():
                samples.by_phase.setdefault(name, []).extend(found)
            samples.rounds.append(median(times.samples_ms[WHOLE]))
            if samples is without:
                self.reunite()
        return with_it, without, warmup_ms

    def reunite(self) -> None:
        """Make parameters and optimizer state rank 0's."""
        states = chain.from_iterable(state.values() for state in self.step.optimizer.state.values())
        tensors = (state for state in states if isinstance(state, torch.Tensor) and state.device == self.rank.device)
        broadcast_from_rank_0(chain(self.step.model.parameters(), tensors))

    def traffic(self) -> Traffic:
        """What one step sends."""
        with Traffic() as traffic:
            for phase in self.phases(communicate=True).values():
                phase()
        return traffic

    def check_replicas(self) -> None:
        """Raise on every rank unless all parameters are the same bits everywhere and all losses are finite."""
        assert self.step.loss is not None
        differing = 0
        for parameter in self.step.model.parameters():
            bits = parameter.detach().reshape(-1).view(torch.uint8)
            of_rank_0 = bits.clone()
            dist.broadcast(of_rank_0, src=0)
            differing += not torch.equal(bits, of_rank_0)
        found = torch.tensor([differing, not math.isfinite(self.step.loss.item())], device=self.rank.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        differing, diverged = found.tolist()
        if differing:
            raise RuntimeError(f"{differing} parameters are not the same bits on all ranks after training")
        if diverged:
            raise FloatingPointError("the loss is not finite on every rank")

    def record(self, path: Path, *, communicate: bool) -> None:
        """Run one warm-up step and a few more, recorded by torch.profiler on rank 0 to ``path``."""
        record_phases_of_ranks(self.phases(communicate=communicate), self.rank, path)


def measure_data_parallel(cell: DataParallelCell, rank: Rank, *, trace: Path | None = None) -> list[Metric]:
    """Everything about one cell; ``trace`` is a folder for a recording of rank 0.

    Raises:
        PredictedOutOfMemory: the eager model would not fit beside those of this machine's other ranks.
        RuntimeError: the replicas ended with different parameters.
        FloatingPointError: the loss is not finite.
    """
    _check_memory(cell, rank)
    meter = PeakMeter(rank.device)
    replica = PreparedReplica(cell, rank)
    with_it, without, warmup_ms = replica.time()
    sent = replica.traffic().sent
    replica.check_replicas()
    peak = torch.tensor(meter.peak_bytes() / GIB, device=rank.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)

    metrics = [Metric(name, "ms", samples) for name, samples in with_it.by_phase.items()]
    metrics += [Metric(f"{LOCAL}_{name}", "ms", samples) for name, samples in without.by_phase.items()]
    if warmup_ms:
        metrics.append(Metric("warmup_step", "ms", warmup_ms))
    exposed = [a - b for a, b in zip(with_it.rounds, without.rounds, strict=True)]
    shares = [100 * gap / whole for gap, whole in zip(exposed, with_it.rounds, strict=True)]
    tokens = cell.world_size * cell.batch_size * cell.context_length
    metrics += [
        Metric("exposed", "ms, one value per round", exposed, derived=True),
        Metric("exposed_share", "% of the step", shares, derived=True),
        Metric("tokens_per_s", "1/s, all ranks", [tokens / ms * 1e3 for ms in with_it.by_phase[WHOLE]], derived=True),
        Metric("collectives", "per step", [len(sent)]),
        Metric("sent", "MiB per step and rank, before the algorithm's factor", [sum(e.n_bytes for e in sent) / MIB]),
        Metric("peak_memory", "GiB, the most of any rank", [peak.item()]),
    ]
    if trace is not None:
        path, local_path = trace / f"{cell.name}.json.gz", trace / f"{cell.name}-{LOCAL}.json.gz"
        replica.record(path, communicate=True)
        replica.record(local_path, communicate=False)
        if rank.rank == 0:
            metrics += _overlap_metrics(path, local_path)
    return metrics


def _check_memory(cell: DataParallelCell, rank: Rank) -> None:
    config = resolve_size(cell.size).at_context(cell.context_length)
    precision = PRECISIONS[cell.dtype]
    replicas_here = 1 if rank.device.type == "cuda" else rank.world_size
    shape = (cell.batch_size, cell.context_length)
    each = peak_memory(config, *shape, precision, "step", optimizer=cell.optimizer, device_type=rank.device.type)
    free = free_bytes(rank.device)
    dist.barrier()  # nobody builds a model before all have looked
    if cell.compile == "off" and each.n_bytes * replicas_here > free:
        needed = each.n_bytes * replicas_here / GIB
        raise PredictedOutOfMemory(f"needs at least {needed:.1f} GiB, {free / GIB:.1f} GiB are free")


def _overlap_metrics(path: Path, local_path: Path) -> list[Metric]:
    """From a GPU's traces of steps with communication and without; a CPU's trace cannot tell.

    Communication, how much of it ran beside other kernels, by how much it slowed those, and the kernels that it adds.
    """
    trace = kineto.read(path)
    communication = communication_metrics(trace)
    if not communication:
        return []
    classes = slowdown(kineto.read(local_path), trace)
    return [
        *communication,
        Metric("slowed", "ms of other kernels per step", [(classes["beside_ms"] - classes["alone_ms"]).sum()]),
        Metric("added_kernels", "ms of other kernels per step", [classes["added_ms"].sum()]),
    ]
