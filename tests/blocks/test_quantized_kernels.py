"""Quantized products by kernels, where Triton's interpreter or a GPU can run them; and the GPU's product itself."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import block_ops, block_products
from cs336_systems.blocks.quantized import QuantizedProducts
from cs336_systems.blocks.quantized_matmul import Quantized, emulated, scaled_mm, values_of_blocks
from cs336_systems.config import PRECISIONS, ModelConfig, Recipe
from cs336_systems.costs.kept import LEVELS, kept_sizes
from cs336_systems.training import TrainingCase, assemble, random_batch

from .cases import written_out
from .test_kernels import CPU, CUDA
from .test_quantized import RECIPES

CONFIG = ModelConfig("32", d_model=64, d_ff=96, n_layers=1, n_heads=4, n_kv_heads=2, qkv_bias=True, context_length=32)
on_a_gpu_with_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)


def run(
    device: str, kernels: str, keep: str, recipe: Recipe, dtype: torch.dtype, **quantizers: object
) -> dict[str, torch.Tensor]:
    """A block's output and gradients; what it holds between them is what is predicted.

    Args:
        quantizers: others than the kernels'.
    """
    products = block_products(kernels, recipe)
    if quantizers:
        products.quantizers = replace(products.quantizers, **quantizers)
    ops = block_ops(kernels, "flash" if kernels == "fused" else "reference")
    found, kept = written_out(CONFIG, 32, dtype, keep, device=device, ops=ops, products=products)
    if kernels == "fused" and not quantizers:
        precision = PRECISIONS["bf16" if dtype == torch.bfloat16 else "fp32"]
        held = {name: tensor.nbytes for name, tensor in kept.items() if name != "slopes"}
        assert held == kept_sizes(CONFIG, 2, 32, precision, keep, recipe), keep
    return found


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().cpu().flatten(), b.double().cpu().flatten(), 0).item()


@pytest.mark.slow
@pytest.mark.parametrize("device", [CUDA, CPU])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_of_kernels_is_that_of_the_reference(device, recipe):
    """The same bits at every level; and what the reference gives but for numbers that round another way.

    Kernels and reference differ by bf16's rounding before they quantize, which turns some of fp8's roundings, and after
    a product or two all of them might. A number with b bits of mantissa that is rounded to nearest is off by 2^-b /
    sqrt(12) of its power of two, with mantissas m spread as 1 / m by a share of 2^-2b / 12 / (3 / (2 ln 2)) of its
    energy. A gradient has at most four quantized gradients behind it and four activations; so independent roundings
    turn it to a cosine of 1 less their shares.
    """
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    if device == "cpu" and recipe == "tensor":
        pytest.skip("e5m2 has the same kernels")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    levels = LEVELS if device == "cuda" else ("input", "all") if recipe == "e5m2" else ("all",)
    results = [run(device, "fused", level, RECIPES[recipe], dtype) for level in levels]
    expected = run("cpu", "reference", "all", RECIPES[recipe], dtype)
    share = {bits: 2 ** (-2 * bits) / 12 / (3 / (2 * math.log(2))) for bits in (2, 3)}
    least = 1 - 4 * share[2 if recipe == "e5m2" else 3] - 4 * share[3]
    for name, value in expected.items():
        assert all(torch.equal(result[name], results[0][name]) for result in results), name
        assert cosine(results[0][name], value) >= (0.9 if name == "attn.k_proj.bias" else least), name


@pytest.mark.slow
@pytest.mark.parametrize("device", [CUDA, CPU])
@pytest.mark.parametrize(("recipe", "keep"), [("e5m2", "products")])
def test_what_is_quantized_where_it_is_made_has_the_same_bits(device, recipe, keep):
    """Norms, gate | up's gradient and SwiGLU's product again."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    how = device, "fused", keep, RECIPES[recipe], torch.bfloat16 if device == "cuda" else torch.float32
    got, apart = run(*how), run(*how, fused=None)
    assert all(torch.equal(got[name], value) for name, value in apart.items())


