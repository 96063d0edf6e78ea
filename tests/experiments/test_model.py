"""``benchmark_model``: its rates by hand, the peers beside its cells, and its figure from made-up rows."""

import pytest

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.flops import forward_flops, hardware_flops, model_flops
from cs336_systems.experiments.model import ModelCell, Options, frontier_figure, make_cells, step_table
from cs336_systems.experiments.model_measure import rates
from cs336_systems.hardware import hardware_named
from cs336_systems.harness.runs import RATES
from tests.report.rows import ceiling, make_cell, make_frame, ms, rate

CONFIG = MODEL_SIZES["tiny"]


def found(device="NVIDIA H200", ceilings=None, **fields) -> dict[str, float]:
    """The rates of a step of 4 ms."""
    cell = ModelCell(size="tiny", batch_size=2, context_length=128, **fields)
    metrics = rates(cell, [4.0], device, {"fp32": 2.0} if ceilings is None else ceilings)
    assert all(metric.derived for metric in metrics)
    return {metric.name: metric.samples[0] for metric in metrics}


def test_rates_of_a_step_on_a_known_device():
    step, whole = found(), model_flops(CONFIG, 2, 128, "step")
    assert step["tokens_per_s"] == pytest.approx(2 * 128 / 4e-3)
    assert step["model_tflops"] == pytest.approx(whole / 4e-3 / 1e12)
    assert step["mfu"] == pytest.approx(100 * whole / 4e-3 / hardware_named("h200").peak("fp32"))
    executed = hardware_flops(CONFIG, 2, 128, "step")
    assert step["hfu"] == pytest.approx(step["mfu"] * executed / whole) and step["mfu_palm"] > step["mfu"]
    assert step["matmul_ceiling_share"] == pytest.approx(100 * step["model_tflops"] / 2.0)
    assert step.keys() <= RATES.keys(), "else rows of it are refused as evidence, as they keep no samples"
    assert found(accumulate=3) == pytest.approx({name: 3 * value for name, value in step.items()})


def test_the_speed_of_light_is_that_of_the_products_dtypes():
    """At twice the peak blocks take half the time, those that are skipped and the rest as long as ever."""
    bf16 = {"dtype": "bf16", "keep": "products"}
    fp8 = ({}, {"matmul_dtype": "e4m3"}, {"matmul_dtype": "e4m3", "fp8_skip_last": 1})
    stored, quantized, half = (found(**bf16, **fields)["light"] for fields in fp8)
    forward = forward_flops(CONFIG, 2, 128)
    share_of_blocks = (forward.projections + forward.feed_forward) / forward.total
    assert quantized == pytest.approx(stored * (1 - share_of_blocks / 2), rel=1e-3)
    assert half == pytest.approx((stored + quantized) / 2), "one of two blocks"


def test_shares_without_their_limit_are_left_out():
    assert found("cpu", {}, mode="forward").keys() == {"tokens_per_s", "model_tflops"}
    assert found("cpu", mode="forward").keys() == {"tokens_per_s", "model_tflops", "matmul_ceiling_share"}


def test_a_peer_follows_the_cells_of_a_turn_and_leads_the_next():
    ours = {"kernels": ("fused",), "keep": ("all", "products"), "attention": ("hopper",), "dtype": ("bf16",)}
    ours |= {"optimizer": ("fused",), "offload": ("m-v",), "mode": ("backward",)}
    cells = make_cells(Options(**ours, peer_compile=("on",), repeat=2))
    turn = [
        ("fused", "all", "off", "m-v"),
        ("fused", "products", "off", "m-v"),
        ("reference", "autograd", "on", "none"),
    ]
    assert [(cell.kernels, cell.keep, cell.compile, cell.offload) for cell in cells] == [*turn, *turn[::-1]]
    assert [cell.repeat for cell in cells] == [0, 0, 0, 1, 1, 1]


def test_the_ratio_is_of_one_turn_and_told_of_written_out_blocks():
    ours, theirs = {"kernels": "fused", "keep": "all"}, {"compile": "on"}
    times = ((180.0, 0, ours), (200.0, 0, theirs), (220.0, 1, theirs), (209.0, 1, ours), (300.0, 0, {}))
    cells = [make_cell(ms("step", step), repeat=repeat, **how) for step, repeat, how in times]
    assert step_table(make_frame(*cells)).frame["/ compiled"].tolist() == ["0.925 (0.900–0.950)", "–", "–"]
    assert "/ compiled" not in step_table(make_frame(cells[1])).frame


# ---- the figure


def kept(policy: str, step_ms: float, peak_gib: float, **settings) -> list:
    """A cell that ran; its predicted peak is a tenth higher."""
    peaks = rate("peak_memory", peak_gib), rate("predicted_peak_memory", 1.1 * peak_gib)
    return make_cell(ms("step", step_ms), *peaks, checkpoint=policy, **settings)


SWEEP = (
    *(kept("none", 100.0, 80.0), kept("first-8", 110.0, 60.0), kept("full", 130.0, 30.0)),
    *(kept("recursive", 180.0, 29.0), kept("keep-matmuls", 135.0, 50.0)),
)


def test_every_policy_is_a_named_point():
    failed = make_cell(status="oom", message="no room", checkpoint="every-32")
    repeats = [kept("none", 120.0, 80.0, repeat=1), kept("none", 140.0, 80.0, repeat=2)]
    other_model = [kept(p, 9.0, 9.0, size="xl") for p in ("none", "full")]
    axes, other = frontier_figure(make_frame(*SWEEP, failed, *repeats, *other_model, ceiling())).axes
    assert sorted(text.get_text() for text in axes.texts) == sorted(row[0]["checkpoint"] for row in SWEEP)
    points, predicted = ({*zip(*line.get_data(), strict=True)} for line in axes.lines)
    assert {(120.0, 80.0), (110.0, 60.0), (180.0, 29.0)} <= points, "none is the median of repeats"
    assert (135.0, pytest.approx(55.0)) in list(predicted)
    assert len(other.texts) == 2
