"""Chooses the plan of a step under memory caps: of all that fit, the one whose simulated step is the fastest.

Every layout (``estimate.py``: chunks, order, residents, levels) that fits both caps is estimated; schedules are built
of the best ones and simulated, small steps (``candidate.py``) are taken from the best of these, and the fastest wins.
So many rounds make a step that what the optimizer adds stays below 2 % of it, unless the tokens of a step are given.

    choice = choose(config, 8192, Caps(24 * GIB, 75 * GIB), Rates.of(hardware))
    choice.plan, choice.tokens_per_s  # and explain.reasons(choice)
"""

import gc
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product

from cs336_systems.config import PRECISIONS, ModelConfig, Precision
from cs336_systems.costs.streaming import MOMENTS, Rates, StreamedWork
from cs336_systems.hardware import GIB
from cs336_systems.streaming.build import build, schedule_times
from cs336_systems.streaming.candidate import Candidate, steps
from cs336_systems.streaming.choice import Caps, CapsTooSmallError, Choice
from cs336_systems.streaming.estimate import Layout, LevelsByHost, WorkSeconds
from cs336_systems.streaming.plan import ORDERS, Order
from cs336_systems.streaming.schedule import Kind
from cs336_systems.streaming.slots import TooFewSlotsError

LEAST_CHUNK = 8192
"""Tokens: below, kernels are too short to hide what the host does between them."""
MOST_CHUNK = 32_768
MOST_PIECES = 32
"""Of a sequence."""
MOST_CHUNKS = 16
"""Of a round, where they are not those of one sequence."""
OPTIMIZER_SHARE = 0.02
"""Of a step, at most, where its tokens are not given."""
INPUT_EVERY = (1, 2, 3, 4)
"""Of how many layers the first keeps x, to be tried: more than one where restoring x takes less time than attention,
as on long sequences."""
SIMULATED = 40
"""Kinds of layouts of which a schedule is built."""
EFFORT = 80_000
"""Operations that are simulated of them, and again on the way from the best plan that was found to better ones."""
STARTS = 8
"""The best of them, from each of which steps are taken first: neighbours of the seventh can be 3 % faster than those of
the first."""
START = 4
"""Part of the effort that goes into each of these."""
FIRST_RUNG, GROWTH = 0.03, 1.5
"""Of a ladder of smaller capacities of the host: what the second has above the least that holds a plan, as a share of
that, and the growth of this from one to the next."""
LESS = 16
"""Part of the effort that goes into each of these."""
LESS_SIMULATED, LESS_STARTS = 2, 1
"""Kinds of layouts there, and of those whose neighbours are tried."""
SIMULATED_ROUNDS = 3
"""Of a step, while plans are compared: the first, one that is like all others, and the last; one more where the first
and the last keep other levels, as backward of one that is like all others runs beside forward of another such."""
LEAST_GAIN = 3e-4
"""For which a step is taken."""


def choose(
    config: ModelConfig,
    context_length: int,
    caps: Caps,
    rates: Rates,
    *,
    tokens_per_step: int | None = None,
    chunk: int | None = None,
    chunks: int | None = None,
    order: Order | None = None,
    clipping: bool = True,
    precision: Precision = PRECISIONS["bf16"],
    moments: dict[str, int] = MOMENTS,
    least_chunk: int = LEAST_CHUNK,
    effort: int = EFFORT,
) -> Choice:
    """The plan whose simulated step has the most tokens per second.

    Args:
        tokens_per_step: of all rounds; None to take as many as hide the optimizer.
        chunk: tokens, if they shall be those; likewise ``chunks`` of a round, and ``order``.
        least_chunk: tokens, where chunks are to be chosen.
        effort: operations to simulate in each part of the search.

    Raises:
        CapsTooSmallError: nothing fits.
        ValueError: a chunk that does not divide, or tokens of a step that no chunks make up.
    """
    works = [
        StreamedWork(config, context_length, tokens, precision, tuple(moments.items()))
        for tokens in ([chunk] if chunk else chunk_sizes(context_length, least_chunk))
    ]
    return _Search(config, context_length, caps, rates, tokens_per_step, clipping, order, effort, works, chunks).best()


