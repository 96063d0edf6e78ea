"""Users do more with a module under FSDP than train it: they scale losses, clip, save, load, assign, hook, copy."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.harness.traffic import Traffic

from .checks import on_each
from .fsdp_models import Block, Blocks, Menagerie, full_gradients, sharded


def rows_of(rank, seed=1, shape=(4, 5)):
    """This rank's half of seeded ids below 11."""
    ids = torch.randint(11, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return ids.chunk(rank.world_size)[rank.rank].to(rank.device)


def backward(fsdp, ids, *arguments):
    fsdp(ids, *arguments).float().square().mean().backward()


def overflowing_rows_make_all_ranks_skip(rank):
    """Only the last row's gradient is infinite, and only the last rank holds that row."""
    for optimizer_cls, options in ((torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True})):
        reference, fsdp = sharded(lambda: nn.Linear(4, 4, bias=False), dtype=torch.float32)
        ours = optimizer_cls(fsdp.parameters(), lr=0.1, **options)
        theirs = optimizer_cls(reference.parameters(), lr=0.1, **options)
        scaler, alone = (torch.amp.GradScaler(rank.device.type, init_scale=1024.0) for _ in range(2))
        for weights in ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 3e38], [1.0, 2.0, 3.0, 4.0]):
            for model, optimizer, its_scaler in ((reference, theirs, alone), (fsdp, ours, scaler)):
                optimizer.zero_grad()
                its_scaler.scale((model(torch.ones(2, 4)).sum(0) @ torch.tensor(weights)).sum()).backward()
            theirs_kept = copy.deepcopy(reference.weight)
            with Traffic() as log:
                scaler.step(ours)
                scaler.update()
            assert [(event.kind, event.n_bytes) for event in log.sent] == [("allreduce", 4)]
            alone.step(theirs)
            alone.update()
            assert torch.equal(theirs_kept, reference.weight) == (3e38 in weights)
            assert scaler.get_scale() == alone.get_scale()
            torch.testing.assert_close(fsdp.gather_full_params()["weight"], reference.weight.detach())
        with Traffic() as log:
            ours.step()
        assert log.sent == []


