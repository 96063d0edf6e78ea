"""The listed activations of a block against what autograd really keeps."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.model import TransformerLM
from cs336_systems.training.precision import autocast, parameter_dtype

PLAIN = ModelConfig(name="plain", d_model=24, d_ff=40, n_layers=1, n_heads=4, vocab_size=50, context_length=16)
GROUPED = replace(PLAIN, n_kv_heads=2, qkv_bias=True, tie_embeddings=True)
QK_NORM = replace(PLAIN, n_kv_heads=2, head_dim=10, qk_norm=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
@pytest.mark.parametrize(
    ("config", "batch_size", "seq_len"),
    [(PLAIN, 2, 16), (PLAIN, 1, 1), (GROUPED, 3, 13), (QK_NORM, 2, 7)],
    ids=["plain", "one-token", "grouped", "qk-norm"],
)
def test_a_block_keeps_the_listed_tensors(config, precision, batch_size, seq_len):
    """As a multiset of (elements, bytes per element); autocast keeps its casts of the matrices besides."""
    precision = PRECISIONS[precision].on("cpu")
    dtype = parameter_dtype(precision)
    model = TransformerLM(config, dtype=dtype)
    x = torch.randn(batch_size, seq_len, config.d_model, dtype=dtype, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    packed: list[Tensor] = []  # while the tensors live, no address is used twice
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, autocast(precision, torch.device("cpu")):
        model.layers[0](x, *model.rotary(seq_len))
    kept = {t.untyped_storage().data_ptr(): t for t in packed if t.untyped_storage().data_ptr() not in known}.values()
    found = Counter((t.untyped_storage().nbytes() // t.element_size(), t.element_size()) for t in kept)
    listed = block_saved_tensors(config, batch_size, seq_len, precision)
    expected = Counter((torch.Size(tensor.shape).numel(), tensor.bytes_per_element) for tensor in listed)
    assert sum(elements * n_bytes * count for (elements, n_bytes), count in expected.items()) == total_bytes(listed)
    if precision.autocast:
        matrices = [p.numel() for p in model.layers[0].parameters() if p.ndim == 2]
        expected += Counter((n_elements, precision.matmul_bytes) for n_elements in matrices)
    assert found == expected
