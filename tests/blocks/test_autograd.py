"""The written-out block among autograd's other nodes: repeated uses, frozen parameters, what is held and freed."""

import copy
import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn

from cs336_systems.blocks import REFERENCE, WrittenOutBlock, write_out
from cs336_systems.blocks.autograd import put_off
from cs336_systems.blocks.products import Products
from cs336_systems.config import PRECISIONS
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.model import TransformerBlock, TransformerLM

from .cases import LLAMA, QWEN, inputs, loss_of, tables


def models(config=QWEN, dtype=torch.float64, keep="products") -> tuple[TransformerLM, TransformerLM]:
    """The reference, and the same with its blocks written out."""
    torch.manual_seed(0)
    reference = TransformerLM(config, dtype=dtype)
    ours = copy.deepcopy(reference)
    write_out(ours, REFERENCE, keep)
    return reference, ours


def blocks(dtype=torch.float64, keep="products") -> tuple[TransformerBlock, WrittenOutBlock]:
    return tuple(model.layers[0] for model in models(LLAMA, dtype, keep))


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_two_uses_of_one_block_add_up_and_odd_strides_are_served():
    """x and dy are not contiguous, and another dy is one number expanded."""
    results = []
    x = torch.randn(LLAMA.d_model, 9, 2, dtype=torch.float64).transpose(0, 2)
    dy = torch.randn(LLAMA.d_model, 2, 9, dtype=torch.float64).permute(1, 2, 0)
    for block in blocks():
        x = x.detach().requires_grad_()
        how = tables(LLAMA, 9, torch.float64)
        (block(block(x, *how), *how) + block(x, *how)).backward(dy)
        block(x, *how).transpose(0, 1).sum().backward()
        results.append([x.grad, *gradients(block).values()])
    torch.testing.assert_close(*results)


def test_a_second_backward_needs_a_retained_graph_and_a_change_in_place_is_noticed():
    _, block = blocks()
    x, dy = inputs(LLAMA, 9, torch.float64)
    y = block(x, *tables(LLAMA, 9, torch.float64))
    y.backward(dy, retain_graph=True)
    once = [gradient.clone() for gradient in gradients(block).values()]
    y.backward(dy)
    for twice, first in zip(gradients(block).values(), once, strict=True):
        torch.testing.assert_close(twice, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(dy)
    for changed in (x, block.ffn.w3.weight):
        y = block(x, *tables(LLAMA, 9, torch.float64))
        with torch.no_grad():
            changed += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


def test_frozen_parameters_and_inputs_get_no_gradients():
    frozen = ("ln1.weight", "attn.q_proj.weight", "ffn.w1.weight", "ffn.w3.weight", "attn.output_proj.weight")
    results = []
    for block in blocks():
        for name in frozen:
            block.get_parameter(name).requires_grad_(False)
        x, dy = inputs(LLAMA, 9, torch.float64)
        block(x, *tables(LLAMA, 9, torch.float64)).backward(dy)
        assert {name for name, gradient in gradients(block).items() if gradient is None} == set(frozen)
        block.requires_grad_(False)
        y = block(x.requires_grad_(), *tables(LLAMA, 9, torch.float64))
        results.append([*(gradient for gradient in gradients(block).values() if gradient is not None), y])
        results[-1] += torch.autograd.grad(y, x, dy)
        assert not block(x.detach(), *tables(LLAMA, 9, torch.float64)).requires_grad
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("keep", ["input", "products", "all", "all-norm-qkv-ffn"])
def test_autograd_holds_the_predicted_bytes(keep):
    """Beside parameters and rotary tables, which are there anyway; and nothing where no backward can come."""
    _, block = blocks(torch.float32, keep)
    held = []
    x, _ = inputs(LLAMA, 9, torch.float32)
    how = tables(LLAMA, 9, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append(tensor) or tensor, lambda tensor: tensor):
        y = block(x.requires_grad_(), *how)
    others = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *how)}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
    n_bytes = sum(storage.nbytes() for place, storage in storages.items() if place not in others)
    assert n_bytes == bytes_kept(LLAMA, 2, 9, PRECISIONS["fp32"], keep)
    assert y.untyped_storage().data_ptr() not in storages
    with torch.no_grad():
        assert torch.equal(block(x, *how), y)


def test_mixed_dtypes_and_autocast_are_refused():
    _, block = blocks(torch.bfloat16)
    x, how = torch.randn(1, 5, LLAMA.d_model), tables(LLAMA, 5, torch.bfloat16)
    with pytest.raises(ValueError, match="x is torch.float32 and ln1.weight torch.bfloat16"):
        block(x, *how)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="leave autocast off"):
        block(x.bfloat16(), *how)
    assert block(x.bfloat16(), *how).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="did you mean 'all'"):
        WrittenOutBlock(LLAMA, REFERENCE, "al")


@pytest.mark.slow
def test_compiled_code_leaves_the_block_as_it_is():
    _, model = models()
    expected = loss_of(model)
    compiled = torch.compile(model, backend="aot_eager")
    loss = loss_of(compiled)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, tuple(model.parameters())) for each in (loss, expected)),
    )


