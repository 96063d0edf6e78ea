"""Users do more with a module under FSDP than train it: they scale losses, clip, save, load, assign, hook, copy."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_model_state_dict

from cs336_systems.distributed.fsdp import FSDP

from .checks import checks_of, on_each
from .fsdp_models import Blocks, Menagerie, full_gradients


def rows_of(rank, seed=1, shape=(4, 5)):
    """This rank's half of seeded ids below 11."""
    ids = torch.randint(11, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return ids.chunk(rank.world_size)[rank.rank].to(rank.device)


def backward(fsdp, ids, *arguments):
    fsdp(ids, *arguments).float().square().mean().backward()


def check_norms_of_one_ranks_rows_are_refused(rank):
    fsdp = FSDP(Blocks())
    backward(fsdp, rows_of(rank))
    before = full_gradients(fsdp)
    scaler = torch.amp.GradScaler(rank.device.type)
    scaler.scale(torch.ones(()))
    for take in (
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 1e-3),
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 1e-3, foreach=True),
        lambda: fsdp.module.embedding.weight.grad.mul_(1).norm(),
        lambda: scaler.unscale_(torch.optim.SGD(fsdp.parameters())),
        torch.optim.Adafactor(fsdp.parameters()).step,
    ):
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(fsdp"):
            take()
    torch.testing.assert_close(full_gradients(fsdp), before, rtol=0, atol=0)


def check_gradients_are_tensors_in_every_other_respect(rank):
    fsdp = FSDP(nn.Linear(6, 4, bias=False))
    backward(fsdp, torch.rand(2, 6))
    parameter = fsdp.module.weight
    rows = parameter.grad.detach()
    assert type(rows) is type(parameter.grad * 2) is torch.Tensor
    assert torch.equal(copy.deepcopy(parameter.grad), pickle.loads(pickle.dumps(parameter.grad)))
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    assert {type(each) for each in optimizer.state[parameter].values()} == {torch.Tensor}
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


def check_methods_of_the_module_inside_use_the_latest_values(rank):
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


def check_what_would_take_rows_for_the_whole_is_refused(rank):
    """State dicts, of the module inside and through torch's checkpoints, and shards in other memory."""
    fsdp = FSDP(Blocks())
    optimizer = torch.optim.AdamW(fsdp.parameters())
    before = fsdp.gather_full_params()
    for attempt in (
        fsdp.state_dict,
        lambda: fsdp.module.load_state_dict(before),
        lambda: get_optimizer_state_dict(fsdp, optimizer),
        lambda: set_model_state_dict(fsdp, before),
    ):
        with pytest.raises(RuntimeError, match=r"save_checkpoint and load_checkpoint .* gather_full_params\(\)"):
            attempt()
    assert all(torch.equal(whole, before[name]) for name, whole in fsdp.gather_full_params().items())
    fsdp.module.blocks[0].up.weight.data = fsdp.module.blocks[0].up.weight.data.clone()
    for attempt in (lambda: fsdp(rows_of(rank)), fsdp.gather_full_params):
        with pytest.raises(RuntimeError, match=r"blocks.0.up.weight.data was set under FSDP"):
            attempt()


def check_hooks_see_averages(rank):
    """On every parameter that some rank has a gradient of, whether or not it has memory or a use on this one."""
    for make, compute_dtype, here in ((Menagerie, None, (rank.rank == 0,)), (Blocks, torch.bfloat16, ())):
        torch.manual_seed(0)
        fsdp = FSDP(make(), compute_dtype)
        name_of = {parameter.sharded_param: parameter.names[0] for parameter in fsdp.managed_parameters()}
        seen = {}

        def note(parameter, seen=seen, name_of=name_of):
            seen.setdefault(name_of[parameter], []).append(parameter.grad.clone())

        for parameter in fsdp.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        with fsdp.no_sync():
            backward(fsdp, rows_of(rank))
        assert seen == {}
        backward(fsdp, rows_of(rank), *here)
        expected = {name: p.grad for p, name in name_of.items() if p.grad is not None}
        assert seen.keys() == expected.keys()
        for name, gradients in seen.items():
            assert len(gradients) == 1
            assert torch.equal(gradients[0], expected[name].detach()), name
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        fsdp.module.embedding.weight.register_hook(print)
    hooked = nn.Linear(2, 2)
    hooked.bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match="bias has gradient hooks"):
        FSDP(hooked)


def check_copies_are_refused(rank):
    fsdp = FSDP(Blocks())
    for copied in (fsdp, fsdp.module):
        for take in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                take(copied)


def check_sparse_gradients_are_refused(rank):
    fsdp = FSDP(nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="0.weight has a sparse gradient"):
        backward(fsdp, rows_of(rank))


def check_whole_matrices_go_without_pythons_collector(rank):
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


test_on_two_ranks = on_each(2, checks_of(globals()))
