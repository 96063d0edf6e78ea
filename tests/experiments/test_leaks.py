"""The lecture's experiments: what they compute and refuse, what they find in made-up rows, and a real run of each."""

import random

import pandas as pd
import pytest
import torch

from cs336_systems.costs.flops import FAMILIES
from cs336_systems.experiments import flops_against_time, launch_overhead, matmul_data, roofline_knee
from cs336_systems.experiments.findings import Findings, crossing, findings_figure, leak_experiment
from cs336_systems.experiments.options import RunOptions
from cs336_systems.experiments.roofline_knee import fit_knee
from cs336_systems.harness.record import Metric
from cs336_systems.harness.sweep import Outcome, make_rows, outcome_rows
from cs336_systems.report.tables import Table
from tests.benchmarks.commands import cells_of
from tests.harness.cells import Cell, measure

XS = [1.0, 2, 4, 8, 16, 32, 64, 128]


def rows_of(*measured) -> pd.DataFrame:
    """Rows as a sweep would have written them: (cell, {metric: value}) each."""
    outcomes = []
    for cell, values in measured:
        outcome = Outcome(cell, "ok", metrics=[Metric(name, "", [value]) for name, value in values.items()])
        outcome.rows = make_rows("test", outcome, {"provenance": {"gpu": "", "host": "a machine"}})
        outcomes.append(outcome)
    return outcome_rows(outcomes)


def command(leak, arguments):
    """The cells that a command line asks for."""
    return cells_of(leak, *arguments.split())


def drawn(findings):
    """The one axes of the figure of an experiment, laid out."""
    figure = findings_figure(findings)
    figure.draw_without_rendering()
    return figure.axes[0]


def test_rows_become_tables_a_figure_and_json(tmp_path, capsys):
    def analyse(rows):
        tables = [Table("caption", rows[["metric", "unit"]])]
        return Findings(tables, {"value": rows["median"].iloc[0]}, lambda axes: axes.plot([1, 2]), "a title")

    outcome = Outcome(Cell("ok"), "ok", metrics=[Metric("time", "ms", [2.0])])
    outcome.rows = make_rows("it", outcome, {"provenance": {}})
    experiment = leak_experiment("it", Cell, RunOptions, lambda options: [], measure, analyse, lambda cell: 1.0)
    found = experiment.present([outcome], RunOptions(device="cpu", format="markdown"), tmp_path / "it.csv")
    assert found == {"value": 2.0, "figure": str(tmp_path / "it.png")} and (tmp_path / "it.png").exists()
    out = capsys.readouterr().out.strip().splitlines()
    assert out[0] == "caption" and out[2].startswith("|")


@pytest.mark.parametrize(
    ("leak", "arguments"),
    [
        ("matmul_data", "--size 0"),
        ("matmul_data", "--seconds 0"),
        ("matmul_data", "--dtype tf32"),
        ("roofline_knee", "--fmas 1 2 3"),
        ("roofline_knee", "--fmas 2 4 8 16"),
        ("roofline_knee", "--fmas 1 2 3 4000"),
        ("launch_overhead", "--depth 1"),
        ("launch_overhead", "--operation matmul --size 1000000"),
        ("flops_against_time", "--warmup 0"),
        ("flops_against_time", "--compile on"),
        ("flops_against_time", "--size llama3-8b --context-length 100000"),
    ],
)
def test_bad_values_are_named(leak, arguments):
    with pytest.raises(ValueError, match=arguments.rpartition(" ")[2]):
        command(leak, arguments)


@pytest.mark.parametrize("knee", [5.0, 10.0, 20.0, 40.0])
@pytest.mark.parametrize("launch", [0.0, 0.5])
def test_the_knee_of_a_roofline_is_found_whatever_its_corner(knee, launch):
    """Points around the knee are slower than either resource alone, which must not enter the rates."""
    ys = [launch + max(3.0, 3.0 * x / knee) * (1.2 if knee / 3 < x < 3 * knee and 1 < x < 128 else 1) for x in XS]
    found = fit_knee(pd.Series(ys, XS), launch)
    assert (found.flat, found.slope, found.position) == pytest.approx((3.0, 3.0 / knee, knee))


