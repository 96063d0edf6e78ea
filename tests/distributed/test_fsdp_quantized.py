"""Weights that travel in eight bits under FSDP: the bits are those of quantizing the whole, the bytes half as many."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.blocks import REFERENCE, block_ops, block_products, write_out
from cs336_systems.blocks.weights import BlockWeights
from cs336_systems.config import MODEL_SIZES, Recipe
from cs336_systems.distributed import FSDP
from cs336_systems.distributed.fsdp_quantized import QuantizedGroup, QuantizedTravel
from cs336_systems.harness.traffic import Traffic
from cs336_systems.kernels.quantize_reference import PartsQuantizer, absmax, quantize, transpose_bytes
from cs336_systems.model import TransformerBlock, TransformerLM
from cs336_systems.training.backward_update import BackwardUpdate
from cs336_systems.training.parallel import _travel
from tests.kernels.interpreter import interpret_without_gpu

from .checks import on_each, on_gpus, on_ranks

CONFIG = replace(
    MODEL_SIZES["tiny"], name="sixteens", d_model=64, d_ff=96, n_heads=4, n_kv_heads=2, vocab_size=96, qkv_bias=True
)
E4M3 = Recipe("e4m3")
IDS = torch.arange(2 * 16).view(2, 16) * 7 % 96


def model_of(
    recipe: Recipe = E4M3, config=CONFIG, dtype=torch.bfloat16, kernels: str = "reference", **placement
) -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(config, dtype=dtype, **placement)
    ops = REFERENCE if kernels == "reference" else block_ops(kernels, "flash")
    write_out(model, ops, "products", block_products(kernels, recipe))
    return model


def fsdp_of(model: TransformerLM, *, travels: bool = True, **how) -> FSDP:
    quantized = _travel if travels else None
    return FSDP(model, units=lambda module: isinstance(module, TransformerBlock), quantized=quantized, **how)


def train(model: nn.Module, n_steps: int = 3) -> list[Tensor]:
    """Losses; on the same data on every rank, where the average of equal gradients is each of them, to the bit."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    ids = IDS.to(next(model.parameters()).device)
    for _ in range(n_steps):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def values_of(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FSDP):
        return list(model.gather_full_params().values())
    return [parameter.detach() for parameter in model.parameters()]


def quantized_groups(model: FSDP) -> list[QuantizedGroup]:
    return [group for group in model.groups if isinstance(group, QuantizedGroup)]


def the_steps_are_those_of_one_rank(rank):
    """They are also where the model comes from meta, nothing is gathered ahead, or shards are 8 rows of 48."""
    narrow = replace(CONFIG, d_model=48, d_ff=80, n_heads=3, n_kv_heads=1)
    for config, placement, how in ((CONFIG, {"device": "meta"}, {}), (narrow, {}, {"prefetch": 0})):
        alone, model = model_of(config=config), fsdp_of(model_of(config=config, **placement), **how)
        assert len(quantized_groups(model)) == config.n_layers
        assert equal(train(model), train(alone))
        assert equal(values_of(model), values_of(alone))


def fp32_weights_are_cast_before_they_travel(rank):
    kinds = [fsdp_of(model_of(dtype=torch.float32), travels=t, compute_dtype=torch.bfloat16) for t in (True, False)]
    assert [len(quantized_groups(model)) for model in kinds] == [CONFIG.n_layers, 0]
    assert equal(*map(train, kinds))
    assert equal(*map(values_of, kinds))


def what_arrives_is_the_whole_quantized(rank):
    whole, model = (model_of(device=rank.device) for _ in range(2))
    model = fsdp_of(model)
    model._order._quantized_rows.renew()
    for block, group in zip(whole.layers, quantized_groups(model), strict=True):
        group.gather()
        group.wait()
        weights = BlockWeights.of(dict(block.named_parameters()))
        for name in ("qkv", "output", "gate_up", "down"):
            weight = getattr(weights, name)
            expected = quantize(weight, absmax(weight), torch.float8_e4m3fn, transposed=True)
            for transposed, q in ((False, expected.q), (True, expected.q_t)):
                values, scale = group.matrix(name, transposed)
                assert values.data_ptr() % 16 == scale.data_ptr() % 16 == 0, name
                assert torch.equal(values.view(torch.uint8), q.view(torch.uint8)), name
                assert torch.equal(scale, expected.inverse_scale)
        group.free()
        assert group.unsharded_bytes == 0


def a_nan_on_one_rank_is_every_ranks(rank):
    model = fsdp_of(model_of())
    group = quantized_groups(model)[0]
    if rank.rank == 1:
        with torch.no_grad():
            group.parameters[0].sharded_param[0, 0] = -torch.tensor(float("nan"))
    model._order._quantized_rows.renew()
    group.gather()
    group.wait()
    assert torch.isnan(group.matrix("qkv", False)[1]) and torch.isfinite(group.matrix("down", False)[1])
    group.free()


