"""Chooses the plan of a step under memory caps: of all that fit, the one whose simulated step is the fastest.

The step time of every plan that fits both caps is estimated (``estimate.py``); schedules of the best plans are built
and simulated, a local search starts from the best of these, and the fastest plan is chosen. Unless its tokens are
given, a step has enough rounds that the optimizer adds less than 2 % to it.

    choice = choose(config, 8192, Caps(24 * GIB, 75 * GIB), Rates.of(hardware))
    choice.plan, choice.tokens_per_s  # and explain.reasons(choice)
"""

import gc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, product

from cs336_systems.config import FP8_QUANTUM, PRECISIONS, Lora, ModelConfig, Precision, Recipe
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.lanes import LaneTimes
from cs336_systems.costs.memory import TABLE_SHARE
from cs336_systems.costs.rates import Rates
from cs336_systems.costs.streaming import MOMENTS, StreamedWork
from cs336_systems.hardware import GIB
from cs336_systems.streaming.build import build, schedule_times
from cs336_systems.streaming.estimate import WorkSeconds, best_keep, neighbours
from cs336_systems.streaming.plan import ORDERS, RESIDENTS, Keep, Order, Plan
from cs336_systems.streaming.schedule import BACKWARDS, Schedule
from cs336_systems.streaming.slots import TooFewSlotsError

DEVICE_OVERHEAD = int(1.05 * GIB)
"""Bytes of the CUDA context and kernels (measured on an H200: 0.74 GiB), of cuBLAS's workspaces and of what torch
reserves unused."""
HOST_OVERHEAD = 3 * GIB
"""Bytes of the process besides its slab, measured on an H200."""

LEAST_CHUNK = 8192
"""The fewest tokens of a chunk: with fewer, kernels are too short to hide the host's work between them."""
MOST_CHUNK = 32_768
"""Tokens of a chunk, unless 32 pieces of a sequence are larger."""
MOST_PIECES = 32
"""Chunks of a sequence."""
MOST_CHUNKS = 16
"""Chunks of a round, unless they are those of one sequence."""
OPTIMIZER_SHARE = 0.02
"""The largest share of a step that the optimizer may add, if the tokens of a step are not given."""
INPUT_EVERY = (1, 2, 3, 4)
"""Values of n: plans keep x of every n-th layer. n is above 1 only where restoring x takes less time than attention."""
SIMULATED = 40
"""The number of kinds of plans of which a schedule is built."""
EFFORT = 80_000
"""Operations to simulate for these plans, and again for the local search from the best of them."""
STARTS = 8
"""Plans from which the local search starts, besides the best of each order and number of chunks: neighbours of the
seventh can be 3 % faster than those of the first, and those of another shape 7 %."""
START_SHARE = 4
"""The fraction of the effort for each start: a quarter."""
SIMULATED_ROUNDS = 3
"""Rounds that are simulated while plans are compared: the first, one that is like all others, and the last."""
LEAST_GAIN = 3e-4
"""The least relative gain for which the local search moves."""


@dataclass(frozen=True)
class Caps:
    """Memory caps in bytes; what the process needs beside its slabs counts, too."""

    device: int
    host: int
    device_overhead: int = DEVICE_OVERHEAD
    host_overhead: int = HOST_OVERHEAD
    table_share: float = TABLE_SHARE
    """Bytes of device memory (page tables) per byte of the pinned host slab."""


@dataclass(frozen=True)
class ChosenPlan:
    """A plan that fits, and its predicted cost."""

    plan: Plan
    schedule: Schedule
    times: LaneTimes
    caps: Caps

    @property
    def tokens_per_s(self) -> float:
        return self.plan.tokens / self.times.span

    @property
    def hardware_flops(self) -> int:
        """FLOPs that this rank executes in a step, recomputation included; HFU is their rate over the peak."""
        flops, group = cache(self.plan.work.hardware_flops), self.plan.work.chunks_per_sequence
        return sum(flops(str(o.kind), o.chunk % group, o.level) for o in self.schedule.operations)

    @property
    def fits(self) -> bool:
        """Whether both caps hold."""
        return sum(self.device_parts.values()) <= self.caps.device and self.spare_host_bytes >= 0

    @property
    def spare_host_bytes(self) -> int:
        """Bytes of the host's cap that are left."""
        return self.caps.host - sum(self.host_parts.values())

    @cached_property
    def device_parts(self) -> dict[str, int]:
        """Bytes on the device; page tables of the host's slab count as memory outside of torch."""
        work = self.plan.work
        tables = math.ceil(self.caps.table_share * sum(region.n_bytes for region in self.schedule.regions.values()))
        rings = {name: ring.n_bytes for name, ring in self.schedule.rings.items()}
        beside = {"embedding, head": work.fixed_bytes - work.adapter_bytes, "temporaries": work.temporary_bytes}
        beside |= {"adapters": work.adapter_bytes} if work.lora else {}
        return beside | {"context, libraries": self.caps.device_overhead + tables} | rings

    @cached_property
    def host_parts(self) -> dict[str, int]:
        regions = {name: region.n_bytes for name, region in self.schedule.regions.items()}
        return {"process": self.caps.host_overhead} | regions