def test_noise_and_an_unmeasured_launch_move_the_knee_little():
    draw = random.Random(0)
    ys = [max(3.0, 3.0 * x / 20) * draw.uniform(0.95, 1.05) for x in XS]
    assert fit_knee(pd.Series(ys, XS)).position == pytest.approx(20, rel=0.2)
    found = fit_knee(pd.Series([0.5 + max(3.0, 3.0 * x / 20) for x in XS], XS))
    assert found.flat == pytest.approx(3.5) and 3.0 / 20 < found.slope < 1.1 * 3.0 / 20


def test_a_crossing_lies_between_its_points_on_logarithmic_axes():
    xs = [1, 4, 16]
    assert crossing(pd.Series([1, 1, 100], [1, 10, 100]), 10) == pytest.approx(10**1.5)
    assert crossing(pd.Series([1, 2, 4], xs), pd.Series([4, 2, 1], xs)) == pytest.approx(4)
    assert crossing(pd.Series([1, 2, 3], xs), 5) is None
    assert crossing(pd.Series([6, 7, 8], xs), 5) == pytest.approx(1)
    assert crossing(pd.Series([6, 1, 1, 10], [1, 2, 4, 8]), 5) > 4  # an early outlier is no crossing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_are_of_their_kind(dtype):
    cpu = torch.device("cpu")
    made = {kind: matmul_data.make_data(kind, (64, 64), dtype, cpu).double() for kind in matmul_data.KINDS}
    assert made["zeros"].eq(0).all() and made["ones"].eq(1).all()
    assert made["uniform"].ge(0).all() and made["uniform"].le(1).all() and 0.45 < made["uniform"].mean() < 0.55
    assert abs(made["normal"].mean()) < 0.1 and 0.9 < made["normal"].std() < 1.1
    assert set(made["integers"].unique().tolist()) == set(range(-8, 9))
    assert made["subnormal"].gt(0).all() and made["subnormal"].lt(torch.finfo(dtype).tiny).all()
    mantissas, _ = torch.frexp(made["sparse-bits"])
    assert set(mantissas.abs().unique().tolist()) == {0.5, 0.75}  # 1.0 and 1.5 times a power of two


def test_kinds_are_interleaved_and_compared_within_a_repeat():
    cells = command("matmul_data", "--size 8192 --data zeros ones --repeat 2")
    assert [cell.data for cell in cells] == ["zeros", "ones", "normal", "normal", "ones", "zeros"]
    speeds = {("zeros", 0): 12.0, ("normal", 0): 10.0, ("zeros", 1): 5.5, ("normal", 1): 5.0, ("ones", 1): 5.0}
    measured = {cell: speeds.get((cell.data, cell.repeat)) for cell in cells}
    found = matmul_data.analyse(
        rows_of(*((cell, {"matmul_tflops": speed, "power_w": 690.0}) for cell, speed in measured.items() if speed))
    )
    assert found.figures["ratio_to_normal"]["8192"] == pytest.approx({"zeros": 1.15, "normal": 1.0, "ones": 1.0})
    assert set(found.tables[0].frame["W"]) == {"690"} and "MHz" not in found.tables[0].frame
    assert [bar.get_width() for bar in drawn(found).patches] == [5.0, 7.5, 8.75]


def chain_findings(time_ms, launch_ms=0.0):
    """What is found in rows of a chain; with a launch of 0 ms they are as rows were before it was measured."""
    measured = []
    for cell in command("roofline_knee", "--elements 67108864 --fmas 1 4 16 64 128 256 --repeat 1"):
        if cell.how == roofline_knee.CEILING:
            measured.append((cell, {"matmul_ceiling": 1.0, "copy_ceiling": 100.0}))
        elif cell.how != roofline_knee.LAUNCH:
            eager = cell.how == roofline_knee.EAGER
            measured.append((cell, {"time": 2 * cell.fmas * time_ms(1) if eager else time_ms(cell.fmas)}))
        elif launch_ms:
            measured.append((cell, {"time": launch_ms}))
    return roofline_knee.analyse(rows_of(*measured))


