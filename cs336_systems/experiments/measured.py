"""Every measurement of a training step says this: its phases, its rates, its peak, and that its loss is finite.

Every rate is computed sample by sample and marked as derived, so that its spread is that of the times.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from cs336_systems.case import TrainingCase
from cs336_systems.costs.checkpointing import KEEP_MATMULS
from cs336_systems.costs.memory import PeakMemory
from cs336_systems.costs.planner import cheapest_keep, cheapest_policy
from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import PhaseTimes
from cs336_systems.harness.fit import is_predictable, predicted_peak
from cs336_systems.harness.record import Metric
from cs336_systems.training.activation_checkpointing import unsupported_reason


def check_loss(loss: Tensor | None) -> None:
    """Raise FloatingPointError unless a step has left a finite loss."""
    assert loss is not None
    if not math.isfinite(value := loss.item()):
        raise FloatingPointError(f"loss is {value}")


def phase_metrics(times: PhaseTimes) -> list[Metric]:
    """The milliseconds of each phase, and of whole steps of the warm-up if there were any."""
    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    return metrics + ([Metric("warmup_step", "ms", times.warmup_ms)] if times.warmup_ms else [])


def rate(name: str, unit: str, amount: float, samples_ms: Sequence[float]) -> Metric:
    """The amount per second of each sample."""
    return Metric(name, unit, [amount / (ms / 1e3) for ms in samples_ms], derived=True)


def step_rates(tokens: int, flops: float, peak: float | None, samples_ms: Sequence[float]) -> list[Metric]:
    """Tokens per second, model TFLOP/s, and their share of the device's peak (FLOP/s) where that is known."""
    metrics = [
        rate("tokens_per_s", "1/s", tokens, samples_ms),
        rate("model_tflops", "TFLOP/s", flops / 1e12, samples_ms),
    ]
    return metrics + ([rate("mfu", "% of datasheet peak, causal", 100 * flops / peak, samples_ms)] if peak else [])


def in_gib(**n_bytes: float) -> list[Metric]:
    """Bytes as metrics in GiB."""
    return [Metric(name, "GiB", [value / GIB]) for name, value in n_bytes.items()]


def _peak_of_reference(case: TrainingCase, mode: str) -> PeakMemory:
    """The predicted peak of the case with eager reference attention, which other attentions stay below."""
    return predicted_peak(replace(case, attention="reference", compile="off"), mode)


def cheapest_within(case: TrainingCase, mode: str, budget_gib: float, **how: Any) -> tuple[dict[str, str], str]:
    """Choose what a case keeps for backward to recompute least within a budget: fields to set, and a sentence about it.

    Args:
        how: for ``predicted_peak`` the ``world_size``, and for ``cheapest_keep`` whether blocks may be ``mixed``.

    Raises:
        ValueError: nothing fits.
    """
    budget, what, mixed = int(budget_gib * GIB), str(case), how.pop("mixed", False)
    if case.written_out:
        found = cheapest_keep(case, mode, budget, partial(predicted_peak, mode=mode, **how), mixed=mixed)
        what, chosen = what.replace(f" keep {case.keep}", "", 1), {"keep": found.choice}
    else:
        selective = unsupported_reason(KEEP_MATMULS, case.attention) is None
        found = cheapest_policy(case, mode, budget, partial(_peak_of_reference, mode=mode), selective=selective)
        chosen = {"checkpoint": found.choice}
    limit = "" if is_predictable(case) else " (the peak is that of eager reference attention: this should need less)"
    return chosen, f"{what} within {budget_gib:g} GiB, least recomputation: {found}{limit}"
