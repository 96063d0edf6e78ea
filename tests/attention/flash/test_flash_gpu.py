"""What ``test_kernels_gpu.py`` does not ask of the Triton kernels: TF32, strides, torch.compile, long spans."""

import gc
from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.attention.flash import FlashAttention
from cs336_systems.attention.flash.function import backward_into_op, backward_op, forward_op
from cs336_systems.attention.flash.tiles import MAX_ROW_STRIDE
from tests.attention.error_budget import check, error, make, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("poisoned", "ieee_products"),
]
flash = partial(results_of, FlashAttention)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_tf32_only_where_torch_allows_it() -> None:
    tensors = make("cuda", n_queries=256, d_head=64)
    exact = flash(*tensors, False, None).o
    torch.set_float32_matmul_precision("high")
    rounded = flash(*tensors, False, None).o
    difference = error(rounded, exact.double())
    assert 0 < difference < 2**-10 * 4 * exact.abs().max().item()


def strided(x: Tensor) -> list[Tensor]:
    """The values of x in other layouts: heads inside rows, columns apart, an odd slice of a wider tensor."""
    wide = torch.cat((x[..., :3], x, x), dim=-1)
    return [x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT, wide[..., 3 : 3 + x.shape[-1]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype) -> None:
    layouts = [strided(x) for x in make("cuda", dtype, batch=2, heads=3, n_queries=150, d_head=64)]
    for turn in range(3):
        q, k, v, do = (layout[(turn + i) % 3] for i, layout in enumerate(layouts))
        check(q, k, v, do, True)


def test_operators_pass_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, k, v, do = (strided(x)[i % 3] for i, x in enumerate(make("cuda", torch.bfloat16, heads=2, n_queries=70)))
    torch.library.opcheck(forward_op, (q, k, v, True, 0.25))
    o, lse = forward_op(q, k, v, True, 0.25)
    torch.library.opcheck(backward_op, (q, k, v, o, lse, do, True, 0.25, True, False))
    into = [torch.empty_like(x) for x in (q, k, v)]
    torch.library.opcheck(backward_into_op, (q, k, v, o, lse, do, *into, True, 0.25))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the compiler makes tensors, too
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v: FlashAttention.apply(2 * q, k, v, True) + 1, fullgraph=True, dynamic=dynamic
    )
    for n_queries in (70, 130):
        q, k, v, do = make("cuda", torch.bfloat16, heads=4, kv_heads=2, n_queries=n_queries, d_head=64)
        for inputs, gradient in (((q, k, v), do), ((q[:, 0], k[:, 0], v[:, 0]), do[:, 0])):
            leaves = [x.detach().requires_grad_() for x in inputs]
            o, expected = compiled(*leaves), FlashAttention.apply(2 * leaves[0], *leaves[1:], True) + 1
            assert torch.equal(o, expected)
            actual_gradients = torch.autograd.grad(o, leaves, gradient)
            for a, b in zip(actual_gradients, torch.autograd.grad(expected, leaves, gradient), strict=True):
                assert torch.equal(a, b)


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
