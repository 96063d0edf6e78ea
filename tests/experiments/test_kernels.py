"""Fused kernels' benchmark: its grid, peers, every subject on the CPU, its figure, and our kernels' errors on a GPU."""

import json
import sys

import pandas as pd
import pytest
import torch

from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernel_measure import Subject, _outputs, errors, extra_bytes, measure
from cs336_systems.experiments.kernel_subjects import SUBJECTS
from cs336_systems.experiments.kernels import HOWS, KERNELS, PEERS, KernelCell, Options, make_cells, shares_figure
from cs336_systems.harness.record import Metric, parse_samples, read_rows
from tests.benchmarks.commands import cells_of, run
from tests.report.rows import make_cell

CPU = torch.device("cpu")


def make_subject(kernel, how, width=256):
    cell = KernelCell("cpu", kernel, "fp32", 16, width, how, 3, 0)
    return SUBJECTS[cell.module](cell, CPU)


def test_peers_without_such_a_kernel_are_left_out():
    cells = make_cells(Options(device="cpu", kernel=("rms_norm", "swiglu"), width=(64,)))
    assert [(cell.kernel, cell.how) for cell in cells] == [
        *(("rms_norm", how) for how in ("ours", "eager", "compiled", "torch", "liger")),
        *(("swiglu", how) for how in ("ours", "eager", "compiled", "liger")),
    ]


def test_widths_are_those_of_models():
    cells = make_cells(Options(kernel=("rms_norm", "swiglu"), how=("ours",), size=("llama3-8b", "qwen2.5-0.5b")))
    assert [(cell.kernel, cell.width) for cell in cells] == [
        *(("rms_norm", 896), ("rms_norm", 4096)),
        *(("swiglu", 4864), ("swiglu", 14_336)),
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_peer_of_the_table_is_there(kernel):
    assert set(make_subject(kernel, "eager").peers) == {peer for peer, theirs in PEERS.items() if kernel in theirs}
    assert ("ours", "eager", "compiled", *PEERS) == HOWS


@pytest.mark.parametrize("kernel", PEERS["torch"])
def test_torchs_kernels_compute_the_formula(kernel):
    subject = make_subject(kernel, "torch")
    gradients = [torch.randn_like(x) for x in _outputs(subject.reference(*subject.inputs.values()))]
    for metric in errors(subject, subject.peers["torch"](), gradients):
        assert metric.samples[0] < 1e-6, metric


def test_ours_rotates_in_place_what_the_others_have_apart():
    subject, apart = (make_subject("rotary", how, width=512) for how in ("ours", "eager"))
    assert subject.inputs["qkv"].shape == (16, (4 + 2 * 1) * 128)
    assert apart.inputs["q"].shape == (1, 4, 16, 128) and apart.inputs["k"].shape == (1, 1, 16, 128)
    assert subject.forward_bytes == apart.forward_bytes == 2 * 16 * 5 * 128 * 4 + 2 * 16 * 64 * 4
    qkv = subject.inputs["qkv"]
    for metric in errors(subject, subject.ours, [torch.randn_like(qkv)]):
        assert metric.samples[0] < 1e-6, metric
    address = qkv.data_ptr()
    out = subject.ours(*subject.inputs.values())
    assert out.data_ptr() == address


@pytest.mark.parametrize(
    ("module", "kernel", "how", "distribution"),
    [
        ("liger_kernel.ops", "swiglu", "liger", "liger-kernel"),
        ("cut_cross_entropy", "linear_cross_entropy", "cut-cross-entropy", "cut-cross-entropy"),
    ],
)
def test_a_peer_that_is_not_installed_is_named_and_how_to_install_it(module, kernel, how, distribution, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unsupported, match=rf"^{distribution} is not there \(.*\): uv sync, or pip install"):
        make_subject(kernel, how).peers[how]()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--kernel", "swiglu", "adamw", "--how", "cut-cross-entropy"),
            "--how cut-cross-entropy has no --kernel swiglu adamw: cut-cross-entropy has linear_cross_entropy",
        ),
        (("--size", "huge"), "unknown model size 'huge'"),
        (("--kernel", "weighted"), f"--kernel weighted: known are {', '.join(KERNELS)}"),
        (("--rows", "0"), "--rows must be positive, got 0"),
        (("--width", "-1"), "--width must be positive, got -1"),
        (("--samples", "0"), "--samples must be positive, got 0"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cells_of("kernels", *arguments)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "." in kernel or "quantize" in kernel])
def test_what_fp8_asks_for_is_the_formula_and_the_error_that_of_its_format(kernel):
    subject = make_subject(kernel, "ours")
    for function in (subject.ours, subject.reference):
        for metric in errors(subject, function, []):
            assert metric.samples[0] < (0.04 if "quantize" in kernel else 1e-6), metric