def norms_of_one_ranks_rows_are_refused(rank):
    fsdp = FSDP(Blocks())
    backward(fsdp, rows_of(rank))
    before = full_gradients(fsdp)
    for take in (
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 1e-3),
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 1e-3, foreach=True),
        lambda: fsdp.module.embedding.weight.grad.mul_(1).norm(),
    ):
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(fsdp"):
            take()
    torch.testing.assert_close(full_gradients(fsdp), before, rtol=0, atol=0)


def gradients_are_tensors_in_every_other_respect(rank):
    fsdp = FSDP(nn.Linear(6, 4, bias=False))
    backward(fsdp, torch.rand(2, 6))
    parameter = fsdp.module.weight
    rows = parameter.grad.detach()
    assert type(rows) is type(parameter.grad * 2) is torch.Tensor
    file = io.BytesIO()
    torch.save(parameter.grad, file)
    file.seek(0)
    for same in (copy.deepcopy(parameter.grad), torch.load(file), parameter.grad.clone(), parameter.grad.cpu()):
        assert torch.equal(same, rows)
    for optimizer_cls in (torch.optim.Adam, torch.optim.Adafactor):
        optimizer = optimizer_cls([parameter])
        optimizer.step()
        states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        assert {type(value) for value in states} == {torch.Tensor}
    nn.utils.clip_grad_value_([parameter], 0.0)
    assert not rows.any()


class Encoder(nn.Module):
    """Ids (batch, seq) -> (batch, seq, 6), by a method that is not ``forward``; its vectors stand in several units."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def encode(self, ids):
        return self.linear(self.norm(self.embedding(ids)))

    def forward(self, ids):
        return self.encode(ids) * self.scale


def methods_of_the_module_inside_use_the_latest_values(rank):
    torch.manual_seed(0)
    fsdp, ids = FSDP(Encoder(), torch.bfloat16), rows_of(rank)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    for _ in range(3):
        with torch.no_grad():
            low = Encoder()
            low.load_state_dict(fsdp.gather_full_params())
            low.to(torch.bfloat16)
            assert torch.equal(fsdp.module.encode(ids), low.encode(ids))
            assert torch.equal(fsdp.module(ids), low(ids))
            assert torch.equal(fsdp(ids), low(ids))
        backward(fsdp, ids)
        optimizer.step()
        optimizer.zero_grad()


def state_dicts_are_of_whole_tensors(rank):
    for make in (Blocks, Menagerie):
        torch.manual_seed(0)
        fsdp = FSDP(make())
        full, shown, plain = fsdp.gather_full_params(), fsdp.state_dict(), make().state_dict()
        assert list(shown) == [f"module.{name}" for name in plain]
        for name, whole in full.items():
            tensor = shown[f"module.{name}"]
            assert torch.equal(tensor.full_tensor() if whole.dim() > 1 else tensor, whole), name
        fsdp.module.load_state_dict(plain)  # every rank takes its rows of rank-equal whole tensors
        other = FSDP(make())
        other.load_state_dict(shown)  # which share memory with the shards, so these are the values just loaded
        for loaded in (fsdp, other):
            for name, whole in loaded.gather_full_params().items():
                assert torch.equal(whole, plain[name]), name
    part = fsdp.module.twice.state_dict()
    assert torch.equal(part["weight"].full_tensor(), plain["twice.weight"])
    assert fsdp.state_dict(keep_vars=True)["module.twice.weight"] is fsdp.module.twice.weight


def state_dicts_of_other_tensors_are_refused(rank):
    fsdp = FSDP(Blocks())
    before = fsdp.gather_full_params()
    with pytest.raises(ValueError, match="assign=True"):
        fsdp.load_state_dict(fsdp.state_dict(), assign=True)
    rows = {name: p.detach() for name, p in fsdp.module.named_parameters(remove_duplicate=False)}
    for wrong, message in ((rows, r"blocks.0.up.weight .*\(21, 7\), got \(1?[01], 7\)"), ({}, "embedding.weight")):
        with pytest.raises(RuntimeError, match=message):
            fsdp.module.load_state_dict(wrong)
    assert all(torch.equal(whole, before[name]) for name, whole in fsdp.gather_full_params().items())


def data_that_is_assigned_counts(rank):
    """As long as it is like the rows; under FSDP, a parameter is what it was made."""
    x = torch.rand(2, 5)
    for compute_dtype in (None, torch.bfloat16):
        reference, fsdp = sharded(lambda: Block(5), compute_dtype, dtype=torch.float32)
        for value in (0, 1):
            for parameter in (*fsdp.parameters(), *reference.parameters()):
                parameter.data = torch.full_like(parameter, value)
            assert all(whole.eq(value).all() for whole in fsdp.gather_full_params().values())
        assert torch.equal(fsdp(x), reference.to(compute_dtype)(x.to(compute_dtype)))
    for wrong in (torch.zeros(15, 5), torch.zeros(fsdp.module.up.weight.shape, dtype=torch.float64)):
        fsdp = FSDP(Block(5))
        fsdp.module.up.weight.data = wrong
        with pytest.raises(RuntimeError, match="up.weight.data was set"):
            fsdp(x)
    fsdp = FSDP(Block(5))
    fsdp.module.up.weight = nn.Parameter(torch.zeros(15, 5))
    with pytest.raises(RuntimeError, match="up.weight was added or replaced"):
        fsdp(x)


def hooks_see_averages(rank):
    """On every parameter that some rank has a gradient of, whether or not it has memory or a use on this one."""
    for make, compute_dtype, here in ((Menagerie, None, (rank.rank == 0,)), (Blocks, torch.bfloat16, ())):
        torch.manual_seed(0)
        fsdp = FSDP(make(), compute_dtype)
        name_of = {parameter.sharded_param: parameter.names[0] for parameter in fsdp.managed_parameters()}
        seen = {}

        def note(parameter, seen=seen, name_of=name_of):
            seen.setdefault(name_of[parameter], []).append(parameter.grad.clone())

        handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in fsdp.parameters()]
        with fsdp.no_sync():
            backward(fsdp, rows_of(rank))
        assert seen == {}
        backward(fsdp, rows_of(rank), *here)
        expected = {name: p.grad for p, name in name_of.items() if p.grad is not None}
        assert seen.keys() == expected.keys()
        for name, gradients in seen.items():
            assert len(gradients) == 1
            assert torch.equal(gradients[0], expected[name].detach()), name
        for handle in handles:
            handle.remove()
        backward(fsdp, rows_of(rank))
        assert {len(gradients) for gradients in seen.values()} == {1}
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        fsdp.module.embedding.weight.register_hook(print)
    hooked = nn.Linear(2, 2)
    hooked.bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match="bias has gradient hooks"):
        FSDP(hooked)


def copies_are_refused(rank):
    for module in (Blocks(), nn.LayerNorm(4)):
        fsdp = FSDP(module)
        for copied, take in (
            *((fsdp, take) for take in (copy.copy, copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO()))),
            *((fsdp.module, take) for take in (copy.deepcopy, pickle.dumps)),
        ):
            with pytest.raises(RuntimeError, match="cannot be copied or pickled under FSDP"):
                take(copied)


def sparse_gradients_are_refused(rank):
    fsdp = FSDP(nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="0.weight has a sparse gradient"):
        backward(fsdp, rows_of(rank))


def batch_norms_keep_the_dtype_of_their_averages(rank):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    for units in (None, lambda module: isinstance(module, nn.Sequential)):
        fsdp = FSDP(copy.deepcopy(reference), torch.bfloat16, units=units)
        low = copy.deepcopy(reference).to(torch.bfloat16)
        low[1].float()
        x = torch.rand(8, 6)
        output = fsdp(x)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, low(x.bfloat16()))
        assert torch.equal(fsdp.module[1].running_var, low[1].running_var)
        output.float().square().mean().backward()
        assert {p.grad.dtype for p in fsdp.parameters()} == {torch.float32}


def whole_matrices_go_without_pythons_collector(rank):
    model = Blocks()
    whole = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() > 1]
    gc.collect()
    gc.disable()
    try:
        fsdp = FSDP(model)
        assert whole
        assert all(parameter() is None for parameter in whole)
        del fsdp
    finally:
        gc.enable()


CHECKS = [
    whole_matrices_go_without_pythons_collector,
    overflowing_rows_make_all_ranks_skip,
    norms_of_one_ranks_rows_are_refused,
    gradients_are_tensors_in_every_other_respect,
    methods_of_the_module_inside_use_the_latest_values,
    state_dicts_are_of_whole_tensors,
    state_dicts_of_other_tensors_are_refused,
    data_that_is_assigned_counts,
    hooks_see_averages,
    copies_are_refused,
    sparse_gradients_are_refused,
    batch_norms_keep_the_dtype_of_their_averages,
]

test_on_two_ranks = on_each(2, CHECKS)
