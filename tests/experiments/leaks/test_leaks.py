"""The lecture experiments: what they compute, what they refuse, and one small real run of each on a CPU."""

import importlib
import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from cs336_systems.costs.operator_flops import FAMILIES
from cs336_systems.experiments.leaks.findings import findings_figure
from cs336_systems.harness.record import SCHEMA_VERSION, Metric, read_rows
from cs336_systems.harness.sweep import Outcome, make_rows, outcome_rows
from cs336_systems.report.figures import save

NAMES = ("matmul_data", "roofline_knee", "launch_overhead", "flops_against_time")
CPU = torch.device("cpu")


class Leak:
    """An experiment's two modules, its options and cells before its measurement, and its command."""

    def __init__(self, name: str, command):
        package = "cs336_systems.experiments.leaks"
        self._modules = [importlib.import_module(f"{package}.{name}{part}") for part in ("_cells", "")]
        self.command = command

    def __getattr__(self, name: str):
        return next(getattr(module, name) for module in self._modules if hasattr(module, name))


@pytest.fixture
def load(load_script):
    """An experiment by its name."""
    return lambda name: Leak(name, load_script(f"scripts/abstraction_leaks/{name}.py"))


def rows_of(*measured) -> pd.DataFrame:
    """Rows as a sweep would have written them: (cell, {metric: (unit, value)}) each."""
    outcomes = []
    for cell, values in measured:
        outcome = Outcome(cell, "ok", metrics=[Metric(name, unit, [value]) for name, (unit, value) in values.items()])
        outcome.rows = make_rows("test", outcome, {"provenance": {"gpu": "", "host": "a machine"}})
        outcomes.append(outcome)
    return outcome_rows(outcomes)


def drawn(script, rows, folder):
    """The one axes of the figure that an experiment draws of rows."""
    figure = findings_figure(script.analyse(rows))
    assert save(figure, folder / "figure.png")
    return figure.axes[0]


def labels(axes):
    """What a legend would name, in order."""
    return axes.get_legend_handles_labels()[1]


def check_run(script, arguments, capsys, tmp_path):
    """Run a script's command with --out; returns its JSON line and rows."""
    assert script.command.main([*arguments, "--device", "cpu", "--out", str(tmp_path)]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith("|") for line in table)
    found = json.loads(last)
    assert found["benchmark"] == script.NAME
    assert found["ok"] == found["asked"]
    assert Path(found["figure"]) == tmp_path / f"{script.NAME}.png" and Path(found["figure"]).exists()
    rows = read_rows(Path(found["csv"]))
    assert set(rows["schema_version"]) == {SCHEMA_VERSION}
    assert set(rows["status"]) == {"ok"}
    return found, rows


