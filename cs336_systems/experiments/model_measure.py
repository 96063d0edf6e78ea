"""How ``model.py`` measures a cell: the machine's ceilings, the phases of a step, and rates beside limits."""

import torch

from cs336_systems.costs.flops import hardware_flops, model_flops
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.experiments.model import CeilingCell, ModelCell
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.clock import (
    WHOLE,
    check_loss,
    in_gib,
    measure_ceilings,
    phase_metrics,
    rate,
    step_rates,
    time_phases,
)
from cs336_systems.harness.memory import PeakMeter, check_fit, is_predictable
from cs336_systems.harness.record import Metric
from cs336_systems.training import assemble, random_batch


def measure_ceiling(cell: CeilingCell) -> list[Metric]:
    """The machine's matmul and copy ceilings in the cell's dtype."""
    return measure_ceilings(cell.precision, torch.device(cell.device))


def measure_model(cell: ModelCell, *, ceilings: dict[str, float], force: bool) -> list[Metric]:
    """Time the phases of one cell's step and put them beside prediction and limit.

    Raises:
        PredictedOutOfMemory: the predicted peak is more than what is free, and ``force`` is not set.
        Unsupported: the device or the attention cannot run the case.
        FloatingPointError: the loss is not finite.
    """
    predicted = check_fit(cell, cell.mode, force=force)
    device = torch.device(cell.device)
    meter = PeakMeter(device)
    step = assemble(cell)
    phases = step.phases(cell.mode, *random_batch(cell))
    times = time_phases(phases, device=device, warmup=cell.warmup, steps=cell.steps)
    check_loss(step.loss)
    peaks = {"peak_memory": meter.peak_bytes(), "predicted_peak_memory": predicted if is_predictable(cell) else None}
    known = {name: n_bytes for name, n_bytes in peaks.items() if n_bytes is not None}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return phase_metrics(times) + in_gib(**known) + rates(cell, times.samples_ms[WHOLE], name, ceilings)


def rates(cell: ModelCell, steps_ms: list[float], device_name: str, ceilings: dict[str, float]) -> list[Metric]:
    """Tokens/s, model TFLOP/s, shares of the device's peaks and of the ceiling that was measured in the same run.

    Args:
        device_name: as the driver calls it; shares of the peak are left out for a device that has none on record.
        ceilings: the measured ``matmul_ceiling`` in TFLOP/s by dtype.
    """
    whole, hardware = "forward" if cell.mode == "forward" else "step", find_hardware(device_name)
    flops = cell.accumulate * model_flops(*cell.work, whole)
    dtype = cell.precision.matmul_dtype
    peak = hardware.peak(dtype) if hardware else None
    metrics = step_rates(cell.tokens_per_step, flops, peak, steps_ms)
    if peak:
        palm = cell.accumulate * model_flops(*cell.work, whole, "palm")
        how = {"attention": cell.attention_kind, "checkpoint": cell.checkpoint, "keep": cell.keep}
        executed = cell.accumulate * hardware_flops(*cell.work, cell.mode, compiled=cell.compiled, **how)  # type: ignore[arg-type]
        metrics.append(rate("mfu_palm", "% of datasheet peak, full attention", 100 * palm / peak, steps_ms))
        metrics.append(rate("hfu", "% of datasheet peak, executed", 100 * executed / peak, steps_ms))
    light = speed_of_light(
        cell.config,
        cell.context_length,
        hardware,
        block_dtype="fp8" if cell.recipe.quantized else dtype,
        dtype=dtype,
        n_stored_blocks=cell.recipe.n_skipped,
    )
    if light.seconds_per_token is not None and whole == "step":
        least = 100 * light.seconds_per_token * cell.tokens_per_step
        metrics.append(rate("light", "% of speed of light", least, steps_ms))
    if cell.dtype in ceilings:
        share = 100 * flops / (ceilings[cell.dtype] * 1e12)
        metrics.append(rate("matmul_ceiling_share", "% of measured matmul, causal", share, steps_ms))
    return metrics
