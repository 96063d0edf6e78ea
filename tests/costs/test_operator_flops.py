"""Arithmetic by kind of operator, against operators counted one by one as a real step dispatches them."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.operator_flops import (
    ELEMENTWISE,
    FAMILIES,
    MATMUL,
    NORMALISATION,
    OPTIMIZER,
    SOFTMAX,
    step_flops_by_operator,
)
from cs336_systems.training import TrainingCase, assemble

PER_NUMBER = {
    **dict.fromkeys(("mul", "add", "sub", "div", "neg", "exp", "sqrt", "rsqrt", "square", "pow", "masked_fill"), 1),
    **dict.fromkeys(("sum", "mean"), 1),
    **{"silu": 2, "silu_backward": 6, "_softmax": 5, "_softmax_backward_data": 4, "logsumexp": 4},
    **{"addcmul_": 3, "addcdiv_": 3, "embedding_dense_backward": 1},
}
"""Operations per number that an operator reads (a reduction) or writes; a gradient's sum is an add."""


class Counting(TorchDispatchMode):
    """Counts operations by operator; products are counted from their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.counts["product"] += 2 * result.numel() * args[0].shape[-1]
        elif (bare := name if name in PER_NUMBER else name.rstrip("_")) in PER_NUMBER:
            reads = name in ("sum", "mean", "logsumexp")
            per_number = PER_NUMBER[bare] + (bare == "add" and (kwargs or {}).get("alpha", 1) != 1)
            self.counts[name] += per_number * (args[0] if reads else result).numel()
        return result


@pytest.fixture(scope="module")
def counted():
    """Operations of the tiny model's step: (forward and backward, optimizer)."""
    config = MODEL_SIZES["tiny"]
    step = assemble(TrainingCase.of(config))
    ids, targets = torch.randint(config.vocab_size, (2, 2, config.context_length))
    phases = step.phases("step", ids, targets)
    passes, update = Counting(), Counting()
    with passes:
        phases["forward"]()
        phases["backward"]()
    with update:
        phases["optimizer"]()
    return passes.counts, update.counts


@pytest.fixture(scope="module")
def predicted():
    config = MODEL_SIZES["tiny"]
    return step_flops_by_operator(config, 2, config.context_length)


def test_products_and_softmax_and_optimizer_are_exact(counted, predicted):
    passes, update = counted
    assert predicted[MATMUL] == passes["product"]
    assert predicted[SOFTMAX] == passes["_softmax"] + passes["_softmax_backward_data"]
    assert predicted[OPTIMIZER] == sum(update.values())


def test_the_rest_is_what_the_operators_do(counted, predicted):
    """Autograd writes some formulas with an operation more or less per number than the table."""
    passes, _ = counted
    rest = sum(passes.values()) - passes["product"] - passes["_softmax"] - passes["_softmax_backward_data"]
    assert predicted[NORMALISATION] + predicted[ELEMENTWISE] == pytest.approx(rest, rel=0.25)


@pytest.mark.parametrize("size", [name for name in MODEL_SIZES if name not in ("tiny",)])
def test_products_are_nearly_all_of_every_real_model(size):
    flops = step_flops_by_operator(MODEL_SIZES[size], 4, 512)
    assert tuple(flops) == FAMILIES
    assert 0.98 < flops[MATMUL] / sum(flops.values()) < 1
