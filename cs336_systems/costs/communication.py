"""Calculates the cost of a collective: its bytes, its seconds on a ring, and algorithm and bus bandwidth.

The model is alpha-beta: a message takes ``alpha_s`` to start and ``beta_s_per_byte`` for each byte. On a ring of n
ranks every collective is a number of steps in which each rank sends one chunk to its neighbour (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; Thakur et al., "Optimization of collective
communication operations in MPICH", 2005):

    collective        steps       chunk      seconds
    all-gather        n - 1       N / n      (n - 1) alpha + (n - 1)/n N beta
    reduce-scatter    n - 1       N / n      (n - 1) alpha + (n - 1)/n N beta
    all-reduce        2 (n - 1)   N / n      the sum of the two above
    broadcast         n - 1       pipelined  (n - 1) alpha + N beta
    all-to-all        n - 1       N / n      (n - 1) alpha + (n - 1)/n N beta   (every chunk goes straight to its owner)

N, everywhere in this suite, is *total bytes* as nccl-tests counts them: the whole tensor of an all-reduce or broadcast,
the whole gathered output of an all-gather, the whole input of a reduce-scatter or all-to-all on one rank. Then

    algbw = N / seconds            busbw = algbw x factor, what each link carries in one direction

with the factors of nccl-tests' PERFORMANCE.md in ``busbw_factor``: busbw can stand beside a link's datasheet figure for
any n. All five costs are linear in the steps and in ``factor x N``, so alpha and beta can be fitted to measured points
of any mixture of collectives, sizes and worlds (``fit``), by least squares in closed form.

Limits: a ring within one switch. NCCL picks trees, NVLS or low-latency protocols below some megabytes, where a fitted
alpha is a mean over protocols; a network with slower links between nodes than within needs a beta for each.

    link = fit([(cost("all_reduce", 2, 100e6), 0.5e-3), (cost("all_gather", 2, 1e6), 0.03e-3)])
    seconds = link.seconds(cost("reduce_scatter", 4, 1e9))
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.config import check_known

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True)
class RingCost:
    """The steps and bytes of a collective on a ring, by which alpha and beta are multiplied."""

    steps: int
    """Messages that a rank sends one after another."""
    wire_bytes: float
    """Bytes that cross each link in one direction: those that a rank sends or, in a broadcast, forwards."""


@dataclass(frozen=True)
class Link:
    """A connection that carries messages."""

    alpha_s: float
    """Seconds to start a message."""
    beta_s_per_byte: float
    """Seconds per byte: the inverse of the bandwidth in one direction."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in one direction."""
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte else float("inf")

    def seconds(self, cost: RingCost) -> float:
        """Seconds that a collective takes."""
        return cost.steps * self.alpha_s + cost.wire_bytes * self.beta_s_per_byte


def busbw_factor(collective: str, world_size: int) -> float:
    """busbw over algbw: bytes that cross each link, over total bytes (nccl-tests, doc/PERFORMANCE.md).

    2(n-1)/n for all-reduce; (n-1)/n for all-gather, reduce-scatter and all-to-all; 1 for broadcast. A world of one
    sends nothing: 0.

    Raises:
        ValueError: no such collective, or no ranks.
    """
    check_known("collective", collective, COLLECTIVES)
    if world_size < 1:
        raise ValueError(f"world size must be positive, got {world_size}")
    if world_size == 1:
        return 0.0
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (world_size - 1) / world_size


def cost(collective: str, world_size: int, total_bytes: float) -> RingCost:
    """Steps and bytes of a collective on a ring.

    Args:
        total_bytes: as nccl-tests counts them, see the top of this file.

    Raises:
        ValueError: no such collective, no ranks, or negative bytes.
    """
    factor = busbw_factor(collective, world_size)
    if total_bytes < 0:
        raise ValueError(f"total bytes must not be negative, got {total_bytes:g}")
    return RingCost((2 if collective == "all_reduce" else 1) * (world_size - 1), factor * total_bytes)


def busbw(collective: str, world_size: int, total_bytes: float, seconds: float) -> float:
    """Bytes per second that each link carries in one direction; ValueError as ``busbw_factor``."""
    return total_bytes / seconds * busbw_factor(collective, world_size)


def fit(points: Sequence[tuple[RingCost, float]]) -> Link:
    """The link of least relative error over measured (cost, seconds): alpha and beta, neither below zero.

    Each residual is divided by the measured time, as otherwise only the largest message would matter. The two normal
    equations are solved in closed form; an unknown that would be negative is set to zero and the other fitted alone.

    Raises:
        ValueError: fewer than two points that send anything, a time that is not positive, or points from which
            latency and bandwidth cannot be told apart because all have the same bytes per step.
    """
    if bad := [seconds for _, seconds in points if not seconds > 0]:
        raise ValueError(f"measured times must be positive, got {bad[0]}")
    rows = [(cost.steps / seconds, cost.wire_bytes / seconds) for cost, seconds in points if cost.steps]
    if len(rows) < 2:
        raise ValueError(f"alpha and beta need at least two measured points between ranks, got {len(rows)}")
    # Bytes are scaled to the size of steps: their squares would otherwise differ by 20 orders of magnitude.
    scale = sum(y for _, y in rows) / sum(x for x, _ in rows) or 1.0
    rows = [(x, y / scale) for x, y in rows]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    if determinant <= 1e-12 * xx * yy:
        raise ValueError(f"all {len(rows)} points have the same bytes per step: alpha and beta cannot be told apart")
    alpha, beta = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    if alpha < 0:
        alpha, beta = 0.0, y1 / yy
    elif beta < 0:
        alpha, beta = x1 / xx, 0.0
    return Link(alpha, beta / scale)
