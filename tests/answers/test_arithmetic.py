"""Quoted numbers of the calculators, against what the handouts' formulas give by hand."""

import math

import pytest

from cs336_systems.answers.arithmetic import figures, terms
from cs336_systems.experiments.precision.pretended_cuda import cuda_autocast, pretended_cuda

TERMS = terms()


def value(spec: str) -> float:
    name, *arguments = spec.split()
    return TERMS[name].value(*arguments)


def test_the_alternate_ring_sends_half_of_n_times_more():
    assert [value(f"ring-ratio {n}") for n in (2, 4, 8)] == pytest.approx([1, 2, 4])


def test_the_accounting_question():
    parameters = 126 * 2 * 16_384 * 53_248
    assert value("xxl states-gb") == pytest.approx(16 * parameters / 1e9)
    assert value("xxl h100") == math.ceil(16 * parameters / 80e9)
    assert value("xxl-devices 0") == math.ceil(16 * parameters / 95e9)
    half = 4096 * 126 * 2 * (16_384 + 53_248) / 2
    assert value("xxl-devices 4096") == math.ceil((16 * parameters + half) / (95e9 - half))
    a, t = 2 * 1.8e11 / 4.6e14, 53_248 * 1.8e11 / 4.6e14
    assert value("xxl-threshold each sum") == math.ceil(16 / a / (1 - 4 / t) / 64)
    assert value("xxl-threshold each max") == math.ceil(16 / a / 64)


def test_forms_of_parallelism():
    c_over_w = 989.4e12 / 450e9
    assert value("tokens-to-hide h100") == pytest.approx(c_over_w, rel=1e-3)
    assert value("largest-world fsdp forward 32768") == pytest.approx(1 + 32_768 / c_over_w, rel=1e-3)
    assert value("largest-world tensor-parallel backward 1") == pytest.approx(1 + 3 * 28_672 / c_over_w, rel=1e-3)


def test_lecture_questions():
    assert value("bubble gpipe 4 8") == pytest.approx(3 / 11)
    assert value("failures hours-between 2048") == pytest.approx(100 * 24 / 2048)
    assert value("scaling batch-limit") == 512


@pytest.mark.slow
def test_figures_are_drawn(tmp_path):
    for path, draw in figures(tmp_path).items():
        draw(path)
        assert path.stat().st_size > 20_000


def test_cudas_autocast_needs_no_gpu():
    torch = pytest.importorskip("torch")
    with pretended_cuda(), cuda_autocast(torch.float16):
        narrow = torch.nn.functional.linear(torch.randn(2, 3), torch.randn(4, 3))
        wide = torch.nn.functional.layer_norm(narrow, (4,))
    assert (narrow.dtype, wide.dtype, wide.device.type) == (torch.float16, torch.float32, "cuda")
    assert not torch.is_autocast_enabled("cuda")
