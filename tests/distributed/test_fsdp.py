"""FSDP against one process that trains on the whole batch: losses, gradients, parameters, precision, clipping, errors.

Worlds are started once per module; each check runs on all ranks of them and reports under its own name.
"""

import copy
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.fsdp import FSDP, clip_grad_norm_
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic
from cs336_systems.model import TransformerLM
from cs336_systems.model.transformer import TransformerBlock

from .checks import on_each, on_ranks
from .fsdp_models import Block, Blocks, Menagerie, full_gradients, same_on_all_ranks

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
ADAMW = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})


def loss_of(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), targets.flatten() % output.shape[-1])


def batches(n, n_words=11, shape=(4, 5)):
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(n_words, shape, generator=generator, device="cpu") for _ in range(n)]
    return [ids.to(torch.get_default_device()) for ids in drawn]


def own_rows(batch, rank):
    each = len(batch) // rank.world_size
    return batch[rank.rank * each : (rank.rank + 1) * each]


def train_both(rank, reference, fsdp, optimizer, n_steps, n_words, loss_function, calls=None):
    """Steps on both sides; yields the reference, its loss, ours averaged over ranks, and our gradients, each step."""
    optimizer_cls, settings = optimizer
    theirs = optimizer_cls(reference.parameters(), **settings)
    ours = optimizer_cls(fsdp.parameters(), **settings)
    for i, ids in enumerate(batches(n_steps, n_words)):
        arguments = calls(i) if calls else ()
        theirs.zero_grad()
        expected = loss_function(reference(ids, *arguments), ids)
        expected.backward()
        ours.zero_grad()
        loss = loss_function(fsdp(own_rows(ids, rank), *arguments), own_rows(ids, rank))
        loss.backward()
        fsdp.finish_gradient_synchronization()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        yield expected.detach(), mean / rank.world_size, full_gradients(fsdp)
        theirs.step()
        ours.step()


def check_parity(rank, make, optimizer, loss_function=loss_of, n_words=11, dtype=torch.float64, calls=None, **options):
    """Ten steps in which losses, gradients and parameters agree within the rounding of the dtype."""
    torch.manual_seed(0)
    reference = make().to(dtype)
    fsdp = FSDP(copy.deepcopy(reference), **options)
    # AdamW divides a gradient that is nothing but rounding, as a key's bias has it, by its own size.
    tolerance = 1e7 * torch.finfo(dtype).eps
    close = {"rtol": tolerance, "atol": tolerance}
    for expected, loss, gradients in train_both(rank, reference, fsdp, optimizer, 10, n_words, loss_function, calls):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # cross_entropy is in fp32
        for name, parameter in reference.named_parameters(remove_duplicate=False):
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, **close)
    full = fsdp.gather_full_params()
    assert list(full) == [name for name, _ in reference.named_parameters(remove_duplicate=False)]
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(full[name], parameter.detach(), **close)
    assert same_on_all_ranks(full)
    assert all(group.unsharded_bytes == 0 or group is fsdp.groups[0] for group in fsdp.groups)


def wide_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def square_loss(output, targets):
    return (output - targets[..., None]).square().mean()


def parity_of_blocks_with_sgd(rank):
    check_parity(rank, Blocks, SGD, wide_loss, units=lambda module: isinstance(module, Block))


def parity_of_blocks_with_adamw(rank):
    check_parity(rank, Blocks, ADAMW, wide_loss)


def parity_without_look_ahead_and_with_much(rank):
    check_parity(rank, Blocks, SGD, wide_loss, prefetch=0)
    check_parity(rank, Blocks, SGD, wide_loss, prefetch=3)


def parity_of_the_language_model_in_fp32(rank):
    torch.manual_seed(0)
    reference = TransformerLM(MODEL_SIZES["tiny"])
    fsdp = FSDP(copy.deepcopy(reference), units=lambda module: isinstance(module, TransformerBlock))
    for expected, loss, _ in train_both(rank, reference, fsdp, (torch.optim.SGD, {"lr": 0.1}), 3, 256, loss_of):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, whole in fsdp.gather_full_params().items():
        torch.testing.assert_close(whole, reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def parity_of_every_kind_of_parameter(rank):
    gentle = (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1})  # the losses are in the tens
    for optimizer in (gentle, ADAMW):
        check_parity(rank, Menagerie, optimizer, square_loss, calls=lambda i: (i % 3 != 1,))


