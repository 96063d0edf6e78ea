"""Fused kernels' benchmark: its peers, every subject on the CPU, and our kernels' errors on a GPU."""

import sys
from unittest.mock import Mock

import pytest
import torch

from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernel_measure import _outputs, errors, measure
from cs336_systems.experiments.kernel_peers import PEERS as PEERS_KERNELS
from cs336_systems.experiments.kernel_subjects import SUBJECTS
from cs336_systems.experiments.kernels import KERNELS, PEERS, KernelCell
from tests.benchmarks.commands import cells_of

CPU = torch.device("cpu")


def cell(kernel, how, *, device="cpu", dtype="fp32", rows=16, width=256, n_samples=3):
    return KernelCell(device, kernel, dtype, rows, width, 2048, how, n_samples)


def make_subject(kernel, how, width=256):
    return SUBJECTS[kernel](cell(kernel, how, width=width), CPU)


@pytest.mark.parametrize("kernel", KERNELS)
def test_torchs_and_ours_in_fp8_compute_every_formula(kernel):
    subject = make_subject(kernel, "ours" if (in_fp8 := "quantize" in kernel) else "eager")
    functions = [subject.reference, subject.ours] if in_fp8 else [subject.reference]
    functions += [PEERS_KERNELS[peer][kernel]() for peer in ("torch", "torch-foreach") if kernel in PEERS[peer]]
    leaves = any(x.requires_grad for x in subject.inputs.values())
    out = _outputs(subject.reference(*subject.inputs.values())) if leaves else ()
    gradients = [torch.randn_like(x) for x in out]
    for function in functions:
        for metric in errors(subject, function, gradients):
            assert metric.samples[0] < (0.04 if "quantize" in kernel else 1e-6), metric


def test_what_cannot_be_measured_is_unsupported(monkeypatch):
    missing = {"liger": "liger_kernel.ops", "quack": "quack", "liger-cute": "cutlass"}
    missing |= {"cut-cross-entropy": "cut_cross_entropy"}
    distributions = {"quack": "quack-kernels", "liger": "liger-kernel", "liger-cute": "nvidia-cutlass-dsl"}
    for peer in ("quack", "liger-cute", "cut-cross-entropy", "liger"):  # the last takes Liger away
        monkeypatch.setitem(sys.modules, missing[peer], None)
        for load in PEERS_KERNELS[peer].values():
            with pytest.raises(Unsupported, match=f"^{distributions.get(peer, peer)} is not there"):
                load()
    for kernel, width, how, said in (
        ("quantize", 256, "eager", "16 does not divide 8 x 256"),
        ("rotary", 1000, "eager", "heads of 128"),
        ("rms_norm", 256, "ours", "need a CUDA device"),
    ):
        with pytest.raises(Unsupported, match=said):
            measure(cell(kernel, how, rows=8, width=width))


def test_names_of_peers_are_those_that_run():
    assert {peer: tuple(kernels) for peer, kernels in PEERS_KERNELS.items()} == PEERS
    assert set(SUBJECTS) == set(KERNELS)


def test_a_peer_that_refuses_a_shape_is_unsupported(monkeypatch):
    refuses = Mock(side_effect=NotImplementedError("requires V to be a multiple of 256; got V=1000"))
    monkeypatch.setitem(PEERS_KERNELS["torch"], "grad_norm", lambda: refuses)
    with pytest.raises(Unsupported, match="^torch: requires V to be a multiple of 256"):
        measure(cell("grad_norm", "torch"))


def test_losses_alone_have_vocabularies():
    asked = ("--how", "ours", "--vocabulary", "512", "1024", "--size", "qwen2.5-0.5b", "--kernel")
    cells = cells_of("kernels", *asked, "cross_entropy", "linear_cross_entropy", "rms_norm")
    assert [(each.kernel, each.width, each.vocabulary) for each in cells] == [
        *(("cross_entropy", words, words) for words in (512, 1024)),
        *(("linear_cross_entropy", 896, words) for words in (512, 1024)),
        ("rms_norm", 896, 151_936),
    ]
    with pytest.raises(ValueError, match="--how quack has no --kernel swiglu"):
        cells_of("kernels", "--how", "quack", "--kernel", "swiglu")


def test_losses_give_the_gradients_of_torchs():
    subject = make_subject("cross_entropy", "eager", width=512)
    logits, targets = subject.inputs.values()
    leaf = logits.clone().requires_grad_()
    wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(leaf, targets, reduction="sum"), leaf)[0]
    got, lse = subject.reference(logits, targets)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_ours_rotates_in_place_what_the_others_have_in_memory_of_their_own():
    subject, others = (make_subject("rotary", how, width=512) for how in ("ours", "eager"))
    assert subject.forward_bytes == others.forward_bytes == 2 * 16 * 5 * 128 * 4 + 2 * 16 * 64 * 4
    for metric in errors(subject, subject.ours, []):
        assert metric.samples[0] < 1e-6, metric
    assert subject.ours(*subject.inputs.values()).data_ptr() == subject.inputs["qkv"].data_ptr()


def test_bandwidth_is_of_the_bytes_that_must_move(monkeypatch):
    monkeypatch.setattr("cs336_systems.experiments.kernel_measure.measure_copy", lambda device: [50.0])
    own = cell("rms_norm", "eager", rows=64, width=48)
    found = {metric.name: metric.samples for metric in measure(own)}
    x, weight = 64 * 48 * 4, 48 * 4
    for name, n_bytes in (("forward", 2 * x + weight), ("backward", 3 * x + 2 * weight)):
        assert found[f"{name}_bandwidth"] == pytest.approx([1e-6 * n_bytes / ms for ms in found[name]])
        assert found[f"{name}_copy_share"] == pytest.approx([2 * rate for rate in found[f"{name}_bandwidth"]])
    assert {name for name in found if name.startswith("error")} == {"error_out", "error_grad_x", "error_grad_weight"}


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "peer"), [(kernel, peer) for peer, kernels in PEERS.items() for kernel in kernels])
def test_others_kernels_compute_the_same(kernel, peer):
    try:
        shape = {"device": "cuda", "dtype": "bf16", "rows": 512, "width": 1024}
        theirs, eager = (measure(cell(kernel, how, **shape)) for how in (peer, "eager"))
    except Unsupported as missing:
        pytest.skip(str(missing))
    allowed = {metric.name: 8 * metric.samples[0] + 2**-9 for metric in eager if metric.name.startswith("error")}
    for metric in theirs:
        if metric.name.startswith("error"):
            assert metric.samples[0] <= allowed[metric.name], metric


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_our_kernels_are_as_exact_as_the_formula(kernel, dtype):
    by_16 = "quantize" in kernel or kernel in ("transpose_bytes", "cross_entropy")
    rows, width = (512, 1008) if by_16 else (507, 1024 if kernel == "rotary" else 1000)  # heads of 128
    shape = {"device": "cuda", "dtype": dtype, "rows": rows, "width": width}
    ours, eager = ({m.name: m.samples[0] for m in measure(cell(kernel, how, **shape))} for how in ("ours", "eager"))
    for kind in ("error_out", "error_grad"):  # ours may return in one tensor what the formula returns in two
        own, formula = (
            max((found[name] for name in found if name.startswith(kind)), default=0.0) for found in (ours, eager)
        )
        allowed = 2 * formula + torch.finfo(torch.float32).eps
        print(f"{kernel} {dtype} {kind}: {own:.2e}, allowed {allowed:.2e}")
        assert own <= allowed
