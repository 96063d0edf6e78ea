"""Written-out blocks whose parameters others move: merged weights stay merged, and results stay the same bits."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.blocks import weights as block_weights
from cs336_systems.distributed import FSDP, BucketedDDP, FlatDDP, ShardedOptimizer, fsdp_gradients
from cs336_systems.distributed.buckets import neighbours
from cs336_systems.distributed.checkpoint import load_checkpoint, save_checkpoint
from cs336_systems.distributed.fsdp_gradients import Reduction
from cs336_systems.model import TransformerBlock, TransformerLM

from ..distributed.checks import checks_of, on_each
from .cases import HANDOUT, QWEN, written_out_model

TIED = replace(QWEN, tie_embeddings=True)
IDS = torch.arange(2 * 9).view(2, 9) * 7 % 50


@contextmanager
def copies_counted() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the matrices that were joined by a copy inside."""
    joined: list[tuple[int, ...]] = []
    merged = block_weights.merged

    def counted(parts: list[Tensor]) -> Tensor:
        whole = merged(parts)
        if whole.data_ptr() != parts[0].data_ptr():
            joined.append(tuple(whole.shape))
        return whole

    block_weights.merged = counted
    try:
        yield joined
    finally:
        block_weights.merged = merged


def model_of(config=TIED, frozen: str = "", **placement) -> TransformerLM:
    model = written_out_model(config, **placement)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    return model


def fsdp_of(model: TransformerLM, dtype: torch.dtype | None = None) -> FSDP:
    return FSDP(model, dtype, units=lambda module: isinstance(module, TransformerBlock))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int = 3) -> None:
    """On the same data on every rank: the average of equal gradients is each of them, to the bit."""
    for _ in range(n_steps):
        nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sharded(model: nn.Module, reduce_gradients: str | None) -> ShardedOptimizer:
    return ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, bucket_size_mb=0.01, reduce_gradients=reduce_gradients
    )


def values_of(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FSDP):
        return list(model.gather_full_params().values())
    return [parameter.detach() for _, parameter in model.named_parameters(remove_duplicate=False)]


def alone(**how) -> list[Tensor]:
    model = model_of(**how)
    train(model, adamw(model))
    return values_of(model)


def same(model: nn.Module, expected: list[Tensor]) -> bool:
    return all(map(torch.equal, values_of(model), expected))


FORMS = (partial(sharded, reduce_gradients=None), partial(sharded, reduce_gradients="reduce-scatter"))
FROZEN = {"frozen": "layers.1.attn.k_proj.weight"}
UNEVEN = {"config": replace(HANDOUT, d_ff=41)}
QKV, GATE_UP = (TIED.d_model + 2 * TIED.d_kv, TIED.d_model), (2 * 41, HANDOUT.d_model)


WAYS: tuple[tuple[Callable, Callable, dict[str, object], set[tuple[int, ...]]], ...] = (
    *((wrap, adamw, {}, set()) for wrap in (fsdp_of, FlatDDP, partial(BucketedDDP, bucket_size_mb=0.01))),
    *((lambda model: model, form, {}, set()) for form in FORMS),
    (FlatDDP, FORMS[0], {}, set()),
    (fsdp_of, adamw, FROZEN, set()),
    *((lambda model: model, form, FROZEN, {QKV}) for form in FORMS),
    (fsdp_of, adamw, UNEVEN, {GATE_UP}),
)
"""Wrapper, optimizer, what is special in the model, and the matrices that are then joined by a copy."""


def check_steps_are_those_of_one_process_without_copies(rank):
    for wrap, make, how, copies in WAYS:
        model = wrap(model_of(**how))
        optimizer = make(model)
        with copies_counted() as joined:
            train(model, optimizer)
        assert set(joined) == copies
        assert same(model, alone(**how))


def check_nor_are_there_copies_from_meta_or_in_a_compute_dtype(rank):
    for device, dtype in (("meta", None), ("cpu", torch.bfloat16), ("meta", torch.bfloat16)):
        model = fsdp_of(model_of(device=device), dtype)
        with copies_counted() as joined:
            train(model, adamw(model))
        assert joined == []
        assert dtype is not None or same(model, alone())


def check_merged_gradients_travel_as_they_are(rank):
    """Under FSDP the slices of what backward wrote are what is reduced: no copy in between."""
    model = fsdp_of(model_of())
    sent: list[list[Tensor]] = []

    class Watched(Reduction):
        def __init__(self, group: fsdp_gradients.ShardedGroup) -> None:
            gradients = [parameter.unsharded_param.grad for parameter in group.trainable]
            super().__init__(group)
            assert [x.data_ptr() for x in self._inputs] == [gradient.data_ptr() for gradient in gradients]
            sent.append(neighbours(gradients))

    fsdp_gradients.Reduction = Watched
    try:
        train(model, adamw(model), 1)
    finally:
        fsdp_gradients.Reduction = Reduction
    assert [sorted(map(len, runs)) for runs in sent] == [*[[1, 1, 2, 3]] * TIED.n_layers, [1]]


def check_checkpoints_are_those_of_the_reference_model(rank):
    """Neither names nor rows in files tell how parameters lay in memory."""
    model = fsdp_of(model_of())
    optimizer = adamw(model)
    train(model, optimizer)
    reference = fsdp_of(TransformerLM(TIED))
    other = adamw(reference)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        save_checkpoint(shared[0], model, optimizer, 3)
        assert load_checkpoint(shared[0], reference, other) == 3
        dist.barrier()
    assert same(reference, values_of(model))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["exp_avg"], other.state[theirs]["exp_avg"])


def check_ranks_must_agree_on_what_lies_together(rank):
    model = model_of()
    if rank.rank == 1:
        parameter = model.layers[0].ffn.w3.weight
        parameter.data = parameter.data.clone()
    message = r"differ across ranks at index 10: rank 0 has .*, in one memory with parameters \[10, 12\], rank 1 has"
    with pytest.raises(ValueError, match=message):
        sharded(model, None)


def check_blocks_must_be_units_of_fsdp(rank):
    with pytest.raises(RuntimeError, match="is read outside of its own module's call"):
        FSDP(model_of())(IDS)


test_two_ranks = pytest.mark.slow(on_each(2, checks_of(globals())))