def a_parameter_that_one_rank_alone_uses(rank):
    """Averages count the others as zeros, as a global batch does; what nobody uses keeps no gradient."""
    torch.manual_seed(0)
    reference = Menagerie()
    fsdp = FSDP(copy.deepcopy(reference))
    (ids,) = batches(1)
    for number in range(rank.world_size):
        (
            reference(own_rows(ids, Rank(number, 0, rank.world_size, rank.device, "")), number == 0).mean()
            / rank.world_size
        ).backward()
    fsdp(own_rows(ids, rank), rank.rank == 0).mean().backward()
    fsdp.finish_gradient_synchronization()
    for name, gradient in full_gradients(fsdp).items():
        expected = reference.get_parameter(name).grad
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, expected)


def gradients_that_no_sharded_layer_announces(rank):
    """Nothing trained is sharded: whether the layers are replicated or frozen, what is left is averaged."""
    frozen = nn.Linear(4, 4).requires_grad_(False)
    for reference in (nn.LayerNorm(4), nn.Sequential(frozen, nn.LayerNorm(4))):
        fsdp = FSDP(copy.deepcopy(reference))
        x = torch.randn(rank.world_size, 3, 4, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            reference(x).square().mean().backward()
            with fsdp.no_sync():
                fsdp(x[rank.rank]).square().mean().backward()
        fsdp.finish_gradient_synchronization()
        gradients = full_gradients(fsdp)
        for name, parameter in reference.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad)


def accumulation_equals_one_large_batch(rank):
    torch.manual_seed(0)
    reference = Menagerie().double()
    fsdp = FSDP(copy.deepcopy(reference))
    ids, more = batches(2)
    for _ in range(2):  # the second time onto gradients that are there
        (reference(ids).mean() + reference(more).mean()).backward()
        with Traffic() as log, pytest.raises(KeyError), fsdp.no_sync():
            fsdp(own_rows(ids, rank)).mean().backward()
            fsdp.finish_gradient_synchronization()
            raise KeyError
        assert log.sent
        assert all("allgather" in event.kind for event in log.sent)
        fsdp(own_rows(more, rank)).mean().backward()
        fsdp.finish_gradient_synchronization()
        for name, gradient in full_gradients(fsdp).items():
            if gradient is not None:
                torch.testing.assert_close(gradient, reference.get_parameter(name).grad)
    fsdp.zero_grad()
    with fsdp.no_sync():  # and with nothing outside
        fsdp(own_rows(ids, rank)).mean().backward()
    fsdp.finish_gradient_synchronization()
    reference.zero_grad()
    reference(ids).mean().backward()
    for name, gradient in full_gradients(fsdp).items():
        if gradient is not None:
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


def unusual_orders_of_passes(rank):
    """Backward twice through one graph; two forwards before two backwards; an abandoned forward; evaluation between."""
    torch.manual_seed(0)
    reference = Blocks().double()
    fsdp = FSDP(copy.deepcopy(reference))
    first, second = batches(2)

    def passes(model, take):
        a, b = wide_loss(model(take(first)), take(first)), wide_loss(model(take(second)), take(second))
        with torch.no_grad():
            model(take(first))
        model(take(second))
        a.backward(retain_graph=True)
        b.backward()
        a.backward()
        (wide_loss(model(take(first)), take(first)) + wide_loss(model(take(second)), take(second))).backward()

    for _ in range(2):
        passes(reference, lambda batch: batch)
        passes(fsdp, lambda batch: own_rows(batch, rank))
        fsdp.finish_gradient_synchronization()
        for name, gradient in full_gradients(fsdp).items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad)
        reference.zero_grad()
        fsdp.zero_grad()
    fsdp.eval()
    with torch.no_grad():
        torch.testing.assert_close(fsdp(first), reference(first))
    assert all(group.unsharded_bytes == 0 for group in fsdp.groups)


def a_unit_called_after_forward(rank):
    """As by code that computes the loss in chunks, outside of the model."""
    torch.manual_seed(0)
    reference = Blocks(tied=False)
    fsdp = FSDP(copy.deepcopy(reference))
    (ids,) = batches(1)
    for _ in range(3):
        for model, inner, rows in ((reference, reference, ids), (fsdp, fsdp.module, own_rows(ids, rank))):
            wide_loss(model(rows) + inner.head(inner.embedding(rows)), rows).backward()
        fsdp.finish_gradient_synchronization()
        assert all(group.unsharded_bytes == 0 for group in fsdp.groups)
    for name, gradient in full_gradients(fsdp).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


