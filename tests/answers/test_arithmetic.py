"""Numbers of the calculators as documents ask for them, against what the handouts' formulas give by hand."""

import math

import pytest
import torch

from cs336_systems.answers.arithmetic import (
    H100,
    LAYER,
    TPU,
    XXL,
    Mesh,
    h100s_that_hide,
    job,
    ring_ratio,
    schedule,
    xxl_remedies,
    xxl_threshold,
)
from cs336_systems.costs.parallelism.forms import least_tokens_per_device
from cs336_systems.experiments.precision.pretended_cuda import cuda_autocast, pretended_cuda


def test_the_alternate_ring_sends_half_of_n_times_more():
    assert [ring_ratio(n) for n in (2, 4, 8)] == pytest.approx([1, 2, 4])


def test_the_accounting_question():
    parameters = 126 * 2 * 16_384 * 53_248
    assert XXL.state_bytes == 16 * parameters
    assert XXL.least_devices(TPU.memory_bytes, 0) == math.ceil(16 * parameters / 95e9)
    half = 4096 * 126 * 2 * (16_384 + 53_248) / 2
    assert XXL.least_devices(TPU.memory_bytes, 4096) == math.ceil((16 * parameters + half) / (95e9 - half))
    a, t = 2 * 1.8e11 / 4.6e14, 53_248 * 1.8e11 / 4.6e14
    assert math.ceil(xxl_threshold(overlapping=False).tokens_per_device) == math.ceil(16 / a / (1 - 4 / t) / 64)
    assert math.ceil(xxl_threshold(overlapping=True).tokens_per_device) == math.ceil(16 / a / 64)
    assert min(xxl_remedies()) < xxl_threshold(overlapping=False).tokens_per_device


def test_forms_of_parallelism():
    c_over_w = 989.4e12 / 450e9
    assert least_tokens_per_device(LAYER, H100.flops_per_s, H100.egress(8)) == pytest.approx(c_over_w, rel=1e-3)
    assert h100s_that_hide("fsdp", "forward", 32_768) == pytest.approx(1 + 32_768 / c_over_w, rel=1e-3)
    tensor_parallel = h100s_that_hide("tensor-parallel", "backward", 1)
    assert tensor_parallel == pytest.approx(1 + 3 * 28_672 / c_over_w, rel=1e-3)


def test_the_mesh_uses_all_devices_and_gains_from_axes_that_overlap():
    for mesh in (Mesh(True), Mesh(False)):
        assert mesh.best.fsdp * mesh.best.tp == pytest.approx(256)
        assert mesh.whole.fsdp * mesh.whole.tp == 256
    assert Mesh(True).largest > Mesh(False).largest


def test_lecture_questions():
    assert schedule("gpipe", 4, 8).bubble_fraction == pytest.approx(3 / 11)
    assert job(2048).mtbf_s == pytest.approx(100 * 86_400 / 2048)


def test_cudas_autocast_needs_no_gpu():
    with pretended_cuda(), cuda_autocast(torch.float16):
        narrow = torch.nn.functional.linear(torch.randn(2, 3), torch.randn(4, 3))
        wide = torch.nn.functional.layer_norm(narrow, (4,))
    assert (narrow.dtype, wide.dtype, wide.device.type) == (torch.float16, torch.float32, "cuda")
    assert not torch.is_autocast_enabled("cuda")
