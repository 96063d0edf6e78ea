"""Adapters against autograd through the merged weights, at each level of what is kept, and with quantized products."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from cs336_systems.blocks import REFERENCE, adapt, block_ops, block_products
from cs336_systems.blocks.products import STORED
from cs336_systems.blocks.weights import PARTS
from cs336_systems.config import ADAPTED, MODEL_SIZES, Lora, Recipe
from cs336_systems.kernels import products as products_kernel
from cs336_systems.model import TransformerLM
from tests.kernels.against_fp64 import check

from .cases import LLAMA, QWEN, QWEN3, written_out_model
from .test_kernels import CPU, CUDA

LORA = Lora(rank=4, alpha=6.0)
IDS = torch.arange(4 * 12).view(4, 12) * 7 % 50
WIDE = replace(LLAMA, name="wide", d_model=64, d_ff=96, n_heads=4)
"""Widths that products in fp8 and kernels of attention take."""
LEVELS = ["input", "attention", "products", "all", "all-norm-qkv-ffn"]


def adapted(config, keep="products", lora=LORA, products=STORED, dtype=torch.float64) -> TransformerLM:
    """With a B that is not zero."""
    model = written_out_model(config, keep, products, dtype=dtype)
    adapt(model, lora)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def by_autograd(model: TransformerLM, lora: Lora) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of the reference model at W + s B A, and the gradients of A and B, all by autograd."""
    own = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    weights = {name: p for name, p in own.items() if ".lora_" not in name}
    for name in weights:
        if (a := own.get(name.replace(".weight", ".lora_A.weight"))) is not None:
            b = own[name.replace(".weight", ".lora_B.weight")]
            weights[name] = own[name] + lora.alpha / lora.rank * b @ a
    reference = TransformerLM(model.config, dtype=torch.float64)
    loss = loss_of(torch.func.functional_call(reference, weights, IDS))
    loss.backward()
    return loss, {name: p.grad for name, p in own.items() if p.requires_grad}


@pytest.mark.parametrize("on", [ADAPTED, ("qkv",), ("output", "gate_up"), ("down",)], ids="-".join)
@pytest.mark.parametrize("config", [LLAMA, QWEN, QWEN3], ids=lambda config: config.name)
def test_loss_and_gradients_are_those_of_the_formula(config, on):
    lora = Lora(4, 6.0, on)
    model = adapted(config, lora=lora)
    loss, expected = by_autograd(model, lora)
    assert len(expected) == 2 * config.n_layers * sum(len(PARTS[name]) for name in on)
    ours = loss_of(model(IDS))
    ours.backward()
    torch.testing.assert_close(ours, loss)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (".lora_" in name) is (name in expected), name
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("recipe", ["same", "tensor", "row", "block"])
def test_each_level_gives_the_same_bits_and_two_backwards_add_up(recipe):
    found = []
    products = (
        STORED if recipe == "same" else block_products("reference", Recipe("e4m3", scaling=recipe), remember=True)
    )
    for keep in LEVELS:
        model = adapted(WIDE, keep, products=products, dtype=torch.float32)
        for _ in range(2):
            loss_of(model(IDS)).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert len(found[-1]) == 14 * WIDE.n_layers
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("keep", LEVELS)
def test_h_is_computed_once_and_its_bytes_are_kept(keep):
    """Four times h and four times its gradient, whatever is computed again; what is added to gate | up and to the
    gradient of SwiGLU's product goes along with the operations that write and read these.
    """
    calls, names, kept = Counter(), ("lora_shrink", "lora_expand_", "lora_gradients_"), []

    def counted(name, *arguments):
        calls[name] += 1
        return getattr(REFERENCE, name)(*arguments)

    model = adapted(LLAMA, keep, dtype=torch.float32)
    block = model.layers[0]
    block.block_ops = replace(REFERENCE, **{name: partial(counted, name) for name in names})
    x = torch.randn(2, 12, LLAMA.d_model)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = block(x, *model.rotary(12))
    assert [tuple(tensor.shape) for tensor in kept[-4:]] == [(24, n * LORA.rank) for n in (3, 1, 2, 1)]
    y.sum().backward()
    assert (calls["lora_shrink"], calls["lora_gradients_"]) == (8, 4)
    assert calls["lora_expand_"] == 3 + 3 + {"input": 2, "attention": 2}.get(keep, "qkv" in keep)


