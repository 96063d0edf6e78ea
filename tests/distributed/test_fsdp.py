"""FSDP against one process, beyond the parity matrix: every kind of parameter and of pass, clipping, meta, errors.

Each check runs on two ranks, which are started once, and is a test.
"""

import copy
import weakref

import pytest
import torch
from torch import nn

from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.fsdp import FSDP, clip_grad_norm_
from cs336_systems.harness.traffic import Traffic
from cs336_systems.model import TransformerLM

from .checks import checks_of, on_each
from .fsdp_models import (
    CLOSE,
    Block,
    Blocks,
    Menagerie,
    Pair,
    batches,
    by_blocks,
    check_gradients,
    loss_of,
    own_rows,
    sharded,
    whole_groups,
    zero_grad,
)
from .toys import same_on_all_ranks


def square_loss(output, targets):
    return (output - targets[..., None]).square().mean()


def check_every_kind_of_parameter_is_trained(rank):
    """Calls differ in what they use; the optimizer sees shards."""
    for make, loss, used, options in (
        (Menagerie, square_loss, ((True,), (False,), (True,)), {}),
        (Menagerie, square_loss, ((), (), ()), {"units": lambda module: isinstance(module, Menagerie)}),
        (Blocks, loss_of, ((), (), ()), {"units": by_blocks, "prefetch": 0}),
        (Blocks, loss_of, ((), (), ()), {"prefetch": 3}),
    ):
        reference, fsdp = sharded(make, **options)
        theirs, ours = (torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (reference, fsdp))
        for ids, arguments in zip(batches(3), used, strict=True):
            zero_grad(reference, fsdp)
            loss(reference(ids, *arguments), ids).backward()
            loss(fsdp(own_rows(ids, rank), *arguments), own_rows(ids, rank)).backward()
            check_gradients(fsdp, reference, rtol=1e-9, atol=1e-9)
            theirs.step()
            ours.step()
        full = fsdp.gather_full_params()
        assert list(full) == [name for name, _ in reference.named_parameters(remove_duplicate=False)]
        for name, whole in full.items():
            torch.testing.assert_close(whole, reference.get_parameter(name).detach(), rtol=1e-9, atol=1e-9)
        assert same_on_all_ranks(full.values())


def check_passes_come_in_unusual_orders(rank):
    """Backward twice through one graph; two forwards before two backwards; an abandoned forward; evaluation between."""
    reference, fsdp = sharded(Blocks)
    first, second = batches(2)

    def passes(model, take):
        a, b = (loss_of(model(take(ids)), take(ids)) for ids in (first, second))
        with torch.no_grad():
            model(take(first))
        model(take(second))
        a.backward(retain_graph=True)
        b.backward()
        a.backward()

    for _ in range(2):
        zero_grad(reference, fsdp)
        passes(reference, lambda batch: batch)
        passes(fsdp, lambda batch: own_rows(batch, rank))
        check_gradients(fsdp, reference)
    with torch.no_grad():
        torch.testing.assert_close(fsdp(first), reference(first), **CLOSE)
    assert not whole_groups(fsdp)


def check_a_unit_is_called_after_forward(rank):
    """Code that computes the loss in chunks, outside of the model, does so."""
    reference, fsdp = sharded(lambda: Blocks(tied=False))
    (ids,) = batches(1)
    for _ in range(3):
        for model, inner, rows in ((reference, reference, ids), (fsdp, fsdp.module, own_rows(ids, rank))):
            loss_of(model(rows) + inner.head(inner.embedding(rows)), rows).backward()
        check_gradients(fsdp, reference)


def check_a_forward_changes_course(rank):
    """Blocks come in another order than the last time: look-ahead guesses wrong, and results do not notice."""
    reference, fsdp = sharded(Blocks)
    (ids,) = batches(1)
    whole = {model: list(model.blocks) for model in (reference, fsdp.module)}
    for order in ([0, 1, 2, 3], [3, 1], [0, 1, 2, 3], [2]):
        zero_grad(reference, fsdp)
        for model, rows in ((reference, ids), (fsdp.module, own_rows(ids, rank))):
            model.blocks = nn.ModuleList(whole[model][i] for i in order)
            loss_of((fsdp if model is fsdp.module else model)(rows), rows).backward()
            model.blocks = nn.ModuleList(whole[model])
        check_gradients(fsdp, reference)


class Moving(nn.Linear):
    """Takes other memory while it runs, as cuDNN's recurrent layers do by themselves."""

    def forward(self, x):
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def check_errors_inside_a_forward_leave_shards_in_place(rank):
    fsdp = FSDP(Blocks())
    (ids,) = batches(1)
    with pytest.raises(IndexError):
        fsdp(ids + 99)
    assert not whole_groups(fsdp)
    loss_of(fsdp(ids), ids).backward()
    with pytest.raises(RuntimeError, match=r"inner\.weight"):
        FSDP(nn.ModuleDict({"inner": Moving(4, 4)})).module["inner"](torch.ones(2, 4))


