"""What ``test_kernels_gpu.py`` does not ask of the Triton kernels: TF32 and long spans."""

import gc
from functools import partial

import pytest
import torch

from cs336_systems.attention.flash import FlashAttention
from cs336_systems.attention.flash.tiles import MAX_ROW_STRIDE
from tests.attention.error_budget import make, results_of
from tests.kernels.against_fp64 import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned", "ieee_products"),
]
flash = partial(results_of, FlashAttention)


def test_tf32_only_where_torch_allows_it() -> None:
    tensors = make("cuda", n_queries=256, d_head=64)
    exact = flash(*tensors, False, None).o
    torch.set_float32_matmul_precision("high")
    rounded = flash(*tensors, False, None).o
    difference = error(rounded, exact.double())
    assert 0 < difference < 2**-10 * 4 * exact.abs().max().item()


def test_spans_beyond_int32() -> None:
    """Heads 2^31 elements apart, and rows as far apart as tiles allow: views into memory that is mostly zero."""
    gib = 2**30
    if torch.cuda.mem_get_info()[0] < 20 * gib:
        pytest.skip("needs 20 GiB of free GPU memory")
    q, k, v, do = make("cuda", torch.bfloat16, heads=2, n_queries=300, d_head=64)
    expected = flash(q, k, v, do, True, None)
    memory = torch.zeros(300 * 2**23, dtype=torch.bfloat16, device="cuda")
    far_heads = memory.as_strided(k.shape, (2**31, 2**31, 64, 1))
    far_heads.copy_(k)
    far_rows = memory.as_strided(v.shape, (2**31, 128, MAX_ROW_STRIDE - 64, 1), storage_offset=2**16)
    far_rows.copy_(v)
    assert far_rows.stride(2) * 299 > 2**31
    for a, b in zip(expected, flash(q, far_heads, far_rows, do, True, None), strict=True):
        assert torch.equal(a, b)
    del memory, far_heads, far_rows
    gc.collect()
    torch.cuda.empty_cache()
