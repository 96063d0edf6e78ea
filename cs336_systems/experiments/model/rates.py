"""What follows from the times of a step: tokens/s, TFLOP/s and the shares of the hardware's limits.

Every rate is computed sample by sample and marked as derived, so that its spread is that of the times. Which operations
and bytes a rate counts, and of which limit it is a share, stands in its unit; ``costs/flops.py`` has the conventions.
"""

from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.memory import adamw_traffic_bytes
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.experiments.model.cells import ModelCell
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.clock import WHOLE
from cs336_systems.harness.record import Metric


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
