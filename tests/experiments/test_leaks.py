"""The lecture's experiments: what they compute and refuse, what they find in made-up rows, and a real run of each."""

import pytest
import torch

from cs336_systems.costs.flops import FAMILIES
from cs336_systems.experiments import flops_against_time, launch_overhead, matmul_data, roofline_knee
from tests.benchmarks.commands import cells_of
from tests.report.rows import rows_of


@pytest.mark.parametrize(
    ("leak", "arguments"),
    [
        ("matmul_data", "--seconds 0"),
        ("matmul_data", "--dtype tf32"),
        ("roofline_knee", "--fmas 0"),
        ("launch_overhead", "--device cpu"),
        ("flops_against_time", "--compile on"),
        ("flops_against_time", "--size llama3-8b --context-length 100000"),
    ],
)
def test_bad_values_are_named(leak, arguments):
    with pytest.raises(ValueError, match=arguments.rpartition(" ")[2]):
        cells_of(leak, *arguments.split())


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
    asked = cells_of("matmul_data", "--size", "8192", "--data", "zeros", "ones", "--repeat", "2")
    assert [cell.data for cell in asked] == ["zeros", "ones", "normal", "normal", "ones", "zeros"]
    speeds = {("zeros", 0): 12.0, ("normal", 0): 10.0, ("zeros", 1): 5.5, ("normal", 1): 5.0, ("ones", 1): 5.0}
    measured = [cell for cell in asked if (cell.data, cell.repeat) in speeds]
    values = [{"matmul_tflops": speeds[cell.data, cell.repeat], "power_w": 690.0} for cell in measured]
    rows = rows_of(measured, values)
    found = matmul_data.SPEEDS.of(rows).frame.set_index("data")
    assert found["ratio to normal"].to_dict() == {"zeros": "1.150 (1.100–1.200)", "normal": "1.000", "ones": "1.000"}
    assert set(found["W"]) == {"690"} and "MHz" not in found


def test_the_knee_is_where_the_highest_rates_of_fused_chains_meet():
    """2 ms of memory for 8 bytes, 0.05 ms for a multiply-add; at the corner both take time."""
    line = "--elements 67108864 --fmas 1 4 16 32 64 128 256 --repeat 1"
    ceiling, *chains = cells_of("roofline_knee", *line.split())
    measured = [{"matmul_ceiling": 1.0, "copy_ceiling": 100.0}]
    for cell in chains:
        fused = max(2.0, cell.fmas / 20) * (1.2 if cell.fmas in (32, 64) else 1)
        measured.append({"time": fused if cell.how == roofline_knee.COMPILED else 4.0 * cell.fmas})
    rows = rows_of([ceiling, *chains], measured)
    found = roofline_knee.knee_of(rows)
    assert found["fmas"] == pytest.approx(40)
    assert found["gb_per_s"] == pytest.approx(8 * 2**26 / 2e-3 / 1e9)
    assert found["tflops"] == pytest.approx(2 * 20 * 2**26 / 1e-3 / 1e12)
    table = roofline_knee.chain_table(rows)
    assert "at 40 multiply-adds" in table.caption and "a copy at 40." in table.caption
    times = table.frame.set_index(["how", "multiply-adds"])["x the first"]
    assert (times["compiled", 128], times["eager", 16]) == ("3.20", "32.00")


def test_a_graph_is_compared_with_launching_one_by_one():
    cells = [launch_overhead.ChainCell("cuda", "matmul", size, "bf16", 20, 5, 0) for size in (64, 4096)]
    rows = rows_of(cells, [{"eager": 6.0, "issue": 5.0, "compiled": 7.0, "graph": n / 1024} for n in (64, 4096)])
    assert launch_overhead.TIMES.of(rows).frame["eager / graph"].tolist() == ["96.00", "1.50"]


