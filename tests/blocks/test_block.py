"""The written-out block against autograd of the reference block, at every choice of what to keep."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.blocks import REFERENCE, BlockGradients, BlockWeights, Saved, backward, forward, recall
from cs336_systems.config import PRECISIONS, Precision
from cs336_systems.costs.kept import kept_names, kept_sizes

from .cases import CONFIGS, KEEPS, LLAMA, QWEN, block_of, by_autograd, inputs, tables, written_out

FP64 = Precision("fp64", parameter_bytes=8, matmul_bytes=8, matmul_dtype="fp64", softmax_bytes=8)
DTYPES = {torch.float64: FP64, torch.float32: PRECISIONS["fp32"], torch.bfloat16: PRECISIONS["bf16"]}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("seq_len", [1, 33])
def test_output_and_gradients_are_those_of_autograd(config, seq_len):
    """fp64 to a few hundred roundings; narrower, no worse against fp64 than the reference block in the same dtype."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    exact, eager, coarse = (by_autograd(config, seq_len, dtype) for dtype in dtypes)
    ours, narrow, narrowest = (written_out(config, seq_len, dtype, "all")[0] for dtype in dtypes)
    assert ours.keys() == narrow.keys() == exact.keys()
    for name, value in exact.items():
        # What cancels in the gradients of q and k, to exactly zero for a sequence of one, is as large as those of v.
        terms = exact[name.replace("q_proj", "v_proj").replace("k_proj", "v_proj")]
        size = max(1.0, value.abs().max().item(), terms.abs().max().item())
        assert (ours[name] - value).abs().max() <= 500 * torch.finfo(torch.float64).eps * size, name
        error, budget = ((tensors[name] - value).abs().max().item() for tensors in (narrow, eager))
        assert error <= 2 * budget + 8 * torch.finfo(torch.float32).eps * size, (name, error, budget)
        error, budget = ((tensors[name].double() - value).square().mean().sqrt() for tensors in (narrowest, coarse))
        assert error <= 2 * budget + torch.finfo(torch.bfloat16).eps * size, (name, error, budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_choice_gives_the_same_bits_and_holds_the_predicted_tensors(config, dtype):
    """And so those of the test above."""
    expected, _ = written_out(config, 33, dtype, "all")
    for keep in KEEPS:
        got, saved = written_out(config, 33, dtype, keep)
        for name, value in expected.items():
            assert torch.equal(got[name], value), (keep, name)
        predicted = kept_sizes(config, 2, 33, DTYPES[dtype], keep)
        assert {name: tensor.nbytes for name, tensor in saved.items()} == predicted, keep


@pytest.mark.parametrize("keep", ["input", "products"])
def test_micro_batches_add_up_in_place(keep):
    """The first overwrites, garbage or not; the second adds; the memory stays the same."""
    parameters = dict(block_of(QWEN, torch.float64).named_parameters())
    how = REFERENCE, QWEN, *tables(QWEN, 17, torch.float64)
    weights = BlockWeights.of(parameters)
    grads = BlockGradients.empty(parameters, parameters)
    views = grads.by_parameter(parameters)
    for view in views.values():
        view.fill_(float("nan"))
    expected = dict.fromkeys(parameters, 0)
    for i in range(2):
        x, dy = inputs(QWEN, 17, torch.float64, seed=i)
        saved = Saved(kept_names(keep))
        forward(x, weights, saved, *how)
        backward(dy, weights, saved, grads, *how, accumulate=i > 0)
        alone = BlockGradients.empty(parameters, parameters)
        backward(dy, weights, saved, alone, *how)
        expected = {name: expected[name] + gradient for name, gradient in alone.by_parameter(parameters).items()}
    for name, view in views.items():
        torch.testing.assert_close(view, expected[name], rtol=1e-13, atol=1e-13, msg=name)


@pytest.mark.parametrize("keep", ["input", "all", "all-norm-qkv-ffn"])
def test_backward_may_run_twice_and_writes_into_no_argument(keep):
    parameters = dict(block_of(LLAMA, torch.float32).named_parameters())
    cos, sin = tables(LLAMA, 17, torch.float32)
    weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep))
    x, dy = inputs(LLAMA, 17, torch.float32)
    y = forward(x, weights, saved, REFERENCE, LLAMA, cos, sin)
    names = set(saved.tensors)
    arguments = [x, dy, y, cos, sin, *parameters.values(), *saved.tensors.values()]
    before = [tensor.clone() for tensor in arguments]
    results = []
    for _ in range(2):
        grads = BlockGradients.empty(parameters, parameters)
        dx = backward(dy, weights, saved, grads, REFERENCE, LLAMA, cos, sin)
        results.append([dx, *grads.by_parameter(parameters).values()])
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, arguments, before))
    assert set(saved.tensors) == names


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("keep", ["input", "products", "all"])
def test_gradients_of_matrices_may_come_later(keep, accumulate):
    """The same bits as at once; until then theirs alone are as they were."""
    parameters = dict(block_of(QWEN, torch.float32).named_parameters())
    weights, how = BlockWeights.of(parameters), (REFERENCE, QWEN, *tables(QWEN, 17, torch.float32))
    x, dy = inputs(QWEN, 17, torch.float32)
    found, later = [], []
    for given in (None, later):
        saved, grads = Saved(kept_names(keep)), BlockGradients.empty(parameters, parameters)
        views = grads.by_parameter(parameters)
        for view in views.values():
            view.fill_(1.0)
        forward(x, weights, saved, *how)
        dx = backward(dy, weights, saved, grads, *how, accumulate=accumulate, consume=True, later=given)
        found.append({"dx": dx, **views})
    left = {name for name, view in found[1].items() if (view == 1).all()}
    assert left == {name for name in parameters if name.endswith("weight") and "ln" not in name}
    assert len(later) == 4
    for work in later:
        work(grads, accumulate)
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_gradients_that_nobody_wants_are_left_out():
    parameters = dict(block_of(QWEN, torch.float64).named_parameters())
    weights, saved = BlockWeights.of(parameters), Saved(kept_names("products"))
    how = REFERENCE, QWEN, *tables(QWEN, 17, torch.float64)
    x, dy = inputs(QWEN, 17, torch.float64)
    forward(x, weights, saved, *how)
    grads = BlockGradients.empty(parameters, ["attn.k_proj.bias", "ffn.w2.weight"])
    assert (grads.ln1, grads.qkv, grads.output, grads.ln2, grads.gate_up) == (None,) * 5
    expected = by_autograd(QWEN, 17, torch.float64)
    torch.testing.assert_close(backward(dy, weights, saved, grads, *how), expected["dx"])
    for name, gradient in grads.by_parameter(parameters).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("statistics", [True, False], ids=["", "without statistics"])