def sums_may_lose(a_MK: torch.Tensor, b_NK: torch.Tensor, promoted_every: int) -> torch.Tensor:
    """How far Hopper's sums of a b^T (M, N) can be from exact ones, for fp64 operands of fp8's precision.

    One instruction adds 32 products to the sum so far. It shifts these 33 numbers to the largest exponent among them
    and cuts each off 13 bits behind that point, then the new sum 13 bits behind its own. So it loses less than 33 units
    of 2^-13 times the largest magnitude and one of the new sum's. Every ``promoted_every`` products the sum is added to
    others in fp32. Sources: ``blocks/quantized_matmul.py``; promotion after 128 is CUTLASS's, cuBLAS says periodically.
    """
    lost = torch.zeros(a_MK.shape[0], b_NK.shape[0], dtype=a_MK.dtype, device=a_MK.device)
    for first in range(0, a_MK.shape[1], 32):
        if first % promoted_every == 0:
            total, lost_of_total = torch.zeros_like(lost), torch.zeros_like(lost)
        products = a_MK[:, None, first : first + 32] * b_NK[None, :, first : first + 32]
        largest = torch.maximum(products.abs().amax(dim=2), total.abs() + lost_of_total)
        total = total + products.sum(dim=2)
        cut_off = 2**-13 * (33 * largest + total.abs() + lost_of_total)
        lost_of_total, lost = lost_of_total + cut_off, lost + cut_off
    in_fp32 = 2**-23 * (2 + a_MK.shape[1] / promoted_every) * (a_MK.abs() @ b_NK.abs().T)
    return lost + in_fp32


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_library_is_asked_for(monkeypatch, recipe, asked):
    """Operands along the sum and scales as it wants them, and fast accumulation in forward alone; by block it refuses
    that and biases, and adds up in fp32."""
    by_block, calls = RECIPES[recipe].scaling == "block", []

    def library(a, b, scale_a, scale_b, **how):
        out = how.get("out")
        assert a.is_contiguous() and b.T.is_contiguous()
        m, n, blocks = len(a), b.shape[1], math.ceil(a.shape[1] / 128)
        shapes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "block": ((m, blocks), (blocks, n))}
        assert (tuple(scale_a.shape), tuple(scale_b.shape)) == shapes[RECIPES[recipe].scaling]
        if by_block:
            assert (scale_a.stride(), scale_b.stride()) == ((1, m), (n, 1))
        assert how["out_dtype"] == torch.bfloat16
        calls.append((how.get("use_fast_accum"), how.get("bias") is not None))
        return torch.zeros(m, n, dtype=torch.bfloat16) if out is None else out.zero_()

    monkeypatch.setattr("cs336_systems.blocks.quantized_matmul.emulated", scaled_mm)  # as on a GPU
    monkeypatch.setattr(torch, "_scaled_mm", library)
    products = block_products("reference", replace(RECIPES[recipe], fast_accumulation=asked))
    assert isinstance(products, QuantizedProducts)
    m, n, k = 288, 144, 272
    x, dy, weight, bias = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((m, k), (m, n), (n, k), (n,)))
    x_read = products.read("normed1", x, products.maxima(x))
    dy_read = products.read_gradient("dy", dy, products.gradient_maxima(dy))
    weight_read, ops = products.read_weight("qkv", weight, rows=True, columns=True), block_ops("reference", "reference")
    y = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    products.forward_(ops, y, x_read, weight_read.rows, bias)
    assert torch.equal(y, bias.expand(m, n) if by_block else torch.zeros(m, n, dtype=torch.bfloat16))
    products.add_forward_(ops, y, dy, x_read, weight_read.rows)
    products.backward(ops, dy_read, weight_read.columns)
    products.backward_weight_(ops, weight, dy_read.columns, x_read.columns, False)
    expected = [(asked, True), (asked, False), (False, False), (False, False)]
    assert calls == (4 * [(None, False)] if by_block else expected)


@pytest.mark.gpu
@on_a_gpu_with_fp8
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_emulation_is_the_gpus_product_within_its_rounding(recipe):
    """Of all three products: what sums may lose by the magnitudes in them, and then half a unit of bf16."""
    m, n, k = 256, 384, 640
    products = block_products("fused", RECIPES[recipe])
    assert isinstance(products, QuantizedProducts)
    x, dy, weight, bias = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (m, n), (n, k), (n,))
    )
    x_read = products.read("normed1", x, products.maxima(x))
    dy_read = products.read_gradient("dy", dy, products.gradient_maxima(dy))
    weight_read = products.read_weight("qkv", weight, rows=True, columns=True)
    pairs = {
        "forward": (x_read.rows, weight_read.rows, bias),
        "backward": (dy_read.rows, weight_read.columns, None),
        "weight": (dy_read.columns, x_read.columns, None),
    }
    by = RECIPES[recipe].scaling
    for name, (a, b, added) in pairs.items():
        wide = [replace(operand, dtype=torch.float64) for operand in (a, b)]
        product, exact = (multiplied(emulated, *wide, each, by=by) for each in (None, added))
        rounded = exact.abs() if added is None or by != "block" else exact.abs() + 1.01 * product.abs()
        for fast in (False, True):
            every = a.values.shape[1] if fast and by != "block" else 128  # scales by block leave no choice
            bound = 2**-8 * rounded + 1.01 * sums_may_lose(*(unscaled(each, by) for each in (a, b)), every)
            got = multiplied(scaled_mm, a, b, added, fast=fast, by=by)
            assert ((got.double() - exact).abs() <= bound).all(), (name, fast)
        once, twice = (multiplied(scaled_mm, a, b, None, adds_to=there, by=by) for there in (0.0, 100.0))
        roundings = 2**-8 * (1 if by == "tensor" else 2) * (once.double().abs() + 101)
        assert ((twice.double() - once.double() - 100).abs() <= roundings).all(), name


def multiplied(
    multiply: Callable[..., None],
    a: Quantized,
    b: Quantized,
    bias: torch.Tensor | None,
    *,
    by: str,
    fast: bool = False,
    adds_to: float | None = None,
) -> torch.Tensor:
    """a b^T + bias, added to a number if one is given."""
    out = a.empty(len(b.values)).fill_(math.nan if adds_to is None else adds_to)
    multiply(a, b, bias, fast, out, None if adds_to is None else out, by=by)
    return out


def unscaled(x: Quantized, by: str) -> torch.Tensor:
    """What x stands for, fp64."""
    return values_of_blocks(x, torch.float64) if by == "block" else x.values.double() * x.scale


@pytest.mark.gpu
@on_a_gpu_with_fp8
@pytest.mark.parametrize("cuda_graph", ["off", "on"])
def test_steps_on_a_gpu_see_weights_change(cuda_graph):
    """With our optimizer, whose kernels write the weights: as with weights that are quantized at each use."""
    case = TrainingCase(
        *("cuda", "tiny"),
        context_length=64,
        dtype="bf16",
        attention="flash",
        optimizer="fused",
        kernels="fused",
        keep="products",
        matmul_dtype="e4m3",
        cuda_graph=cuda_graph,
    )
    step, plain = assemble(case), assemble(replace(case, cuda_graph="off"))
    for block in plain.model.layers:
        block.products.remember = False
    batch = random_batch(case)
    for i in range(8):
        assert torch.equal(step(*batch), plain(*batch)), i
        with torch.no_grad():
            assert torch.equal(step.model(*batch), plain.model(*batch)), i
