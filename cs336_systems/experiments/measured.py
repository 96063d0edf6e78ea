"""Every measurement of a training step says this: its phases, its rates, its peak, and that its loss is finite.

Every rate is computed sample by sample and marked as derived, so that its spread is that of the times.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from cs336_systems.hardware import GIB
from cs336_systems.harness.clock import PhaseTimes
from cs336_systems.harness.record import Metric


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
