"""A sharded optimizer whose step returns before other ranks' updates are there: nobody reads a parameter too early.

Here what other ranks update comes as late as it may: when it is waited for. So who does not wait reads that of the
step before, every time.
"""

import gc
import tempfile
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.checkpoint import load_checkpoint, save_checkpoint
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.harness.traffic import Traffic

from .checks import checks_of, on_each
from .late import late_updates
from .sharding_models import Toy, flat, train
from .test_sharded_optimizer import SCATTERED, TWO_FORMS, sharded

WIDTHS = (4, 8, 16, 32)


def layers() -> nn.Sequential:
    """Each with a bucket of its own, larger than those before it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, width, bias=False) for width in WIDTHS))


def read_first_to_last(model: nn.Sequential, rank: int) -> torch.Tensor:
    """A loss of all layers, each by itself."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    return torch.stack([layer(x).square().sum() for layer in model]).sum()


def one_step(model: nn.Sequential, optimizer: ShardedOptimizer, rank: Rank) -> None:
    read_first_to_last(model, rank.rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def each(form: str | None, model: nn.Module) -> ShardedOptimizer:
    return sharded(model, form, bucket_size_mb=64 / 1024**2)


def stepped(rank: Rank, form: str | None) -> tuple[nn.Sequential, ShardedOptimizer, torch.Tensor]:
    """A model whose updates are on their way, its optimizer, and what the parameters will be."""
    expected = layers()
    one_step(expected, each(form, expected), rank)
    model = layers()
    optimizer = each(form, model)
    optimizer.send_under_forward(model)
    with late_updates():
        one_step(model, optimizer, rank)
    assert not torch.equal(flat(model), flat(expected))  # else the checks could not fail
    return model, optimizer, flat(expected)


def check_numbers_are_those_of_a_step_that_waits(rank: Rank) -> None:
    """Also of parameters that are shared, or in none of the modules."""
    for form in TWO_FORMS:
        model, expected = Toy(), Toy()
        train(expected, sharded(expected, form), range(4), rank.world_size, rank.rank)
        optimizer = sharded(model, form)
        optimizer.send_under_forward([model.first, model.second, model.tied])
        with late_updates():
            train(model, optimizer, range(4), rank.world_size, rank.rank)
        optimizer.wait()
        assert torch.equal(flat(model), flat(expected)), form


def check_first_layers_are_sent_first(rank: Rank) -> None:
    for order in (range(4), (2, 0, 3, 1)):
        model = layers()
        optimizer = each(SCATTERED, model)
        optimizer.send_under_forward(model[i] for i in order)
        read_first_to_last(model, rank.rank).backward()
        with Traffic() as log:
            optimizer.step()
        gathered = [event.n_bytes for event in log.sent if event.kind == "_allgather_base"]
        assert gathered == [max(256, 16 * WIDTHS[i]) for i in order]  # 128 bytes for each rank at the least


def check_each_layer_waits_for_its_own(rank: Rank) -> None:
    for form in TWO_FORMS:
        model, _optimizer, expected = stepped(rank, form)
        x = torch.ones(1, 4)
        for layer in model[:2]:
            layer(x)
        n_there = 4 * sum(WIDTHS[:2])
        assert torch.equal(flat(model[:2]), expected[:n_there])
        if form is SCATTERED:  # else a rank may own all that is left
            assert not torch.equal(flat(model[2:]), expected[n_there:])
        for layer in model[2:]:
            layer(x)
        assert torch.equal(flat(model), expected)


def check_whoever_else_reads_waits(rank: Rank) -> None:
    """Who calls ``wait``, state dicts of the model, checkpoints, and who writes."""
    for form in TWO_FORMS:
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders)
            for reader in ("who waits", "state dict", "checkpoint"):
                model, optimizer, expected = stepped(rank, form)
                if reader == "who waits":
                    optimizer.wait()
                elif reader == "state dict":
                    model.state_dict()
                else:
                    save_checkpoint(folders[0], model, optimizer, 1)
                assert torch.equal(flat(model), expected), reader
            one_step(model, optimizer, rank)
            save_checkpoint(folders[0], model, optimizer, 2)
            other, its, _ = stepped(rank, form)  # has made a step less, whose updates are not to come after loading
            assert load_checkpoint(folders[0], other, its) == 2
            its.wait()
            assert torch.equal(flat(other), flat(model))
            dist.barrier()
        model, _optimizer, expected = stepped(rank, form)
        model.load_state_dict(layers().state_dict())
        read_first_to_last(model, 0)
        assert torch.equal(flat(model), flat(layers()))


def check_what_goes_leaves_nothing_behind(rank: Rank) -> None:
    """An optimizer no hooks, and the parameters updated. Without Python's collector."""
    model, optimizer, expected = stepped(rank, SCATTERED)
    gone = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        assert torch.equal(flat(model), expected)
        assert not any(layer._forward_pre_hooks or layer._state_dict_pre_hooks for layer in model)
    finally:
        gc.enable()


def check_modules_that_differ_or_are_compiled_are_refused(rank: Rank) -> None:
    model = layers()
    optimizer = each(SCATTERED, model)
    with pytest.raises(ValueError, match="differ across ranks"):
        optimizer.send_under_forward(reversed(model) if rank.rank else model)
    model[1].compile()
    with pytest.raises(ValueError, match="Linear is compiled"):
        optimizer.send_under_forward(model)


test_on_two_ranks = on_each(2, checks_of(globals()))
