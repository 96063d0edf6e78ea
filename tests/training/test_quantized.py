"""Steps whose blocks multiply in fp8, emulated: they train as others do, alone and among ranks, or say why not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.case import TrainingCase
from cs336_systems.config import MODEL_SIZES, PRECISIONS, Recipe
from cs336_systems.distributed.process_group import Rank
from cs336_systems.ranks import Parallel
from cs336_systems.training import TrainStep, assemble, random_batch
from cs336_systems.training.precision import recipe_unsupported_reason

from ..distributed.checks import on_ranks
from .shared import Shared
from .test_parallel import WAYS, whole

CONFIG = replace(MODEL_SIZES["tiny"], name="sixteens", d_model=64, d_ff=96, vocab_size=97, context_length=32)
E4M3 = {"matmul_dtype": "e4m3", "keep": "products", "optimizer": "torch-fused"}


def losses_of(case: TrainingCase, n_steps: int, **fields: object) -> Tensor:
    step, batch = assemble(replace(case, **fields)), random_batch(case)
    return torch.stack([step(*batch) for _ in range(n_steps)])


@pytest.mark.parametrize(
    "recipe", [{"gradient_dtype": "e5m2"}, {"scaling": "row"}, {"scaling": "block", "fp8_skip_last": 1}], ids=str
)
def test_losses_are_near_those_of_products_that_are_not_quantized(recipe):
    """Within a percent or two over ten steps on one batch, which add differences up; the loss falls by a third."""
    case = TrainingCase.of(CONFIG, batch_size=4, dtype="bf16", **E4M3, **recipe)
    got, stored = losses_of(case, 10), losses_of(case, 10, matmul_dtype="same")
    assert not torch.equal(got, stored)
    assert got[-1] < 0.7 * got[0]
    torch.testing.assert_close(got, stored, rtol=0.02 if recipe.get("gradient_dtype") else 0.01, atol=0)


def test_what_is_kept_and_micro_batches_change_no_bit():
    case = TrainingCase.of(CONFIG, batch_size=2, accumulate=2, dtype="bf16", **E4M3)
    expected = losses_of(case, 3)
    for keep in ("input", "all"):
        assert torch.equal(losses_of(case, 3, keep=keep), expected), keep


def test_weights_are_quantized_once_a_step_unless_someone_else_writes_them():
    """Whatever the number of micro-batches."""
    case = TrainingCase.of(CONFIG, batch_size=1, accumulate=4, dtype="bf16", **E4M3)
    step, n_quantized = assemble(case), [0]
    for block in step.model.layers:
        own = block.products.quantizers

        def counted(x: Tensor, *arguments: object, quantize: Any = own.quantize, **options: object) -> Any:
            n_quantized[0] += len(x) != CONFIG.context_length  # as no weight has as many rows
            return quantize(x, *arguments, **options)

        block.products.quantizers = replace(own, quantize=counted)
    for _ in range(2):
        n_quantized[0] = 0
        step(*random_batch(case))
        assert n_quantized == [4 * CONFIG.n_layers]
    micro_batch = [each[:1] for each in random_batch(case)]
    step.model(*micro_batch)
    with torch.no_grad():
        step.model.layers[0].attn.k_proj.weight.mul_(3)
    n_quantized[0] = 0
    step.model(*micro_batch)
    assert n_quantized == [4]


def forgetful(step: TrainStep) -> TrainStep:
    """The same step with weights that are quantized each time they are read."""
    for module in step.model.modules():
        if (products := getattr(module, "products", None)) is not None:
            products.remember = False
    return step


def train_all(rank: Rank) -> list[tuple[str, int, Tensor, list[Tensor], bool]]:
    """Of each way and number of micro-batches: losses of three steps and the weights after them, and whether weights
    that are remembered made no difference."""
    ways = [(how, 2) for how in WAYS if how.wrapper not in ("naive", "flat", "torch-ddp")]
    ways += [(how, 1) for how in (Parallel("bucketed"), Parallel(optimizer_state="scattered-gradients"))]
    found = []
    for how, n in ways:
        case = Shared.of(CONFIG, how=how, batch_size=2, seed=3, accumulate=n, dtype="bf16", **E4M3)
        steps = assemble(case, rank), forgetful(assemble(case, rank))
        losses = [torch.stack([step(*random_batch(case, rank)) for _ in range(3)]) for step in steps]
        weights = [[weight.clone() for weight in whole(step.model)] for step in steps]
        same = torch.equal(*losses) and all(map(torch.equal, *weights))
        found.append((str(how), n, losses[0], weights[0], same))
    return found


@pytest.mark.slow
def test_every_wrapper_and_optimizer_has_the_weights_of_its_step():
    """Also those that write parameters where no version counts it; and of two ranks, whose sums have one order, all
    train the same bits, however parameters, gradients and states are divided.

    Gradients that are divided are averaged for each micro-batch, so they are compared at one.
    """
    for of_rank in on_ranks(train_all, 2):
        first = {n: (losses, weights) for _, n, losses, weights, _ in reversed(of_rank)}
        for how, n, losses, weights, same in of_rank:
            assert same, how
            assert torch.equal(losses, first[n][0]), (how, n)
            assert all(map(torch.equal, weights, first[n][1])), (how, n)
            assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("capability", "recipe", "dtype", "message"),
    [
        ((8, 6), Recipe("e4m3"), "bf16", "e4m3 needs compute capability 8.9 or newer, an old one has 8.6"),
        ((9, 0), Recipe("e4m3"), "fp32", "e4m3 on CUDA devices returns bf16: it goes with dtype bf16, got fp32"),
        ((8, 9), Recipe("e4m3", scaling="row"), "bf16", "e4m3 with scaling row needs Hopper, an old one is another"),
        ((8, 9), Recipe("e4m3"), "bf16", None),
    ],
)
def test_devices_without_fp8_are_told_in_a_sentence(monkeypatch, capability, recipe, dtype, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    reason = recipe_unsupported_reason(recipe, PRECISIONS[dtype], torch.device("cuda"))
    assert reason == message if message is None else message in str(reason)