def rows_are_quantized_once_until_some_rank_changes_its_own(rank):
    model, alone = fsdp_of(model_of()), model_of()
    own = quantized_groups(model)[0].parameters[0]
    whole, rows, n_quantized = dict(alone.named_parameters())[own.names[0]], model._order._quantized_rows, []
    rows.renew = lambda renew=rows.renew: n_quantized.append(1) or renew()

    def losses() -> list[Tensor]:
        """Those of two micro-batches."""
        found: list[Tensor] = []
        for each in (model, alone, model, alone):
            loss = nn.functional.cross_entropy(each(IDS).flatten(0, 1).float(), IDS.flatten())
            loss.backward()
            found.append(loss)
        assert torch.equal(found[0], found[1]) and equal(found[:2], found[2:])
        return found

    before = losses()
    assert len(n_quantized) == 1
    with torch.no_grad():
        whole[whole.shape[0] // rank.world_size] *= 3
        if rank.rank == 1:
            own.sharded_param[0] *= 3
    assert not equal(losses(), before)
    assert len(n_quantized) == 2  # on all ranks
    train(model, 1)
    model(IDS)
    assert len(n_quantized) == 3  # its optimizer has changed all


def rows_that_a_kernel_updates_under_backward_are_quantized_anew(rank):
    """The kernel is interpreted where there is no GPU."""
    interpret_without_gpu()
    from cs336_systems.training.fused_adamw import FusedAdamW  # brings Triton along

    config, ids, found = replace(CONFIG, n_layers=1), IDS.to(rank.device), []
    for under_backward in (True, False):
        model = fsdp_of(model_of(config=config, device=rank.device), travels=under_backward)
        optimizer = FusedAdamW(model.parameters(), lr=0.01)
        update = BackwardUpdate(model, optimizer) if under_backward else None
        losses = []
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
            loss.backward()
            losses.append(loss.detach())
            if update is not None:
                update.finish()
            else:
                optimizer.step()
                optimizer.zero_grad()
        found.append([*losses, *values_of(model)])
    assert equal(*found)


def half_the_bytes_travel(rank):
    n_bytes = []
    for travels in (True, False):
        with Traffic() as log:
            train(fsdp_of(model_of(), travels=travels), 1)
        n_bytes.append(Counter())
        for event in log.sent:
            if event.kind == "_allgather_base":
                n_bytes[-1][event.dtype] += event.n_bytes
    ours, whole = n_bytes
    assert set(whole) == {torch.bfloat16}
    assert whole[torch.bfloat16] - ours[torch.bfloat16] == 2 * ours[torch.uint8] > 0


def others_travel_as_they_are_stored(rank):
    row = fsdp_of(model_of(Recipe("e4m3", scaling="row")))
    skipped = fsdp_of(model_of(Recipe("e4m3", skip_first=1)))
    assert [len(quantized_groups(model)) for model in (row, skipped)] == [0, CONFIG.n_layers - 1]


def kernels_give_the_same_steps(rank):
    """On GPUs, of fused kernels, over NCCL and on streams of their own."""
    for config in (CONFIG, replace(CONFIG, d_model=256, n_heads=8, n_kv_heads=1, d_ff=512)):
        fused = {"config": config, "kernels": "fused", "device": rank.device}
        kinds = [fsdp_of(model_of(**fused), travels=travels) for travels in (True, False)]
        assert [len(quantized_groups(model)) for model in kinds] == [config.n_layers, 0]
        assert equal(*map(train, kinds))
        assert equal(*map(values_of, kinds))


CHECKS = (
    the_steps_are_those_of_one_rank,
    fp32_weights_are_cast_before_they_travel,
    what_arrives_is_the_whole_quantized,
    a_nan_on_one_rank_is_every_ranks,
    rows_are_quantized_once_until_some_rank_changes_its_own,
    half_the_bytes_travel,
    others_travel_as_they_are_stored,
)
if not torch.cuda.is_available():
    CHECKS += (rows_that_a_kernel_updates_under_backward_are_quantized_anew,)
ON_GPUS = (
    what_arrives_is_the_whole_quantized,
    kernels_give_the_same_steps,
    rows_that_a_kernel_updates_under_backward_are_quantized_anew,
)
test_two_ranks = pytest.mark.slow(on_each(2, CHECKS))


@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_gpus(world_size, device):
    for check in ON_GPUS:
        on_ranks(check, world_size, device=device)


def test_a_unit_with_other_matrices_or_uneven_shards_travels_as_stored():
    travel = QuantizedTravel(
        {"one": ("a", "b")}, torch.float8_e4m3fn, PartsQuantizer, transpose_bytes, lambda matrix: None
    )
    a, b = torch.empty(32, 64), torch.empty(64, 64)
    assert travel.serves([a, b], 2) and travel.serves([a, b], 4)
    assert not travel.serves([a, b, b], 2)
    assert not travel.serves([a, b], 3)
    assert not travel.serves([a, torch.empty(32, 8)], 32)
