"""The lecture's experiments: what they compute, what they refuse, and one small real run of each on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from cs336_systems.costs.flops import FAMILIES
from cs336_systems.experiments import flops_against_time, launch_overhead, matmul_data, roofline_knee
from cs336_systems.experiments.findings import findings_figure
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.sweep import Outcome, make_rows, outcome_rows

CPU = torch.device("cpu")


def options_of(leak, **given):
    return replace(leak.Options.default("cpu"), **given)


def rows_of(*measured) -> pd.DataFrame:
    """Rows as a sweep would have written them: (cell, {metric: (unit, value)}) each."""
    outcomes = []
    for cell, values in measured:
        outcome = Outcome(cell, "ok", metrics=[Metric(name, unit, [value]) for name, (unit, value) in values.items()])
        outcome.rows = make_rows("test", outcome, {"provenance": {"gpu": "", "host": "a machine"}})
        outcomes.append(outcome)
    return outcome_rows(outcomes)


def drawn(leak, rows):
    """The one axes of the figure that an experiment draws of rows, laid out."""
    figure = findings_figure(leak.analyse(rows))
    figure.draw_without_rendering()
    return figure.axes[0]


def labels(axes):
    """What a legend would name, in order."""
    return axes.get_legend_handles_labels()[1]


@pytest.fixture
def command(load_script):
    """Runs an experiment's command on the CPU; returns its exit code."""

    def run(leak, *arguments):
        script = load_script(f"scripts/abstraction_leaks/{leak.NAME}.py")
        return script.main(["--device", "cpu", *map(str, arguments)])

    return run


