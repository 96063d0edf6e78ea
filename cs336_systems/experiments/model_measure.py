"""One step in one mode: its phases, its peak against the prediction, and its rates against the limits.

Which operations and bytes a rate counts, and of which limit it is a share, stands in its unit; ``costs/flops.py`` has
the conventions.
"""

import math

import torch

from cs336_systems.costs.flops import hardware_flops, model_flops
from cs336_systems.costs.memory import adamw_traffic_bytes
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.experiments.measured import check_loss, in_gib, phase_metrics, rate, step_rates
from cs336_systems.experiments.model import CeilingCell, ModelCell
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.clock import WHOLE, measure_ceilings, time_phases
from cs336_systems.harness.fit import check_fit, is_predictable, predicted_bytes
from cs336_systems.harness.memory import PeakMeter, free_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.training import assemble, random_batch

Ceilings = dict[str, dict[str, float]]
"""Medians of ``matmul_ceiling``, ``copy_ceiling`` and ``free_memory`` by dtype, as far as they were measured."""


def measure_ceiling(cell: CeilingCell) -> list[Metric]:
    """The machine's matmul and copy ceilings in the cell's dtype, and the memory that is free for cells."""
    device = torch.device(cell.device)
    free = free_bytes(device)
    return [*measure_ceilings(cell.precision, device), *in_gib(free_memory=free)]


def measure_model(cell: ModelCell, *, ceilings: Ceilings, force: bool) -> list[Metric]:
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
    return phase_metrics(times) + in_gib(**known) + rates(cell, times.samples_ms, name, ceilings.get(cell.dtype, {}))


def rates(
    cell: ModelCell, samples_ms: dict[str, list[float]], device_name: str, ceilings: dict[str, float]
) -> list[Metric]:
    """Tokens/s, model TFLOP/s, shares of the device's peaks and of the ceilings that were measured in the same run.

    Args:
        samples_ms: milliseconds of each phase and of the whole pass; a captured step has no phases.
        device_name: as the driver calls it; shares of the peak are left out for a device that has none on record.
        ceilings: TFLOP/s and GB/s, empty if they were not measured.
    """
    work, n, steps = cell.work, cell.accumulate, samples_ms[WHOLE]
    whole = "forward" if cell.mode == "forward" else "step"
    model, hardware = n * model_flops(*work, whole), find_hardware(device_name)
    peak = hardware.peak(cell.precision.matmul_dtype) if hardware else None
    metrics = step_rates(cell.tokens_per_step, model, peak, steps)
    metrics += [
        rate(f"{phase}_model_tflops", "TFLOP/s", n * model_flops(*work, phase) / 1e12, samples_ms[phase])
        for phase in ("forward", "backward")
        if phase in samples_ms
    ]
    if peak:
        palm = n * model_flops(*work, whole, "palm")
        how = {"attention": cell.attention_kind, "checkpoint": cell.checkpoint, "keep": cell.keep}
        executed = n * hardware_flops(*work, cell.mode, compiled=cell.compiled, **how)  # type: ignore[arg-type]
        metrics.append(rate("mfu_palm", "% of datasheet peak, full attention", 100 * palm / peak, steps))
        metrics.append(rate("hfu", "% of datasheet peak, executed", 100 * executed / peak, steps))
    light = speed_of_light(
        cell.config,
        cell.context_length,
        hardware,
        block_dtype="fp8" if cell.recipe.quantized else cell.precision.matmul_dtype,
        dtype=cell.precision.matmul_dtype,
        n_stored_blocks=cell.recipe.n_skipped,
    )
    if light.seconds_per_token is not None and whole == "step":
        least = 100 * light.seconds_per_token * cell.tokens_per_step
        metrics.append(rate("light", "% of speed of light", least, steps))
    if "matmul_ceiling" in ceilings:
        share = 100 * model / (ceilings["matmul_ceiling"] * 1e12)
        metrics.append(rate("matmul_ceiling_share", "% of measured matmul, causal", share, steps))
    if "optimizer" in samples_ms:
        update_ms, traffic = samples_ms["optimizer"], adamw_traffic_bytes(cell.config, cell.precision)
        metrics.append(rate("optimizer_bandwidth", "GB/s", traffic / 1e9, update_ms))
        if "copy_ceiling" in ceilings:
            share = 100 * traffic / (ceilings["copy_ceiling"] * 1e9)
            metrics.append(rate("optimizer_copy_share", "% of measured copy", share, update_ms))
    return metrics


def expected_seconds(cell: ModelCell, *, ceilings: Ceilings) -> float:
    """The seconds that a cell should take: a process, filling parameters, its steps at half of the measured ceiling."""
    if isinstance(cell, CeilingCell):
        return 5.0 if cell.device == "cuda" else 10.0
    measured = ceilings.get(cell.dtype, {})
    if predicted_bytes(cell, cell.mode) > measured.get("free_memory", math.inf) * GIB:
        return 0.5
    flops = cell.accumulate * hardware_flops(*cell.work, cell.mode, checkpoint=cell.checkpoint, keep=cell.keep)
    steps = (cell.warmup + cell.steps) * flops / (0.5e12 * measured.get("matmul_ceiling", 0.1))
    filling = cell.config.n_parameters / (2e10 if cell.device == "cuda" else 7e7)
    compiling = {"on": 10.0, "whole-model": 2.0 * cell.config.n_layers}.get(cell.compile, 0.0)
    return (4.0 if cell.device == "cuda" else 1.0) + steps + filling + compiling
