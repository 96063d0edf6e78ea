"""Fused kernels' benchmark: its list and its files, its grid, a run on the CPU, and our kernels' errors on a GPU."""

import json
from pathlib import Path

import pytest
import torch

import cs336_systems
from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernels.cells import KERNELS, KernelCell
from cs336_systems.experiments.kernels.measure import Subject, errors, measure
from cs336_systems.harness.record import read_rows
from tests.benchmarks.commands import cells_of, run

PACKAGE = Path(cs336_systems.__file__).parent


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_of_the_list_has_both_files(kernel):
    assert (PACKAGE / "kernels" / f"{kernel}.py").exists()
    assert (PACKAGE / "experiments" / "kernels" / f"{kernel}.py").exists()


def test_the_grid_puts_ways_of_computing_the_same_next_to_each_other():
    cells = cells_of("kernels", "--rows", "64", "--width", "8", "16", "--dtype", "fp32", "--kernel", "weighted_sum")
    assert [(cell.width, cell.how) for cell in cells] == [
        (width, how) for width in (8, 16) for how in ("ours", "eager")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", "weighted"), f"--kernel weighted: known are {', '.join(KERNELS)}"),
        (("--rows", "0"), "--rows must be positive, got 0"),
        (("--width", "-1"), "--width must be positive, got -1"),
        (("--samples", "0"), "--samples must be positive, got 0"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cells_of("kernels", *arguments)


@pytest.mark.slow
def test_a_cpu_measures_the_formula_and_says_why_not_our_kernel(tmp_path, capsys):
    shape = ["--kernel", "weighted_sum", "--rows", "64", "--width", "48", "--samples", "3"]
    code, out, _ = run("benchmark_kernels", capsys, *shape, "--out", tmp_path)
    assert code == 0
    cells = json.loads(out.splitlines()[-1])["cells"]
    assert [cell["status"] for cell in cells] == ["unsupported", "ok"]
    assert cells[0]["message"] == "Triton kernels need a CUDA device"
    rows = read_rows(tmp_path / "benchmark_kernels.csv").set_index("metric")
    x, weight, outs = 64 * 48 * 4, 48 * 4, 64 * 4
    for name, n_bytes in (("forward", x + weight + outs), ("backward", 2 * (x + weight) + outs)):
        bandwidth = 1e-6 * n_bytes / rows.loc[name, "median"]
        assert rows.loc[f"{name}_bandwidth", "median"] == pytest.approx(bandwidth)
        assert rows.loc[f"{name}_copy_share", "median"] == pytest.approx(100 * bandwidth / rows.loc["copy", "median"])
    assert {name for name in rows.index.dropna() if name.startswith("error")} == {
        *("error_out", "error_grad_x", "error_grad_weight"),
    }


def test_errors_are_of_every_output_and_gradient_and_leave_the_inputs():
    def twice_in_place(x, y):
        return x.mul_(2), y.mul_(3)

    ones = {"x": torch.ones(4), "y": torch.ones(4)}
    subject = Subject(ones, twice_in_place, lambda x, y: (x * 2, y * 2), 64)
    found = {metric.name: metric.samples for metric in errors(subject, subject.ours, [torch.ones(4)] * 2)}
    assert found == {"error_out": [0.0], "error_out1": [0.5]}
    assert all((x == 1).all() for x in ones.values())

    x = {"x": torch.ones(4, requires_grad=True)}
    subject = Subject(x, lambda x: x.clone(), lambda x: x * x, 64)
    found = {metric.name: metric.samples for metric in errors(subject, subject.ours, [torch.ones(4)])}
    assert found == {"error_out": [0.0], "error_grad_x": [0.5]}


def test_heads_that_do_not_divide_a_width_are_not_measured():
    with pytest.raises(Unsupported, match="heads of 128 do not divide a width of 1000"):
        measure(KernelCell("cpu", "rotary", "fp32", 8, 1000, "eager", 5, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_our_kernels_are_as_exact_as_the_formula(kernel, dtype):
    width = 1024 if kernel == "rotary" else 1000  # heads of 128
    ours, eager = (
        {metric.name: metric.samples[0] for metric in measure(KernelCell("cuda", kernel, dtype, 507, width, how, 5, 0))}
        for how in ("ours", "eager")
    )
    for name in (name for name in eager if name.startswith("error")):
        allowed = 2 * eager[name] + torch.finfo(torch.float32).eps
        print(f"{kernel} {dtype} {name}: {ours[name]:.2e}, allowed {allowed:.2e}")
        assert ours[name] <= allowed