@pytest.mark.parametrize(
    ("leak", "arguments"),
    [
        (matmul_data, ["--size", "0"]),
        (matmul_data, ["--seconds", "0"]),
        (matmul_data, ["--dtype", "tf32"]),
        (roofline_knee, ["--fmas", "1", "2", "3"]),
        (roofline_knee, ["--fmas", "2", "4", "8", "16"]),
        (roofline_knee, ["--fmas", "1", "2", "3", "4000"]),
        (launch_overhead, ["--depth", "1"]),
        (launch_overhead, ["--size", "-4"]),
        (launch_overhead, ["--operation", "matmul", "--size", "1000000"]),
        (flops_against_time, ["--size", "enormous"]),
        (flops_against_time, ["--warmup", "0"]),
        (flops_against_time, ["--size", "llama3-8b", "--context-length", "100000"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(command, leak, arguments, capsys):
    assert command(leak, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_are_of_their_kind(dtype):
    made = {kind: matmul_data.make_data(kind, (64, 64), dtype, CPU).double() for kind in matmul_data.KINDS}
    assert made["zeros"].eq(0).all()
    assert made["ones"].eq(1).all()
    assert made["uniform"].ge(0).all() and made["uniform"].le(1).all() and 0.45 < made["uniform"].mean() < 0.55
    assert abs(made["normal"].mean()) < 0.1 and 0.9 < made["normal"].std() < 1.1
    assert set(made["integers"].unique().tolist()) == set(range(-8, 9))
    assert made["subnormal"].gt(0).all() and made["subnormal"].lt(torch.finfo(dtype).tiny).all()
    mantissas, _ = torch.frexp(made["sparse-bits"])
    assert set(mantissas.abs().unique().tolist()) == {0.5, 0.75}  # 1.0 and 1.5 times a power of two
    with pytest.raises(ValueError, match="noise"):
        matmul_data.make_data("noise", (2, 2), dtype, CPU)


def test_kinds_are_interleaved_and_compared_within_a_repeat():
    cells = matmul_data.make_cells(options_of(matmul_data, size=(8192,), data=("zeros", "ones"), repeat=2))
    assert [cell.data for cell in cells] == ["zeros", "ones", "normal", "normal", "ones", "zeros"]
    speeds = {("zeros", 0): 12.0, ("normal", 0): 10.0, ("zeros", 1): 5.5, ("normal", 1): 5.0, ("ones", 1): 5.0}
    state = {"power_w": ("W", 690.0), "sm_mhz": ("MHz", 1500.0)}
    measured = {cell: speeds.get((cell.data, cell.repeat)) for cell in cells}
    rows = rows_of(
        *((cell, state | {"matmul_tflops": ("TFLOP/s", speed)}) for cell, speed in measured.items() if speed)
    )
    assert matmul_data.ratios_to_normal(rows) == {"zeros": [1.2, 1.1], "normal": [1.0, 1.0], "ones": [1.0]}
    found = matmul_data.analyse(rows)
    assert found.figures["ratio_to_normal"]["8192"] == {"zeros": 1.15, "normal": 1.0, "ones": 1.0}
    assert set(found.tables[0].frame["W"]) == {"690"} and set(found.tables[0].frame["MHz"]) == {"1500"}
    axes = drawn(matmul_data, rows)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ones", "normal", "zeros"]
    assert [bar.get_width() for bar in axes.patches] == [5.0, 7.5, 8.75]
    assert [text.get_text() for text in axes.texts] == ["690 W, 1500 MHz"] * 3


def chain_rows(time_ms, launch_ms=0.0):
    """Rows of a chain; with a launch of 0 ms they are as rows were before it was measured."""
    measured = []
    for cell in roofline_knee.make_cells(
        options_of(roofline_knee, elements=2**26, fmas=(1, 4, 16, 64, 128, 256), repeat=1)
    ):
        if cell.how == roofline_knee.CEILING:
            values = {"matmul_ceiling": ("TFLOP/s", 1.0), "copy_ceiling": ("GB/s", 100.0)}
        elif cell.how == roofline_knee.LAUNCH:
            if not launch_ms:
                continue
            values = {"time": ("ms", launch_ms)}
        else:
            eager = cell.how == roofline_knee.EAGER
            values = {"time": ("ms", 2 * cell.fmas * time_ms(1) if eager else time_ms(cell.fmas))}
        measured.append((cell, values))
    return rows_of(*measured)


def test_the_knee_of_a_roofline_is_told_and_drawn():
    rows = chain_rows(lambda k: max(2.0, k / 20))
    found = roofline_knee.analyse(rows).figures
    assert (found["knee_fmas"], found["knee_flop_per_byte"]) == pytest.approx((40, 10))
    assert found["doubling_fmas"] == pytest.approx(80, rel=0.01)
    assert found["flat_gb_per_s"] == pytest.approx(8 * 2**26 / 2e-3 / 1e9, rel=1e-3)
    assert found["rising_tflops"] == pytest.approx(2 * 20 * 2**26 / 1e-3 / 1e12, rel=1e-3)
    own = found["rising_tflops"] * 1e12, found["flat_gb_per_s"] * 1e9
    assert roofline_knee.predicted_knee(*own) == pytest.approx(found["knee_fmas"], rel=1e-3)
    axes = drawn(roofline_knee, rows)
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.get_window_extent()) and legend.y0 >= 0


def test_rates_of_a_chain_are_those_far_from_its_knee():
    """Launch of 0.5 ms, 2 ms of memory, 0.05 ms per multiply-add: a knee at 40, around which half as much is added."""
    rows = chain_rows(lambda k: 0.5 + max(2.0, k / 20) * (1.5 if k in (16, 64) else 1.0), launch_ms=0.5)
    found = roofline_knee.analyse(rows).figures
    assert found["knee_fmas"] == pytest.approx(40)
    assert found["flat_gb_per_s"] == pytest.approx(8 * 2**26 / 2e-3 / 1e9, rel=1e-3)
    assert found["launch_us"] == 500 and found["flat_up_to_fmas"] == 4
    assert found["corner_excess_percent"] == pytest.approx(100 * (0.5 + 1.5 * 3.2) / (0.5 + 3.2) - 100, abs=0.1)
    unmeasured = roofline_knee.analyse(rows[rows["how"] != roofline_knee.LAUNCH]).figures
    assert unmeasured["launch_us"] is None and unmeasured["rising_tflops"] < found["rising_tflops"]


def test_a_chain_that_never_slows_has_no_knee():
    found = roofline_knee.analyse(chain_rows(lambda k: 2.0))
    assert found.figures["knee_fmas"] is None and found.figures["message"]


def test_a_chain_that_failed_is_a_row_without_samples():
    rows = rows_of((roofline_knee.make_cells(options_of(roofline_knee))[-1], {}))  # its ``samples`` are not measured
    assert list(rows["samples"]) == [[]]


@pytest.mark.slow
@torch._inductor.config.patch({"cpp.vec_isa_ok": False})  # scalar code compiles in a third of the time
def test_every_chain_computes_the_same():
    x, out = torch.randn(2, 1000)
    for fmas in (1, 3):
        roofline_knee.chain(fmas)(x, expected := torch.empty_like(x))
        roofline_knee.eager_chain(fmas)(x, out)
        torch.testing.assert_close(out, expected)
    compiled = roofline_knee.compiled_chain(3)
    metrics = {metric.name: metric.samples for metric in roofline_knee.compile_metrics(compiled, x, out.zero_())}
    torch.testing.assert_close(out, expected)
    assert metrics.get("kernels", [1]) == [1]
    assert roofline_knee.compile_metrics(compiled, x, out) == []
    cell = roofline_knee.ChainCell("cpu", roofline_knee.COMPILED, 3, 1000, 2, 0, 0)
    assert [metric.name for metric in roofline_knee.measure(cell)] == ["time"]


def turning_rows(device, device_us, host_us=5.0):
    """Rows of a machine whose device needs ``device_us(n)``, eager time being the slower of device and host."""
    measured = []
    for size in (1, 10, 100, 1000, 10_000):
        times = {"eager": max(host_us, device_us(size)), "issue": host_us}
        if device == "cuda":
            times["graph"] = device_us(size)
        cell = launch_overhead.ChainCell(device, "elementwise", size, "bf16", 20, 5, "off", 0)
        measured.append((cell, {name: ("us per operation", value) for name, value in times.items()}))
    return rows_of(*measured)


def test_the_turn_is_where_the_device_needs_as_long_as_the_host():
    rows = turning_rows("cuda", lambda n: max(1.0, n / 100))
    found = launch_overhead.analyse(rows).figures["operations"]["elementwise"]
    assert (found["turn_n"], found["graph_speedup"]) == (500, 5.0)
    axes = drawn(launch_overhead, rows)
    assert labels(axes) == ["elementwise, eager", "elementwise, graph", "elementwise turns at n = 500"]
    eager, graph, star = axes.lines
    assert list(graph.get_xdata()) == [2 * n / 1024 for n in (1, 10, 100, 1000, 10_000)]  # KiB of bf16
    assert list(graph.get_ydata()) == [1.0, 1.0, 1.0, 10.0, 100.0]
    assert list(eager.get_ydata()) == [5.0, 5.0, 5.0, 10.0, 100.0]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == pytest.approx((2 * 500 / 1024, 5.0))
    beyond = launch_overhead.analyse(turning_rows("cuda", lambda n: 1.0)).figures["operations"]
    assert beyond["elementwise"]["turn_n"] is None
    without_graphs = launch_overhead.analyse(turning_rows("cpu", lambda n: 5.0 * max(1.0, n / 100))).figures
    assert without_graphs["operations"]["elementwise"]["turn_n"] == 200, "twice the least time"


def test_time_is_sorted_into_families():
    plain = {"in_norm": False, "in_optimizer": False}
    for name, wanted in {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN": "matmul",
        "triton_per_fused__softmax_3": "softmax",
        "triton_red_fused_mean_mul_rsqrt_1": "normalisation",
        "triton_poi_fused_mul_silu_2": "elementwise",
        "cpp_fused_add_mean_mul_rsqrt_1": "normalisation",
        "cpp_fused__softmax_masked_fill_2": "softmax",
        "cpp_fused_mul_silu_0": "elementwise",
        "aten::mean": "elementwise",
        "memcpy": "elementwise",
    }.items():
        assert flops_against_time.family(name, **plain) == wanted, name
    assert flops_against_time.family("aten::mean", in_norm=True, in_optimizer=False) == "normalisation"
    assert flops_against_time.family("aten::mm", in_norm=False, in_optimizer=True) == "optimizer"
    assert flops_against_time.shares({"a": 3.0, "b": 1.0}) == {"a": 75.0, "b": 25.0}
    assert flops_against_time.shares({"a": 0.0}) == {"a": 0.0}


def test_shares_of_flops_and_time_are_drawn_as_bars_of_100():
    flops = dict(zip(FAMILIES, (96.0, 1.0, 1.0, 1.0, 1.0), strict=True))
    times = {"off": (1.0, 1.0, 1.0, 1.0, 1.0), "on": (2.0, 0.5, 0.5, 0.5, 0.5)}
    measured = []
    for cell in flops_against_time.make_cells(options_of(flops_against_time)):
        ms = dict(zip(FAMILIES, times[cell.compile], strict=True))
        values = {"step": ("ms", 6.0), "busy": ("ms", 5.0)}
        values |= {f"{name}_time": ("ms", ms[name]) for name in FAMILIES}
        values |= {f"{name}_flops": ("GFLOP", flops[name]) for name in FAMILIES}
        measured.append((cell, values))
    axes = drawn(flops_against_time, rows_of(*measured))
    assert labels(axes) == list(FAMILIES)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FLOPs", "time, eager", "time, compiled"]
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths[0] == pytest.approx([96, 20, 50]) and widths[1] == pytest.approx([1, 20, 12.5])
    assert [sum(column) for column in zip(*widths, strict=True)] == pytest.approx([100] * 3)


def test_fused_cpu_kernels_are_read_from_a_trace(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "ts": 10.5, "dur": 2.25, "pid": 1, "tid": 2}
    names = ("graph_0_cpp_fused_mul_1", "cpp_fused_mean_0", "aten::mm")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{**event, "name": name} for name in names]}))
    found = flops_against_time.fused_cpu_kernels(path)
    assert list(found["name"]) == ["cpp_fused_mul_1", "cpp_fused_mean_0"]
    assert set(found["end"] - found["start"]) == {2250}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "arguments"),
    [
        (matmul_data, "--data zeros --size 64 --seconds 0.02 --warmup-seconds 0 --repeat 2"),
        (launch_overhead, "--size 4 64 --depth 3 --samples 5 --compile off"),
        (flops_against_time, "--compile off --steps 1 --batch-size 1 --context-length 32"),
    ],
)
def test_each_runs(command, leak, arguments, capsys, tmp_path):
    assert command(leak, *arguments.split(), "--out", tmp_path) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert any(line.startswith("|") for line in table)
    assert found["benchmark"] == leak.NAME and found["ok"] == found["asked"]
    assert Path(found["figure"]).exists()
    rows = read_rows(Path(found["csv"]))
    assert set(rows["status"]) == {"ok"}
    if leak is flops_against_time:  # operators of one thread are disjoint
        times = rows[rows["metric"].isin([f"{name}_time" for name in FAMILIES])]["median"]
        busy = float(rows[rows["metric"] == "busy"]["median"].iloc[0])
        assert len(times) == len(FAMILIES) and (times > 0).all() and times.sum() == pytest.approx(busy, rel=0.02)


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
    assert found == {"eager", "issue", "compiled", "graph", "compile"}


@pytest.mark.gpu
@needs_gpu
def test_each_measures_on_a_gpu():
    cell = matmul_data.DataCell("cuda", "ones", 1024, "bf16", 0.3, 0.1, 0, 0)
    found = {metric.name: metric.samples for metric in matmul_data.measure(cell)}
    assert len(found["matmul"]) >= 2 and min(found["power_w"]) > 0 and max(found["sm_mhz"]) > 0
    x, out = torch.randn(2, 10_000, device="cuda")
    roofline_knee.eager_chain(64)(x, expected := torch.empty_like(x))
    compiled = roofline_knee.compiled_chain(64)
    metrics = {metric.name: metric.samples for metric in roofline_knee.compile_metrics(compiled, x, out)}
    torch.testing.assert_close(out, expected)
    assert metrics.get("kernels", [1]) == [1]
    for how in ("off", "on"):
        step = flops_against_time.StepCell("cuda", "tiny", 2, 64, "bf16", how, "reference", 2, 2, 0)
        found = {metric.name: metric.samples[0] for metric in flops_against_time.measure(step)}
        assert all(found[f"{name}_time"] > 0 for name in FAMILIES)
