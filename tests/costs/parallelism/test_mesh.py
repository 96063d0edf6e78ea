"""Closed forms of the best mesh against searches over it, and the 4D question worked by hand."""

import math

import pytest

from cs336_systems.costs.parallelism.forms import DEVICES, FeedForward, pass_cost
from cs336_systems.costs.parallelism.mesh import (
    XXL,
    FeedForwardStack,
    Network,
    Split,
    best_whole_split,
    evaluate,
    largest_mesh,
    least_tokens,
    least_tokens_per_device,
    optimal_split,
    smaller_batches,
    thresholds,
)

LAYER = FeedForward(8192, 28_672)
TPU = DEVICES["tpu-v5p"]
NETWORKS = [
    Network(989.4e12, 400e9, 450e9, overlapping, large_rings)
    for overlapping in (True, False)
    for large_rings in (True, False)
]


def name(network: Network) -> str:
    return f"{'max' if network.overlapping else 'sum'}-{'large' if network.large_rings else 'exact'}"


def compute_bound(split: Split) -> bool:
    return split.communication_s <= split.compute_s * (1 + 1e-12)


def on_tpus(overlapping: bool, large_rings: bool) -> Network:
    """A torus two of whose axes carry FSDP and one tensor parallelism."""
    w = TPU.egress_bytes_per_s
    return Network(TPU.flops_per_s, 2 * w, w, overlapping, large_rings)


every_network = pytest.mark.parametrize("network", NETWORKS, ids=name)


@every_network
@pytest.mark.parametrize(("tokens", "n"), [(2**14, 8), (2**20, 1000)])
def test_the_closed_form_is_the_best_of_many_splits(network, tokens, n):
    best = optimal_split(LAYER, tokens, n, network)
    xs = [n ** (i / 400) for i in range(1, 400)]
    searched = min(evaluate(LAYER, tokens, x, n / x, network).communication_s for x in xs)
    whole = best_whole_split(LAYER, tokens, n, network)
    assert whole.fsdp * whole.tp == n
    assert whole.communication_s == min(
        evaluate(LAYER, tokens, x, n // x, network).communication_s for x in range(1, n + 1) if n % x == 0
    )
    ends = 0 if network.large_rings else evaluate(LAYER, tokens, 1, n, network).communication_s
    if 1 < best.fsdp < n:
        assert best.communication_s <= searched * (1 + 1e-12)
        assert best.communication_s == pytest.approx(searched, rel=1e-2)
    else:
        assert ends == 0 or min(searched, ends) >= best.communication_s * (1 - 1e-12)


@every_network
@pytest.mark.parametrize("tokens", [2**12, 2**19])
def test_the_largest_mesh_is_the_largest_that_a_search_finds(network, tokens):
    x, y = largest_mesh(LAYER, tokens, network)
    assert compute_bound(evaluate(LAYER, tokens, x, y, network))
    grid = ((p, q) for p in range(2, 600) for q in range(2, 50) if p * q > x * y)
    searched = max((p * q for p, q in grid if compute_bound(evaluate(LAYER, tokens, p, q, network))), default=0)
    assert searched == 0, f"a mesh of {searched} devices is still bound by compute, the closed form says {x * y}"


def test_one_axis_alone_is_fsdp_and_tensor_parallelism():
    network = NETWORKS[-1]
    fsdp, tp = evaluate(LAYER, 2**18, 8, 1, network), evaluate(LAYER, 2**18, 1, 8, network)
    assert fsdp.communication_s == pytest.approx(pass_cost("fsdp", LAYER, 2**18, 8, "forward").sent_bytes / 400e9)
    assert tp.communication_s == pytest.approx(
        pass_cost("tensor-parallel", LAYER, 2**18, 8, "forward").sent_bytes / 450e9
    )


def test_the_books_example():
    """64 chips of TPU v5p, F = 32,768: 396 tokens per chip, where the best of all splits is bound by both."""
    layer, network = FeedForward(8192, 32_768, n_matrices=2), on_tpus(False, True)
    least = least_tokens_per_device(layer, network)
    assert least == pytest.approx(396, rel=0.01)
    best = optimal_split(layer, 64 * least, 64, network)
    assert best.communication_s == pytest.approx(best.compute_s)
    assert not compute_bound(optimal_split(layer, 63 * least, 64, network))


@pytest.mark.parametrize(("tokens", "expected"), [(0, 38), (396, 39)])
def test_the_least_degree_fits_a_tpu_v5p_and_one_less_does_not(tokens, expected):
    degree = XXL.least_devices(95e9, tokens)
    assert XXL.device_bytes(degree, tokens) <= 95e9 < XXL.device_bytes(degree - 1, tokens)
    assert degree == expected


@pytest.mark.parametrize(
    ("overlapping", "large_rings", "expected"),
    [(False, True, 395.4), (True, True, 319.4), (False, False, 349.9), (True, False, 299.5)],
)
def test_local_batch_on_16_by_4(overlapping, large_rings, expected):
    """X = 16, Y = 4, M_x = 2, M_y = 1: b F / C against F / (Y W M_x) and b Y / (W M_y), by hand and by the network."""
    network = on_tpus(overlapping, large_rings)
    tokens = least_tokens(XXL.layer, 16, 4, network)
    assert tokens / 64 == pytest.approx(expected, rel=1e-3)
    assert compute_bound(evaluate(XXL.layer, tokens * 1.001, 16, 4, network))
    assert not compute_bound(evaluate(XXL.layer, tokens * 0.999, 16, 4, network))


def test_each_remedy_needs_fewer_tokens():
    """Rings of n: 4 (C/W)^2 / (2 F) is 245 tokens where even the best split is bound by both."""
    found = smaller_batches(XXL.layer, 16, 4, on_tpus(False, True))
    assert [math.ceil(tokens) for _, tokens in found] == [396, 260, 320, 80, 246]
    assert all(tokens < found[0][1] for _, tokens in found[1:])


def test_bad_input():
    network = NETWORKS[0]
    for call, value in (
        (lambda: evaluate(LAYER, 1, 0.5, 4, network), "0.5 x 4"),
        (lambda: evaluate(LAYER, 0, 1, 4, network), "0"),
        (lambda: Network(1, 1, 0, True), "0"),
        (lambda: FeedForwardStack(XXL.layer, 0), "0"),
        (lambda: XXL.device_bytes(0), "0"),
        (lambda: XXL.device_bytes(1, -1), "-1"),
        (lambda: thresholds(XXL.layer, 0, network), "0"),
    ):
        with pytest.raises(ValueError, match=f"got {value}"):
            call()
    with pytest.raises(ValueError, match="activations of 1e\\+06 tokens leave nothing"):
        XXL.least_devices(95e9, 1e6)