def test_rates_of_a_chain_are_those_far_from_its_knee():
    """Launch of 0.5 ms, 2 ms of memory, 0.05 ms per multiply-add: a knee at 40, around which half as much is added."""
    findings = chain_findings(lambda k: 0.5 + max(2.0, k / 20) * (1.5 if k in (16, 64) else 1.0), launch_ms=0.5)
    found = findings.figures
    assert found["knee_fmas"] == pytest.approx(40)
    assert found["flat_gb_per_s"] == pytest.approx(8 * 2**26 / 2e-3 / 1e9, rel=1e-3)
    assert found["rising_tflops"] == pytest.approx(2 * 20 * 2**26 / 1e-3 / 1e12, rel=1e-3)
    assert found["launch_us"] == 500 and found["flat_up_to_fmas"] == 4
    assert found["corner_excess_percent"] == pytest.approx(100 * (0.5 + 1.5 * 3.2) / (0.5 + 3.2) - 100, abs=0.1)
    assert found["predicted_knee_fmas"] == {"measured fp32 product": 40.0}
    axes = drawn(findings)
    assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
    plain = chain_findings(lambda k: max(2.0, k / 20)).figures
    assert plain["doubling_fmas"] == pytest.approx(80, rel=0.01) and plain["launch_us"] is None
    flat = chain_findings(lambda k: 2.0).figures
    assert flat["knee_fmas"] is None and flat["message"]


def test_every_chain_computes_the_same():
    x, out = torch.randn(2, 1000)
    for fmas in (1, 3):
        roofline_knee.chain(fmas)(x, expected := torch.empty_like(x))
        roofline_knee.eager_chain(fmas)(x, out)
        torch.testing.assert_close(out, expected)
    cell = roofline_knee.ChainCell("cpu", roofline_knee.EAGER, 3, 1000, 2, 0, 0)
    assert [len(metric.samples) for metric in roofline_knee.measure(cell)] == [2]


def turning(device, device_us, host_us=5.0):
    """What is found on a machine whose device needs ``device_us(n)``, eager time being the slower of the two."""
    measured = []
    for size in (1, 10, 100, 1000, 10_000):
        times = {"eager": max(host_us, device_us(size)), "issue": host_us}
        graph = {"graph": device_us(size)} if device == "cuda" else {}
        measured.append(
            (launch_overhead.ChainCell(device, "elementwise", size, "bf16", 20, 5, "off", 0), times | graph)
        )
    return launch_overhead.analyse(rows_of(*measured))


def test_the_turn_is_where_the_device_needs_as_long_as_the_host():
    findings = turning("cuda", lambda n: max(1.0, n / 100))
    found = findings.figures["operations"]["elementwise"]
    assert (found["turn_n"], found["graph_speedup"]) == (500, 5.0)
    _, graph, star = drawn(findings).lines
    assert list(graph.get_xdata()) == [2 * n / 1024 for n in (1, 10, 100, 1000, 10_000)]  # KiB of bf16
    assert list(graph.get_ydata()) == [1.0, 1.0, 1.0, 10.0, 100.0]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == pytest.approx((2 * 500 / 1024, 5.0))
    assert turning("cuda", lambda n: 1.0).figures["operations"]["elementwise"]["turn_n"] is None
    without_graphs = turning("cpu", lambda n: 5.0 * max(1.0, n / 100)).figures["operations"]
    assert without_graphs["elementwise"]["turn_n"] == 200, "twice the least time"


def test_time_is_sorted_into_families():
    for name, wanted in {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN": "matmul",
        "triton_per_fused__softmax_3": "softmax",
        "triton_red_fused_mean_mul_rsqrt_1": "normalisation",
        "triton_poi_fused_mul_silu_2": "elementwise",
        "aten::mean": "elementwise",
        "memcpy": "elementwise",
    }.items():
        assert flops_against_time.family(name, in_norm=False, in_optimizer=False) == wanted, name
    assert flops_against_time.family("aten::mean", in_norm=True, in_optimizer=False) == "normalisation"
    assert flops_against_time.family("aten::mm", in_norm=False, in_optimizer=True) == "optimizer"