@pytest.mark.parametrize("recipe", ["same", "tensor"])
def test_a_block_whose_b_is_zero_computes_as_without_adapters(recipe):
    products = STORED if recipe == "same" else block_products("reference", Recipe("e4m3", scaling=recipe))
    x = torch.randn(2, 16, WIDE.d_model, dtype=torch.bfloat16)
    results = []
    plain = written_out_model(WIDE, products=products, dtype=torch.bfloat16)
    ours = copy.deepcopy(plain)
    adapt(ours, LORA)
    for model in (plain, ours):
        own = x.clone().requires_grad_()
        y = model.layers[0](own, *model.rotary(16))
        y.backward(torch.ones_like(y))
        results.append((y.detach(), own.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_quantized_adapters_are_near_those_of_stored_matrices():
    """Adapters read what quantized products read, which differs by the rounding to three bits."""
    gradients = []
    for products in (STORED, block_products("reference", Recipe("e4m3"))):
        model = adapted(WIDE, products=products, dtype=torch.float32)
        loss_of(model(IDS)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    exact, quantized = gradients
    assert 0 < (quantized - exact).norm() / exact.norm() < 0.2


def test_frozen_weights_are_quantized_once_and_there_in_fp8_alone():
    products = block_products("reference", Recipe("e4m3"), remember=True)
    model = adapted(WIDE, products=products, dtype=torch.float32)
    own = model.layers[0].products
    made = []
    quantize = own._quantize
    own._quantize = lambda *given, **how: made.append(how.get("square", False)) or quantize(*given, **how)
    for _ in range(2):
        loss_of(model(IDS)).backward()
        torch.autograd.graph.increment_version([p for p in model.parameters() if p.requires_grad])
    assert sum(made) == 4
    names = [part for name in ADAPTED for part in PARTS[name]]
    assert not any(model.layers[0].get_parameter(name).untyped_storage().nbytes() for name in names)
    with pytest.raises(RuntimeError, match="there in fp8 alone"):
        model.to(torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["same", "e4m3"])
@pytest.mark.parametrize("device", [CUDA, CPU])
def test_kernels_with_adapters(device, recipe):
    """The same bits at each level, and as without adapters where B is zero; near the plain operations: in fp8 sums in
    another order round a few numbers to their other neighbour.
    """
    fused, found, kernels = block_ops("fused", "flash"), {}, {"dtype": torch.float32}
    kernels["products"], plain = (block_products(name, Recipe(recipe)) for name in ("fused", "reference"))
    models = {
        "plain": written_out_model(WIDE, **kernels),
        "reference": adapted(WIDE, products=plain, dtype=torch.float32),
    }
    models |= {"products": adapted(WIDE, **kernels), "all": adapted(WIDE, "all", **kernels)}
    models["zero"] = copy.deepcopy(models["plain"])
    adapt(models["zero"], LORA)
    for name, model in models.items():
        block = model.to(device).layers[0]
        block.block_ops = REFERENCE if name == "reference" else fused
        torch.manual_seed(3)
        x = torch.randn(2, 16, WIDE.d_model).to(device).requires_grad_()
        y = block(x, *model.rotary(16))
        y.backward(torch.ones_like(y))
        own = [parameter.grad for key, parameter in block.named_parameters() if ".lora_" in key]
        found[name] = [y.detach(), x.grad, *own]
    assert all(torch.equal(one, other) for one, other in zip(found["plain"], found["zero"][:2], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found["products"], found["all"], strict=True))
    assert len(found["all"]) == 2 + 14
    if recipe == "same":
        torch.testing.assert_close(found["all"], found["reference"], rtol=1e-4, atol=1e-4)
    for ours, reference in zip(found["all"], found["reference"], strict=True):
        assert (ours - reference).norm() < 1e-2 * reference.norm()


@pytest.mark.gpu
def test_a_block_of_half_a_billion_on_a_gpu():
    """bf16, where the product with SwiGLU adds the adapter's part: the same bits at each level, and without adapters
    where B is zero; errors against fp64 are at most twice those of the plain operations in bf16.
    """
    config = replace(MODEL_SIZES["qwen2.5-0.5b"], n_layers=1, vocab_size=64, context_length=1024)
    assert (2 * config.d_ff, config.d_model, True) in products_kernel.FASTER
    lora, fused = Lora(rank=16, alpha=32.0), block_ops("fused", "flash")
    with torch.device("cuda"):
        x = torch.randn(1, 1024, config.d_model, generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        plain = written_out_model(config, dtype=torch.bfloat16)
        models = {keep: adapted(config, keep, lora, dtype=torch.bfloat16) for keep in ("input", "products", "all")}
        models |= {"eager": copy.deepcopy(models["all"]), "exact": copy.deepcopy(models["all"]).double()}
        models |= {"plain": plain, "zero": copy.deepcopy(plain)}
        adapt(models["zero"], lora)
    found = {}
    for name, model in models.items():
        block = model.layers[0]
        block.block_ops = REFERENCE if name in ("eager", "exact") else fused
        own = x.to(block.ln1.weight.dtype, copy=True).requires_grad_()
        y = block(own, *model.rotary(1024))
        y.backward(y.detach().cos())
        adapters = [parameter.grad for key, parameter in block.named_parameters() if ".lora_" in key]
        found[name] = [y.detach(), own.grad, *adapters]
    assert all(map(torch.equal, found["zero"], found["plain"]))
    for ours, *others in zip(*(found[name] for name in ("products", "input", "all")), strict=True):
        assert all(torch.equal(ours, other) for other in others)
    for name, *values in zip(range(2 + 14), *(found[name] for name in ("products", "eager", "exact")), strict=True):
        check(str(name), *values)


def test_a_rank_beyond_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"rank of 9 is larger than attn.k_proj.weight, which is \d+ x \d+"):
        adapt(written_out_model(LLAMA), Lora(9, 9.0, ("qkv",)))
