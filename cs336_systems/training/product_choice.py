"""The matmuls of a training step, which ``kernels.matmul.choose`` measures before the first one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cs336_systems.case import TrainingCase
from cs336_systems.costs.memory import default_chunk
from cs336_systems.kernels.linear_cross_entropy import row_width
from cs336_systems.kernels.matmul import Asked
from cs336_systems.training.precision import parameter_dtype


def products_of(case: TrainingCase, device: torch.device) -> Iterator[Asked]:
    """The products of a micro-batch for which ``kernels.matmul`` may choose a kernel, with newly allocated tensors.

    Not included: products with a bias, gate | up if its kernel also computes SwiGLU, and blocks that fp8 skips.
    """
    from cs336_systems.kernels.products import FASTER  # brings Triton along

    config, dtype, recipe = case.config, parameter_dtype(case.precision), case.recipe
    rows, d = case.batch_size * case.context_length, config.d_model

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def operand(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float8_e4m3fn if recipe.quantized else dtype, device=device)

    def weight_gradient(adds: bool, out: Tensor, dy: Tensor, x: Tensor, scales: Any = None) -> Asked:
        return Asked(out, dy, x, out if adds else None, scales)

    scales = (torch.ones((), device=device), torch.ones((), device=device)) if recipe.quantized else None
    adding = (False, True) if case.accumulate > 1 else (False,)
    for name, (k, n) in config.block_shapes.items():
        with_swiglu = name == "gate_up" and not recipe.quantized and (n, k, True) in FASTER
        if not with_swiglu and not (name == "qkv" and config.qkv_bias):
            out, addend, fast = empty(rows, n), None, recipe.quantized and recipe.fast_accumulation
            if name == "down":  # adds to the residual stream, in fp8 into other memory
                addend = empty(rows, n) if recipe.quantized else out
            yield Asked(out, operand(rows, k), operand(n, k).T, addend, scales, fast)
        if recipe.quantized:
            yield Asked(empty(rows, k), operand(rows, n), operand(k, n).T, None, scales)
            for adds in adding:
                yield weight_gradient(adds, empty(n, k), operand(n, rows), operand(k, rows).T, scales)
        else:
            yield Asked(empty(rows, k), operand(rows, n), operand(n, k))
            for adds in adding:
                yield weight_gradient(adds, empty(n, k), operand(rows, n).T, operand(rows, k))
    chunk = min(rows, default_chunk(rows, config.vocab_size, dtype.itemsize))
    logits = empty(chunk, row_width(config.vocab_size))[:, : config.vocab_size]
    yield Asked(logits, empty(chunk, d), empty(config.vocab_size, d).T)
    yield Asked(empty(chunk, d), logits, empty(config.vocab_size, d))
    for adds in (False, True) if rows > chunk else (False,):
        yield weight_gradient(adds, empty(config.vocab_size, d), logits.T, empty(chunk, d))
