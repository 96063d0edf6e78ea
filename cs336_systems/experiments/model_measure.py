"""One step in one mode: its phases, its peak against the prediction, and its rates against the limits.

Every rate is computed sample by sample and marked as derived, so that its spread is that of the times. Which operations
and bytes a rate counts, and of which limit it is a share, stands in its unit; ``costs/flops.py`` has the conventions.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from cs336_systems.costs.checkpointing import KEEP_MATMULS
from cs336_systems.costs.flops import hardware_flops, model_flops
from cs336_systems.costs.memory import adamw_traffic_bytes
from cs336_systems.costs.planner import Choice, KeepChoice, cheapest_keep, cheapest_policy
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.experiments.model import CeilingCell, ModelCell
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.clock import WHOLE, measure_ceilings, time_phases
from cs336_systems.harness.fit import check_fit, is_predictable, predicted_bytes, predicted_peak
from cs336_systems.harness.memory import PeakMeter, cublas_workspace_bytes, free_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.training import assemble, random_batch
from cs336_systems.training.activation_checkpointing import unsupported_reason as checkpointing_reason

Ceilings = dict[str, dict[str, float]]
"""Medians of ``matmul_ceiling``, ``copy_ceiling`` and ``free_memory`` by dtype, as far as they were measured."""


def measure_ceiling(cell: CeilingCell) -> list[Metric]:
    """The machine's matmul and copy ceilings in the cell's dtype, and the memory that is free for cells."""
    device = torch.device(cell.device)
    free = free_bytes(device)
    return [*measure_ceilings(cell.precision, device), Metric("free_memory", "GiB", [free / GIB])]


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
    assert step.loss is not None
    if not math.isfinite(loss := step.loss.item()):
        raise FloatingPointError(f"loss is {loss}")

    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    if times.warmup_ms:
        metrics.append(Metric("warmup_step", "ms", times.warmup_ms))
    if (peak := meter.peak_bytes()) is not None:
        metrics.append(Metric("peak_memory", "GiB", [peak / GIB]))
    if is_predictable(cell):
        metrics.append(Metric("predicted_peak_memory", "GiB", [predicted / GIB]))
    executed = cell.accumulate * hardware_flops(
        *cell.work,
        cell.mode,
        attention=cell.attention_kind,
        checkpoint=cell.checkpoint,
        keep=cell.keep,
        compiled=cell.compiled,
    )
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return metrics + step_rates(cell, times.samples_ms, executed, device_name, ceilings.get(cell.dtype, {}))


def step_rates(
    cell: ModelCell,
    samples_ms: dict[str, list[float]],
    executed_flops: int,
    device_name: str,
    ceilings: dict[str, float],
) -> list[Metric]:
    """Tokens/s, model TFLOP/s, shares of peak and ceiling.

    Args:
        samples_ms: milliseconds of each phase and of the whole pass.
        executed_flops: of the whole pass, recomputation included; their share of the peak is ``hfu``.
        device_name: as the driver calls it; shares of the peak are left out for a device that has none on record.
        ceilings: TFLOP/s and GB/s measured in the same run, empty if they were not.
    """
    whole = "forward" if cell.mode == "forward" else "step"
    needed = {phase: cell.accumulate * model_flops(*cell.work, phase) for phase in ("forward", "backward")}
    needed[WHOLE] = needed["forward"] + (needed["backward"] if whole == "step" else 0)
    palm = cell.accumulate * model_flops(*cell.work, whole, "palm")
    hardware = find_hardware(device_name)
    peak = hardware.peak(cell.precision.matmul_dtype) if hardware else None

    def rate(name: str, unit: str, amount: float, phase: str = WHOLE) -> Metric:
        return Metric(name, unit, [amount / (ms / 1e3) for ms in samples_ms[phase]], derived=True)

    metrics = [
        rate("tokens_per_s", "1/s", cell.tokens_per_step),
        rate("model_tflops", "TFLOP/s", needed[WHOLE] / 1e12),
    ]
    for phase in ("forward", "backward"):
        if phase in samples_ms:
            metrics.append(rate(f"{phase}_model_tflops", "TFLOP/s", needed[phase] / 1e12, phase))
    if peak:
        metrics.append(rate("mfu", "% of datasheet peak, causal", 100 * needed[WHOLE] / peak))
        metrics.append(rate("mfu_palm", "% of datasheet peak, full attention", 100 * palm / peak))
        metrics.append(rate("hfu", "% of datasheet peak, executed", 100 * executed_flops / peak))
    light = speed_of_light(
        cell.config,
        cell.context_length,
        hardware,
        block_dtype="fp8" if cell.recipe.quantized else cell.precision.matmul_dtype,
        dtype=cell.precision.matmul_dtype,
        n_stored_blocks=cell.recipe.n_skipped,
    )
    if light.seconds_per_token is not None and whole == "step":
        least = light.seconds_per_token * cell.tokens_per_step
        metrics.append(rate("light", "% of speed of light", 100 * least))
    if "matmul_ceiling" in ceilings:
        share = needed[WHOLE] / (ceilings["matmul_ceiling"] * 1e12)
        metrics.append(rate("matmul_ceiling_share", "% of measured matmul, causal", 100 * share))
    if "optimizer" in samples_ms:
        traffic = adamw_traffic_bytes(cell.config, cell.precision)
        metrics.append(rate("optimizer_bandwidth", "GB/s", traffic / 1e9, "optimizer"))
        if "copy_ceiling" in ceilings:
            share = traffic / (ceilings["copy_ceiling"] * 1e9)
            metrics.append(rate("optimizer_copy_share", "% of measured copy", 100 * share, "optimizer"))
    return metrics


def expected_seconds(cell: ModelCell, *, ceilings: Ceilings) -> float:
    """What a cell should take: a process, filling the parameters, and its steps at half of the measured ceiling."""
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


def fit_to_budget(cells: list[ModelCell], budget_gib: float) -> tuple[list[ModelCell], list[str]]:
    """The cells with the policy, or with what fused blocks keep, that the planner picks; a sentence for every pick.

    Raises:
        ValueError: nothing fits a cell.
    """
    fitted, notes = [], []
    for cell in cells:
        budget, workspace = int(budget_gib * GIB), cublas_workspace_bytes(torch.device(cell.device))
        what = str(cell)
        choice: Choice | KeepChoice
        if cell.written_out:
            choice = cheapest_keep(cell, cell.mode, budget, partial(predicted_peak, mode=cell.mode))
            what = what.replace(f" keep {cell.keep}", "", 1)
            cell = replace(cell, keep=choice.keep)
        else:
            selective = checkpointing_reason(KEEP_MATMULS, cell.attention) is None
            choice = cheapest_policy(cell, cell.mode, budget, selective=selective, workspace_bytes=workspace)
            cell = replace(cell, checkpoint=choice.policy)
        fitted.append(cell)
        limit = " (the peak is that of eager reference attention: this cell should need less)"
        note = f"{what} within {budget_gib:g} GiB, least recomputation: {choice}"
        notes.append(note + ("" if is_predictable(cell) else limit))
    return fitted, list(dict.fromkeys(notes))