def an_error_inside_leaves_shards_in_place(rank):
    fsdp = FSDP(Blocks())
    with pytest.raises(IndexError):
        fsdp(torch.full((1, 2), 99))
    assert all(group.unsharded_bytes == 0 for group in fsdp.groups)
    wide_loss(fsdp(batches(1)[0]), batches(1)[0]).backward()
    fsdp.finish_gradient_synchronization()


class Moving(nn.Linear):
    """Takes other memory while it runs, as cuDNN's recurrent layers do by themselves."""

    def forward(self, x):
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def weights_that_a_module_moves_are_told(rank):
    with pytest.raises(RuntimeError, match="inner.weight was moved to other memory while its module ran"):
        FSDP(nn.ModuleDict({"inner": Moving(4, 4)}), units=None).module["inner"](torch.ones(2, 4))


def half_precision_equals_the_same_arithmetic_in_one_process(rank):
    """Weights in bf16, a gradient per rank, its average, and the update in fp32: the same bits for two ranks."""
    torch.manual_seed(0)
    reference = TransformerLM(MODEL_SIZES["tiny"])
    fsdp = FSDP(copy.deepcopy(reference), torch.bfloat16)
    assert {p.dtype for p in fsdp.parameters()} == {torch.float32}
    ours = torch.optim.AdamW(fsdp.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for ids in batches(3, 256):
        halves = []
        for number in range(rank.world_size):
            low = copy.deepcopy(reference).to(torch.bfloat16)
            rows = own_rows(ids, Rank(number, 0, rank.world_size, rank.device, ""))
            loss_of(low(rows), rows).backward()
            halves.append([p.grad.float() for p in low.parameters()])
        for parameter, *parts in zip(reference.parameters(), *halves, strict=True):
            parameter.grad = sum(parts) / rank.world_size
        output = fsdp(own_rows(ids, rank))
        assert output.dtype == torch.bfloat16
        loss_of(output, own_rows(ids, rank)).backward()
        fsdp.finish_gradient_synchronization()
        assert {p.grad.dtype for p in fsdp.parameters()} == {torch.float32}
        ours.step()
        theirs.step()
        ours.zero_grad()
    for name, whole in fsdp.gather_full_params().items():
        assert torch.equal(whole, reference.get_parameter(name)), name
    low = FSDP(nn.Linear(4, 4), torch.bfloat16, reduce_dtype=torch.bfloat16)
    with Traffic() as log:
        low(torch.rand(2, 4)).sum().backward()  # a floating-point input is cast
        low.finish_gradient_synchronization()
    assert [event.dtype for event in log.sent] == [torch.bfloat16] * 3 + [torch.float32]
    (group,) = low.groups
    group.gather()
    places = {tensor.untyped_storage().data_ptr() for tensor in (group._unsharded, *group._sent)}
    assert len(places) == 1  # rows are cast into the whole, in no memory of their own
    group.free()


def clipping_bites(rank):
    torch.manual_seed(0)
    reference = Menagerie()
    fsdp = FSDP(copy.deepcopy(reference))
    (ids,) = batches(1)
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        for share in (0.5, 2.0):
            reference.zero_grad()
            square_loss(reference(ids), ids).backward()
            fsdp.zero_grad()
            square_loss(fsdp(own_rows(ids, rank)), own_rows(ids, rank)).backward()
            fsdp.finish_gradient_synchronization()
            expected = nn.utils.get_total_norm(
                [p.grad for p in reference.parameters() if p.grad is not None], norm_type
            )
            before = full_gradients(fsdp)
            with Traffic() as log:
                norm = clip_grad_norm_(fsdp, share * expected.item(), norm_type)
            assert [(event.kind, event.n_bytes) for event in log.sent] == [("allreduce", 4)]
            torch.testing.assert_close(norm, expected)
            after = full_gradients(fsdp)
            scale = min(1.0, share)
            for name, gradient in after.items():
                if gradient is not None:
                    torch.testing.assert_close(gradient, before[name] * scale)
            remaining = nn.utils.get_total_norm([g for g in after.values() if g is not None], norm_type)
            torch.testing.assert_close(remaining, expected * scale)
    with pytest.raises(ValueError, match="max_norm and norm_type must be positive, got 0.0 and 2.0"):
        clip_grad_norm_(fsdp, 0.0)


def ranks_start_from_rank_0(rank):
    torch.manual_seed(rank.rank)
    fsdp = FSDP(Menagerie())
    torch.manual_seed(0)
    for name, whole in Menagerie().named_parameters():
        assert torch.equal(fsdp.gather_full_params()[name], whole.detach()), name
    assert same_on_all_ranks(dict(fsdp.named_buffers()))


def fill_with_ones(module):
    for parameter in module.parameters():
        nn.init.ones_(parameter)


def a_model_from_meta_is_never_whole(rank):
    """Equal to the seeded model of one process, and no more of it at once than a block and the tied embedding."""
    for make in (
        lambda device: TransformerLM(MODEL_SIZES["tiny"], device=device),
        lambda device: Blocks(n_blocks=2, device=device),
    ):
        torch.manual_seed(5)
        reference = make("cpu")
        torch.manual_seed(5)
        fsdp = FSDP(make("meta"), units=lambda module: isinstance(module, (TransformerBlock, Block)), device="cpu")
        full = fsdp.gather_full_params()
        if isinstance(reference, TransformerLM):  # its constructor draws in the order of its modules
            assert all(torch.equal(full[name], p.detach()) for name, p in reference.named_parameters())
        ids = batches(1)[0]
        assert torch.isfinite(fsdp(ids)).all()
        assert full.keys() == dict(reference.named_parameters(remove_duplicate=False)).keys()
    seen, peak = [], [0]

    def watched(module):
        seen.extend(weakref.ref(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() > 1)
        live = {id(parameter): parameter.numel() for ref in seen if (parameter := ref()) is not None}
        peak[0] = max(peak[0], sum(live.values()))
        module.reset_parameters()

    shell = Blocks(n_blocks=3, device="meta")
    FSDP(shell, units=lambda module: isinstance(module, Block), initialise=watched, device="cpu")
    assert peak[0] == 11 * 7 + 2 * 3 * 7 * 7  # the tied embedding and one block
    filled = FSDP(nn.Linear(3, 3, device="meta"), initialise=fill_with_ones, device="cpu")
    assert torch.equal(filled.gather_full_params()["weight"], torch.ones(3, 3))
    with pytest.raises(ValueError, match="Pair is on meta and has no reset_parameters"):
        with torch.device("meta"):
            shell = Menagerie().pair
        FSDP(shell, device="cpu")


def bad_arguments_are_told(rank):
    for arguments, options, message in (
        ((nn.Linear(2, 2),), {"prefetch": -1}, "prefetch must not be negative, got -1"),
        ((nn.Linear(2, 2), torch.int8), {}, "compute_dtype must be a floating-point dtype, got torch.int8"),
        ((nn.ReLU(),), {}, "ReLU has no parameters to shard"),
        ((nn.Linear(2, 2 + rank.rank),), {}, "differ"),
    ):
        with pytest.raises(ValueError, match=message):
            FSDP(*arguments, **options)
    with pytest.raises(ValueError, match="cannot be moved or cast"):
        FSDP(nn.Linear(2, 2)).to(torch.bfloat16)


ON_TWO = [
    parity_of_blocks_with_sgd,
    parity_of_blocks_with_adamw,
    parity_without_look_ahead_and_with_much,
    parity_of_the_language_model_in_fp32,
    parity_of_every_kind_of_parameter,
    a_parameter_that_one_rank_alone_uses,
    gradients_that_no_sharded_layer_announces,
    accumulation_equals_one_large_batch,
    unusual_orders_of_passes,
    a_unit_called_after_forward,
    an_error_inside_leaves_shards_in_place,
    weights_that_a_module_moves_are_told,
    half_precision_equals_the_same_arithmetic_in_one_process,
    clipping_bites,
    ranks_start_from_rank_0,
    a_model_from_meta_is_never_whole,
    bad_arguments_are_told,
]
ON_FOUR = [parity_of_blocks_with_sgd, parity_of_every_kind_of_parameter]
ON_ONE = [parity_of_blocks_with_adamw]


test_on_two_ranks = on_each(2, ON_TWO)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "checks"), [(4, ON_FOUR), (1, ON_ONE)])
def test_on_four_ranks_and_on_one(world_size, checks):
    for check in checks:
        on_ranks(check, world_size)
