"""What a block holds between forward and backward against the table that predicts it."""

import pytest
import torch

from cs336_systems.blocks import Saved
from cs336_systems.config import PRECISIONS, Precision
from cs336_systems.costs.kept import bytes_kept, kept_names, kept_tensors

from .cases import CONFIGS, KEEPS, written_out

FP64 = Precision("fp64", parameter_bytes=8, matmul_bytes=8, matmul_dtype="fp64", softmax_bytes=8)
DTYPES = {torch.float64: FP64, torch.float32: PRECISIONS["fp32"], torch.bfloat16: PRECISIONS["bf16"]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_held_bytes_are_the_predicted_ones(config, dtype):
    for keep in KEEPS:
        _, saved = written_out(config, 17, dtype, keep)
        predicted = kept_tensors(config, 2, 17, DTYPES[dtype], keep)
        held = {name: (tuple(tensor.shape), tensor.element_size()) for name, tensor in saved.tensors.items()}
        assert held == {tensor.name: (tensor.shape, tensor.bytes_per_element) for tensor in predicted}, keep
        assert saved.n_bytes == bytes_kept(config, 2, 17, DTYPES[dtype], keep), keep


def test_memory_is_counted_once():
    saved = Saved(kept_names("all"))
    both = torch.zeros(4, 3)
    saved.keep(normed1=both[:2], normed2=both[2:], unknown=torch.zeros(5))
    assert saved.n_bytes == 48