@pytest.mark.parametrize(
    ("kernel", "width", "said"), [("quantize", 256, "16 does not divide 8 x 256"), ("rotary", 1000, "heads of 128")]
)
def test_shapes_that_a_kernel_does_not_take_are_not_measured(kernel, width, said):
    with pytest.raises(Unsupported, match=said):
        measure(KernelCell("cpu", kernel, "fp32", 8, width, "eager", 5, 0))


@pytest.mark.slow
def test_a_cpu_measures_every_formula_without_a_kernel(monkeypatch):
    monkeypatch.setattr("triton.JITFunction", object)  # no kernel runs on a CPU outside the interpreter
    for kernel in KERNELS:
        found = measure(KernelCell("cpu", kernel, "fp32", 16, 128, "eager", 1, 0))
        assert {"forward", "forward_bandwidth", "copy"} <= {metric.name for metric in found}, kernel


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


def shares(kernel, how, width, *shares, rows=16_384):
    metrics = [
        Metric(f"{name}_copy_share", "% of copy", [share])
        for name, share in zip(("forward", "backward"), shares, strict=False)
    ]
    gpu = {"gpu": "NVIDIA H200", "device": "cuda", "dtype": "bf16"}
    return make_cell(*metrics, kernel=kernel, how=how, width=width, rows=rows, **gpu)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def drawn(figure):
    """(title, line's points) of every panel that is seen."""
    return {
        axes.get_title(): [list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()[:-1]]
        for axes in figure.axes
        if axes.get_visible()
    }


def test_a_panel_for_each_kernel_and_pass_and_a_line_for_each_way():
    found = drawn(
        shares_figure(
            frame(
                shares("rms_norm", "ours", 4096, 93, 85),
                shares("rms_norm", "ours", 896, 60, 50),
                shares("rms_norm", "liger", 4096, 87, 40),
                shares("adamw", "ours", 4096, 94),
                shares("rms_norm", "ours", 4096, 95, 86, rows=4096),
                shares("linear_cross_entropy", "ours", 4096, 1),
            )
        )
    )
    assert list(found) == ["rms_norm\nforward", "rms_norm\nbackward", "adamw\nforward"]
    assert found["rms_norm\nforward"] == [[(0, 60), (1, 93)], [(1, 87)]]
    assert found["rms_norm\nbackward"] == [[(0, 50), (1, 85)], [(1, 40)]]
    assert found["adamw\nforward"] == [[(0, 94)]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_extra_memory_is_what_a_call_takes_beyond_what_it_leaves():
    x = torch.randn(2**20, device="cuda")

    def clone_after_a_temporary():
        x + 1
        return x.clone()

    # The temporary is gone when the clone is made, in its place.
    assert extra_bytes(clone_after_a_temporary, x.device) <= 4096
    assert extra_bytes(lambda: (x + 1)[:1].clone(), x.device) == pytest.approx(x.nbytes, rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kernel", "peer"),
    [(kernel, peer) for peer, kernels in PEERS.items() for kernel in kernels if not peer.endswith("filtered")],
)
def test_others_kernels_compute_the_same(kernel, peer):
    try:
        theirs, eager = (measure(KernelCell("cuda", kernel, "bf16", 512, 1024, how, 5, 0)) for how in (peer, "eager"))
    except Unsupported as missing:
        pytest.skip(str(missing))
    allowed = {metric.name: 8 * metric.samples[0] + 2**-9 for metric in eager if metric.name.startswith("error")}
    for metric in theirs:
        if metric.name.startswith("error"):
            assert metric.samples[0] <= allowed[metric.name], metric


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "adamw.absmax"])  # one number, by chance
def test_our_kernels_are_as_exact_as_the_formula(kernel, dtype):
    width = 1024 if kernel == "rotary" else 1000  # heads of 128
    rows, width = (
        (512, 1008) if "quantize" in kernel or kernel == "transpose_bytes" else (507, width)
    )  # 16 divides what fp8 takes
    ours, eager = (
        {m.name: m.samples[0] for m in measure(KernelCell("cuda", kernel, dtype, rows, width, how, 5, 0))}
        for how in ("ours", "eager")
    )
    for kind in ("error_out", "error_grad"):  # ours may return in one tensor what the formula returns in two
        own, formula = (
            max((found[name] for name in found if name.startswith(kind)), default=0.0) for found in (ours, eager)
        )
        allowed = 2 * formula + torch.finfo(torch.float32).eps
        print(f"{kernel} {dtype} {kind}: {own:.2e}, allowed {allowed:.2e}")
        assert own <= allowed
