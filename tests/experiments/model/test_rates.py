"""Rates by hand from one-sample times: what each counts, and of which limit it is a share."""

import pytest

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.flops import forward_flops, model_flops
from cs336_systems.experiments.model import ModelCell
from cs336_systems.experiments.model_measure import step_rates
from cs336_systems.harness.clock import WHOLE
from cs336_systems.harness.runs import RATES

CONFIG = MODEL_SIZES["tiny"]
TIMES = {"forward": [1.0], "backward": [2.0], "optimizer": [1.0], WHOLE: [4.0]}
CEILINGS = {"matmul_ceiling": 2.0, "copy_ceiling": 10.0}


def rates(
    mode: str,
    device_name: str,
    ceilings: dict[str, float],
    samples: dict[str, list[float]] | None = None,
    **fields: int | str,
) -> dict[str, float]:
    samples = samples or (TIMES if mode == "step" else {"forward": [1.0], WHOLE: [1.0]})
    cell = ModelCell(size="tiny", batch_size=2, context_length=128, mode=mode, **fields)
    executed = 7 * 10**9
    metrics = step_rates(cell, samples, executed, device_name, ceilings)
    assert all(metric.derived for metric in metrics)
    return {metric.name: metric.samples[0] for metric in metrics}


def test_a_step_on_a_known_device():
    found = rates("step", "NVIDIA H200", CEILINGS)
    forward, step = (model_flops(CONFIG, 2, 128, phase) for phase in ("forward", "step"))
    peak = found["model_tflops"] / found["mfu"] * 100
    assert found["tokens_per_s"] == pytest.approx(2 * 128 / 4e-3)
    assert found["model_tflops"] == pytest.approx(step / 4e-3 / 1e12)
    assert found["forward_model_tflops"] == pytest.approx(forward / 1e-3 / 1e12)
    assert found["backward_model_tflops"] == pytest.approx(2 * forward / 2e-3 / 1e12)
    assert found["hfu"] == pytest.approx(100 * 7e9 / 4e-3 / 1e12 / peak)
    assert found["mfu_palm"] > found["mfu"]
    assert found["matmul_ceiling_share"] == pytest.approx(100 * found["model_tflops"] / 2.0)
    assert found["optimizer_bandwidth"] == pytest.approx(7 * 4 * CONFIG.n_parameters / 1e-3 / 1e9)
    assert found["optimizer_copy_share"] == pytest.approx(100 * found["optimizer_bandwidth"] / 10.0)


def test_the_speed_of_light_is_that_of_the_products_dtypes():
    """At twice the peak blocks take half the time, those that are skipped and the rest as long as ever."""
    bf16 = {"dtype": "bf16", "keep": "products"}
    stored, quantized, half = (
        rates("step", "NVIDIA H200", CEILINGS, **bf16, **fields)["light"]
        for fields in ({}, {"matmul_dtype": "e4m3"}, {"matmul_dtype": "e4m3", "fp8_skip_last": 1})
    )
    forward = forward_flops(CONFIG, 2, 128)
    share_of_blocks = (forward.projections + forward.feed_forward) / forward.total
    assert CONFIG.n_layers == 2
    assert quantized == pytest.approx(stored * (1 - share_of_blocks / 2), rel=1e-3)
    assert half == pytest.approx((stored + quantized) / 2)


def test_every_rate_is_known_by_the_time_that_it_follows_from():
    """Else rows of it are refused as evidence, as they keep no samples."""
    assert rates("step", "NVIDIA H200", CEILINGS).keys() <= RATES.keys()


def test_shares_without_their_limit_and_phases_that_did_not_run_are_left_out():
    assert rates("forward", "cpu", {}).keys() == {"tokens_per_s", "model_tflops", "forward_model_tflops"}
    assert rates("step", "cpu", {}).keys().isdisjoint({"mfu", "mfu_palm", "hfu", "matmul_ceiling_share"})


def test_all_micro_batches_count():
    one, three = rates("step", "NVIDIA H200", CEILINGS), rates("step", "NVIDIA H200", CEILINGS, accumulate=3)
    once = {"hfu", "optimizer_bandwidth", "optimizer_copy_share"}  # hfu: of the FLOPs that the caller counted
    assert three == pytest.approx({name: rate * (1 if name in once else 3) for name, rate in one.items()})


def test_a_captured_step_has_the_rates_of_the_whole():
    found = rates("step", "NVIDIA H200", CEILINGS, {WHOLE: TIMES[WHOLE]})
    whole = rates("step", "NVIDIA H200", CEILINGS)
    of_phases = ("forward_model_tflops", "backward_model_tflops", "optimizer_bandwidth", "optimizer_copy_share")
    assert found == {name: rate for name, rate in whole.items() if name not in of_phases}
