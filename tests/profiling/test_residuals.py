"""What one block keeps, tensor by tensor: against the predicted list and against the graph."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.memory import block_saved_tensors, total_bytes
from cs336_systems.model import REFERENCE_OPS
from cs336_systems.profiling.residuals import (
    ACTIVATION,
    MIB,
    PARAMETER,
    PARAMETER_COPY,
    TABLE,
    block_residuals,
)

CPU = torch.device("cpu")
TINY = MODEL_SIZES["tiny"]
CONFIGS = {
    "grouped, biased, tied": replace(TINY, n_kv_heads=2, qkv_bias=True, tie_embeddings=True),
    "square": replace(TINY, d_ff=64),
}
FP32 = PRECISIONS["fp32"]


def activations(residuals):
    return residuals.tensors[residuals.tensors["kind"] == ACTIVATION]


@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_block_keeps_what_is_predicted(config, precision):
    """Tensor by tensor; an activation of (1, 64) tokens has as many elements as a matrix, and is no copy of it."""
    batch = 1, 64
    precision = PRECISIONS[precision].on("cpu")
    residuals = block_residuals(config, *batch, precision, CPU)
    listed = block_saved_tensors(config, *batch, precision)
    assert Counter(mib * MIB for mib in activations(residuals)["mib"]) == Counter(t.n_bytes for t in listed)
    assert residuals.activation_mib * MIB == total_bytes(listed)
    matrices = config.n_block_parameters - 2 * config.d_model - (config.d_qkv if config.qkv_bias else 0)
    casts = matrices * precision.matmul_bytes if precision.autocast else 0
    assert residuals.mib(PARAMETER_COPY) * MIB == casts
    assert residuals.gradient_mib * MIB == config.n_block_parameters * precision.parameter_bytes


def test_every_tensor_is_named_by_module_node_and_line():
    tensors = block_residuals(TINY, 2, 32, FP32, CPU).tensors
    assert tensors["kept_by"].str.fullmatch(r"(\w+\.\w+)(, \w+\.\w+)*").all()
    assert tensors["source"].str.startswith("model/ops.py:").all()
    probabilities = tensors[tensors["shape"] == (2, 4, 32, 32)].iloc[0]
    assert (probabilities["module"], probabilities["kept_by"]) == ("attn", "Softmax.result, Bmm.self")
    assert probabilities["source"].endswith(" attention")
    assert (probabilities["dtype"], probabilities["mib"]) == ("float32", 2 * 4 * 32 * 32 * 4 / MIB)
    gate = tensors[tensors["kept_by"] == "Silu.self"].iloc[0]
    assert (gate["module"], gate["shape"]) == ("ffn", (2, 32, 192))


def test_parameters_and_tables_are_listed_apart_and_count_for_nothing():
    residuals = block_residuals(TINY, 2, 32, FP32, CPU)
    apart = residuals.tensors[residuals.tensors["kind"].isin([PARAMETER, TABLE])]
    names = {name for name, _ in residuals.gradients[["parameter", "mib"]].itertuples(index=False)}
    assert set(apart["module"]) == names | {"cos", "sin"}


def test_a_fused_attention_keeps_no_scores():
    def attention(q, k, v, *, causal):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    fused = block_residuals(TINY, 2, 128, FP32, CPU, ops=replace(REFERENCE_OPS, attention=attention))
    assert activations(block_residuals(TINY, 2, 128, FP32, CPU)).iloc[0]["shape"] == (2, 4, 128, 128)
    assert not (fused.tensors["shape"] == (2, 4, 128, 128)).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
def test_a_block_on_a_gpu_keeps_what_is_predicted(precision):
    precision, small = PRECISIONS[precision], MODEL_SIZES["small"]
    residuals = block_residuals(small, 2, 128, precision, torch.device("cuda"))
    assert residuals.activation_mib * MIB == total_bytes(block_saved_tensors(small, 2, 128, precision))
