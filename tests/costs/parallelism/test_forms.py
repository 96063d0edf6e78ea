"""FLOPs against a list of matmuls, bytes against collectives written out, limits against a search."""

import math

import pytest

from cs336_systems.costs.parallelism.forms import (
    DEVICES,
    FORMS,
    PASSES,
    FeedForward,
    find_device,
    largest_world,
    pass_cost,
)

LAYER = FeedForward(d_model=64, d_ff=192)
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often a rank of a ring sends all of a tensor but its own piece."""


def matmuls(form: str, which: str, b: int, d: int, f: int, n: int) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of every matmul that one device runs in an SwiGLU layer."""
    if form == "tensor-parallel":
        f //= n
    else:
        b //= n
    if which == "forward":
        return [(b, d, f), (b, d, f), (b, f, d)]
    input_gradients = [(b, d, f), (b, f, d), (b, f, d)]
    weight_gradients = [(f, b, d), (d, b, f), (d, b, f)]
    return input_gradients + weight_gradients


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_flops_are_those_of_the_matmuls_and_bytes_those_of_the_collectives(form, n):
    weights, activations = 2 * 3 * 64 * 192, 2 * 512 * 64
    collectives = {
        "data-parallel": ([], [("all_reduce", weights)]),
        "fsdp": ([("all_gather", weights)], [("all_gather", weights), ("reduce_scatter", weights)]),
        "tensor-parallel": ([("all_reduce", activations)], [("all_reduce", activations)]),
    }[form]
    for which, expected in zip(PASSES, collectives, strict=True):
        found = pass_cost(form, LAYER, 512, n, which)
        assert found.flops == sum(2 * m * k * columns for m, k, columns in matmuls(form, which, 512, 64, 192, n))
        sent = sum(ROUNDS[name] * (total - total / n) for name, total in expected)
        assert found.sent_bytes == pytest.approx(sent)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("form", FORMS)
def test_the_limit_is_where_a_search_finds_it(form, which):
    layer, tokens, h100 = FeedForward(8192, 28672), 2**18, DEVICES["h100"]
    egress = h100.egress_bytes_per_s
    limit = largest_world(form, layer, tokens, which, h100.flops_per_s, egress)

    def hidden(n: int) -> bool:
        found = pass_cost(form, layer, tokens, n, which)
        return found.communication_s(egress) <= found.compute_s(h100)

    searched = max((n for n in range(2, 1000) if hidden(n)), default=1)
    assert searched == (999 if math.isinf(limit) else math.floor(limit))


def test_the_books_limits():
    """Chapter 5 with C = 4.6e14 and W = 2 x 9e10: 2,550 tokens per chip; tensor parallel up to F / 2,550, and one."""
    tpu, layer = DEVICES["tpu-v5p"], FeedForward(8192, 30_000, n_matrices=2)
    rates = tpu.flops_per_s, tpu.egress_bytes_per_s
    assert largest_world("fsdp", layer, 2550 * 64, "forward", *rates) - 1 == pytest.approx(64, rel=3e-3)
    assert largest_world("tensor-parallel", layer, 1, "forward", *rates) - 1 == pytest.approx(30_000 / 2550, rel=3e-3)


def test_bad_input():
    wrong = (("zero", 1, 1, "forward"), ("fsdp", 1, 1, "step"), ("fsdp", 1, 0, "forward"), ("fsdp", 0, 1, "forward"))
    for form, tokens, n, which in wrong:
        with pytest.raises(ValueError, match="zero|step|got 0"):
            pass_cost(form, LAYER, tokens, n, which)
    with pytest.raises(ValueError, match="d_model must be positive, got 0"):
        FeedForward(0, 1)
    with pytest.raises(ValueError, match="h300"):
        find_device("h300")