@pytest.mark.parametrize("name", NAMES)
def test_each_script_predicts_and_says_how_to_run_it(load, name):
    text = load(name).command.__doc__
    assert "**Prediction, before measuring.**" in text
    assert f"uv run scripts/abstraction_leaks/{name}.py" in text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("matmul_data", ["--size", "0"]),
        ("matmul_data", ["--seconds", "0"]),
        ("matmul_data", ["--repeat", "0"]),
        ("matmul_data", ["--dtype", "tf32"]),
        ("roofline_knee", ["--fmas", "1", "2", "3"]),
        ("roofline_knee", ["--fmas", "2", "4", "8", "16"]),
        ("roofline_knee", ["--fmas", "1", "2", "3", "4000"]),
        ("roofline_knee", ["--samples", "0"]),
        ("launch_overhead", ["--depth", "1"]),
        ("launch_overhead", ["--size", "-4"]),
        ("launch_overhead", ["--operation", "matmul", "--size", "1000000"]),
        ("flops_against_time", ["--size", "enormous"]),
        ("flops_against_time", ["--context-length", "0"]),
        ("flops_against_time", ["--warmup", "0"]),
        ("flops_against_time", ["--size", "llama3-8b", "--context-length", "100000"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(load, name, arguments, capsys):
    assert load(name).command.main([*arguments, "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_gpu_and_a_foreign_file_are_one_sentence(load, name, capsys, tmp_path):
    main = load(name).command.main
    assert main(["--device", "cuda"]) == 2
    (tmp_path / f"{name}.csv").write_text("a,b\n1,2\n")
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_is_of_its_kind(load, dtype):
    script = load("matmul_data")
    made = {kind: script.make_data(kind, (64, 64), dtype, CPU).double() for kind in script.PREDICTED_ON_GPU}
    assert made["zeros"].eq(0).all()
    assert made["ones"].eq(1).all()
    assert made["uniform"].ge(0).all() and made["uniform"].le(1).all() and 0.45 < made["uniform"].mean() < 0.55
    assert abs(made["normal"].mean()) < 0.1 and 0.9 < made["normal"].std() < 1.1
    assert set(made["integers"].unique().tolist()) == set(range(-8, 9))
    assert made["subnormal"].gt(0).all() and made["subnormal"].lt(torch.finfo(dtype).tiny).all()
    mantissas, _ = torch.frexp(made["sparse-bits"])
    assert set(mantissas.abs().unique().tolist()) == {0.5, 0.75}  # 1.0 and 1.5 times a power of two
    with pytest.raises(ValueError, match="unknown data 'noise'"):
        script.make_data("noise", (2, 2), dtype, CPU)


def test_kinds_take_turns_and_are_compared_within_a_repeat(load):
    script = load("matmul_data")
    cells = script.make_cells(script.Options(device="cpu", dtype="fp32", data=("zeros", "ones"), repeat=2))
    assert [cell.data for cell in cells] == ["zeros", "ones", "normal", "normal", "ones", "zeros"]
    speeds = {("zeros", 0): 12.0, ("normal", 0): 10.0, ("zeros", 1): 5.5, ("normal", 1): 5.0, ("ones", 1): 5.0}
    rows = rows_of(
        *(
            (cell, {"matmul_tflops": ("TFLOP/s", speeds[cell.data, cell.repeat])})
            for cell in cells
            if (cell.data, cell.repeat) in speeds
        )
    )
    assert script.ratios_to_normal(rows) == {"zeros": [1.2, 1.1], "normal": [1.0, 1.0], "ones": [1.0]}
    found = script.analyse(rows).figures["ratio_to_normal"]["8192"]
    assert list(found) == ["zeros", "normal", "ones"] and found["zeros"] == 1.15


def chain_rows(script, time_ms, copy_gb_per_s=100.0, matmul_tflops=1.0, launch_ms=0.0):
    """Rows of a chain; with a launch of 0 ms they are as rows were before it was measured."""
    options = script.Options(device="cpu", fmas=(1, 4, 16, 64, 128, 256), repeat=1)
    measured = []
    for cell in script.make_cells(options):
        if cell.how == script.CEILING:
            values = {"matmul_ceiling": ("TFLOP/s", matmul_tflops), "copy_ceiling": ("GB/s", copy_gb_per_s)}
        elif cell.how == script.LAUNCH:
            if not launch_ms:
                continue
            values = {"time": ("ms", launch_ms)}
        else:
            values = {"time": ("ms", 2 * cell.fmas * time_ms(1) if cell.how == script.EAGER else time_ms(cell.fmas))}
        measured.append((cell, values))
    return rows_of(*measured)


def test_knee_and_doubling_of_a_roofline(load, tmp_path):
    script = load("roofline_knee")
    rows = chain_rows(script, lambda k: max(2.0, k / 20))
    found = script.analyse(rows)
    assert found.figures["knee_fmas"] == pytest.approx(40)
    assert found.figures["knee_flop_per_byte"] == pytest.approx(10)
    assert found.figures["doubling_fmas"] == pytest.approx(80, rel=0.01)
    assert found.figures["flat_gb_per_s"] == pytest.approx(8 * 2**26 / 2e-3 / 1e9, rel=1e-3)
    assert found.figures["rising_tflops"] == pytest.approx(2 * 20 * 2**26 / 1e-3 / 1e12, rel=1e-3)
    assert found.figures["predicted_knee_fmas"] == {"measured fp32 product": 40.0}  # 8 B / 100 GB/s x 1 TFLOP/s / 2
    assert "eager / fused" in found.tables[1].frame.columns
    axes = drawn(script, rows, tmp_path)
    measured, fitted, eager, knee, predicted = axes.lines
    assert list(measured.get_xdata()) == [k / 4 for k in (1, 4, 16, 64, 128, 256)]  # 2 operations for 8 bytes
    assert list(measured.get_ydata()) == [max(2.0, k / 20) for k in (1, 4, 16, 64, 128, 256)]
    assert fitted.get_ydata()[[0, -1]] == pytest.approx([2.0, 256 / 20])
    assert list(eager.get_ydata()) == [4.0, 16.0, 64.0]
    assert (knee.get_xdata()[0], knee.get_ydata()[0]) == pytest.approx((10, 2.0))
    assert predicted.get_xdata()[0] == pytest.approx(10)
    assert labels(axes)[-2:] == ["knee of these rates: 10.0", "knee predicted, measured fp32 product: 10.0"]


def test_rates_of_a_chain_are_those_far_from_its_knee(load):
    """Launch of 0.5 ms, 2 ms of memory, 0.05 ms per multiply-add: a knee at 40, around which half as much is added."""
    script = load("roofline_knee")

    def time_ms(k):
        return 0.5 + max(2.0, k / 20) * (1.5 if k in (16, 64) else 1.0)

    rows = chain_rows(script, time_ms, launch_ms=0.5)
    found = script.analyse(rows)
    assert found.figures["knee_fmas"] == pytest.approx(40)
    assert found.figures["flat_gb_per_s"] == pytest.approx(8 * 2**26 / 2e-3 / 1e9, rel=1e-3)
    assert found.figures["rising_tflops"] == pytest.approx(2 * 20 * 2**26 / 1e-3 / 1e12, rel=1e-3)
    own = found.figures["rising_tflops"] * 1e12, found.figures["flat_gb_per_s"] * 1e9
    assert script.predicted_knee(*own) == pytest.approx(found.figures["knee_fmas"], rel=1e-3)
    assert found.figures["launch_us"] == 500 and found.figures["flat_up_to_fmas"] == 4
    assert found.figures["corner_excess_percent"] == pytest.approx(100 * (0.5 + 1.5 * 3.2) / (0.5 + 3.2) - 100, abs=0.1)
    assert "less the 500.0 µs of a launch" in found.tables[0].caption
    unmeasured = script.analyse(rows[rows["how"] != script.LAUNCH])
    assert unmeasured.figures["launch_us"] is None and "launches included" in unmeasured.tables[0].caption
    assert unmeasured.figures["rising_tflops"] < found.figures["rising_tflops"]


def test_the_legend_of_the_roofline_stands_clear_of_its_data(load, tmp_path):
    axes = drawn(load("roofline_knee"), chain_rows(load("roofline_knee"), lambda k: max(2.0, k / 20)), tmp_path)
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.get_window_extent()) and legend.y0 >= 0


def test_a_chain_that_never_slows_has_no_knee(load):
    script = load("roofline_knee")
    found = script.analyse(chain_rows(script, lambda k: 2.0))
    assert found.figures["knee_fmas"] is None and "do not rise" in found.figures["message"]


def test_a_chain_that_failed_is_a_row_without_samples(load):
    script = load("roofline_knee")
    rows = rows_of((script.make_cells(script.Options(device="cpu"))[-1], {}))  # its ``samples`` are no measured ones
    assert list(rows["samples"]) == [[]]


def test_predicted_knee_of_an_h200(load):
    """66.9 TFLOP/s over 4.3 TB/s are 15.6 operations per byte; eight bytes carry 62 multiply-adds."""
    assert load("roofline_knee").predicted_knee(66.9e12, 4.3e12) == pytest.approx(62.2, abs=0.1)


@pytest.mark.slow
@torch._inductor.config.patch({"cpp.vec_isa_ok": False})  # scalar code compiles in a third of the time
def test_every_chain_computes_the_same(load):
    script = load("roofline_knee")
    x, out = torch.randn(2, 1000)
    for fmas in (1, 3):
        script.chain(fmas)(x, expected := torch.empty_like(x))
        script.eager_chain(fmas)(x, out)
        torch.testing.assert_close(out, expected)
    compiled = script.compiled_chain(3)
    metrics = {metric.name: metric.samples for metric in script.compile_metrics(compiled, x, out.zero_())}
    torch.testing.assert_close(out, expected)
    assert metrics.get("kernels", [1]) == [1]
    assert script.compile_metrics(compiled, x, out) == []
    cell = script.ChainCell("cpu", script.COMPILED, 3, 1000, 2, 0, 0)
    assert [metric.name for metric in script.measure(cell)] == ["time"]


def turning_rows(script, device, device_us, host_us=5.0):
    """Rows of a machine whose device needs ``device_us(n)``, eager time being the slower of device and host."""
    cell = script.ChainCell(device, "elementwise", 0, "bf16", 20, 5, "off", 0)
    measured = []
    for size in (1, 10, 100, 1000, 10_000):
        own = script.ChainCell(**{**vars(cell), "size": size})
        times = {script.EAGER: max(host_us, device_us(size)), script.ISSUE: host_us}
        if device == "cuda":
            times[script.GRAPH] = device_us(size)
        measured.append((own, {name: ("us per operation", value) for name, value in times.items()}))
    return rows_of(*measured)


def test_the_turn_is_where_the_device_needs_as_long_as_the_host(load):
    script = load("launch_overhead")
    found = script.analyse(turning_rows(script, "cuda", lambda n: max(1.0, n / 100))).figures["operations"]
    assert found["elementwise"]["turn_n"] == 500
    assert found["elementwise"]["graph_speedup"] == 5.0
    beyond = script.analyse(turning_rows(script, "cuda", lambda n: 1.0)).figures["operations"]
    assert beyond["elementwise"]["turn_n"] is None


def test_graphs_are_drawn_beside_eager_with_the_turn(load, tmp_path):
    script = load("launch_overhead")
    axes = drawn(script, turning_rows(script, "cuda", lambda n: max(1.0, n / 100)), tmp_path)
    assert labels(axes) == ["elementwise, eager", "elementwise, graph", "elementwise turns at n = 500"]
    eager, graph, star = axes.lines
    assert list(graph.get_xdata()) == [2 * n / 1024 for n in (1, 10, 100, 1000, 10_000)]  # KiB of bf16
    assert list(graph.get_ydata()) == [1.0, 1.0, 1.0, 10.0, 100.0]
    assert list(eager.get_ydata()) == [5.0, 5.0, 5.0, 10.0, 100.0]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == pytest.approx((2 * 500 / 1024, 5.0))


def test_power_and_clock_are_drawn_beside_speed(load, tmp_path):
    script = load("matmul_data")
    cells = script.make_cells(script.Options(device="cpu", dtype="fp32", data=("zeros",), repeat=1))
    values = {"power_w": ("W", 690.0), "sm_mhz": ("MHz", 1500.0)}
    speeds = {"zeros": 800.0, "normal": 700.0}
    rows = rows_of(*((cell, values | {"matmul_tflops": ("TFLOP/s", speeds[cell.data])}) for cell in cells))
    frame = script.analyse(rows).tables[0].frame
    assert list(frame["W"]) == ["690", "690"]
    assert list(frame["MHz"]) == ["1500", "1500"]
    axes = drawn(script, rows, tmp_path)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["normal", "zeros"]
    assert [bar.get_width() for bar in axes.patches] == [700.0, 800.0]
    assert [text.get_text() for text in axes.texts] == ["690 W, 1500 MHz"] * 2


def test_without_graphs_the_turn_is_twice_the_least_time(load):
    script = load("launch_overhead")
    found = script.analyse(turning_rows(script, "cpu", lambda n: 5.0 * max(1.0, n / 100)))
    assert found.figures["operations"]["elementwise"]["turn_n"] == 200
    assert "CUDA graphs need CUDA" in found.tables[0].caption


def test_time_is_sorted_into_families(load):
    script = load("flops_against_time")
    plain = {"in_norm": False, "in_optimizer": False}
    for name, wanted in {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN": "matmul",
        "aten::addmm": "matmul",
        "triton_per_fused__softmax_3": "softmax",
        "triton_red_fused_mean_mul_rsqrt_1": "normalisation",
        "triton_poi_fused_mul_silu_2": "elementwise",
        "cpp_fused_add_mean_mul_rsqrt_1": "normalisation",
        "cpp_fused__softmax_masked_fill_2": "softmax",
        "cpp_fused_mul_silu_0": "elementwise",
        "aten::mul": "elementwise",
        "aten::mean": "elementwise",
        "memcpy": "elementwise",
    }.items():
        assert script.family(name, **plain) == wanted, name
    assert script.family("aten::mean", in_norm=True, in_optimizer=False) == "normalisation"
    assert script.family("aten::mm", in_norm=False, in_optimizer=True) == "optimizer"
    assert script.shares({"a": 3.0, "b": 1.0}) == {"a": 75.0, "b": 25.0}
    assert script.shares({"a": 0.0}) == {"a": 0.0}


def test_shares_of_flops_and_time_are_drawn_as_bars_of_100(load, tmp_path):
    script = load("flops_against_time")
    options = script.Options(device="cpu", size=("tiny",), context_length=128, dtype="fp32")
    flops = dict(zip(FAMILIES, (96.0, 1.0, 1.0, 1.0, 1.0), strict=True))
    times = {"off": (1.0, 1.0, 1.0, 1.0, 1.0), "on": (2.0, 0.5, 0.5, 0.5, 0.5)}
    measured = []
    for cell in script.make_cells(options):
        ms = dict(zip(FAMILIES, times[cell.compile], strict=True))
        values = {"step": ("ms", 6.0), "busy": ("ms", 5.0)}
        values |= {f"{name}_time": ("ms", ms[name]) for name in FAMILIES}
        values |= {f"{name}_flops": ("GFLOP", flops[name]) for name in FAMILIES}
        measured.append((cell, values))
    axes = drawn(script, rows_of(*measured), tmp_path)
    assert labels(axes) == list(FAMILIES)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FLOPs", "time, eager", "time, compiled"]
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths[0] == pytest.approx([96, 20, 50]) and widths[1] == pytest.approx([1, 20, 12.5])
    assert [sum(column) for column in zip(*widths, strict=True)] == pytest.approx([100] * 3)


def test_fused_cpu_kernels_are_read_from_a_trace(load, tmp_path):
    script = load("flops_against_time")
    event = {"ph": "X", "cat": "cpu_op", "ts": 10.5, "dur": 2.25, "pid": 1, "tid": 2}
    names = ("graph_0_cpp_fused_mul_1", "cpp_fused_mean_0", "aten::mm")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{**event, "name": name} for name in names]}))
    found = script.fused_cpu_kernels(path)
    assert list(found["name"]) == ["cpp_fused_mul_1", "cpp_fused_mean_0"]
    assert set(found["end"] - found["start"]) == {2250}