def test_backward_adds_where_gradients_are_unless_a_hook_or_autograd_grad_wants_its_own():
    """A second micro-batch writes into the same memory; the sum is that of autograd."""
    _, block = blocks()
    x, dy = inputs(LLAMA, 9, torch.float64)
    x, how, parameters = x.detach(), tables(LLAMA, 9, torch.float64), dict(block.named_parameters())

    def backward():
        block(x, *how).backward(dy)

    backward()
    once = {name: p.grad.clone() for name, p in parameters.items()}
    places = {name: p.grad.data_ptr() for name, p in parameters.items()}
    only = torch.autograd.grad(block(x, *how), list(parameters.values()), dy)
    for (name, p), gradient in zip(parameters.items(), only, strict=True):
        torch.testing.assert_close(gradient, once[name])
        assert torch.equal(p.grad, once[name]), "torch.autograd.grad changed a gradient"
    with patch.object(Products, "backward_weight_", autospec=True, side_effect=Products.backward_weight_) as products:
        backward()
        assert [call.args[-1] for call in products.call_args_list] == [True] * 4
        after, handles = [], []
        handles.append(parameters["ffn.w1.weight"].register_post_accumulate_grad_hook(after.append))
        backward()
        assert len(after) == 1 and [call.args[-1] for call in products.call_args_list[4:]] == [True] * 4
        handles.append(parameters["ffn.w1.weight"].register_hook(lambda gradient: 2 * gradient))  # sees each gradient
        backward()
        assert len(after) == 2 and [call.args[-1] for call in products.call_args_list[8:]] == [False] * 4
        for handle in handles:
            handle.remove()
    for name, p in parameters.items():
        torch.testing.assert_close(p.grad, (5 if name == "ffn.w1.weight" else 4) * once[name])
        assert p.grad.data_ptr() == places[name]


def heard_on(block) -> dict[str, list[torch.Tensor]]:
    """By name, the gradients that a parameter's hook has seen."""
    heard: dict[str, list[torch.Tensor]] = {name: [] for name, _ in block.named_parameters()}
    for name, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: heard[name].append(p.grad.clone()))
    return heard


def test_gradients_that_are_put_off_come_when_they_are_computed():
    """Two graphs interleaved, over gradients that are there already: the same bits as in one piece."""
    whole, block = (copy.deepcopy(blocks()[1]) for _ in range(2))
    how, given = tables(LLAMA, 9, torch.float64), [inputs(LLAMA, 9, torch.float64, seed) for seed in range(3)]
    expected = []
    for x, dy in given:
        whole(x.requires_grad_(), *how).backward(dy)
        expected.append(x.grad)
    (x, dy), *others = inputs_again = [(x.detach().requires_grad_(), dy) for x, dy in given]
    block(x, *how).backward(dy)
    before = {name: gradient.clone() for name, gradient in gradients(block).items()}
    heard, outputs = heard_on(block), [block(x, *how) for x, _ in others]
    later: list[list] = [[], []]
    for i in (1, 0):
        with put_off(later[i]):
            outputs[i].backward(others[i][1])
    assert all(torch.equal(each, before[name]) for name, each in gradients(block).items())
    assert all(torch.equal(each, before[name]) for name, seen in heard.items() for each in seen)
    assert all(torch.equal(x.grad, dx) for (x, _), dx in zip(inputs_again, expected, strict=True))
    for (work,) in later:
        for seen in heard.values():
            seen.clear()
        work()
        now = gradients(block)
        assert all(len(seen) == 1 and torch.equal(seen[0], now[name]) for name, seen in heard.items())
        assert not any(torch.equal(each, before[name]) for name, each in now.items())
        before = {name: gradient.clone() for name, gradient in now.items()}
    assert all(torch.equal(each, gradients(whole)[name]) for name, each in gradients(block).items())


def test_put_off_serves_frozen_parameters_and_contexts_within_each_other():
    _, block = blocks()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name == "ffn.w2.weight")
    how, outer, inner = tables(LLAMA, 9, torch.float64), [], []
    (x, dy), (other, _) = (inputs(LLAMA, 9, torch.float64, seed) for seed in range(2))
    y, z = (block(each.requires_grad_(), *how) for each in (x, other))
    with put_off(outer):
        with put_off(inner):
            z.backward(dy)
        with pytest.raises(RuntimeError, match="Mismatch in shape"), put_off(inner):
            y.backward(dy[:1])
        y.backward(dy)
    assert (len(outer), len(inner)) == (1, 1) and block.ffn.w2.weight.grad is None
    inner[0]()
    (alone,) = torch.autograd.grad(block(other, *how), block.ffn.w2.weight, dy)  # in one piece again
    assert torch.equal(block.ffn.w2.weight.grad, alone)
    outer[0]()
    assert [name for name, gradient in gradients(block).items() if gradient is not None] == ["ffn.w2.weight"]
    expected = torch.autograd.grad([block(each, *how) for each in (x, other)], block.ffn.w2.weight, [dy, dy])
    torch.testing.assert_close(block.ffn.w2.weight.grad, *expected)


def test_what_was_put_off_is_freed_once_it_is_done():
    """Without Python's collector, which may come after memory has run out."""
    _, block = blocks()
    x, dy = inputs(LLAMA, 9, torch.float64)
    works, read = [], []

    def note(products, ops, gradient, dy, x, accumulate):
        read.extend(map(weakref.ref, (dy, x)))

    gc.collect()
    gc.disable()
    try:
        with put_off(works):
            block(x, *tables(LLAMA, 9, torch.float64)).backward(dy)
        with patch.object(Products, "backward_weight_", note):
            while works:
                works.pop()()
        assert len(read) == 8 and not any(ref() is not None and ref() is not dy for ref in read)
    finally:
        gc.enable()