class CapsTooSmallError(ValueError):
    """No plan fits; the message says which memory is too small, by how much, and the smallest sufficient caps."""


def choose(
    config: ModelConfig,
    context_length: int,
    caps: Caps,
    rates: Rates,
    *,
    tokens_per_step: int | None = None,
    chunk: int | None = None,
    chunks: int | None = None,
    clipping: bool = True,
    precision: Precision = PRECISIONS["bf16"],
    moments: dict[str, int] = MOMENTS,
    least_chunk: int = LEAST_CHUNK,
    recipe: Recipe = STORED,
    lora: Lora | None = None,
    effort: int = EFFORT,
) -> ChosenPlan:
    """The plan whose simulated step has the most tokens per second.

    Args:
        tokens_per_step: tokens of all rounds; None means enough to hide the optimizer.
        chunk: tokens of a chunk, chosen if None; so are ``chunks`` of a round.
        least_chunk: tokens of a chunk, where chunks are chosen.
        recipe: of blocks' matmuls.
        lora: adapters that are trained instead of the weights.
        effort: operations to simulate in each part of the search.

    Raises:
        CapsTooSmallError: nothing fits.
        ValueError: the chunk does not divide a sequence or step, or no chunks add up to the tokens of a step.
    """
    works = [
        StreamedWork(
            *(config, context_length, tokens, precision, tuple(moments.items()), recipe),
            lora=lora,
            quantized_at_use=True,
        )
        for tokens in ([chunk] if chunk else chunk_sizes(context_length, least_chunk))
    ]
    return Search(works, caps, rates, tokens_per_step, chunks, clipping).best(effort)


def staging_bytes(config: ModelConfig, width: int, lora: Lora | None = None) -> int:
    """Bytes of pinned host memory through which a run saves its largest tensor, of ``width`` bytes a number."""
    largest = config.vocab_size * config.d_model
    if lora is not None:  # adapters alone are saved
        largest = lora.rank * max(config.d_model, config.d_query, config.d_ff)
    return 2 ** math.ceil(math.log2(largest * width))