def check_clipping_sends_two_numbers(rank):
    fsdp = FSDP(Menagerie())
    (ids,) = batches(1)
    square_loss(fsdp(ids), ids).backward()
    with Traffic() as log:
        clip_grad_norm_(fsdp, 1.0)
    assert [(event.kind, event.n_bytes) for event in log.sent] == [("allreduce", 16)]
    torch.manual_seed(0)
    alone, x = nn.Linear(4, 6).double(), torch.randn(3, 4, dtype=torch.float64)
    wide = FSDP(copy.deepcopy(alone))
    for module in (alone, wide):
        module(x).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    torch.testing.assert_close(clip_grad_norm_(wide, 1.0), norm, rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match=r"0\.0"):
        clip_grad_norm_(fsdp, 0.0)
    with pytest.raises(ValueError, match="got Menagerie"):
        clip_grad_norm_(Menagerie(), 1.0)


def check_norms_of_bf16_gradients_are_wide(rank):
    torch.manual_seed(0)
    fsdp = FSDP(nn.Linear(300, 300).bfloat16())
    fsdp(torch.randn(4, 300).bfloat16()).float().square().mean().backward()
    squares = sum(p.sharded_param.grad.detach().double().square().sum() for p in fsdp.managed_parameters())
    torch.distributed.all_reduce(squares)
    bias = fsdp.module.bias.grad.detach().double().square().sum() if fsdp.replicated else 0.0
    exact = (squares - bias * (rank.world_size - 1)).sqrt()  # a vector is whole on both ranks
    torch.testing.assert_close(clip_grad_norm_(fsdp, 1.0).double(), exact, rtol=1e-6, atol=0.0)


def check_ranks_start_from_rank_0(rank):
    torch.manual_seed(rank.rank)
    fsdp = FSDP(Menagerie())
    assert same_on_all_ranks([*fsdp.gather_full_params().values(), *fsdp.buffers()])


def check_a_model_from_meta_is_never_whole(rank):
    """It equals the seeded model of one process, and no more of it is there at once than a block and the embedding."""
    torch.manual_seed(5)
    reference = TransformerLM(MODEL_SIZES["tiny"], device="cpu")
    torch.manual_seed(5)
    fsdp = FSDP(TransformerLM(MODEL_SIZES["tiny"], device="meta"), units=by_blocks, device="cpu")
    full = fsdp.gather_full_params()
    assert all(torch.equal(full[name], p.detach()) for name, p in reference.named_parameters())
    seen, peak = [], [0]

    def watched(module, reset):
        seen.extend(weakref.ref(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() > 1)
        live = {id(parameter): parameter.numel() for ref in seen if (parameter := ref()) is not None}
        peak[0] = max(peak[0], sum(live.values()))
        reset(module)

    model = Blocks(n_blocks=3, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        for kind in (nn.Linear, nn.Embedding):
            patch.setattr(kind, "reset_parameters", lambda own, reset=kind.reset_parameters: watched(own, reset))
        tied = FSDP(model, units=by_blocks, device="cpu")
    assert peak[0] == 11 * 7 + 2 * 3 * 7 * 7  # the tied embedding and one block
    assert torch.isfinite(tied(batches(1)[0])).all()
    with pytest.raises(ValueError, match="Pair is on meta"):
        FSDP(Pair().to("meta"), device="cpu")


def check_bad_arguments_are_refused(rank):
    for arguments, options, message in (
        ((nn.Linear(2, 2),), {"prefetch": -1}, "-1"),
        ((nn.Linear(2, 2),), {"prefetch": 1.5}, r"1\.5"),
        ((nn.Linear(2, 2),), {"units": "Linear"}, "'Linear'"),
        ((nn.Linear(2, 2), torch.int8), {}, "torch.int8"),
        ((nn.ReLU(),), {}, "ReLU"),
        ((nn.LazyLinear(2),), {}, "weight has no shape"),
        ((nn.Linear(2, 2 + rank.rank),), {}, "differ"),
    ):
        with pytest.raises(ValueError, match=message):
            FSDP(*arguments, **options)
    fsdp = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    fsdp.module[0].register_forward_hook(lambda *_: fsdp.module[1](torch.ones(2, 2)))
    with pytest.raises(RuntimeError, match="1 is called by 0"):
        fsdp(torch.ones(2, 2))
    with pytest.raises(ValueError, match="cannot be moved or cast"):
        FSDP(nn.Linear(2, 2)).to(torch.bfloat16)
    fsdp = FSDP(nn.Sequential(nn.Linear(2, 2)))
    assert nn.Sequential(fsdp).to(rank.device, torch.float32)[0].float() is fsdp
    fsdp.module.append(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="^1.weight was added or replaced"):
        fsdp(torch.ones(2, 2))
    fsdp = FSDP(Block(3))
    for module, name in ((nn.Sequential(fsdp), "0"), (fsdp, "FSDP"), (fsdp.module, "up")):
        with pytest.raises(ValueError, match=name + " is under FSDP already"):
            FSDP(module)


CHECKS = [
    check_every_kind_of_parameter_is_trained,
    check_passes_come_in_unusual_orders,
    check_a_unit_is_called_after_forward,
    check_a_forward_changes_course,
    check_clipping_sends_two_numbers,
]
test_on_two_ranks = on_each(2, checks_of(globals()))
