"""Which activation checkpointing, or which level of what written-out blocks keep, fits a budget at the least cost?

    case = TrainingCase("cuda", "xl", batch_size=4, context_length=2048, dtype="autocast-bf16")
    choice = cheapest_policy(case, "step", budget_bytes=80 * 1024**3)
    choice.policy, choice.peak_bytes, choice.extra_flops

    choice = cheapest_keep(fused_case, "step", budget_bytes=80 * 1024**3, predict=predict)
    choice.keep, choice.peak_bytes, choice.seconds

Policies. Every policy is a candidate, at every length of segment and every number of first blocks. Of those whose
predicted peak (``costs/memory.py``) is within the budget, the one that recomputes the fewest matmuls wins; between
equals the one without recomputation, then the lower peak. Limits: the peak is predicted for eager execution of the
reference model; time that is not matmuls (norms, softmax, casts, which ``keep-matmuls`` recomputes) is not weighed.

Levels. Every level with every set of switches is a candidate (``costs/kept.py``), the same for all blocks. Recomputing
what is not kept takes time at an H200's published peaks, matmuls at that of the dtype and norms, rotation and SwiGLU at
that of memory; real kernels reach 70 to 95 % of both, and the order is what counts. Candidates that keep as much as
another and take longer are left out; the rest is ordered by what is kept, and since the peak grows with it, the largest
that fits is found by bisection: a prediction, which ``predict`` makes, takes a second. Where levels may be mixed, the
first blocks keep more than the others, as many blocks as fit.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from cs336_systems.case import TrainingCase
from cs336_systems.costs.checkpointing import SELECTIVE
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import LEVELS, SWITCHES, bytes_kept, keep_of_blocks, kept_names
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PeakMemory, peak_memory
from cs336_systems.costs.recomputed import WORDS, recomputed
from cs336_systems.hardware import GIB, Hardware, find_hardware


@dataclass(frozen=True)
class Choice:
    """A policy and what it is predicted to cost."""

    policy: str
    peak_bytes: int
    extra_flops: int
    """Matrix-product operations of a step that run a second time."""
    step_flops: int
    """Those of the step without checkpointing."""

    def __str__(self) -> str:
        share = 100 * self.extra_flops / self.step_flops
        return f"{self.policy}: predicted peak {self.peak_bytes / GIB:.4g} GiB, {share:.1f} % more FLOPs"


def candidate_policies(n_layers: int) -> list[str]:
    """Every policy that differs from the others for a model of so many blocks."""
    first = [f"first-{m}" for m in range(1, n_layers)]
    every = [f"every-{k}" for k in range(2, n_layers)]
    return ["none", *SELECTIVE, *first, "full", *every, "recursive"]


def cheapest_policy(
    case: TrainingCase,
    mode: str,
    budget_bytes: int,
    *,
    selective: bool = True,
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> Choice:
    """The policy of least recomputation with which the predicted peak of ``case`` is at most ``budget_bytes``.

    The attention decides what running a block again costs; the peak is that of the reference attention either way.

    Args:
        selective: whether the attention can be had with policies that keep results of operators.

    Raises:
        ValueError: no policy fits, and the message names the smallest predicted peak; or an unknown mode, optimizer or
            device.
    """

    def executed(policy: str) -> int:
        return hardware_flops(*case.work, mode, attention=case.attention_kind, checkpoint=policy)

    choices = []
    for policy in candidate_policies(case.config.n_layers):
        if policy in SELECTIVE and not selective:
            continue
        peak = peak_memory(
            *case.work,
            case.precision,
            mode,
            optimizer=case.optimizer,
            checkpoint=policy,
            device_type=case.device,
            workspace_bytes=workspace_bytes,
        )
        choices.append(Choice(policy, peak.n_bytes, executed(policy) - executed("none"), executed("none")))
    fitting = [choice for choice in choices if choice.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(choices, key=lambda choice: choice.peak_bytes)
        raise ValueError(
            f"no checkpoint policy fits {budget_bytes / GIB:.4g} GiB for {case.config.name}, batch {case.batch_size}, "
            f"context {case.context_length}, {case.dtype}, {mode}: the smallest predicted peak is "
            f"{least.peak_bytes / GIB:.4g} GiB, with {least.policy}"
        )
    return min(fitting, key=lambda choice: (choice.extra_flops, choice.policy != "none", choice.peak_bytes))


@dataclass(frozen=True)
class KeepChoice:
    """What written-out blocks keep, and what that is predicted to cost."""

    keep: str
    peak_bytes: int
    moment: str
    """Of the peak."""
    again: tuple[str, ...]
    """What each block computes a second time, of ``costs.recomputed.WORDS``."""
    extra_flops: int
    """Operations of matrix products and attention that a step runs a second time."""
    step_flops: int
    """Those of the step that computes none twice."""
    extra_bytes: int
    """That norms, rotations and SwiGLU move a second time."""
    seconds: float
    """Of both at an H200's peaks."""

    def __str__(self) -> str:
        fits = f"keep {self.keep}: predicted peak {self.peak_bytes / GIB:.4g} GiB ({self.moment})"
        if not self.again:
            return f"{fits}; nothing is computed again"
        again, share = ", ".join(WORDS[name] for name in self.again), 100 * self.extra_flops / self.step_flops
        return (
            f"{fits}; {again} run again: {share:.1f} % more FLOPs, {self.extra_bytes / GIB:.3g} GiB of traffic, "
            f"{1e3 * self.seconds:.3g} ms at an H200's peaks"
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
    case: TrainingCase,
    mode: str,
    budget_bytes: int,
    predict: Callable[[TrainingCase], PeakMemory],
    *,
    mixed: bool = False,
) -> KeepChoice:
    """What blocks with a hand-written backward must keep so that the predicted peak is at most ``budget_bytes`` and the
    least time goes into recomputation; the case's own choice is not looked at.

    Args:
        predict: the peak of one pass of ``mode``.
        mixed: whether the first blocks may keep more than the others.

    Raises:
        ValueError: no choice fits, and the message names the smallest predicted peak; or an unknown mode, optimizer or
            attention, or a dtype with autocast.
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
        least = predict(replace(case, keep=most_first[-1]))
        raise ValueError(
            f"nothing that blocks may keep fits {budget_bytes / GIB:.4g} GiB for {case.config.name}, batch "
            f"{case.batch_size}, context {case.context_length}, {case.dtype}, {mode}: the smallest predicted peak is "
            f"{least.n_bytes / GIB:.4g} GiB ({least.moment}), with keep {most_first[-1]}"
        )
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
    """What the first blocks keep and what the others do, of what does not fit all blocks and of what does.

    That is an estimate: peaks are taken to differ by what is kept. ``room`` bytes are left where all blocks keep what
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


def _keep_choice(case: TrainingCase, mode: str, predict: Callable[[TrainingCase], PeakMemory]) -> KeepChoice:
    """What the case's blocks keep, with its costs."""
    peak = predict(case)
    blocks = Counter(keep_of_blocks(case.keep, case.config.n_layers)) if mode != "forward" else Counter()
    again = {each: recomputed(*case.work, case.precision, each) for each in blocks}
    names = {name for each in again.values() for name in each.names}
    return KeepChoice(
        case.keep,
        peak.n_bytes,
        peak.moment,
        tuple(name for name in WORDS if name in names),
        sum(n * again[each].flops for each, n in blocks.items()),
        hardware_flops(*case.work, mode, attention="flash"),
        sum(n * again[each].traffic_bytes for each, n in blocks.items()),
        sum(n * again[each].seconds(_hardware(), case.precision.matmul_dtype) for each, n in blocks.items()),
    )