@pytest.mark.slow
def test_matmul_data_runs(load, capsys, tmp_path):
    short = ["--size", "64", "--seconds", "0.02", "--warmup-seconds", "0", "--repeat", "2"]
    found, rows = check_run(load("matmul_data"), ["--data", "zeros", *short], capsys, tmp_path)
    assert set(found["ratio_to_normal"]["64"]) == {"zeros", "normal"}
    assert len(rows[rows["metric"] == "matmul"]) == 4


@pytest.mark.slow
def test_launch_overhead_runs(load, capsys, tmp_path):
    arguments = ["--size", "4", "64", "--depth", "3", "--samples", "5", "--compile", "off"]
    found, rows = check_run(load("launch_overhead"), arguments, capsys, tmp_path)
    assert set(found["operations"]) == {"matmul", "elementwise"}
    assert set(rows["metric"]) == {"eager", "issue"}


@pytest.mark.slow
def test_flops_against_time_runs(load, capsys, tmp_path):
    arguments = ["--compile", "off", "--steps", "1", "--batch-size", "1", "--context-length", "32"]
    found, rows = check_run(load("flops_against_time"), arguments, capsys, tmp_path)
    times = rows[rows["metric"].isin([f"{name}_time" for name in FAMILIES])]["median"]
    assert len(times) == len(FAMILIES) and (times > 0).all()
    busy = float(rows[rows["metric"] == "busy"]["median"].iloc[0])
    assert times.sum() == pytest.approx(busy, rel=0.02)  # operators of one thread are disjoint
    assert 0 < found["steps"]["tiny eager"]["matmul_time_percent"] < 100


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("operation", ["matmul", "elementwise"])
def test_a_graph_replays_the_chain_on_what_its_input_holds_then(load, operation):
    script = load("launch_overhead")
    cell = script.ChainCell("cuda", operation, 64, "bf16", 5, 3, "on", 0)
    chain, x = script.make_chain(cell)
    with torch.no_grad():
        graph, result = script.captured(chain, x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(result, chain(x), rtol=0, atol=0)
    assert {metric.name for metric in script.measure(cell)} == {"eager", "issue", "compiled", "graph", "compile"}


@pytest.mark.gpu
@needs_gpu
def test_power_and_clock_are_read_while_a_gpu_multiplies(load):
    script = load("matmul_data")
    found = {m.name: m.samples for m in script.measure(script.DataCell("cuda", "ones", 1024, "bf16", 0.3, 0.1, 0, 0))}
    assert len(found["matmul"]) >= 2 and min(found["power_w"]) > 0 and max(found["sm_mhz"]) > 0


@pytest.mark.gpu
@needs_gpu
def test_a_chain_is_one_kernel_on_a_gpu(load):
    script = load("roofline_knee")
    x, out = torch.randn(2, 10_000, device="cuda")
    script.eager_chain(64)(x, expected := torch.empty_like(x))
    compiled = script.compiled_chain(64)
    metrics = {metric.name: metric.samples for metric in script.compile_metrics(compiled, x, out)}
    torch.testing.assert_close(out, expected)
    assert metrics.get("kernels", [1]) == [1]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_steps_kernels_are_sorted_on_a_gpu(load, compiled):
    script = load("flops_against_time")
    cell = script.StepCell("cuda", "tiny", 2, 64, "bf16", compiled, "reference", 2, 2, 0)
    found = {metric.name: metric.samples[0] for metric in script.measure(cell)}
    assert all(found[f"{name}_time"] > 0 for name in FAMILIES)
