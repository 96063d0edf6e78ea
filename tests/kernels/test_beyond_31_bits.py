"""Offsets beyond 2^31 elements: the last rows of a tensor that is mostly zeros are what they are alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels import quantize_reference as reference
from cs336_systems.kernels.quantize import quantize, quantize_blocks
from cs336_systems.kernels.rms_norm import add_rms_norm_forward, rms_norm_backward
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu import swiglu, swiglu_backward_
from tests.kernels.against_fp64 import random
from tests.kernels.test_rotary import angles

pytestmark = pytest.mark.gpu
BF16, E4M3, ROWS = torch.bfloat16, torch.float8_e4m3fn, 1024


def norm(x: Tensor, branch: Tensor) -> list[Tensor]:
    gain = random(x.shape[-1:], "cuda", BF16, 9)
    residual, y, rstd = add_rms_norm_forward(x, branch, gain, 1e-5)
    return [residual, y, rms_norm_backward(x, residual, gain, rstd, x)[0]]


def gated(gate_up: Tensor, dz: Tensor) -> list[Tensor]:
    z, dgate_up, dz = swiglu(gate_up), gate_up.clone(), dz[:, : gate_up.shape[1] // 2].clone()
    swiglu_backward_(dz, dgate_up, with_product=True)
    return [z, dgate_up, dz]


def rotated(qkv: Tensor, _: Tensor) -> list[Tensor]:
    rotate_(qkv, *angles(ROWS, 128, "cuda"), 16, 8)
    return [qkv]


def quantized(x: Tensor, _: Tensor) -> list[Tensor]:
    one = quantize(x, reference.absmax(x[-ROWS:]), E4M3, transposed=True)
    each = quantize_blocks(x, E4M3, square=True, transposed=True)
    return [found for q, q_t, *_ in (one, each) for found in (q[-ROWS:].float(), q_t[:, -ROWS:].float().t())]


@pytest.mark.parametrize(
    ("kernels", "width"), [(norm, 4096), (norm, 16384), (gated, 32768), (rotated, 4096), (quantized, 16400)]
)
def test_the_last_rows_are_what_they_are_alone(kernels: Callable[..., list[Tensor]], width: int) -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    last = [random((ROWS, width), "cuda", BF16, seed) for seed in (1, 2)]
    whole = [torch.zeros((2**31 // width // ROWS + 1) * ROWS, width, device="cuda", dtype=BF16) for _ in last]
    for tensor, end in zip(whole, last, strict=True):
        tensor[-ROWS:] = end
    for found, expected in zip(kernels(*whole), kernels(*last), strict=True):
        assert torch.equal(found[-ROWS:], expected)
