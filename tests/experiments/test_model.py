"""``benchmark_model``: its rates by hand, the peers beside its cells, and its figures from made-up rows."""

import pytest
from matplotlib.colors import to_hex

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.flops import forward_flops, hardware_flops, model_flops
from cs336_systems.experiments.model import ModelCell, Options, make_cells, step_table
from cs336_systems.experiments.model_figures import frontier_figure, speedups_figure, step_figure
from cs336_systems.experiments.model_measure import rates
from cs336_systems.harness.clock import WHOLE
from cs336_systems.harness.runs import RATES
from tests.report.rows import ceiling, make_cell, make_frame, ms, rate

CONFIG = MODEL_SIZES["tiny"]
TIMES = {"forward": [1.0], "backward": [2.0], "optimizer": [1.0], WHOLE: [4.0]}
CEILINGS = {"matmul_ceiling": 2.0, "copy_ceiling": 10.0}


def found(samples=TIMES, device="NVIDIA H200", ceilings=CEILINGS, **fields) -> dict[str, float]:
    metrics = rates(ModelCell(size="tiny", batch_size=2, context_length=128, **fields), samples, device, ceilings)
    assert all(metric.derived for metric in metrics)
    return {metric.name: metric.samples[0] for metric in metrics}


def test_rates_of_a_step_on_a_known_device():
    step = found()
    forward, whole = (model_flops(CONFIG, 2, 128, phase) for phase in ("forward", "step"))
    peak = step["model_tflops"] / step["mfu"] * 100
    assert step["tokens_per_s"] == pytest.approx(2 * 128 / 4e-3)
    assert step["model_tflops"] == pytest.approx(whole / 4e-3 / 1e12)
    assert step["forward_model_tflops"] == pytest.approx(forward / 1e-3 / 1e12)
    assert step["backward_model_tflops"] == pytest.approx(2 * forward / 2e-3 / 1e12)
    assert step["hfu"] == pytest.approx(100 * hardware_flops(CONFIG, 2, 128, "step") / 4e-3 / 1e12 / peak)
    assert step["mfu_palm"] > step["mfu"]
    assert step["matmul_ceiling_share"] == pytest.approx(100 * step["model_tflops"] / 2.0)
    assert step["optimizer_bandwidth"] == pytest.approx(7 * 4 * CONFIG.n_parameters / 1e-3 / 1e9)
    assert step["optimizer_copy_share"] == pytest.approx(100 * step["optimizer_bandwidth"] / 10.0)
    assert step.keys() <= RATES.keys(), "else rows of it are refused as evidence, as they keep no samples"
    three, once = found(accumulate=3), {"optimizer_bandwidth", "optimizer_copy_share"}
    assert three == pytest.approx({name: value * (1 if name in once else 3) for name, value in step.items()})
    captured = found({WHOLE: TIMES[WHOLE]})
    of_phases = ("forward_model_tflops", "backward_model_tflops", *once)
    assert captured == {name: value for name, value in step.items() if name not in of_phases}


def test_the_speed_of_light_is_that_of_the_products_dtypes():
    """At twice the peak blocks take half the time, those that are skipped and the rest as long as ever."""
    bf16 = {"dtype": "bf16", "keep": "products"}
    fp8 = ({}, {"matmul_dtype": "e4m3"}, {"matmul_dtype": "e4m3", "fp8_skip_last": 1})
    stored, quantized, half = (found(**bf16, **fields)["light"] for fields in fp8)
    forward = forward_flops(CONFIG, 2, 128)
    share_of_blocks = (forward.projections + forward.feed_forward) / forward.total
    assert quantized == pytest.approx(stored * (1 - share_of_blocks / 2), rel=1e-3)
    assert half == pytest.approx((stored + quantized) / 2), "one of two blocks"


def test_shares_without_their_limit_and_phases_that_did_not_run_are_left_out():
    forward = found({"forward": [1.0], WHOLE: [1.0]}, "cpu", {}, mode="forward")
    assert forward.keys() == {"tokens_per_s", "model_tflops", "forward_model_tflops"}
    assert found(device="cpu", ceilings={}).keys().isdisjoint({"mfu", "mfu_palm", "hfu", "matmul_ceiling_share"})


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


# ---- figures


def measured(milliseconds: float, share: str = "mfu", **settings):
    step = ms("step", 0.9 * milliseconds, milliseconds, 1.1 * milliseconds)
    return make_cell(step, rate(share, 40.0), **settings)


def drawn(*cells):
    """The colour and the points of each line by axes (time, share), and the legend's colours."""
    figure = step_figure(make_frame(*cells))
    lines = [
        [(to_hex(bars[0].get_color()), *map(list, bars[0].get_data())) for bars in axes.containers]
        for axes in figure.axes
    ]
    (legend,) = figure.legends
    entries = zip(legend.get_texts(), legend.get_lines(), strict=True)
    return *lines, {text.get_text(): to_hex(line.get_color()) for text, line in entries}


