"""From a description to a step: seeds, dtypes, operations, refusals, and compilation that keeps the numbers."""

from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.training import TrainingCase, TrainStep, assemble, cross_entropy

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(CONFIG.vocab_size, (2, 2, 16), generator=generator)
    return ids, targets


def same_bits(actual: TrainStep, expected: TrainStep) -> bool:
    pairs = zip(actual.model.parameters(), expected.model.parameters(), strict=True)
    return all(torch.equal(a, e) for a, e in pairs)


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_the_optimizer_holds_every_parameter_once_in_the_precisions_dtype(precision):
    config = replace(CONFIG, tie_embeddings=True)
    step = assemble(TrainingCase.of(config, dtype=precision, optimizer="torch-fused"))
    held = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == list(map(id, step.model.parameters()))
    assert sum(parameter.numel() for parameter in held) == config.n_parameters
    assert {parameter.dtype.itemsize for parameter in held} == {PRECISIONS[precision].parameter_bytes}


@pytest.mark.slow
def test_compiled_steps_have_the_losses_of_eager_ones():
    """The budget is the eager error against fp64, and one rounding of such a loss where that happens to vanish."""
    eager, compiled, oracle = (assemble(TrainingCase.of(CONFIG, compile=flag)) for flag in ("off", "on", "off"))
    assert all(block._compiled_call_impl is not None for block in compiled.model.layers)
    assert compiled.loss_function is not cross_entropy
    oracle.model.double()
    rows = []
    try:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):  # scalar code compiles in a third of the time
            for seed in range(4):
                rows.append(torch.stack([step(*batch(seed)).double() for step in (eager, compiled, oracle)]))
    finally:
        torch.compiler.reset()
    losses = torch.stack(rows)
    eager_error, compiled_error = ((losses[:, i] - losses[:, 2]).abs().max().item() for i in (0, 1))
    print(f"against fp64: eager {eager_error:.1e}, compiled {compiled_error:.1e}")
    assert losses[:, 2].diff().abs().min() > 1e-3, "the batches differ"
    assert compiled_error <= 2 * eager_error + 2**-24 * losses.max().item()
