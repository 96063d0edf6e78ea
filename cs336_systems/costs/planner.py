"""Chooses the checkpointing policy, or the ``--keep`` level, that fits a memory budget with the least recomputation.

    found = cheapest_policy(case, "step", budget_bytes=80 * 1024**3, predict=predict)
    found = cheapest_keep(fused_case, "step", budget_bytes=80 * 1024**3, predict=predict)
    found.choice, found.peak_bytes, found.extra_flops, found.step_flops

``predict`` runs the step on tensors without storage (``training/dry_run.py``), which takes a second. Candidates are
therefore sorted by cost, and bisection finds the cheapest that fits.

Policies. Candidates recompute no matmul, all matmuls of the first 1 to n blocks, or all of these except attention.
Longer segments and nested segments need as much memory as ``full`` and recompute more (``costs/checkpointing.py``).
Only matmuls are costed, not norms, softmax and casts, which ``keep-matmuls`` recomputes.

Levels. Every level with every set of switches is a candidate (``costs/kept.py``), the same for all blocks. The cost is
recomputation time at an H200's published peaks: of the dtype for matmuls, of memory for norms, rotation and SwiGLU.
Real kernels reach 70 to 95 % of both peaks; only the order of candidates matters. A candidate that keeps at least as
many bytes as another and takes no less time is left out; the rest are sorted by the bytes that they keep.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from cs336_systems.case import TrainingCase
from cs336_systems.costs.checkpointing import KEEP_ATTENTION, KEEP_MATMULS
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import LEVELS, SWITCHES, bytes_kept, kept_names, recomputed
from cs336_systems.costs.memory import PeakMemory
from cs336_systems.hardware import GIB, hardware_named

Predict = Callable[[TrainingCase], PeakMemory]
"""Predicts the peak memory of one pass of a case."""


@dataclass(frozen=True)
class LeastRecomputation:
    """A policy, or a level of hand-written blocks, that fits a budget, with its predicted cost."""

    choice: str
    peak_bytes: int
    extra_flops: int
    """FLOPs of matmuls and attention that a step recomputes."""
    step_flops: int
    """FLOPs of a step without recomputation."""

    def __str__(self) -> str:
        more = f"{100 * self.extra_flops / self.step_flops:.1f} % more FLOPs"
        return f"{self.choice}: predicted peak {self.peak_bytes / GIB:.4g} GiB, {more}"


def cheapest_policy(
    case: TrainingCase, mode: str, budget_bytes: int, predict: Predict, *, selective: bool = True
) -> LeastRecomputation:
    """The policy with the least recomputation whose predicted peak is at most ``budget_bytes``.

    Args:
        selective: whether the case's attention supports policies that keep the results of operators.

    Raises:
        ValueError: no policy fits (the message gives the smallest predicted peak), or the mode is unknown.
    """
    peaks: dict[str, int] = {}

    def flops(policy: str) -> int:
        return hardware_flops(*case.work, mode, attention=case.attention_kind, checkpoint=policy)

    def fits(policy: str) -> bool:
        peaks[policy] = predict(replace(case, checkpoint=policy)).n_bytes
        return peaks[policy] <= budget_bytes

    def first_that_fits(policies: list[str]) -> list[str]:
        place = bisect_left(policies, True, key=fits)
        return policies[place : place + 1]

    n_layers = case.config.n_layers
    first = [*(f"first-{m}" for m in range(1, n_layers)), "full"]
    kept = [*(f"{KEEP_MATMULS}-{k}" for k in range(n_layers - 1, 0, -1)), KEEP_ATTENTION] if selective else []
    free = ["none", KEEP_MATMULS] if selective else ["none"]
    found = next((policy for policy in free if fits(policy)), None)
    if found is None:
        found = min(first_that_fits(first) + first_that_fits(kept), key=flops, default=None)
    if found is None:
        raise ValueError(_nothing_fits(case, mode, budget_bytes, peaks, "--checkpoint"))
    return LeastRecomputation(found, peaks[found], flops(found) - flops("none"), flops("none"))


def _nothing_fits(case: TrainingCase, mode: str, budget_bytes: int, peaks: dict[str, int], option: str) -> str:
    smallest = min(reversed(peaks), key=peaks.__getitem__)  # of equal peaks the last tried, which keeps least
    return (
        f"nothing that may be kept for backward fits {budget_bytes / GIB:.4g} GiB for {case.config.name}, "
        f"batch {case.batch_size}, context {case.context_length}, {case.dtype}, {mode}: the smallest predicted peak is "
        f"{peaks[smallest] / GIB:.4g} GiB, with {option} {smallest}"
    )


def candidate_keeps() -> Iterator[str]:
    """Every set of tensors that a level with switches can name, each once, by its shortest name."""
    seen = set()
    for n_switches in range(len(SWITCHES) + 1):
        for switches in combinations(SWITCHES, n_switches):
            for level in LEVELS:
                keep = "-".join((level, *switches))
                if (names := kept_names(keep)) not in seen:
                    seen.add(names)
                    yield keep


def cheapest_keep(case: TrainingCase, mode: str, budget_bytes: int, predict: Predict) -> LeastRecomputation:
    """The level of hand-written blocks with the least recomputation time whose predicted peak is at most
    ``budget_bytes``; the case's own level is ignored.

    Raises:
        ValueError: no level fits (the message gives the smallest predicted peak), the mode or attention is unknown, or
            the dtype has autocast.
    """
    hardware = hardware_named("h200")
    again = {keep: recomputed(*case.work, case.precision, keep) for keep in candidate_keeps()}
    seconds = {keep: each.seconds(hardware, case.precision.matmul_dtype) for keep, each in again.items()}
    n_bytes = {keep: bytes_kept(*case.work, case.precision, keep, case.recipe) for keep in again}
    most_first: list[str] = []
    for keep in sorted(n_bytes, key=lambda keep: (n_bytes[keep], seconds[keep])):
        if not most_first or seconds[keep] < seconds[most_first[0]]:
            most_first.insert(0, keep)
    peaks: dict[str, int] = {}

    def fits(keep: str) -> bool:
        peaks[keep] = predict(replace(case, keep=keep)).n_bytes
        return peaks[keep] <= budget_bytes

    place = bisect_left(most_first, True, key=fits)
    if place == len(most_first):
        raise ValueError(_nothing_fits(case, mode, budget_bytes, peaks, "--keep"))
    keep, n_layers = most_first[place], case.config.n_layers if mode != "forward" else 0
    step_flops = hardware_flops(*case.work, mode, attention="flash")
    return LeastRecomputation(keep, peaks[keep], n_layers * again[keep].flops, step_flops)
