"""Bytes of states against a step's, and the allocator's rules, block by block."""

from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.fsdp import model_units
from cs336_systems.costs.memory import MIB, cuda_block_bytes, parameter_bytes, rotary_bytes
from cs336_systems.model import TransformerLM
from cs336_systems.training import TrainingCase, assemble


@pytest.mark.slow
def test_parameter_sizes_are_the_models():
    for config in MODEL_SIZES.values():
        units = [[prod(shape) for shape in unit] for unit in model_units(config)]
        model = TransformerLM(config.at_context(128), device="meta")
        assert Counter(units[1]) == Counter(p.numel() for p in model.layers[0].parameters())
        assert Counter(n for unit in units for n in unit) == Counter(p.numel() for p in model.parameters())
        assert sum(map(sum, units)) == config.n_parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
def test_states_are_those_that_a_step_leaves(precision):
    config, how = MODEL_SIZES["tiny"], PRECISIONS[precision]
    step = assemble(TrainingCase.of(config, dtype=precision))
    step(ids := torch.zeros(1, 4, dtype=torch.int64), ids)
    moments = [t for state in step.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    states = parameter_bytes(config, how)
    assert sum(p.nbytes for p in step.model.parameters()) == states
    assert sum(t.nbytes for t in step.model.buffers()) == rotary_bytes(config)
    assert sum(t.nbytes for t in moments) == 2 * states


@pytest.mark.parametrize(
    ("asked", "set_aside"),
    [
        (0, 0),
        (513, 1024),
        (MIB, MIB),
        (MIB + 1, MIB + 512 + (20 * MIB - 19 * (MIB + 512)) // 19),  # 19 to a segment of 20 MiB
        (10_240_000, 10 * MIB),  # 9.77 MiB, two to a segment of 20 MiB
        (11 * MIB, 12 * MIB),  # exactly 1 MiB left, which is not cut off
        (81_920_000, 81_920_000),  # 78.125 MiB alone in 80 MiB, 1.875 left and cut off
        (3 * MIB, 3 * MIB),  # six to a segment, 2 MiB left and cut off
    ],
)
def test_known_blocks(asked, set_aside):
    assert cuda_block_bytes(asked) == set_aside


def allocated_by_filling_one_segment(n_bytes: int) -> tuple[int, int]:
    """(tensors, bytes set aside) when a fresh segment is filled: the allocator, block by block."""
    size = max(512, (n_bytes + 511) // 512 * 512)
    if size <= MIB:
        free, least_rest = 2 * MIB, 512
    elif size < 10 * MIB:
        free, least_rest = 20 * MIB, MIB + 1
    else:
        free, least_rest = (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB), MIB + 1
    n_tensors = set_aside = 0
    while free >= size:
        block = size if free - size >= least_rest else free
        n_tensors, set_aside, free = n_tensors + 1, set_aside + block, free - block
    return n_tensors, set_aside


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.one_of(st.integers(1, 4 * MIB), st.integers(1, 64 * MIB), st.integers(1, 2**33)))
def test_blocks_are_the_allocators_average_over_a_segment(n_bytes):
    n_tensors, set_aside = allocated_by_filling_one_segment(n_bytes)
    assert 0 <= set_aside - n_tensors * cuda_block_bytes(n_bytes) < n_tensors
    assert n_bytes <= cuda_block_bytes(n_bytes) <= n_bytes + 511 + MIB
