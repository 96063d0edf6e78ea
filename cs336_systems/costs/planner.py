"""Chooses the activation checkpointing, or level of ``--keep``, that fits a memory budget at the least recomputation.

    found = cheapest_policy(case, "step", budget_bytes=80 * 1024**3, predict=predict)
    found = cheapest_keep(fused_case, "step", budget_bytes=80 * 1024**3, predict=predict)
    found.choice, found.peak_bytes, found.extra_flops, found.step_flops

``predict`` runs the step on tensors without storage (``training/dry_run.py``), which takes a second, so candidates are
ordered by what they cost and the cheapest that fits is found by bisection.

Policies. Candidates recompute no matmul, those of the first 1 to n blocks, or of these blocks all but attention; longer
segments and halves of halves need as much memory as ``full`` and recompute more (``costs/checkpointing.py``). Time that
is not matmuls (norms, softmax, casts, which ``keep-matmuls`` recomputes) is not weighed.

Levels. Every level with every set of switches is a candidate (``costs/kept.py``), the same for all blocks. Recomputing
what is not kept takes time at an H200's published peaks, matmuls at that of the dtype and norms, rotation and SwiGLU at
that of memory; real kernels reach 70 to 95 % of both, and the order is what counts. Candidates that keep as much as
another and take longer are left out; the rest is ordered by what is kept.
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
"""Predicts the peak of one pass of a case."""


@dataclass(frozen=True)
class LeastRecomputation:
    """A policy, or what hand-written blocks keep, that fits a budget, and what it is predicted to cost."""

    choice: str
    peak_bytes: int
    extra_flops: int
    """FLOPs of matmuls and attention that a step recomputes."""
    step_flops: int
    """FLOPs of the step that recomputes nothing."""

    def __str__(self) -> str:
        more = f"{100 * self.extra_flops / self.step_flops:.1f} % more FLOPs"
        return f"{self.choice}: predicted peak {self.peak_bytes / GIB:.4g} GiB, {more}"


def cheapest_policy(
    case: TrainingCase, mode: str, budget_bytes: int, predict: Predict, *, selective: bool = True
) -> LeastRecomputation:
    """The policy of least recomputation with which the predicted peak of ``case`` is at most ``budget_bytes``.

    Args:
        selective: whether the attention can be had with policies that keep results of operators.

    Raises:
        ValueError: no policy fits, and the message names the smallest predicted peak; or an unknown mode.
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
    smallest = min(reversed(peaks), key=peaks.__getitem__)  # of equal ones what keeps least, which is tried last
    return (
        f"nothing that may be kept for backward fits {budget_bytes / GIB:.4g} GiB for {case.config.name}, "
        f"batch {case.batch_size}, context {case.context_length}, {case.dtype}, {mode}: the smallest predicted peak is "
        f"{peaks[smallest] / GIB:.4g} GiB, with {option} {smallest}"
    )


def candidate_keeps() -> Iterator[str]:
    """Every choice of tensors that levels and switches can say, each once, by the shortest of its names."""
    seen = set()
    for n_switches in range(len(SWITCHES) + 1):
        for switches in combinations(SWITCHES, n_switches):
            for level in LEVELS:
                keep = "-".join((level, *switches))
                if (names := kept_names(keep)) not in seen:
                    seen.add(names)
                    yield keep


def cheapest_keep(case: TrainingCase, mode: str, budget_bytes: int, predict: Predict) -> LeastRecomputation:
    """The choice for hand-written blocks with which the predicted peak is at most ``budget_bytes`` and the least time
    goes into recomputation; the case's own choice is not looked at.

    Raises:
        ValueError: no choice fits, and the message names the smallest predicted peak; or an unknown mode or attention,
            or a dtype with autocast.
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
