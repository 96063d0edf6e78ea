"""Every layout of a training job, those that fit the GPUs' memory, and the fastest of these.

A layout (``layout.py``) is a mesh, a level of ZeRO, a pipeline schedule with its chunks, the level of activations that
blocks keep, and a micro-batch. All layouts are tried whose sizes multiply to the number of GPUs and divide the batch
and the model. Their peak is a closed form (``rank_memory.py``). They are sorted by a lower bound of their step's time,
with the least bubble of their schedule, and simulated in that order until no remaining bound can be the fastest.

    found = Search.of(Job(config, 8192, 2**22, n_gpus=64, hardware=hardware, device_bytes=80 * 2**30))
    found.best(10), found.best(1, lambda layout: layout.pipeline == 1)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from cs336_systems.config import ModelConfig
from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.parallelism.bubbles import simulates
from cs336_systems.costs.parallelism.forms import GPUS_PER_HOST, NETWORK_BYTES_PER_S, check_positive
from cs336_systems.costs.parallelism.layout import ZERO_LEVELS, Layout
from cs336_systems.costs.parallelism.rank_memory import rank_peak
from cs336_systems.costs.parallelism.schedules import places_of
from cs336_systems.costs.parallelism.seconds import Moments, StepSeconds, step_seconds
from cs336_systems.costs.streaming import LEVELS, MASTER_MOMENTS
from cs336_systems.hardware import GIB, Hardware
from cs336_systems.ranks import SCHEDULES

USABLE = 0.95
"""The share of a GPU's memory that tensors may take: the CUDA context, NCCL's buffers and fragmentation need the rest
(4 of 80 GiB)."""

MICRO_BATCHES = (1, 2, 4)
"""Sequences per micro-batch. With context ranks, it is one: two sequences on four ranks are the same work and bytes as
one on two, with more messages."""

Where = Callable[[Layout], bool]


@dataclass(frozen=True)
class Job:
    """A model, its batch, and the GPUs to train it on.

    Raises:
        ValueError: a number is not positive, a peak of the GPU is not published, or the batch is not a whole number of
            sequences.
    """

    config: ModelConfig
    length: int
    """Tokens of a sequence."""
    batch_tokens: int
    n_gpus: int
    hardware: Hardware
    device_bytes: float
    """The memory of a GPU, of which tensors may take the share ``USABLE``."""
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    """The rate at which a GPU sends to other hosts."""
    moments: Moments = tuple(MASTER_MOMENTS.items())

    def __post_init__(self) -> None:
        check_positive(self, "length", "batch_tokens", "n_gpus", "device_bytes", "network_bytes_per_s")
        self.hardware.peaks("bf16")
        if self.batch_tokens % self.length:
            raise ValueError(f"a batch of {self.batch_tokens} tokens is no whole number of sequences of {self.length}")

    @property
    def n_sequences(self) -> int:
        return self.batch_tokens // self.length

    @property
    def budget_bytes(self) -> float:
        return USABLE * self.device_bytes

    def seconds(self, layout: Layout, *, simulated: bool = True) -> StepSeconds:
        return step_seconds(
            self.config,
            self.length,
            layout,
            self.hardware,
            network_bytes_per_s=self.network_bytes_per_s,
            moments=self.moments,
            simulated=simulated,
        )

    def peak_bytes(self, layout: Layout) -> int:
        return rank_peak(self.config, self.length, layout, moments=self.moments).n_bytes

    def mfu(self, seconds: float) -> float:
        """Model FLOP/s divided by the peak, with causal attention (``costs/flops.py``)."""
        flops = self.n_sequences * model_flops(self.config, 1, self.length, "step")
        return flops / seconds / self.n_gpus / self.hardware.peaks("bf16")[0]

    def tokens_per_s(self, seconds: float) -> float:
        """Tokens per second of all GPUs together."""
        return self.batch_tokens / seconds

    def meshes(self) -> Iterator[Layout]:
        """The divisions of the GPUs into stages, tensor, context and data ranks that divide the model and its batch."""
        for pipeline, tensor, context in self.ranks_of_a_sequence():
            data, rest = divmod(self.n_gpus, pipeline * tensor * context)
            if data and not rest and self.n_sequences % data == 0:
                yield Layout(replicas=data, context=context, tensor=tensor, pipeline=pipeline)

    def ranks_of_a_sequence(self) -> Iterator[tuple[int, int, int]]:
        """Numbers of stages, tensor and context ranks that divide the model and a sequence, on any number of GPUs."""
        contexts = [n for n in divisors(self.length) if n == 1 or self.length % (2 * n) == 0]
        tensors = [n for n in range(1, self.config.n_heads + 1) if divides(self.config, n)]
        for pipeline in range(1, self.config.n_layers + 1):
            for tensor in tensors:
                for context in contexts:
                    if self.length // context % tensor == 0:
                        yield pipeline, tensor, context

    def layouts(self) -> Iterator[Layout]:
        """All layouts, whether they fit or not."""
        for mesh in self.meshes():
            each = self.n_sequences // mesh.data
            for micro_batch in (b for b in MICRO_BATCHES if each % b == 0 and (b == 1 or mesh.context == 1)):
                for schedule, chunks in self._schedules(mesh.pipeline, each // micro_batch):
                    for zero, shards in _divisions_of_states(mesh):
                        for keep in LEVELS:
                            yield replace(
                                mesh,
                                replicas=mesh.data // shards,
                                shards=shards,
                                zero=zero,
                                keep=keep,
                                micro_batch=micro_batch,
                                n_micro_batches=each // micro_batch,
                                schedule=schedule,
                                chunks=chunks,
                            )

    def _schedules(self, n_stages: int, n_micro_batches: int) -> list[tuple[str, int]]:
        """The schedules and numbers of chunks that run ``n_micro_batches`` on ``n_stages``.

        Chunks of ``interleaved`` are equal: the blocks divide evenly among them, or do so if embedding and head each
        count as a block. Every chunk has a block.
        """
        if n_stages == 1:
            return [("1f1b", 1)]
        blocks = self.config.n_layers
        chunks = [n for n in range(2, blocks // n_stages + 1) if blocks % (n * n_stages) in (0, n * n_stages - 2)]
        asked = [(name, n) for name in SCHEDULES for n in (chunks if name == "interleaved" else [1])]
        asked = [(name, n) for name, n in asked if len(places_of(name, n_stages, n)) <= blocks]
        return [(name, n) for name, n in asked if simulates(name, n_stages, n_micro_batches, n)]


def _divisions_of_states(mesh: Layout) -> Iterator[tuple[int, int]]:
    """(ZeRO level, ranks along shard): levels 1 and 2 shard over all data ranks, 3 also over some of them.

    Pipeline stages hold unsharded gradients, so level 2 would equal level 1 there.
    """
    for zero in (each for each in ZERO_LEVELS if each != 2 or mesh.pipeline == 1):
        if zero == 0 or mesh.data * mesh.context > 1:
            for shards in {0: [1], 1: [mesh.data], 2: [mesh.data]}.get(zero, divisors(mesh.data)):
                if zero == 0 or shards * mesh.context > 1:
                    yield zero, shards


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, in ascending order."""
    low = [each for each in range(1, math.isqrt(n) + 1) if n % each == 0]
    return sorted({*low, *(n // each for each in low)})


def divides(config: ModelConfig, tensor: int) -> bool:
    """Whether ``tensor`` ranks can have equal parts of the model."""
    try:
        config.part(tensor)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and its prediction."""

    layout: Layout
    peak_bytes: int
    seconds: StepSeconds

    @property
    def rank(self) -> tuple[float, int, int, float]:
        """The sort key: seconds to three digits, as predictions are no more exact; then the simplest layout."""
        layout = self.layout
        sizes = layout.data, layout.context, layout.tensor, layout.pipeline, layout.chunks
        return _three_digits(self.seconds.total), sum(n > 1 for n in sizes), self.peak_bytes, self.seconds.total


def _three_digits(seconds: float) -> float:
    return float(f"{seconds:.3g}")


@dataclass(frozen=True)
class Search:
    """The layouts of a job and their peaks, which do not depend on the memory or network of its GPUs."""

    job: Job
    peaks: tuple[tuple[int, Layout], ...]
    """(bytes, layout) of all layouts, whether they fit or not."""

    @classmethod
    def of(cls, job: Job) -> "Search":
        """Try all layouts.

        Raises:
            ValueError: no layout divides the batch and the model; the message gives numbers of GPUs that do.
        """
        peaks = tuple((job.peak_bytes(layout), layout) for layout in job.layouts())
        if not peaks:
            raise ValueError(_nothing_divides(job))
        return cls(job, peaks)

    def of_job(self, job: Job) -> "Search":
        """The same layouts for a job that differs only in the memory or the network of its GPUs."""
        return replace(self, job=job)

    def hiding_tensor_ranks(self) -> "Search":
        """The same layouts, but tensor ranks copy rows beside matmuls, as GPUs with peer access can."""

        def copying(layout: Layout) -> Layout:
            near = layout.tensor <= GPUS_PER_HOST and self.job.hardware.copies_reach(layout.tensor)
            return replace(layout, tensor_by="copies") if near else layout

        return replace(self, peaks=tuple((peak, copying(layout)) for peak, layout in self.peaks))

    @cached_property
    def _fitting(self) -> list[tuple[float, int, Layout]]:
        """(lower bound of seconds, bytes, layout) of the layouts that fit, sorted by seconds."""
        budget, bound = self.job.budget_bytes, partial(self.job.seconds, simulated=False)
        found = [(bound(layout).total, peak, layout) for peak, layout in self.peaks if peak <= budget]
        return sorted(found, key=lambda each: each[:2])

    @property
    def n_fitting(self) -> int:
        return len(self._fitting)

    def check_fits(self) -> None:
        """Raise ValueError if no layout fits; the message gives the least memory with which one would."""
        if not self._fitting:
            job, (least, layout) = self.job, min(self.peaks, key=lambda each: each[0])
            gpus = f"{job.n_gpus} GPUs" if job.n_gpus > 1 else "one GPU"
            raise ValueError(
                f"nothing fits {job.device_bytes / GIB:.4g} GiB a GPU, of which tensors may take {USABLE:.0%}: "
                f"{job.config.name} on {gpus} needs at least {least / USABLE / GIB:.4g} GiB, with {layout}"
            )

    def best(self, n: int = 1, where: Where = lambda layout: True) -> list[Candidate]:
        """The fastest ``n`` layouts, or fewer, that fit and satisfy ``where``."""
        found: list[Candidate] = []
        for bound, peak, layout in self._fitting:
            if len(found) >= n and _three_digits(bound) > found[n - 1].rank[0]:
                break
            if where(layout):
                found.append(Candidate(layout, peak, self.job.seconds(layout)))
                found.sort(key=lambda each: each.rank)
        return found[:n]


def _nothing_divides(job: Job) -> str:
    said = f"no division of {job.n_gpus} GPUs divides {job.n_sequences} sequences and {job.config.name}"
    data = divisors(job.n_sequences)
    numbers = {math.prod(ranks) * n for ranks in job.ranks_of_a_sequence() for n in data}
    below, above = ([n for n in numbers if side * n > side * job.n_gpus] for side in (-1, 1))
    near = f"the nearest numbers that can be divided are {max(below)} and {min(above)}" if above else ""
    return f"{said}: {near or f'at most {max(below)} can be divided'}"