def chunk_sizes(context_length: int, least: int = LEAST_CHUNK) -> list[int]:
    """Whole sequences of at least so many tokens together, or even pieces of one."""
    if context_length <= least:
        first = context_length * math.ceil(least / context_length)
        return [first, 2 * first]
    most_pieces = min(MOST_PIECES, context_length // least)
    sizes = [context_length // n for n in range(1, most_pieces + 1) if context_length % n == 0]
    most = max(MOST_CHUNK, sizes[-1])
    fitting = [size for size in sizes if size <= most and size % 128 == 0] or sizes[-1:]
    return fitting if context_length > most else [*fitting, 2 * context_length][:4]


def _gib(n_bytes: float) -> str:
    """Rounded up to a tenth, or to two digits of what is smaller."""
    step = 10.0 ** min(-1, math.floor(math.log10(n_bytes / GIB)) - 1)
    return f"{math.ceil(round(n_bytes / GIB / step, 6)) * step:.10g}"


@dataclass(frozen=True)
class _Search:
    config: ModelConfig
    context_length: int
    caps: Caps
    rates: Rates
    tokens_per_step: int | None
    clipping: bool
    order: Order | None
    effort: int
    works: list[StreamedWork]
    chunks: int | None

    def best(self) -> Choice:
        """By estimates first, then by simulation, then by small steps from the best ones: with little effort under the
        smaller caps of a ladder, then with all of it under its own. What is found there is a plan here and where steps
        begin, so that more of the host's memory is not slower than a rung of the ladder. Than a cap between rungs,
        whose own search may find more, it can be, and more of the device's memory, which has no ladder: of llama3-8b
        at 8,192 tokens, among 28 pairs of caps, by up to 1.0 % (LOG.md).
        """
        tried = _Tried(self)
        for host_cap in self._host_ladder():
            tried.explore(host_cap, self.estimated(host_cap), LESS_SIMULATED, LESS_STARTS, self.effort // LESS)
        found = self.estimated(self.caps.host)
        tried.explore(self.caps.host, found, SIMULATED, STARTS, self.effort)
        late = (one for one in chain(found, map(_least, found)) if tried.rate(one, self.caps.host))
        for candidate in chain(tried.ranking(self.caps.host), late):
            if (choice := self.choice(candidate)) is not None:
                return choice
        raise CapsTooSmallError(self._shortage())

    def estimated(self, host_cap: int) -> list[Candidate]:
        """The best of each kind of layouts under a cap of the host, the fastest first: an order, chunks, whether
        context is kept, of how many layers x is, and how many layers' weights are resident, as steps seldom find
        another number of those.
        """
        best: dict[tuple, Candidate] = {}
        for levels in self._levels:
            candidate = self._candidate(levels, host_cap - self.caps.host_overhead)
            if candidate is not None:
                layout = candidate.layout
                kept = layout.keep_context, layout.input_every
                kind = layout.order, layout.work.chunk, layout.chunks, kept, layout.weights
                if kind not in best or best[kind].tokens_per_s < candidate.tokens_per_s:
                    best[kind] = candidate
        return _ranked((candidate, candidate.tokens_per_s) for candidate in best.values())

    def _host_ladder(self) -> Iterator[int]:
        """Caps of the host below its own, the same for all of them: from the least that holds a plan."""
        if not self._levels:
            return
        least = min(levels.host_bytes[0] for levels in self._levels) + self.caps.host_overhead
        above = FIRST_RUNG * least
        while 0 < above < self.caps.host - least:  # a plan that needs no host has no rung below it
            yield int(least + above)
            above *= GROWTH

    @cached_property
    def _levels(self) -> list[LevelsByHost]:
        """Of all layouts that fit the device."""
        return [
            LevelsByHost.of(layout, ring_bytes)
            for work in self.works
            for ring_bytes in [self._ring_bytes(work)]
            for layout in self._layouts(work)
            if layout.least_bytes(layout.level_bounds[0]) <= ring_bytes
        ]

    def _candidate(self, of: LevelsByHost, host_bytes: int) -> Candidate | None:
        """The best levels of a layout, by estimates; None if it does not fit."""
        layout, n = of.layout, bisect_right(of.host_bytes, host_bytes)
        if not n:
            return None
        alone, edges = of.alone[n - 1]
        seconds, levels = of.together[n - 1] if layout.order == "interleaved" else (alone, edges)
        rounds = self._rounds(layout, seconds)
        if layout.order == "interleaved" and rounds < 3:
            return None
        step = layout.optimizer_seconds + (rounds - 1) * seconds + alone
        return Candidate(layout, levels, edges, rounds, of.ring_bytes, rounds * layout.tokens / step)

    def _ring_bytes(self, work: StreamedWork) -> int:
        """Of the device, for all slots."""
        return self.caps.device - self.caps.device_overhead - work.fixed_bytes - work.temporary_bytes

    def _layouts(self, work: StreamedWork) -> Iterator[Layout]:
        n_layers, group = self.config.n_layers, work.chunks_per_sequence
        seconds = WorkSeconds.of(work, self.rates)
        parts = sorted({n_layers * i // 8 for i in range(9)})
        counts = [n * group for n in (1, 2, 3, 4, 6, 8, 12, 16) if n == 1 or n * group <= MOST_CHUNKS]
        counts = counts if self.chunks is None else [self.chunks]
        residents = [
            (weights, gradients, moments)
            for weights, gradients, moments in product(parts, repeat=3)
            if gradients <= weights or weights == n_layers
        ]
        attention = seconds.again_input - seconds.again_attention
        inputs = [n for n in INPUT_EVERY if n == 1 or (n <= n_layers and seconds.restore < attention)]
        for chunks, order, kept, every in product(counts, ORDERS, (True, False) if work.is_long else (True,), inputs):
            if self.order in (None, order) and not (self.tokens_per_step or 0) % (chunks * work.chunk):
                for resident in residents:
                    yield Layout(work, seconds, chunks, order, *resident, kept, every, self.caps.table_share)

    def _rounds(self, layout: Layout, seconds: float) -> int:
        if self.tokens_per_step:
            return self.tokens_per_step // layout.tokens
        return math.ceil(layout.optimizer_seconds / seconds * (1 - OPTIMIZER_SHARE) / OPTIMIZER_SHARE)

    def simulate(self, candidate: Candidate) -> "_Simulated":
        """From as few rounds as show them all."""
        layout = candidate.layout
        if layout.least_bytes(layout.level_bounds[0]) > candidate.ring_bytes:
            return _Simulated()
        rounds = min(candidate.rounds, SIMULATED_ROUNDS + (candidate.edges != candidate.levels))
        plan = replace(candidate, rounds=rounds).plan(self.clipping)
        try:
            schedule = build(plan)
        except TooFewSlotsError:
            return _Simulated()
        times = schedule_times(plan, schedule, self.rates)
        choice = Choice(plan, schedule, times, self.caps, self.rates)
        seconds = times.span
        if more := candidate.rounds - rounds:
            ends = [0.0] * rounds
            for operation, end in zip(schedule.operations, times.ends, strict=True):
                if operation.kind is Kind.EMBED_BACKWARD:
                    ends[operation.round] = end
            seconds += more * (ends[1] - ends[0])
        if sum(choice.device_parts.values()) > self.caps.device:
            return _Simulated(n_operations=len(schedule.operations))
        speed = candidate.rounds * layout.tokens / seconds
        return _Simulated(speed, sum(choice.host_parts.values()), len(schedule.operations))

    def choice(self, candidate: Candidate) -> Choice | None:
        """None if it does not fit after all."""
        plan = candidate.plan(self.clipping)
        schedule = build(plan)
        choice = Choice(plan, schedule, schedule_times(plan, schedule, self.rates), self.caps, self.rates)
        return choice if choice.fits else None

    def _shortage(self) -> str:
        """What is missing, and the smallest caps that would do."""
        caps = self.caps
        given = f"{_gib(caps.device)} GiB of device and {_gib(caps.host)} GiB of host memory"
        who = f"{self.config.name} on sequences of {self.context_length:,} tokens"
        layouts = [layout for work in self.works for layout in self._layouts(work)]
        device = min(
            caps.device - self._ring_bytes(layout.work) + layout.least_bytes(layout.level_bounds[0])
            for layout in layouts
        )
        device_cap = max(device, caps.device)
        host = min(
            caps.host_overhead + layout.host_bytes(layout.level_bounds[0], ring_bytes)
            for layout in layouts
            for ring_bytes in [device_cap - caps.device + self._ring_bytes(layout.work)]
            if layout.least_bytes(layout.level_bounds[0]) <= ring_bytes
        )
        short = [
            f"{what} is {_gib(needed - has)} GiB short"
            for what, needed, has in (("the device", device, caps.device), ("the host", host, caps.host))
            if needed > has
        ]
        would = f"{_gib(device_cap)} GiB of device and {_gib(max(host, caps.host))} GiB of host memory would do"
        return f"{who} does not fit {given}: {' and '.join(short or ['a ring of slots is too small'])}; {would}"


@dataclass(frozen=True)
class _Simulated:
    """Of a candidate."""

    tokens_per_s: float = 0.0
    """0 if it does not fit the device."""
    host_bytes: int = 0
    n_operations: int = 0


class _Tried:
    """Simulated candidates."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.simulated: dict[Candidate, _Simulated] = {}
        self.operations = 0

    def rate(self, candidate: Candidate, host_cap: int) -> float:
        """Tokens per second; 0 if it does not fit."""
        if candidate not in self.simulated:
            with _without_collector():
                self.simulated[candidate] = self.search.simulate(candidate)
            self.operations += self.simulated[candidate].n_operations
        found = self.simulated[candidate]
        return found.tokens_per_s * (found.host_bytes <= host_cap)

    def ranking(self, host_cap: int) -> list[Candidate]:
        """Those that fit, the fastest first."""
        rated = ((candidate, self.rate(candidate, host_cap)) for candidate in self.simulated)
        return _ranked((candidate, rate) for candidate, rate in rated if rate)

    def explore(self, host_cap: int, estimated: list[Candidate], kinds: int, starts: int, effort: int) -> None:
        """So many of the best estimates under one cap, then steps from so many of the best plans that are known under
        it, then from the best one.
        """
        most = self.operations + effort
        for n, candidate in enumerate(chain(estimated, map(_least, estimated))):  # estimates can be low
            if self.ranking(host_cap) and (n >= kinds or self.operations >= most):
                break
            self.rate(candidate, host_cap)
        for start in self.ranking(host_cap)[:starts]:
            self._climb(start, host_cap, self.operations + effort // START)
        for best in self.ranking(host_cap)[:1]:
            self._climb(best, host_cap, self.operations + effort)

    def _climb(self, best: Candidate, host_cap: int, most: int) -> None:
        """Step by step, large ones first, as long as one is faster, up to so many simulated operations."""
        for parts in (8, 32, best.layout.pairs):
            improved = True
            while improved:
                improved = False
                for step in steps(best.layout, parts):
                    while self.operations < most and (after := step(best)) is not None:
                        if self.rate(after, host_cap) <= self.rate(best, host_cap) * (1 + LEAST_GAIN):
                            break
                        best, improved = after, True


@contextmanager
def _without_collector() -> Iterator[None]:
    """A schedule is thousands of small objects without a cycle: looking for cycles takes half of the time it is built
    in."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _ranked(rated: Iterable[tuple[Candidate, float]]) -> list[Candidate]:
    """The fastest first; of equals sequential ones, which are simpler, and of those the ones with the shortest rounds,
    which hold least. Equal is what differs by how sums were rounded alone.
    """

    def rank(pair: tuple[Candidate, float]) -> tuple[float, int]:
        layout, speed = pair[0].layout, pair[1] * (1 + LEAST_GAIN * (pair[0].layout.order == "sequential"))
        return float(f"{speed:.9e}"), -layout.chunks

    return [candidate for candidate, _ in sorted(rated, key=rank, reverse=True)]


def _least(candidate: Candidate) -> Candidate:
    """The same that keeps the least."""
    least, _ = candidate.layout.level_bounds
    return replace(candidate, levels=least, edges=least)