@pytest.mark.parametrize("keep", ["input", "attention", "products"])
def test_recalled_into_places_of_the_callers(keep, statistics):
    """Forward fills them, recall fills those that were lost, and backward finds the bits that it would compute."""
    expected, everything = written_out(QWEN, 17, torch.bfloat16, "products")
    parameters, (x, dy) = dict(block_of(QWEN, torch.bfloat16).named_parameters()), inputs(QWEN, 17, torch.bfloat16)
    weights, how = BlockWeights.of(parameters), (REFERENCE, QWEN, *tables(QWEN, 17, torch.bfloat16))
    places = {name: torch.full_like(tensor, float("nan")) for name, tensor in everything.items()}
    saved, out = Saved(kept_names("products"), places), torch.full_like(x, float("nan"))
    assert torch.equal(forward(x, weights, saved, *how, out=out), expected["y"])
    assert torch.equal(out, expected["y"])
    there = set(kept_names(keep)) - (set() if statistics else {"rstd1", "rstd2"})
    for name in set(places) - there:
        del saved.tensors[name]
        places[name].fill_(float("nan"))
    recall(saved, weights, *how)
    for name, place in places.items():
        assert saved.tensors[name] is place
        assert torch.equal(place, everything[name]), name
    grads = BlockGradients.empty(parameters, parameters)
    assert torch.equal(backward(dy, weights, saved, grads, *how, consume=True), expected["dx"])
    for name, gradient in grads.by_parameter(parameters).items():
        assert torch.equal(gradient, expected[name]), name


def test_forward_goes_on_from_attention_that_is_there():
    """Nothing before it is computed: of q, k and v there are no weights."""
    expected, everything = written_out(QWEN, 17, torch.bfloat16, "products")
    parameters, (x, _) = dict(block_of(QWEN, torch.bfloat16).named_parameters()), inputs(QWEN, 17, torch.bfloat16)
    weights = replace(BlockWeights.of(parameters), ln1=None, qkv=None, qkv_bias=None)
    saved = Saved(["attended", "residual", "gate_up"])
    saved.tensors["attended"] = everything["attended"]
    y = forward(x, weights, saved, REFERENCE, QWEN, *tables(QWEN, 17, torch.bfloat16))
    assert torch.equal(y, expected["y"])
    assert saved.tensors.keys() == saved.names
    for name, tensor in saved.tensors.items():
        assert torch.equal(tensor, everything[name]), name
