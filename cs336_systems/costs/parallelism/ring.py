"""Ring collectives played step by step on named chunks, to verify the closed forms.

Rank r sends to rank r + 1 (mod n), and all ranks send at the same time. What a rank holds of a chunk is the set of
ranks whose values are summed in it, so that a run shows by itself whether every rank ends with every contribution, and
none twice. The algorithms are Patarasuk and Yuan's (2009):

    reduce-scatter   n - 1 steps; the chunk that arrives is added to one's own and passed on in the next step
    all-gather       n - 1 steps; the chunk that arrives is kept and passed on
    all-reduce       the first, then the second

and the CS336 2026 handout's alternate all-reduce: n - 1 steps, in each of which a rank passes on the *whole* tensor
that arrived before and adds it to its own sum. It has half the steps, but sends (n - 1) S bytes per rank where the ring
of chunks sends 2 (n - 1)/n S: n/2 times more, hence worse from three ranks on (equal at two). It needs two buffers more
(a tensor in transit and one arriving), and each rank adds in an order of its own: replicas differ in their last bits.

Bytes count one direction of each link: a rank's egress. A torus that sends half of every chunk each way around halves
the seconds, and that is what doubling the bandwidth of one link (the "bidirectional" bandwidth W of the scaling book)
says.

    run = all_reduce(4, total_bytes=1024)
    run.bytes_per_link      # (1536, 1536, 1536, 1536)
    run.seconds(450e9)      # each step takes as long as its largest message
"""

from collections.abc import Callable
from dataclasses import dataclass

MOST_RANKS = 64
"""Ranks of the largest ring that is played for a question, in a second; time grows with their number to the third power
and more, to 52 s and 8.7 GB of holdings at 384. The closed forms of ``costs/communication.py`` know no limit."""

Holdings = tuple[dict[int, frozenset[int]], ...]
"""For each rank: chunk -> ranks whose values are summed in what it holds of the chunk."""


@dataclass(frozen=True)
class Message:
    """One chunk on its way from ``source`` to its neighbour."""

    source: int
    destination: int
    chunk: int
    contributors: frozenset[int]
    n_bytes: int


@dataclass(frozen=True)
class RingRun:
    """The messages of each step, and the holdings of every rank before the first step and after each."""

    world_size: int
    steps: tuple[tuple[Message, ...], ...]
    holdings: tuple[Holdings, ...]

    @property
    def bytes_per_link(self) -> tuple[int, ...]:
        """Bytes that each rank sent to its neighbour."""
        return tuple(
            sum(message.n_bytes for step in self.steps for message in step if message.source == rank)
            for rank in range(self.world_size)
        )

    def seconds(self, bytes_per_s: float, alpha_s: float = 0.0) -> float:
        """Time of the run where a step ends with its largest message: ``alpha_s`` + its bytes over the bandwidth."""
        return sum(alpha_s + max(message.n_bytes for message in step) / bytes_per_s for step in self.steps)


def reduce_scatter(world_size: int, total_bytes: int) -> RingRun:
    """Every rank begins with all n chunks of its own tensor of ``total_bytes``; rank r ends with the sum of chunk r.

    Raises:
        ValueError: no ranks, or negative bytes.
    """
    sizes = _chunk_sizes(total_bytes, world_size)
    start = tuple({chunk: frozenset({rank}) for chunk in range(world_size)} for rank in range(world_size))
    return _play(start, sizes, lambda rank, step: rank - 1 - step, reduces=True)


def all_gather(world_size: int, total_bytes: int) -> RingRun:
    """Rank r begins with chunk r of a tensor of ``total_bytes``; every rank ends with all chunks.

    Raises:
        ValueError: no ranks, or negative bytes.
    """
    return _play(_own(world_size), _chunk_sizes(total_bytes, world_size), lambda rank, step: rank - step)


def all_reduce(world_size: int, total_bytes: int) -> RingRun:
    """Every rank begins with a tensor of ``total_bytes`` and ends with the sum: reduce-scatter, then all-gather.

    Raises:
        ValueError: no ranks, or negative bytes.
    """
    first = reduce_scatter(world_size, total_bytes)
    sizes = _chunk_sizes(total_bytes, world_size)
    second = _play(first.holdings[-1], sizes, lambda rank, step: rank - step)
    return RingRun(world_size, first.steps + second.steps, first.holdings + second.holdings[1:])


def alternate_all_reduce(world_size: int, total_bytes: int) -> RingRun:
    """The handout's alternative, whole tensors around the ring: ``chunk`` is the rank that a tensor came from.

    Holdings are what a rank has seen and added to its sum. In step t rank i sends the tensor of rank i - t.

    Raises:
        ValueError: no ranks, or negative bytes.
    """
    _check(total_bytes, world_size)
    return _play(_own(world_size), [total_bytes] * world_size, lambda rank, step: rank - step)


def _own(world_size: int) -> Holdings:
    """Rank r holds chunk r, which nothing has been added to."""
    return tuple({rank: frozenset({rank})} for rank in range(world_size))


def _play(start: Holdings, sizes: list[int], sent_by: Callable[[int, int], int], *, reduces: bool = False) -> RingRun:
    """n - 1 steps in which rank r sends chunk ``sent_by(r, step)`` mod n.

    Reducing, what arrives is added to one's own, and the sender's partial sum lives on at the neighbour only; else what
    arrives is kept, and the sender keeps it too.
    """
    world_size = len(start)
    holdings, steps = [start], []
    for step in range(world_size - 1):
        before = holdings[-1]
        messages = tuple(
            Message(rank, (rank + 1) % world_size, chunk, before[rank][chunk], sizes[chunk])
            for rank in range(world_size)
            for chunk in (sent_by(rank, step) % world_size,)
        )
        after = [dict(held) for held in before]
        if reduces:
            for message in messages:
                del after[message.source][message.chunk]
        for message in messages:
            held, arrived = after[message.destination], message.contributors
            assert (message.chunk in held) == reduces, f"chunk {message.chunk} is added up, or fills an empty place"
            own = held.get(message.chunk, frozenset())
            assert not own & arrived, f"ranks {sorted(own & arrived)} would be counted twice"
            held[message.chunk] = own | arrived
        steps.append(messages)
        holdings.append(tuple(after))
    return RingRun(world_size, tuple(steps), tuple(holdings))


def _chunk_sizes(total_bytes: int, world_size: int) -> list[int]:
    """``total_bytes`` in n chunks that differ by one byte at most."""
    _check(total_bytes, world_size)
    return [total_bytes // world_size + (chunk < total_bytes % world_size) for chunk in range(world_size)]


def _check(total_bytes: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world size must be positive, got {world_size}")
    if total_bytes < 0:
        raise ValueError(f"total bytes must not be negative, got {total_bytes}")