def chunk_sizes(context_length: int, least: int = LEAST_CHUNK) -> list[int]:
    """Tokens of a chunk, ``least`` or more: of whole sequences together, or of even pieces of one."""
    if context_length <= least:
        first = context_length * math.ceil(least / context_length)
        return [first, 2 * first]
    most_pieces = min(MOST_PIECES, context_length // least)
    sizes = [context_length // n for n in range(1, most_pieces + 1) if context_length % n == 0]
    most = max(MOST_CHUNK, sizes[-1])
    fitting = [size for size in sizes if size <= most and size % 128 == 0]
    fitting = fitting or [size for size in sizes if size % FP8_QUANTUM == 0][-1:] or sizes[-1:]
    return fitting if context_length > most else [*fitting, 2 * context_length][:4]


@dataclass
class Search:
    """A search for the best plan under two caps."""

    works: list[StreamedWork]
    caps: Caps
    rates: Rates
    tokens_per_step: int | None
    chunks: int | None
    clipping: bool
    orders: tuple[Order, ...] = ORDERS
    lead: int = 0
    """``lead`` of interleaved plans."""

    def __post_init__(self) -> None:
        self.tried: dict[Plan, float] = {}
        """Tokens per second of simulated plans, 0 of one that does not fit."""
        self.operations = 0
        """Operations that have been simulated."""

    def best(self, effort: int) -> ChosenPlan:
        """Find the best plan by estimates, then by simulation, then by a local search from the best ones.

        Raises:
            CapsTooSmallError: nothing fits.
        """
        found = self.estimated()
        for n, plan in enumerate(chain(found, map(_least, found))):  # estimates can be low
            if self.ranking() and (n >= SIMULATED or self.operations >= effort):
                break
            self.rate(plan)
        ranking = self.ranking()
        shapes = {(plan.order, plan.work.chunk, plan.chunks): plan for plan in reversed(ranking)}
        for start in dict.fromkeys((*ranking[:STARTS], *shapes.values())):  # the search keeps the shape of a round
            self._climb(start, self.operations + effort // START_SHARE)
        for best in self.ranking()[:1]:
            self._climb(best, self.operations + effort)
        late = (plan for plan in chain(found, map(_least, found)) if self.rate(plan))
        for plan in chain(self.ranking(), late):
            if (choice := self._choice(plan)).fits:
                return choice
        raise CapsTooSmallError(self._shortage())

    def estimated(self) -> list[Plan]:
        """The best plan of each kind, the fastest first.

        A kind is an order, the number of chunks, whether context is kept, the number of layers whose x is kept, the
        number of layers with resident weights, and the quarters of these with resident gradients: the local search
        seldom changes those.
        """
        best: dict[tuple, tuple[Plan, float]] = {}
        for work in self.works:
            seconds = WorkSeconds.of(work, self.rates)
            for blank in self._blank_plans(work, seconds):
                if blank.least_bytes(blank.keep) <= self._ring_bytes(work):
                    plan, speed = self._filled(blank, seconds)
                    quarter = 4 * plan.gradients // max(plan.weights, 1)
                    kept = plan.keep_context, plan.input_every, plan.weights, quarter
                    kind = plan.order, work.chunk, plan.chunks, *kept
                    if speed and (kind not in best or best[kind][1] < speed):
                        best[kind] = plan, speed
        return _ranked(best.values())

    def _blank_plans(self, work: StreamedWork, seconds: WorkSeconds) -> Iterator[Plan]:
        """Plans of one round that keep the least."""
        n_layers, group = len(work.layers), work.chunks_per_sequence
        parts = sorted({n_layers * i // 8 for i in range(9)})
        counts = [n * group for n in (1, 2, 3, 4, 6, 8, 12, 16) if n == 1 or n * group <= MOST_CHUNKS]
        counts = counts if self.chunks is None else [self.chunks]
        counts = [n for n in counts if n >= (work.share.n_ranks if work.share else 1)]
        residents = [
            (weights, gradients, moments)
            for weights, gradients, moments in product(*(parts if what in work.states else [0] for what in RESIDENTS))
            if gradients <= weights or weights == n_layers
        ]
        attention, ring_bytes = seconds.recompute_input - seconds.recompute_attention, self._ring_bytes(work)
        most = n_layers if work.restores else 1
        inputs = [n for n in INPUT_EVERY if n == 1 or (n <= most and seconds.restore < attention)]
        for chunks, order, kept, every in product(
            counts, self.orders, (True, False) if work.is_long else (True,), inputs
        ):
            if not (self.tokens_per_step or 0) % (chunks * work.chunk):
                keep = Keep(chunks * (n_layers - math.ceil(n_layers / every)), 0)
                lead = self.lead if order == "interleaved" else 0
                for weights, gradients, moments in residents:
                    state, how = (weights, gradients, moments), (kept, every, self.clipping)
                    yield Plan(work, chunks, 1, order, keep, *state, *how, ring_bytes, self.caps.table_share, lead)

    def _filled(self, blank: Plan, seconds: WorkSeconds) -> tuple[Plan, float]:
        """(The plan with its number of rounds and the best activations that it can keep, its estimated speed or 0 if it
        does not fit)."""
        if (best := best_keep(blank, seconds, self.caps.host - self.caps.host_overhead)) is None:
            return blank, 0.0
        (of_round, keep), end = best, seconds.of_optimizer(blank)
        if self.tokens_per_step:
            rounds = self.tokens_per_step // blank.tokens
        else:
            rounds = math.ceil(end / of_round * (1 - OPTIMIZER_SHARE) / OPTIMIZER_SHARE)
        if blank.order == "interleaved" and rounds < 3:
            return blank, 0.0
        plan = replace(blank, keep=keep, rounds=rounds)
        return plan, plan.tokens / (end + (rounds - 1) * of_round + seconds.of_round(plan, keep, alone=True))

    def _ring_bytes(self, work: StreamedWork) -> int:
        """Bytes of the device for all slots."""
        return self.caps.device - self.caps.device_overhead - work.fixed_bytes - work.temporary_bytes

    def rate(self, plan: Plan) -> float:
        """Simulated tokens per second; 0 if the plan does not fit."""
        if plan not in self.tried:
            collects = gc.isenabled()
            gc.disable()  # looking for cycles among the small objects of a schedule takes half of the time to build it
            try:
                self.tried[plan] = self._simulate(plan)
            finally:
                if collects:
                    gc.enable()
        return self.tried[plan]

    def _simulate(self, plan: Plan) -> float:
        """Simulates as few rounds as show them all."""
        assert plan.ring_bytes is not None
        if plan.least_bytes(plan.keep_bounds[0]) > plan.ring_bytes:
            return 0.0
        rounds = min(plan.rounds, SIMULATED_ROUNDS)
        try:
            few = self._choice(replace(plan, rounds=rounds))
        except TooFewSlotsError:
            return 0.0
        self.operations += len(few.schedule.operations)
        if not few.fits:
            return 0.0
        seconds = few.times.span
        if more := plan.rounds - rounds:
            ends = [0.0] * rounds
            for operation, end in zip(few.schedule.operations, few.times.ends, strict=True):
                if operation.kind in BACKWARDS:
                    ends[operation.round] = end
            seconds += more * (ends[1] - ends[0])
        return plan.tokens / seconds

    def _choice(self, plan: Plan) -> ChosenPlan:
        schedule = build(plan)
        return ChosenPlan(plan, schedule, schedule_times(plan, schedule, self.rates), self.caps)

    def ranking(self) -> list[Plan]:
        """The plans that fit, the fastest first."""
        return _ranked((plan, rate) for plan, rate in self.tried.items() if rate)

    def _climb(self, best: Plan, most: int) -> None:
        """Move to faster neighbours, by large steps first, until ``most`` operations have been simulated."""
        for parts in (8, 32, best.pairs):
            improved = True
            while improved:
                improved = False
                for step in neighbours(best, parts):
                    while self.operations < most and (after := step(best)) is not None:
                        if self.rate(after) <= self.rate(best) * (1 + LEAST_GAIN):
                            break
                        best, improved = after, True

    def _shortage(self) -> str:
        """A sentence on the memory that is too small, and the smallest sufficient caps.

        Raises:
            ValueError: no caps are sufficient, as no chunks add up to a step.
        """
        caps, works = self.caps, self.works
        given = f"{_gib(caps.device)} GiB of device and {_gib(caps.host)} GiB of host memory"
        who = f"{works[0].config.name} on sequences of {works[0].context_length:,} tokens"
        if works[0].share:
            who += f", on rank {works[0].rank} of {works[0].share.n_ranks},"
        plans = [plan for work in works for plan in self._blank_plans(work, WorkSeconds.of(work, self.rates))]
        if not plans and (share := works[0].share):
            n, least = share.n_ranks, min(work.chunk for work in works)
            step = f"{self.tokens_per_step:,} tokens" if self.tokens_per_step else f"{self.chunks} chunks"
            return f"{who} has no rounds of at least {n} chunks of {least:,} tokens, as a ring of {n} needs: got {step}"
        if not plans:
            sizes = " or ".join(f"{work.chunk:,}" for work in works)
            raise ValueError(f"no chunks of {sizes} tokens make up a step of {self.tokens_per_step:,} tokens")
        device = min(caps.device - self._ring_bytes(plan.work) + plan.least_bytes(plan.keep) for plan in plans)
        device_cap = max(device, caps.device)
        host = min(
            caps.host_overhead + replace(plan, ring_bytes=ring_bytes).host_bytes(plan.keep)
            for plan in plans
            for ring_bytes in [device_cap - caps.device + self._ring_bytes(plan.work)]
            if plan.least_bytes(plan.keep) <= ring_bytes
        )
        short = [
            f"{what} is {_gib(needed - has)} GiB short"
            for what, needed, has in (("the device", device, caps.device), ("the host", host, caps.host))
            if needed > has
        ]
        would = f"{_gib(device_cap)} GiB of device and {_gib(max(host, caps.host))} GiB of host memory would do"
        return f"{who} does not fit {given}: {' and '.join(short or ['a ring of slots is too small'])}; {would}"


def _gib(n_bytes: float) -> str:
    """GiB, rounded up to a tenth, or to two digits if it is smaller."""
    step = 10.0 ** min(-1, math.floor(math.log10(n_bytes / GIB)) - 1)
    return f"{math.ceil(round(n_bytes / GIB / step, 6)) * step:.10g}"


def _ranked(rated: Iterable[tuple[Plan, float]]) -> list[Plan]:
    """The fastest first; of equals sequential ones, which are simpler, and of those the ones with the shortest rounds,
    which hold least. Equal are speeds that differ by how sums were rounded alone.
    """

    def rank(pair: tuple[Plan, float]) -> tuple[float, int]:
        plan, speed = pair[0], pair[1] * (1 + LEAST_GAIN * (pair[0].order == "sequential"))
        return float(f"{speed:.9e}"), -plan.chunks

    return [plan for plan, _ in sorted(rated, key=rank, reverse=True)]


def _least(plan: Plan) -> Plan:
    return replace(plan, keep=plan.keep_bounds[0])
