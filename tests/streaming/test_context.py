"""A sequence in chunks through a block, against the sequence in one piece."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, BlockGradients, BlockWeights, Saved, backward, block_ops, forward
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import kept_names
from cs336_systems.streaming.context import Sums, attending
from tests.blocks.cases import LLAMA, QWEN, block_of, inputs, tables

LENGTH = 24


def memory(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """As garbage as unused memory is."""
    return torch.full((LENGTH, 2, config.kv_heads, config.d_head), float("nan"), dtype=dtype)


def in_chunks(config: ModelConfig, dtype: torch.dtype, n_chunks: int, keep: str) -> dict[str, Tensor]:
    parameters = dict(block_of(config, dtype).named_parameters())
    x, dy = (tensor[:1] for tensor in inputs(config, LENGTH, dtype))
    weights, grads = BlockWeights.of(parameters), BlockGradients.empty(parameters, parameters)
    cos, sin = tables(config, LENGTH, dtype)
    context, part, total = (memory(config, of) for of in (dtype, dtype, torch.promote_types(dtype, torch.float32)))
    size = LENGTH // n_chunks
    saved, ys, dxs = [], [], []
    kept = [name if name != "qkv" else "q" for name in kept_names(keep)]
    for start in range(0, LENGTH, size):
        piece = slice(start, start + size)
        saved.append(Saved([*kept, "keys_values"], {"keys_values": context[piece].view(size, -1)}))
        ops = attending(REFERENCE, context[: piece.stop])
        ys.append(forward(x[:, piece].contiguous(), weights, saved[-1], ops, config, cos[piece], sin[piece]))
    for chunk in reversed(range(n_chunks)):
        piece = slice(chunk * size, (chunk + 1) * size)
        is_last = chunk == n_chunks - 1
        sums = Sums(total[: piece.stop], part[: piece.stop], is_last)
        how = attending(REFERENCE, context[: piece.stop], sums), config, cos[piece], sin[piece]
        dxs.append(backward(dy[:, piece].contiguous(), weights, saved[chunk], grads, *how, accumulate=not is_last))
    return {"y": torch.cat(ys, 1), "dx": torch.cat(dxs[::-1], 1), **grads.by_parameter(parameters)}


@pytest.mark.parametrize("keep", ["input", "attention", "products"])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config.name)
def test_chunks_of_a_sequence_are_the_sequence(config, keep):
    """fp64, to a few hundred roundings."""
    whole = in_chunks(config, torch.float64, 1, "all")
    for n_chunks in (2, 4):
        chunked = in_chunks(config, torch.float64, n_chunks, keep)
        for name, value in whole.items():
            size = max(1.0, value.abs().max().item())
            assert (chunked[name] - value).abs().max() <= 500 * torch.finfo(torch.float64).eps * size, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_changes_no_bit(dtype):
    expected = in_chunks(QWEN, dtype, 3, "all")
    for keep in ("input", "attention", "products", "all-attention"):
        got = in_chunks(QWEN, dtype, 3, keep)
        assert all(torch.equal(got[name], value) for name, value in expected.items()), keep


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_the_kernels_attend_over_chunks(monkeypatch):
    """Triton's, interpreted in fp32: as near to fp64 as the reference is, and the same bits whatever is kept."""
    config = replace(LLAMA, d_model=64, n_heads=4, n_kv_heads=2, d_ff=64)
    exact, eager = (in_chunks(config, dtype, 3, "products") for dtype in (torch.float64, torch.float32))
    monkeypatch.setitem(globals(), "REFERENCE", block_ops("fused", "flash"))
    found = {keep: in_chunks(config, torch.float32, 3, keep) for keep in ("products", "input")}
    for name, value in exact.items():
        error, budget = ((tensors[name] - value).abs().max().item() for tensors in (found["products"], eager))
        assert error <= 4 * budget + 8 * torch.finfo(torch.float32).eps * value.abs().max().item(), name
        assert torch.equal(found["products"][name], found["input"][name]), name
