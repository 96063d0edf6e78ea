"""What one block keeps, tensor by tensor: against the predicted list and against the graph."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.memory import block_saved_tensors, total_bytes
from cs336_systems.experiments.memory_digest import account_block
from cs336_systems.model import REFERENCE_OPS
from cs336_systems.profiling.residuals import (
    ACTIVATION,
    GRADIENT,
    MIB,
    PARAMETER,
    PARAMETER_COPY,
    TABLE,
    block_residuals,
)

CPU = torch.device("cpu")
TINY = MODEL_SIZES["tiny"]
CASES = {
    "grouped, biased, tied": (replace(TINY, n_kv_heads=2, qkv_bias=True, tie_embeddings=True), 1, 64),
    "square": (replace(TINY, d_ff=64), 1, 64),
    "normed": (replace(TINY, n_kv_heads=2, head_dim=10, qk_norm=True), 3, 13),
    "one token": (TINY, 1, 1),
}
FP32 = PRECISIONS["fp32"]


def activations(residuals):
    return residuals[residuals["kind"] == ACTIVATION]


def n_bytes(residuals, kind):
    return residuals.loc[residuals["kind"] == kind, "mib"].sum() * MIB


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
@pytest.mark.parametrize(("config", "batch_size", "seq_len"), CASES.values(), ids=CASES)
def test_a_block_keeps_what_is_predicted(config, batch_size, seq_len, precision):
    """Tensor by tensor; an activation of (1, 64) tokens has as many elements as a matrix, and is no copy of it."""
    batch = batch_size, seq_len
    precision = PRECISIONS[precision]
    precision = replace(precision, softmax_bytes=precision.matmul_bytes)  # a CPU's autocast does not widen softmax
    residuals = block_residuals(config, *batch, precision, CPU)
    listed = block_saved_tensors(config, *batch, precision)
    kept = activations(residuals)[["mib", "dtype"]].itertuples(index=False)
    found = Counter((mib * MIB, getattr(torch, dtype).itemsize) for mib, dtype in kept)
    assert found == Counter((tensor.n_bytes, tensor.bytes_per_element) for tensor in listed)
    assert n_bytes(residuals, ACTIVATION) == total_bytes(listed)
    vectors = 2 * config.d_model + config.d_qkv * config.qkv_bias + 2 * config.d_head * config.qk_norm
    matrices = config.n_block_parameters - vectors
    casts = matrices * precision.matmul_bytes if precision.autocast else 0
    assert n_bytes(residuals, PARAMETER_COPY) == casts
    assert n_bytes(residuals, GRADIENT) == config.n_block_parameters * precision.parameter_bytes


def test_every_tensor_is_named_by_its_node_or_parameter():
    kept = block_residuals(TINY, 2, 32, FP32, CPU)
    tensors = kept[kept["kind"] != GRADIENT]
    assert tensors["kept_by"].str.fullmatch(r"(\w+\.\w+)(, \w+\.\w+)*").all()
    probabilities = tensors[tensors["shape"] == (2, 4, 32, 32)].iloc[0]
    assert set(probabilities["kept_by"].split(", ")) == {"Softmax.result", "Bmm.self"}
    assert (probabilities["dtype"], probabilities["mib"]) == ("float32", 2 * 4 * 32 * 32 * 4 / MIB)
    assert tensors[tensors["kept_by"] == "Silu.self"].iloc[0]["shape"] == (2, 32, 192)
    alive_anyway = kept[kept["kind"].isin([PARAMETER, TABLE])]
    assert set(alive_anyway["name"]) == {*kept.loc[kept["kind"] == GRADIENT, "name"], "cos", "sin"}


@pytest.mark.parametrize("keep", ["autograd", "input", "products", "all"])
def test_each_parameter_has_one_gradient_of_its_size(keep):
    """Hand-written blocks have q | k | v, and gate | up, in one storage each."""
    account = account_block(TrainingCase(size="tiny", batch_size=1, context_length=32, keep=keep))
    gradients = account[account["kind"] == GRADIENT]
    assert n_bytes(account, GRADIENT) == 4 * TINY.n_block_parameters
    assert not gradients["name"].duplicated().any()
    for name in account.loc[account["kind"] == PARAMETER, "name"]:
        assert {*name.split(" | ")} <= {*gradients["name"]}


def test_a_fused_attention_keeps_no_scores():
    def attention(q, k, v, *, causal):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    fused = block_residuals(TINY, 2, 128, FP32, CPU, ops=replace(REFERENCE_OPS, attention=attention))
    assert activations(block_residuals(TINY, 2, 128, FP32, CPU)).iloc[0]["shape"] == (2, 4, 128, 128)
    assert not (fused["shape"] == (2, 4, 128, 128)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
def test_a_block_on_a_gpu_keeps_what_is_predicted(precision):
    precision, small = PRECISIONS[precision], MODEL_SIZES["small"]
    residuals = block_residuals(small, 2, 128, precision, torch.device("cuda"))
    assert n_bytes(residuals, ACTIVATION) == total_bytes(block_saved_tensors(small, 2, 128, precision))
