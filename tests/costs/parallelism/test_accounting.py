"""The 4D question worked by hand, and its sharding against a search."""

import math
from dataclasses import replace

import pytest

from cs336_systems.costs.parallelism.accounting import XXL, FeedForwardStack, smaller_batches, thresholds, torus_network
from cs336_systems.costs.parallelism.forms import DEVICES, FeedForward
from cs336_systems.costs.parallelism.mesh import evaluate, least_tokens

TPU = DEVICES["tpu-v5p"]


def test_states_of_xxl():
    assert XXL.n_parameters == 126 * 2 * 16_384 * 53_248 == 219_848_638_464
    assert XXL.state_bytes == 3_517_578_215_424
    assert math.ceil(XXL.state_bytes / 80e9) == 44
    assert math.ceil(XXL.state_bytes / (80 * 2**30)) == 41
    assert XXL.activation_bytes_per_token == 126 * (2 * 16_384 + 2 * 53_248) == 17_547_264


@pytest.mark.parametrize("tokens", [0, 396, 4096])
def test_the_least_degree_fits_and_one_less_does_not(tokens):
    degree = XXL.least_devices(95e9, tokens)
    assert XXL.device_bytes(degree, tokens) <= 95e9 < XXL.device_bytes(degree - 1, tokens)


def test_the_degree_that_fits_a_tpu_v5p():
    assert XXL.least_devices(TPU.memory_bytes) == 38
    assert XXL.least_devices(TPU.memory_bytes, tokens=396) == 39


def test_a_gated_layer_keeps_three_wide_tensors():
    gated = FeedForwardStack(FeedForward(64, 192, n_matrices=3), 2)
    assert gated.activation_bytes_per_token == 2 * 2 * (64 + 3 * 192)


@pytest.mark.parametrize(
    ("overlapping", "large_rings", "expected"),
    [(False, True, 395.4), (True, True, 319.4), (False, False, 349.9), (True, False, 299.5)],
)
def test_local_batch_on_16_by_4(overlapping, large_rings, expected):
    """X = 16, Y = 4, M_x = 2, M_y = 1: b F / C against F / (Y W M_x) and b Y / (W M_y), by hand and by the network."""
    network = torus_network(TPU, 2, 1, overlapping=overlapping, large_rings=large_rings)
    tokens = least_tokens(XXL.layer, 16, 4, network)
    assert tokens / 64 == pytest.approx(expected, rel=1e-3)
    assert evaluate(XXL.layer, tokens * 1.001, 16, 4, network).compute_bound
    assert not evaluate(XXL.layer, tokens * 0.999, 16, 4, network).compute_bound


def test_another_split_needs_fewer_tokens():
    network = torus_network(TPU, 2, 1, overlapping=False, large_rings=True)
    found = {(row.fsdp, row.tp): row.tokens_per_device for row in thresholds(XXL.layer, 64, network)}
    assert list(found) == [(64, 1), (32, 2), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)]
    assert found[8, 8] == min(found.values()) < 0.7 * found[16, 4]
    assert math.isinf(found[2, 32])


def test_each_remedy_needs_fewer_tokens():
    """Rings of n: 4 (C/W)^2 / (2 F) is 245 tokens where even the best split is bound by both."""
    found = smaller_batches(XXL.layer, 16, 4, torus_network(TPU, 2, 1, overlapping=False, large_rings=True))
    assert [math.ceil(tokens) for _, tokens in found] == [396, 260, 320, 80, 246]
    assert all(tokens < found[0][1] for _, tokens in found[1:])


def test_narrower_numbers_leave_every_limit_where_it_was():
    narrow = FeedForward(16_384, 53_248, n_matrices=2, bytes_per_element=1)
    network = torus_network(TPU, 2, 1, overlapping=False, large_rings=True)
    twice = replace(network, flops_per_s=2 * network.flops_per_s)
    assert least_tokens(narrow, 16, 4, twice) == pytest.approx(least_tokens(XXL.layer, 16, 4, network))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FeedForwardStack(XXL.layer, 0), "number of blocks must be positive, got 0"),
        (lambda: XXL.device_bytes(0), "number of devices must be positive, got 0"),
        (lambda: XXL.device_bytes(1, -1), "tokens must not be negative, got -1"),
        (lambda: XXL.least_devices(95e9, 1e6), "activations of 1e\\+06 tokens leave nothing of 9.5e\\+10 bytes"),
        (lambda: thresholds(XXL.layer, 0, torus_network(TPU, 2, 1, overlapping=True, large_rings=True)), "got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
