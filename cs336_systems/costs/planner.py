"""Which activation checkpointing, or which level of what hand-written blocks keep, fits a budget at the least cost?

    found = cheapest_policy(case, "step", budget_bytes=80 * 1024**3, predict=predict)
    found = cheapest_keep(fused_case, "step", budget_bytes=80 * 1024**3, predict=predict)
    found.choice, found.peak_bytes, found.extra_flops, found.seconds

``predict`` runs the step on tensors without storage (``training/dry_run.py``), which takes a second, so candidates are
ordered by what they cost and the cheapest that fits is found by bisection.

Policies. Candidates recompute no matmul, those of the first 1 to n blocks, or all but attention; longer segments and
halves of halves need as much memory as ``full`` and recompute more (``costs/checkpointing.py``). Time that is not
matmuls (norms, softmax, casts, which ``keep-matmuls`` recomputes) is not weighed.

Levels. Every level with every set of switches is a candidate (``costs/kept.py``), the same for all blocks. Recomputing
what is not kept takes time at an H200's published peaks, matmuls at that of the dtype and norms, rotation and SwiGLU at
that of memory; real kernels reach 70 to 95 % of both, and the order is what counts. Candidates that keep as much as
another and take longer are left out; the rest is ordered by what is kept. Where levels may be mixed, the first blocks
keep more than the others, as many blocks as fit.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from cs336_systems.case import TrainingCase
from cs336_systems.costs.checkpointing import KEEP_ATTENTION, KEEP_MATMULS
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import (
    LEVELS,
    RECOMPUTED_WORDS,
    SWITCHES,
    bytes_kept,
    keep_of_blocks,
    kept_names,
    recomputed,
)
from cs336_systems.costs.memory import PeakMemory
from cs336_systems.hardware import GIB, Hardware, find_hardware

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
    seconds: float | None = None
    """Seconds of recomputation at an H200's peaks, of what hand-written blocks keep."""
    recomputes: tuple[str, ...] = ()
    """Names of what such blocks recompute, of ``costs.kept.RECOMPUTED_WORDS``."""

    def __str__(self) -> str:
        fits = f"{self.choice}: predicted peak {self.peak_bytes / GIB:.4g} GiB"
        more = f"{100 * self.extra_flops / self.step_flops:.1f} % more FLOPs"
        if self.seconds is None:
            return f"{fits}, {more}"
        if not self.recomputes:
            return f"keep {fits}; nothing is recomputed"
        names = ", ".join(RECOMPUTED_WORDS[name] for name in self.recomputes)
        return f"keep {fits}; {names} recomputed: {more}, {1e3 * self.seconds:.3g} ms at an H200's peaks"


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

    kept = [KEEP_MATMULS] if selective else []
    first = [*(f"first-{m}" for m in range(1, case.config.n_layers)), "full"]
    found = next((policy for policy in ("none", *kept) if fits(policy)), None)
    if found is None:
        place = bisect_left(first, True, key=fits)
        found = first[place] if place < len(first) else None
        least = flops(found or "full")
        if selective and flops(KEEP_ATTENTION) < least and fits(KEEP_ATTENTION):
            found = KEEP_ATTENTION
    if found is None:
        smallest = min(peaks, key=peaks.__getitem__)
        raise ValueError(_nothing_fits("no checkpoint policy", case, mode, budget_bytes, peaks[smallest], smallest))
    return LeastRecomputation(found, peaks[found], flops(found) - flops("none"), flops("none"))


def _nothing_fits(what: str, case: TrainingCase, mode: str, budget_bytes: int, least: int, where: str) -> str:
    return (
        f"{what} fits {budget_bytes / GIB:.4g} GiB for {case.config.name}, batch {case.batch_size}, "
        f"context {case.context_length}, {case.dtype}, {mode}: the smallest predicted peak is "
        f"{least / GIB:.4g} GiB, with {where}"
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


def cheapest_keep(
    case: TrainingCase, mode: str, budget_bytes: int, predict: Predict, *, mixed: bool = False
) -> LeastRecomputation:
    """The choice for hand-written blocks with which the predicted peak is at most ``budget_bytes`` and the least time
    goes into recomputation; the case's own choice is not looked at.

    Args:
        mixed: whether the first blocks may keep more than the others.

    Raises:
        ValueError: no choice fits, and the message names the smallest predicted peak; or an unknown mode or attention,
            or a dtype with autocast.
    """
    n_layers = case.config.n_layers if mode != "forward" else 0
    seconds, n_bytes = dict[str, float](), dict[str, int]()
    for keep in candidate_keeps():
        seconds[keep] = recomputed(*case.work, case.precision, keep).seconds(_hardware(), case.precision.matmul_dtype)
        n_bytes[keep] = bytes_kept(*case.work, case.precision, keep, case.recipe)
    most_first: list[str] = []
    for keep in sorted(n_bytes, key=lambda keep: (n_bytes[keep], seconds[keep])):
        if not most_first or seconds[keep] < seconds[most_first[0]]:
            most_first.insert(0, keep)

    def fits(keep: str) -> bool:
        return predict(replace(case, keep=keep)).n_bytes <= budget_bytes

    first = bisect_left(most_first, True, key=fits)
    if first == len(most_first):
        least, where = predict(replace(case, keep=most_first[-1])), f"keep {most_first[-1]}"
        raise ValueError(_nothing_fits("nothing that blocks may keep", case, mode, budget_bytes, least.n_bytes, where))
    keep = most_first[first]
    if mixed and first and n_layers > 1:
        room = budget_bytes - predict(replace(case, keep=keep)).n_bytes
        more, less = _best_pair(most_first, first, room, n_layers, seconds, n_bytes)
        mixes = [f"{n}x{more}+{less}" for n in range(n_layers - 1, 0, -1)]
        if (place := bisect_left(mixes, True, key=fits)) < len(mixes):
            keep = mixes[place]
    return _keep_choice(replace(case, keep=keep), mode, predict)


def _best_pair(
    most_first: list[str], first: int, room: int, n_layers: int, seconds: dict[str, float], n_bytes: dict[str, int]
) -> tuple[str, str]:
    """The level of the first blocks, which does not fit all blocks, and that of the others, which does.

    This is an estimate: peaks are taken to differ by what is kept. ``room`` bytes are left where all blocks keep what
    is at ``first``.
    """

    def time(pair: tuple[str, str]) -> float:
        more, less = pair
        left = room + n_layers * (n_bytes[most_first[first]] - n_bytes[less])
        n = min(n_layers - 1, left // (n_bytes[more] - n_bytes[less]))
        return n * seconds[more] + (n_layers - n) * seconds[less]

    return min(product(most_first[:first], most_first[first:]), key=time)


def _hardware() -> Hardware:
    hardware = find_hardware("NVIDIA H200")
    assert hardware is not None
    return hardware


def _keep_choice(case: TrainingCase, mode: str, predict: Predict) -> LeastRecomputation:
    """The case's own choice of what blocks keep, with its costs."""
    blocks = Counter(keep_of_blocks(case.keep, case.config.n_layers)) if mode != "forward" else Counter()
    again = {each: recomputed(*case.work, case.precision, each) for each in blocks}
    return LeastRecomputation(
        case.keep,
        predict(case).n_bytes,
        sum(n * again[each].flops for each, n in blocks.items()),
        hardware_flops(*case.work, mode, attention="flash"),
        sum(n * again[each].seconds(_hardware(), case.precision.matmul_dtype) for each, n in blocks.items()),
        tuple(name for name in RECOMPUTED_WORDS if any(name in each.names for each in again.values())),
    )
