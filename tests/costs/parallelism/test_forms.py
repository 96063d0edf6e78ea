"""FLOPs against a list of matrix products, bytes against rings played step by step, limits against a search."""

import math

import pytest
import torch

from cs336_systems.costs.parallelism.forms import (
    DEVICES,
    FORMS,
    PASSES,
    FeedForward,
    find_device,
    largest_world,
    least_tokens_per_device,
    pass_cost,
)
from cs336_systems.costs.parallelism.ring import all_gather, all_reduce, reduce_scatter

LAYER = FeedForward(d_model=64, d_ff=192)
SIMULATED = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def products(form: str, which: str, b: int, d: int, f: int, n: int) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of every matrix product that one device runs in an SwiGLU layer."""
    if form == "tensor-parallel":
        f //= n
    else:
        b //= n
    if which == "forward":
        return [(b, d, f), (b, d, f), (b, f, d)]
    input_gradients = [(b, d, f), (b, f, d), (b, f, d)]
    weight_gradients = [(f, b, d), (d, b, f), (d, b, f)]
    return input_gradients + weight_gradients


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_flops_are_those_of_the_matrix_products(form, which, n):
    listed = sum(2 * rows * inner * columns for rows, inner, columns in products(form, which, 512, 64, 192, n))
    assert pass_cost(form, LAYER, 512, n, which).flops == listed


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_bytes_are_those_of_rings_played_step_by_step(form, which, n):
    weights, activations = 2 * 3 * 64 * 192, 2 * 512 * 64
    expected = {
        ("data-parallel", "forward"): [],
        ("data-parallel", "backward"): [("all_reduce", weights)],
        ("fsdp", "forward"): [("all_gather", weights)],
        ("fsdp", "backward"): [("all_gather", weights), ("reduce_scatter", weights)],
        ("tensor-parallel", "forward"): [("all_reduce", activations)],
        ("tensor-parallel", "backward"): [("all_reduce", activations)],
    }[form, which]
    sent = sum(SIMULATED[name](n, total).bytes_per_link[0] for name, total in expected)
    assert pass_cost(form, LAYER, 512, n, which).sent_bytes == pytest.approx(sent)


@pytest.mark.parametrize("large_rings", [False, True])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("form", FORMS)
def test_the_limit_is_where_a_search_finds_it(form, which, large_rings):
    layer, tokens, h100 = FeedForward(8192, 28672), 2**18, DEVICES["h100"]
    egress = h100.egress_bytes_per_s
    limit = largest_world(form, layer, tokens, which, h100.flops_per_s, egress, large_rings=large_rings)

    def hidden(n: int) -> bool:
        found = pass_cost(form, layer, tokens, n, which, large_rings=large_rings)
        return found.communication_s(egress) <= found.compute_s(h100)

    searched = max((n for n in range(2, 1000) if hidden(n)), default=1)
    assert searched == (999 if math.isinf(limit) else math.floor(limit))


def test_tensor_parallel_backward_needs_one_all_reduce():
    """The equations in the module's docstring, on four devices played in turn, against autograd on whole matrices."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 6, 8, dtype=torch.float64)
    w1, w2, w3 = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 16), (8, 16), (16, 8)))
    inputs = [tensor.clone().requires_grad_() for tensor in (x, w1, w2, w3)]
    ((torch.nn.functional.silu(inputs[0] @ inputs[1]) * (inputs[0] @ inputs[2])) @ inputs[3]).backward(dy)

    sent, gradients = [], []
    for w1_i, w2_i, w3_i in zip(w1.chunk(4, 1), w2.chunk(4, 1), w3.chunk(4, 0), strict=True):
        x1, x2 = x @ w1_i, x @ w2_i
        f, slope = torch.nn.functional.silu(x1), x1.sigmoid() * (1 + x1 * (1 - x1.sigmoid()))
        dz = dy @ w3_i.T
        dx1, dx2 = dz * x2 * slope, dz * f
        gradients.append((x.T @ dx1, x.T @ dx2, (f * x2).T @ dy))
        sent.append(dx1 @ w1_i.T + dx2 @ w2_i.T)
    found = [
        sum(sent),
        *(torch.cat(parts, cut) for parts, cut in zip(zip(*gradients, strict=True), (1, 1, 0), strict=True)),
    ]
    for tensor, expected in zip(found, inputs, strict=True):
        torch.testing.assert_close(tensor, expected.grad)


def test_the_books_limits():
    """Chapter 5 with C = 4.6e14 and W = 2 x 9e10: 2,550 tokens per chip; tensor parallel up to F / 2,550."""
    tpu = DEVICES["tpu-v5p"]
    layer = FeedForward(8192, 30_000, n_matrices=2)
    assert least_tokens_per_device(layer, tpu.flops_per_s, tpu.egress(64)) == pytest.approx(2550, rel=3e-3)
    widest = largest_world(
        "tensor-parallel", layer, 1, "forward", tpu.flops_per_s, tpu.egress_bytes_per_s, large_rings=True
    )
    assert widest == pytest.approx(30_000 / 2550, rel=3e-3)


def test_presets_hold_what_their_sources_say():
    assert {name: device.flops_per_s for name, device in DEVICES.items()} == {
        "h100": 989.4e12,
        "h200": 989.4e12,
        "b200": 2250e12,
        "tpu-v5p": 4.6e14,
    }
    assert all("https://" in device.source for device in DEVICES.values())


def test_a_ring_beyond_one_node_goes_through_the_network_cards():
    h100 = find_device("h100")
    assert h100.egress(8) == 450e9
    assert h100.egress(16) == 8 * 50e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_cost("zero", LAYER, 1, 1, "forward"), "unknown form 'zero'"),
        (lambda: pass_cost("fsdp", LAYER, 1, 1, "step"), "unknown pass 'step'"),
        (lambda: pass_cost("fsdp", LAYER, 1, 0, "forward"), "world size must be positive, got 0"),
        (lambda: pass_cost("fsdp", LAYER, 0, 1, "forward"), "tokens must be positive, got 0"),
        (lambda: FeedForward(0, 1), "d_model must be positive, got 0"),
        (lambda: find_device("h300"), "unknown device 'h300': known are h100"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
