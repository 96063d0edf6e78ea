"""Work of attention's stages, against sums written out and against the FLOPs of the whole model."""

import pytest

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.attention_stages import attention_stages
from cs336_systems.costs.flops import forward_flops

SMALL = MODEL_SIZES["small"]
SCORES = 12 * 4 * 12 * 512 * 512
"""Layers, batch, heads, queries, keys."""


@pytest.mark.parametrize(("direction", "factor"), [("forward", 1), ("backward", 2)])
def test_the_products_are_those_of_the_model_with_full_attention(direction, factor):
    stages = attention_stages(SMALL, 4, 512, PRECISIONS["fp32"], direction)
    products = stages.scores_matmul.flops + stages.values_matmul.flops
    assert products == factor * forward_flops(SMALL, 4, 512, "palm").attention


def test_forward_by_hand():
    stages = attention_stages(SMALL, 4, 512, PRECISIONS["fp32"], "forward")
    assert stages.scores_matmul.flops == 2 * SCORES * 64
    assert stages.softmax.flops == 5 * SCORES
    assert stages.softmax.n_bytes == 8 * SCORES
    assert stages.scores_matmul.n_bytes == 4 * (SCORES + 2 * SCORES // 512 * 64)


def test_backward_by_hand():
    stages = attention_stages(SMALL, 4, 512, PRECISIONS["fp32"], "backward")
    assert stages.softmax.flops == 4 * SCORES
    assert stages.softmax.n_bytes == 12 * SCORES
    assert stages.values_matmul.n_bytes == 4 * (2 * SCORES + 4 * SCORES // 512 * 64)


def test_precision_counts_what_softmax_widens():
    on_gpu, on_cpu = PRECISIONS["autocast-bf16"], PRECISIONS["autocast-bf16"].on("cpu")
    assert attention_stages(SMALL, 4, 512, on_gpu, "forward").softmax.n_bytes == (2 + 4) * SCORES
    assert attention_stages(SMALL, 4, 512, on_cpu, "forward").softmax.n_bytes == (2 + 2) * SCORES
    assert attention_stages(SMALL, 4, 512, PRECISIONS["bf16"], "backward").softmax.n_bytes == 6 * SCORES


def test_softmax_is_limited_by_memory():
    stages = attention_stages(SMALL, 4, 512, PRECISIONS["bf16"], "forward")
    assert stages.softmax.flops / stages.softmax.n_bytes < 2
    assert stages.scores_matmul.flops / stages.scores_matmul.n_bytes > 40


def test_unknown_direction():
    with pytest.raises(ValueError, match="sideways"):
        attention_stages(SMALL, 4, 512, PRECISIONS["fp32"], "sideways")
