"""Which activation checkpointing, or which level of what written-out blocks keep, fits a budget at the least cost?

    case = TrainingCase("cuda", "xl", batch_size=4, context_length=2048, dtype="autocast-bf16")
    choice = cheapest_policy(case, "step", budget_bytes=80 * 1024**3)
    choice.policy, choice.peak_bytes, choice.extra_flops

    choice = cheapest_keep(fused_case, "step", budget_bytes=80 * 1024**3, chunk=2048)
    choice.keep, choice.peak_bytes, choice.seconds

Policies. Every policy is a candidate, at every length of segment and every number of first blocks. Of those whose
predicted peak is within the budget, the one that runs the fewest matrix products again wins; between equals the one
without recomputation, then the lower peak. Limits: the peak is predicted for eager execution of the reference model;
time that is not matrix products (norms, softmax, casts, which ``keep-matmuls`` runs again) is not weighed.

Levels. Every level with every set of switches is a candidate (``costs/kept.py``), the same for all blocks. Where they
may be mixed, so is any two of them, the one too large for all blocks in as many of the first ones as fit. Of those that
fit, the one wins whose second computations take the least time at an H200's published peaks, products at that of the
dtype and norms, rotation and SwiGLU at that of memory; between equals the lower peak. The order is what counts: real
kernels reach 70 to 95 % of both.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

from cs336_systems.case import TrainingCase
from cs336_systems.costs.checkpointing import SELECTIVE
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.kept import LEVELS, SWITCHES, keep_of_blocks, kept_names
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, peak_memory
from cs336_systems.costs.offload import offloaded, state_bytes_per_parameter
from cs336_systems.costs.recomputed import WORDS, recomputed
from cs336_systems.costs.written_out import written_out_peak
from cs336_systems.hardware import GIB, find_hardware


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
    *,
    chunk: int,
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
    n_shards: int = 1,
    mixed: bool = False,
) -> KeepChoice:
    """What blocks with a written-out backward must keep so that the predicted peak is at most ``budget_bytes`` and the
    least is computed a second time; the case's own choice is not looked at.

    Args:
        chunk: tokens whose logits the head has at a time.
        n_shards: ranks of fully sharded data parallelism, as in ``written_out_peak``.
        mixed: whether the first blocks may keep more than the others, as many as fit.

    Raises:
        ValueError: no choice fits, and the message names the smallest predicted peak; or an unknown mode, optimizer or
            attention, or a dtype with autocast.
    """
    choice_of = partial(_keep_choice, case, mode, chunk=chunk, workspace_bytes=workspace_bytes, n_shards=n_shards)
    choices = [choice_of(keep) for keep in candidate_keeps()]
    fitting = [choice for choice in choices if choice.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(choices, key=lambda choice: choice.peak_bytes)
        raise ValueError(
            f"nothing that blocks may keep fits {budget_bytes / GIB:.4g} GiB for {case.config.name}, batch "
            f"{case.batch_size}, context {case.context_length}, {case.dtype}, {mode}: the smallest predicted peak is "
            f"{least.peak_bytes / GIB:.4g} GiB ({least.moment}), with keep {least.keep}"
        )
    if mixed and mode != "forward":
        best = _best_of_their_size(choices)
        for more, less in product(best, best):
            if more.peak_bytes > budget_bytes >= less.peak_bytes:
                mixes = [f"{n}x{more.keep}+{less.keep}" for n in range(1, case.config.n_layers)]
                n_fit = bisect_right(mixes, budget_bytes, key=lambda keep: choice_of(keep).peak_bytes)
                fitting += [choice_of(keep) for keep in mixes[max(0, n_fit - 1) : n_fit]]
    return min(fitting, key=lambda choice: (choice.seconds, choice.peak_bytes))


def _keep_choice(
    case: TrainingCase, mode: str, keep: str, *, chunk: int, workspace_bytes: int, n_shards: int
) -> KeepChoice:
    """What blocks keep, with its costs; arguments as of ``cheapest_keep``."""
    hardware = find_hardware("NVIDIA H200")
    assert hardware is not None
    peak = written_out_peak(
        *case.work,
        case.precision,
        mode,
        keep=keep,
        chunk=chunk,
        attention=case.attention,
        optimizer=case.optimizer,
        recipe=case.recipe,
        n_shards=n_shards,
        prefetch=case.parallel.prefetch,
        update=case.parallel.update,
        states=state_bytes_per_parameter(case),
        away=offloaded(case),
        device_type=case.device,
        workspace_bytes=workspace_bytes,
    )
    blocks = Counter(keep_of_blocks(keep, case.config.n_layers)) if mode != "forward" else Counter()
    again = {each: recomputed(*case.work, case.precision, each) for each in blocks}
    names = {name for each in again.values() for name in each.names}
    return KeepChoice(
        keep,
        peak.n_bytes,
        peak.moment,
        tuple(name for name in WORDS if name in names),
        sum(n * again[each].flops for each, n in blocks.items()),
        hardware_flops(*case.work, mode, attention="flash"),
        sum(n * again[each].traffic_bytes for each, n in blocks.items()),
        sum(n * again[each].seconds(hardware, case.precision.matmul_dtype) for each, n in blocks.items()),
    )


def _best_of_their_size(choices: list[KeepChoice]) -> list[KeepChoice]:
    """Those than which none takes less time in as little memory."""
    best: list[KeepChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.peak_bytes, choice.seconds)):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best