def test_time_is_sorted_into_families():
    for name, wanted in {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN": "matmul",
        "triton_per_fused__softmax_3": "softmax",
        "triton_red_fused_mean_mul_rsqrt_1": "normalisation",
        "triton_poi_fused_mul_silu_2": "elementwise",
        "aten::mean": "elementwise",
    }.items():
        assert flops_against_time.family(name, in_norm=False, in_optimizer=False) == wanted, name
    assert flops_against_time.family("aten::mean", in_norm=True, in_optimizer=False) == "normalisation"
    assert flops_against_time.family("aten::mm", in_norm=False, in_optimizer=True) == "optimizer"


def test_shares_of_flops_and_time_are_bars_of_100():
    flops, times = (96.0, 1.0, 1.0, 1.0, 1.0), {"off": (1.0, 1.0, 1.0, 1.0, 1.0), "on": (2.0, 0.5, 0.5, 0.5, 0.5)}
    cells, measured = flops_against_time.make_cells(flops_against_time.Options()), []
    for cell in cells:
        found = {"step": 6.0, "busy": 5.0}
        found |= {f"{name}_time": ms for name, ms in zip(FAMILIES, times[cell.compile], strict=True)}
        found |= {f"{name}_flops": n for name, n in zip(FAMILIES, flops, strict=True)}
        measured.append(found)
    rows = rows_of(cells, measured)
    assert flops_against_time.SHARES.of(rows).frame["matmul: % of time"].tolist() == ["20.0", "50.0"]


def test_a_cpu_measures_each():
    line = "--data normal --size 64 --seconds 0.02 --warmup-seconds 0 --repeat 1"
    (cell,) = cells_of("matmul_data", *line.split())
    rates = {metric.name: metric.samples for metric in matmul_data.measure(cell)}
    assert len(rates["matmul"]) >= 2
    assert rates["matmul_tflops"] == pytest.approx([2 * 64**3 / ms / 1e9 for ms in rates["matmul"]])
    x, out = torch.randn(2, 1000)
    roofline_knee.chain(3)(x, out)
    torch.testing.assert_close(out, ((x * 0.999 + 0.001) * 0.999 + 0.001) * 0.999 + 0.001)
    chain = roofline_knee.ChainCell("cpu", roofline_knee.EAGER, 3, 1000, 2, 0, 0)
    assert [len(metric.samples) for metric in roofline_knee.measure(chain)] == [2]
    (cell,) = cells_of("flops_against_time", "--steps", "1", "--batch-size", "1", "--context-length", "32")
    found = {metric.name: metric.samples[0] for metric in flops_against_time.measure(cell)}
    spent = [found[f"{name}_time"] for name in FAMILIES]
    assert min(spent) > 0 and sum(spent) == pytest.approx(found["busy"], rel=0.02), "operators of a thread are disjoint"


@pytest.mark.gpu
def test_each_measures_on_a_gpu():
    cell = matmul_data.DataCell("cuda", "ones", 1024, "bf16", 0.3, 0.1, 0, 0)
    found = {metric.name: metric.samples for metric in matmul_data.measure(cell)}
    assert len(found["matmul"]) >= 2 and min(found["power_w"]) > 0 and max(found["sm_mhz"]) > 0
    x, out = torch.randn(2, 10_000, device="cuda")
    roofline_knee.chain(64)(x, expected := torch.empty_like(x))
    roofline_knee.compiled_chain(64)(x, out)
    torch.testing.assert_close(out, expected)
    for operation in ("matmul", "elementwise"):
        cell = launch_overhead.ChainCell("cuda", operation, 64, "bf16", 5, 3, 0)
        chain, x = launch_overhead.make_chain(cell)
        with torch.no_grad():
            graph, result = launch_overhead.captured(chain, x)
            x.normal_()
            graph.replay()
            torch.testing.assert_close(result, chain(x), rtol=0, atol=0)
        assert {metric.name for metric in launch_overhead.measure(cell)} == {"eager", "issue", "compiled", "graph"}
    for how in ("off", "on"):
        step = flops_against_time.StepCell("cuda", "tiny", 2, 64, "bf16", how, "reference", 2, 2, 0)
        found = {metric.name: metric.samples[0] for metric in flops_against_time.measure(step)}
        assert all(found[f"{name}_time"] > 0 for name in FAMILIES)
