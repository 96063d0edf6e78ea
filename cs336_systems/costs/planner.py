"""Which activation checkpointing fits a memory budget at the least cost?

    case = TrainingCase("cuda", "xl", batch_size=4, context_length=2048, dtype="autocast-bf16")
    choice = cheapest_policy(case, "step", budget_bytes=80 * 1024**3)
    choice.policy, choice.peak_bytes, choice.extra_flops

Every policy is a candidate, at every length of segment and every number of first blocks. Of those whose predicted peak
is within the budget, the one that runs the fewest matrix products again wins; between equals the one without
recomputation, then the lower peak. Limits: the peak is predicted for eager execution of the reference model; time that
is not matrix products (norms, softmax, casts, which ``keep-matmuls`` runs again) is not weighed.
"""

from dataclasses import dataclass

from cs336_systems.case import TrainingCase
from cs336_systems.costs.checkpointing import SELECTIVE
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, peak_memory

GIB = 1024**3


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