def test_shares_of_flops_and_time_are_bars_of_100():
    flops, times = (96.0, 1.0, 1.0, 1.0, 1.0), {"off": (1.0, 1.0, 1.0, 1.0, 1.0), "on": (2.0, 0.5, 0.5, 0.5, 0.5)}
    measured = []
    for cell in flops_against_time.make_cells(flops_against_time.Options()):
        found = {"step": 6.0, "busy": 5.0}
        found |= {f"{name}_time": ms for name, ms in zip(FAMILIES, times[cell.compile], strict=True)}
        found |= {f"{name}_flops": n for name, n in zip(FAMILIES, flops, strict=True)}
        measured.append((cell, found))
    findings = flops_against_time.analyse(rows_of(*measured))
    assert findings.figures["steps"]["small compiled"]["matmul_time_percent"] == 50.0
    axes = drawn(findings)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FLOPs", "time, eager", "time, compiled"]
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths[0] == pytest.approx([96, 20, 50]) and widths[1] == pytest.approx([1, 20, 12.5])
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx([100] * 3)


def test_a_cpu_measures_each():
    (cell,) = command("matmul_data", "--data normal --size 64 --seconds 0.02 --warmup-seconds 0 --repeat 1")
    rates = {metric.name: metric.samples for metric in matmul_data.measure(cell)}
    assert len(rates["matmul"]) >= 2
    assert rates["matmul_tflops"] == pytest.approx([2 * 64**3 / ms / 1e9 for ms in rates["matmul"]])
    (cell,) = command("launch_overhead", "--operation matmul --size 4 --depth 3 --samples 5 --compile off")
    times = {metric.name: metric.samples for metric in launch_overhead.measure(cell)}
    assert {name: len(samples) for name, samples in times.items()} == {"eager": 5, "issue": 5}
    assert all(issue <= whole for issue, whole in zip(times["issue"], times["eager"], strict=True))
    (cell,) = command("flops_against_time", "--steps 1 --batch-size 1 --context-length 32")
    found = {metric.name: metric.samples[0] for metric in flops_against_time.measure(cell)}
    spent = [found[f"{name}_time"] for name in FAMILIES]
    assert min(spent) > 0 and sum(spent) == pytest.approx(found["busy"], rel=0.02), "operators of a thread are disjoint"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("operation", ["matmul", "elementwise"])
def test_a_graph_replays_the_chain_on_what_its_input_holds_then(operation):
    cell = launch_overhead.ChainCell("cuda", operation, 64, "bf16", 5, 3, "on", 0)
    chain, x = launch_overhead.make_chain(cell)
    with torch.no_grad():
        graph, result = launch_overhead.captured(chain, x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(result, chain(x), rtol=0, atol=0)
    found = {metric.name for metric in launch_overhead.measure(cell)}
    assert found == {"eager", "issue", "compiled", "graph"}


@pytest.mark.gpu
@needs_gpu
def test_each_measures_on_a_gpu():
    cell = matmul_data.DataCell("cuda", "ones", 1024, "bf16", 0.3, 0.1, 0, 0)
    found = {metric.name: metric.samples for metric in matmul_data.measure(cell)}
    assert len(found["matmul"]) >= 2 and min(found["power_w"]) > 0 and max(found["sm_mhz"]) > 0
    x, out = torch.randn(2, 10_000, device="cuda")
    roofline_knee.eager_chain(64)(x, expected := torch.empty_like(x))
    roofline_knee.compiled_chain(64)(x, out)
    torch.testing.assert_close(out, expected)
    for how in ("off", "on"):
        step = flops_against_time.StepCell("cuda", "tiny", 2, 64, "bf16", how, "reference", 2, 2, 0)
        found = {metric.name: metric.samples[0] for metric in flops_against_time.measure(step)}
        assert all(found[f"{name}_time"] > 0 for name in FAMILIES)
