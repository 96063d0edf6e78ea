"""Rotary against fp64 and, to the bit, against the reference; in place in q | k | v; operators, refusals, the code."""

import dataclasses

import pytest
import torch
from torch import Tensor

from cs336_systems.config import MODEL_SIZES
from cs336_systems.kernels.rotary import rotary, rotary_op, rotate_, rotate_in_place_op
from cs336_systems.model import REFERENCE_OPS, TransformerLM, ops
from tests.attention.offline import ON_HOPPER, report
from tests.kernels.against_fp64 import INTERPRETED, ON_GPU, PLACES, check, random

SHAPES = [(1, 1, 1, 2), (2, 3, 5, 64), (1, 2, 17, 80), (2, 4, 9, 128), (1, 25, 3, 10), (3, 1, 7, 6), (0, 2, 3, 4)]
"""(B, H, S, E)"""
MERGED = [(2, 5, 3, 3, 64), (1, 7, 4, 2, 80), (3, 4, 6, 1, 128), (2, 3, 5, 5, 6), (1, 1, 1, 1, 2), (0, 4, 2, 1, 8)]
"""(B, S, H, K, E)"""


def angles(n_positions: int, d_head: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin (S, E/2) of theta 100."""
    frequencies = 100.0 ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    table = torch.outer(torch.arange(n_positions, dtype=torch.float64), frequencies)
    return table.cos().float().to(device), table.sin().float().to(device)


def split(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, ...]:
    """q, k, v (B, heads, S, E) as views of qkv (B, S, W)."""
    heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1)).transpose(1, 2)
    return heads.split((n_heads, n_kv_heads, n_kv_heads), dim=1)


@pytest.mark.parametrize("heads_in_rows", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients(shape: tuple[int, ...], heads_in_rows: bool, device: str, dtype: torch.dtype) -> None:
    x, dy = (random(shape, device, dtype, seed) for seed in (0, 1))
    if heads_in_rows:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    tables = angles(*shape[2:], device)
    results = []
    for function, wide in ((rotary, dtype), (ops.rotary, dtype), (ops.rotary, torch.float64)):
        leaf = x.to(wide, copy=True).requires_grad_()
        y = function(leaf, *(table.to(torch.promote_types(wide, torch.float32)) for table in tables))
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy.to(wide))))
    for name, *found in zip(("y", "dx"), *results, strict=True):
        check(name, *found)
    assert torch.equal(results[0][0], results[1][0])  # rounded as the reference rounds
    assert results[0][0].stride() == x.stride()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shape", MERGED, ids=str)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_in_place_is_out_of_place_and_back_is_the_start(
    shape: tuple[int, ...], flat: bool, device: str, dtype: torch.dtype
) -> None:
    batch, n_positions, n_heads, n_kv_heads, d_head = shape
    qkv = random((batch, n_positions, (n_heads + 2 * n_kv_heads) * d_head), device, dtype)
    tables = angles(n_positions, d_head, device)
    written = qkv.clone()
    rows = written.flatten(0, 1) if flat else written
    q, k, v = split(qkv, n_heads, n_kv_heads)
    for inverse in (True, False):
        written.copy_(qkv)
        rotate_(rows, *tables, n_heads, n_kv_heads, inverse=inverse)
        expected = rotary_op(q, *tables, inverse), rotary_op(k, *tables, inverse), v
        for found, other in zip(split(written, n_heads, n_kv_heads), expected, strict=True):
            assert torch.equal(found, other)
    for first, *heads in ((0, n_heads, 0), (n_heads * d_head, 0, n_kv_heads)):
        part = rows[..., first : first + (heads[0] + 2 * heads[1]) * d_head]
        alone = qkv.view_as(rows)[..., first : first + part.shape[-1]].contiguous()
        rotate_(alone, *tables, *heads)
        assert torch.equal(alone, part)
    rotate_(rows, *tables, n_heads, n_kv_heads, inverse=True)
    # Each way rounds a pair, of length sqrt(2) max|x| at most, to the dtype, after a few smaller roundings in fp32.
    bound = 6 * torch.finfo(dtype).eps * qkv.abs().max().item() if qkv.numel() else 0.0
    torch.testing.assert_close(written, qkv, rtol=0, atol=bound)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_positions_may_start_anywhere(device: str, dtype: torch.dtype) -> None:
    x, (cos, sin) = random((2, 2, 9, 8), device, dtype), angles(9, 8, device)
    whole = rotary(x, cos, sin)
    assert torch.equal(rotary(x[:, :, 4:], cos[4:], sin[4:]), whole[:, :, 4:])
    qkv = torch.cat((x, x), dim=1).transpose(1, 2)[:, 4:].flatten(2).contiguous()  # two query heads, and k and v
    rotate_(qkv, cos[4:], sin[4:], 2, 1)
    assert torch.equal(split(qkv, 2, 1)[0], whole[:, :, 4:])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_strides_and_expanded_gradients(device: str, dtype: torch.dtype) -> None:
    tables = angles(5, 8, device)
    x, dy = (random((2, 3, 5, 8), device, dtype, seed) for seed in (0, 1))
    expected = rotary(x, *tables)
    columns_apart, merged = torch.stack((x, x), dim=-1)[..., 0], torch.cat((dy, x, dy), dim=-1)[..., 8:16]
    scattered = [torch.cat((table, table), dim=1)[:, 4:] for table in tables]
    for strided in (columns_apart, merged):
        assert torch.equal(rotary(strided, *scattered), expected)
    leaf = x.clone().requires_grad_()
    for dy_expanded in (dy[:1, :1].expand(2, 3, 5, 8), dy[..., :1].expand(2, 3, 5, 8), dy[:, :1].expand(2, 3, 5, 8)):
        (dx,) = torch.autograd.grad(rotary(leaf, *tables), leaf, dy_expanded)
        assert torch.equal(dx, rotary_op(dy_expanded.contiguous(), *tables, True))


@INTERPRETED
def test_a_model_takes_it() -> None:
    config = dataclasses.replace(MODEL_SIZES["tiny"], n_layers=1)
    tokens = torch.randint(config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    fused = dataclasses.replace(REFERENCE_OPS, rotary=rotary)
    results = []
    for model_ops, dtype in ((fused, torch.float32), (REFERENCE_OPS, torch.float32), (REFERENCE_OPS, torch.float64)):
        torch.manual_seed(0)
        model = TransformerLM(config, model_ops).to(dtype)
        logits = model(tokens)
        logits.square().mean().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for i, found in enumerate(zip(*results, strict=True)):
        check(f"logits, then gradients: {i}", *found)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_operators_pass_opcheck(device: str, dtype: torch.dtype) -> None:
    tables = angles(5, 8, device)
    qkv = random((2, 5, 4 * 8), device, dtype)
    q, k, _ = split(qkv, 2, 1)
    for x in (q, k.mT.contiguous().mT):
        torch.library.opcheck(rotary_op, (x, *tables, True))
    torch.library.opcheck(rotate_in_place_op, (qkv, *tables, 2, 1, False))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_compiles_without_graph_breaks(device: str, dtype: torch.dtype) -> None:
    tables = angles(5, 8, device)
    leaf, dy = random((2, 3, 5, 8), device, dtype).requires_grad_(), random((2, 3, 5, 8), device, dtype, seed=1)
    qkv = random((2, 5, 4 * 8), device, dtype)
    torch.compiler.reset()

    def both(x: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
        qkv = 2 * qkv
        rotate_(qkv, *tables, 2, 1)
        return 2 * rotary(x, *tables), qkv

    found, expected = torch.compile(both, fullgraph=True, backend="aot_eager")(leaf, qkv), both(leaf, qkv)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(*(torch.autograd.grad(y, leaf, dy)[0] for y, _ in (found, expected)))


def test_refusals() -> None:
    cos, sin = angles(5, 8, "cpu")
    with pytest.raises(ValueError, match=r"x \(1, 1, 6, 8\) is not .* for cos \(S, E/2\) = \(5, 4\)"):
        rotary(torch.zeros(1, 1, 6, 8), cos, sin)
    with pytest.raises(ValueError, match=r"sin must be float32 \(5, 4\) on cpu, got torch.float32 \(5, 3\) on cpu"):
        rotary(torch.zeros(1, 1, 5, 8), cos, sin[:, :3])
    with pytest.raises(ValueError, match=r"cos must be float32 \(5, 4\) on cpu, got torch.bfloat16"):
        rotary(torch.zeros(1, 1, 5, 8), cos.bfloat16(), sin)
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 and float16, got torch.float64"):
        rotary(torch.zeros(1, 1, 5, 8).double(), cos, sin)
    for shape in ((2, 6, 32), (12, 32), (2, 5, 40), (1, 2, 5, 32)):
        with pytest.raises(ValueError, match=r"neither \(batch, 5, 32\) nor \(a multiple of 5, 32\), as 2 \+ 2 x 1"):
            rotate_(torch.zeros(shape), cos, sin, 2, 1)
    for heads in ((2, -1), (0, 0)):
        with pytest.raises(ValueError, match=f"needs heads and cos .*, got {heads[0]}, {heads[1]} and"):
            rotate_(torch.zeros(5, 16), cos, sin, *heads)
    with pytest.raises(ValueError, match=r"qkv is overwritten and must be contiguous, got strides \(1, 5\)"):
        rotate_(torch.zeros(32, 5).t(), cos, sin, 2, 1)


def test_it_needs_a_gpu_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.JITFunction", object)  # what a kernel is without the interpreter
    with pytest.raises(ValueError, match="needs a CUDA device"):
        rotate_(torch.zeros(5, 32), *angles(5, 8, "cpu"), 2, 1)


@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cuda", torch.bfloat16, marks=ON_GPU)])
def test_more_than_2_to_the_31_elements(device: str, dtype: torch.dtype) -> None:
    n_positions, n_heads, n_kv_heads, d_head = 1024, 16, 8, 128
    n_tokens = (2**19 // n_positions + 1) * n_positions
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    qkv = torch.zeros(n_tokens, (n_heads + 2 * n_kv_heads) * d_head, device=device, dtype=dtype)
    tables = angles(n_positions, d_head, device)
    last = random((n_positions, qkv.shape[1]), device, dtype)
    qkv[-n_positions:] = last
    q, _, _ = split(qkv.unflatten(0, (-1, n_positions)), n_heads, n_kv_heads)
    expected = rotary(q, *tables)[-1]
    rotate_(qkv, *tables, n_heads, n_kv_heads)
    assert torch.equal(q[-1], expected)
    rotate_(last, *tables, n_heads, n_kv_heads)
    assert torch.equal(qkv[-n_positions:], last)


COMPILE = (
    ON_HOPPER
    + """
import importlib, json, sys
rotary = importlib.import_module("cs336_systems.kernels.rotary")

d_head = int(sys.argv[2])
rotary.rotate_in_place_op(
    torch.zeros(32, 40 * d_head, dtype=torch.bfloat16), *torch.zeros(2, 32, d_head // 2), 24, 8, False
)
(kernel,) = compiled.values()
counted = ("ld.global", "ld.global.v4.b32", "st.global", "st.global.v4.b32", "fma")
print(json.dumps({"ptx": kernel.asm["ptx"], "metadata": {text: kernel.asm["ptx"].count(text) for text in counted}}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("d_head", [64, 80, 128])
def test_it_compiles_to_wide_accesses(d_head: int) -> None:
    """16 bytes each: 4 loads of angles, 2 of the head and 2 stores; registers for 12 programs on a multiprocessor."""
    found = report(COMPILE, "rotary", d_head)
    assert found["spill_stores"] == found["stack_frame"] == 0
    assert found["registers"] <= 40
    assert found["ld.global"] == found["ld.global.v4.b32"] == 6
    assert found["st.global"] == found["st.global.v4.b32"] == 2
    assert found["fma"] == 0
