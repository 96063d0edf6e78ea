"""Counts of attention by itself and of its stages, from first principles at small sizes."""

from dataclasses import replace

import pytest

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.attention import AttentionWork, attention_stages
from cs336_systems.costs.flops import forward_flops

WORK = AttentionWork(batch_size=2, heads=4, kv_heads=2, n_queries=8, n_keys=8, d_head=16, causal=False)
SMALL = MODEL_SIZES["small"]
SCORES = 12 * 4 * 12 * 512 * 512
"""Layers, batch, heads, queries, keys."""


def test_flops_follow_the_flash_attention_convention():
    products = 2 * (2 * WORK.n_scores * WORK.d_head)
    assert (WORK.forward_flops, WORK.backward_flops) == (products, 2.5 * products)
    assert AttentionWork(1, 16, 16, 16_384, 16_384, 64, causal=True).forward_flops == 549_755_813_888


def test_bytes_grow_with_the_square_or_with_the_length():
    assert WORK.tensor_bytes(1) == 2 * (2 * 2 * 4 * 8 * 16 + 2 * 2 * 2 * 8 * 16)
    work = AttentionWork(1, 1, 1, 1024, 1024, 64, causal=False)
    assert work.tiled_bytes(2) == work.tensor_bytes(2) + 2 * 4 * 1024
    for compiled, matrices in ((False, 4), (True, 2)):
        scores = work.materialised_bytes(4, compiled=compiled) - work.tensor_bytes(4) - 4 * 1024 * 64
        assert scores == matrices * 4 * 1024**2
        masked = replace(work, causal=True).materialised_bytes(4, compiled=compiled)
        assert masked - work.materialised_bytes(4, compiled=compiled) == 1024**2


@pytest.mark.parametrize(
    ("direction", "matmuls", "operations", "softmax_bytes"), [("forward", 1, 5, 8), ("backward", 2, 4, 12)]
)
def test_stages_by_hand(direction, matmuls, operations, softmax_bytes):
    matmul, softmax = attention_stages(SMALL, 4, 512, PRECISIONS["fp32"], direction)
    assert 2 * matmul.flops == matmuls * forward_flops(SMALL, 4, 512, "palm").attention
    assert matmul.n_bytes == matmuls * 4 * (SCORES + 2 * SCORES // 512 * 64)
    assert (softmax.flops, softmax.n_bytes) == (operations * SCORES, softmax_bytes * SCORES)
    _, narrow = attention_stages(SMALL, 4, 512, PRECISIONS["autocast-bf16"], "forward")
    assert narrow.n_bytes == (2 + 4) * SCORES, "CUDA's autocast widens the probabilities"
    with pytest.raises(ValueError, match="sideways"):
        attention_stages(SMALL, 4, 512, PRECISIONS["fp32"], "sideways")