def test_a_line_for_each_size_and_dtype_against_context_and_for_each_way_against_size():
    sizes, dtypes, contexts = ("small", "medium"), ("fp32", "autocast-bf16"), [128, 256, 512]
    grid = [(size, dtype, context) for size in sizes for dtype in dtypes for context in contexts]
    cells = [measured(c / 10, context_length=c, size=size, dtype=dtype) for size, dtype, c in grid]
    times, shares, legend = drawn(*cells, make_cell(status="oom", message="no room", context_length=1024))
    assert [line[1:] for line in times] == [(contexts, [12.8, 25.6, 51.2])] * 4
    assert [line[1:] for line in shares] == [(contexts, [40.0] * 3)] * 4
    assert list(legend) == [*sizes, *dtypes]
    ways = ("off", "on", "whole-model")
    times, _, legend = drawn(*(measured(10.0, size=size, compile=how) for size in sizes for how in ways))
    assert [line[1] for line in times] == [list(sizes)] * 3
    assert list(legend) == ["fp32", "fp32, compiled", "fp32, whole model compiled"]


def test_the_largest_mode_and_the_commonest_setting_are_drawn_the_newest_row_of_each_cell():
    times, shares, _ = drawn(
        measured(1.0, mode="forward", context_length=128),
        measured(2.0, context_length=256),
        measured(3.0, context_length=128),
        measured(4.0, context_length=256, batch_size=8),
        measured(5.0, context_length=256),
        *(measured(6.0, context_length=512), ceiling()),
        make_cell(status="oom", message="no room", context_length=512, argv="a later command"),
    )
    assert [line[1:] for line in times] == [([128, 256], [3.0, 5.0])]
    assert [line[1:] for line in shares] == [([128, 256], [40.0, 40.0])]
    flash = [measured(7.0, attention="flash", size=size) for size in ("small", "xl")]
    assert [line[1:] for line in drawn(measured(3.0, size="small"), *flash)[0]] == [(["small", "xl"], [7.0, 7.0])]
    assert step_figure(make_frame(ceiling(), make_cell(status="oom", message="no room"))) is None


def test_colours_mean_the_same_in_both_halves_and_in_the_legend():
    """A dtype without a datasheet peak has no share; the others keep their colours."""
    without_share = make_cell(ms("step", 7.0), dtype="fp32")
    times, shares, legend = drawn(without_share, measured(3.0, dtype="bf16"), measured(4.0, dtype="autocast-bf16"))
    assert [line[0] for line in times] == list(legend.values())
    assert [line[0] for line in shares] == [legend["bf16"], legend["autocast-bf16"]]


def kept(policy: str, step_ms: float, peak_gib: float, **settings) -> list:
    """A cell that ran; its predicted peak is a tenth higher."""
    peaks = rate("peak_memory", peak_gib), rate("predicted_peak_memory", 1.1 * peak_gib)
    return make_cell(ms("step", step_ms), *peaks, checkpoint=policy, **settings)


SWEEP = (
    *(kept("none", 100.0, 80.0), kept("first-8", 110.0, 60.0), kept("full", 130.0, 30.0)),
    *(kept("every-4", 131.0, 36.0), kept("every-2", 130.5, 33.0)),
    *(kept("recursive", 180.0, 29.0), kept("keep-matmuls", 135.0, 50.0)),
)


def points(axes) -> list[list[tuple[float, float]]]:
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]


def test_every_policy_is_a_named_point_and_lines_go_by_number():
    failed = make_cell(status="oom", message="no room", checkpoint="every-32")
    repeats = [kept("none", 120.0, 80.0, repeat=1), kept("none", 140.0, 80.0, repeat=2)]
    other_model = [kept(p, 9.0, 9.0, size="xl") for p in ("none", "full")]
    axes, other = frontier_figure(make_frame(*SWEEP, failed, *repeats, *other_model, ceiling())).axes
    assert sorted(text.get_text() for text in axes.texts) == sorted(row[0]["checkpoint"] for row in SWEEP)
    front, *lines = points(axes)
    assert front == [(110.0, 60.0), (130.0, 30.0), (180.0, 29.0)], "none is slower than first-8"
    assert [(130.0, 30.0), (130.5, 33.0), (131.0, 36.0)] in lines, "full, every-2, every-4"
    assert [(120.0, 80.0), (110.0, 60.0), (130.0, 30.0)] in lines, "none, the median of repeats; first-8; full"
    assert [(180.0, pytest.approx(1.1 * 29.0)), (135.0, pytest.approx(55.0))] in lines, "predictions of the others"
    assert "tiny step" in axes.get_title() and "every-32: oom" in axes.get_title()
    assert "xl step" in other.get_title()


def test_without_several_policies_of_one_model_nothing_is_drawn():
    assert frontier_figure(make_frame(ceiling())) is None
    assert frontier_figure(make_frame(kept("full", 1.0, 1.0), kept("none", 1.0, 1.0, size="xl"))) is None


def test_two_precisions_make_a_figure_of_speedups():
    def cell(size, dtype, scale):
        times = (ms("forward", scale), ms("backward", 2 * scale), ms("optimizer", 1.0), ms("step", 3 * scale + 1))
        return make_cell(*times, size=size, dtype=dtype)

    cells = [cell(size, dtype, s) for size in ("small", "xl") for dtype, s in (("fp32", 4.0), ("autocast-bf16", 1.0))]
    (axes,) = speedups_figure(make_frame(cell("small", "fp32", 90.0), *cells)).axes
    ratios = {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines[:4]}
    both = {"forward": 4.0, "backward": 4.0, "optimizer": 1.0, "whole step": 13 / 4}
    assert ratios == {phase: (["small", "xl"], [ratio] * 2) for phase, ratio in both.items()}
    assert speedups_figure(make_frame(cells[0])) is None
