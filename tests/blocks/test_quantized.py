"""The block with quantized products: the same bits at every choice of what to keep, and gradients that are right."""

import copy
from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import REFERENCE, QuantizedProducts, block_products, write_out
from cs336_systems.config import PRECISIONS, Recipe
from cs336_systems.costs.kept import kept_sizes
from cs336_systems.model import REFERENCE_OPS, TransformerLM

from .cases import KEEPS, QWEN, block_of, inputs, tables, written_out

CONFIG = replace(QWEN, d_model=32, d_ff=48, n_heads=4, n_kv_heads=2, context_length=16)
QK_NORM = replace(CONFIG, name="qk norm", qkv_bias=False, qk_norm=True, head_dim=16)
SMALL = replace(CONFIG, n_layers=4, vocab_size=64)
RECIPES = {
    "tensor": Recipe("e4m3"),
    "e5m2": Recipe("e4m3", "e5m2"),
    "row": Recipe("e4m3", scaling="row"),
    "block": Recipe("e4m3", scaling="block"),
}


def products_of(recipe: Recipe, **how) -> QuantizedProducts:
    products = block_products("reference", recipe, **how)
    assert isinstance(products, QuantizedProducts)
    return products


def quantized(dtype: torch.dtype, keep: str, recipe: Recipe, *, config=CONFIG, **of_backward):
    """Output and gradients, and what was kept between."""
    return written_out(config, 16, dtype, keep, products=products_of(recipe), **of_backward)


@pytest.mark.parametrize(("recipe", "config"), [*((name, CONFIG) for name in RECIPES), ("tensor", QK_NORM)])
def test_every_choice_gives_the_same_bits_and_holds_the_predicted_bytes(recipe, config):
    """Whether backward may write over what was kept, and when matrices' gradients come, too."""
    expected, _ = quantized(torch.bfloat16, "all", RECIPES[recipe], config=config)
    for i, keep in enumerate(KEEPS):
        of_backward = {"consume": i % 2 == 0, "later": [] if i % 3 == 0 else None}
        got, held = quantized(torch.bfloat16, keep, RECIPES[recipe], config=config, **of_backward)
        for name, value in expected.items():
            assert torch.equal(got[name], value), (keep, name)
        predicted = kept_sizes(config, 2, 16, PRECISIONS["bf16"], keep, RECIPES[recipe])
        assert {name: tensor.nbytes for name, tensor in held.items()} == predicted, keep


class FakeQuantizedLinear(torch.autograd.Function):
    """The oracle: a linear layer of a recipe, by the definition of quantization alone, in the dtype of x."""

    @staticmethod
    def forward(ctx, x, weight, recipe):
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = rounded(x.flatten(0, -2), recipe.matmul, recipe.scaling)[0]
        columns = rounded(weight, recipe.matmul, of_weights(recipe))[0]
        return (rows @ columns.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy_rows, dy_columns = rounded(dy.flatten(0, -2), ctx.recipe.gradient, ctx.recipe.scaling)
        _, x_columns = rounded(x.flatten(0, -2), ctx.recipe.matmul, ctx.recipe.scaling)
        _, weight_columns = rounded(weight, ctx.recipe.matmul, of_weights(ctx.recipe))
        return (dy_rows @ weight_columns.T).view_as(x), dy_columns @ x_columns.T, None


def of_weights(recipe: Recipe) -> str:
    return "square" if recipe.scaling == "block" else recipe.scaling


def rounded(x: torch.Tensor, name: str, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and its transpose, each rounded to fp8 where its last dimension is summed over, in x's dtype."""
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[name]
    height, width = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "square": (128, 128)}[scaling]
    found = []
    for matrix in (x, x.T):
        result = torch.empty_like(matrix)
        for rows in torch.arange(len(matrix)).split(height or len(matrix)):
            for columns in torch.arange(matrix.shape[1]).split(width or matrix.shape[1]):
                group = matrix[rows][:, columns].float()
                absmax = group.abs().amax().clamp(min=1e-10)
                scale = torch.full_like(absmax, largest) / absmax
                result[rows[:, None], columns] = (group * scale).to(dtype).to(x.dtype) / scale
        found.append(result)
    return found[0], found[1]


def by_definition(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Output and gradients in fp64 by autograd through the oracle, q | k | v and gate | up in one product."""
    parameters = {name: p.detach().requires_grad_() for name, p in block_of(CONFIG, torch.float64).named_parameters()}
    x, dy = inputs(CONFIG, 16, torch.float64)
    x.requires_grad_()
    cos, sin = tables(CONFIG, 16, torch.float64)
    ops = REFERENCE_OPS

    def linear(x, *names):
        weight = torch.cat([parameters[f"{name}.weight"] for name in names])
        return FakeQuantizedLinear.apply(x, weight, recipe)

    normed = ops.rms_norm(x, parameters["ln1.weight"], CONFIG.rms_norm_eps)
    projections = tuple(f"attn.{name}_proj" for name in "qkv")
    qkv = linear(normed, *projections) + torch.cat([parameters[f"{name}.bias"] for name in projections])
    sizes = CONFIG.d_model, CONFIG.d_kv, CONFIG.d_kv
    q, k, v = (part.unflatten(-1, (-1, CONFIG.d_head)).transpose(1, 2) for part in qkv.split(sizes, -1))
    attended = ops.attention(ops.rotary(q, cos, sin), ops.rotary(k, cos, sin), v, causal=True)
    residual = x + linear(attended.transpose(1, 2).flatten(2), "attn.output_proj")
    normed = ops.rms_norm(residual, parameters["ln2.weight"], CONFIG.rms_norm_eps)
    y = residual + linear(ops.swiglu(*linear(normed, "ffn.w1", "ffn.w3").chunk(2, -1)), "ffn.w2")
    dx, *gradients = torch.autograd.grad(y, (x, *parameters.values()), dy)
    return {"y": y.detach(), "dx": dx, **dict(zip(parameters, gradients, strict=True))}


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_those_of_the_definition(recipe):
    """In fp64, where both round the same numbers: to the fp32 of the scales, and a few hundred roundings."""
    expected, (got, _) = by_definition(RECIPES[recipe]), quantized(torch.float64, "products", RECIPES[recipe])
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        size = max(1.0, value.abs().max().item())
        assert (got[name] - value).abs().max() <= 16 * torch.finfo(torch.float32).eps * size, name


def test_gradients_add_to_earlier_ones():
    """The sum is rounded, the product is not."""
    fresh, _ = quantized(torch.bfloat16, "products", RECIPES["tensor"])
    added, _ = quantized(torch.bfloat16, "products", RECIPES["tensor"], accumulate=True)
    for name in block_of(CONFIG, torch.bfloat16).state_dict():
        product = fresh[name].double()
        assert ((added[name].double() - 1 - product).abs() <= 2**-8 * ((product + 1).abs() + product.abs())).all(), name
    matrix = "ffn.w2.weight"
    assert not torch.equal(added[matrix], fresh[matrix] + 1), "rounded twice"


def test_skipped_blocks_are_those_of_no_recipe():
    model = TransformerLM(SMALL)
    write_out(model, REFERENCE, "products", products_of(Recipe("e4m3", skip_first=1, skip_last=2), remember=True))
    assert [block.products.quantized for block in model.layers] == [False, True, False, False]
    assert ["absmax" in block.kept for block in model.layers] == [False, True, False, False]
    copied = copy.deepcopy(model.layers[1])
    assert copied.products is not model.layers[1].products  # it remembers weights of its own
