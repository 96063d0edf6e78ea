"""How a step of data parallelism may go: when gradients are averages, what may come in between, and what copies do."""

import copy
import gc
import io
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.harness.traffic import Traffic

from .checks import on_gpus, on_ranks
from .replicas import averaged, backward, gradients, local_gradients, run_on_every_rung
from .test_ddp import identical_on_all_ranks
from .toys import Branches, Toy

# --- checks, each a function of a rung's constructor ---------------------------------------------------------------


def no_sync_accumulates_and_is_left_when_its_body_raises(wrap, rank):
    model = wrap(Toy())
    x, y, z = (torch.randn(3, 6) for _ in range(3))
    expected = [
        averaged(sum(parts))
        for parts in zip(
            *(local_gradients(model.module, model.module(t).square().sum()) for t in (x, y, z)), strict=True
        )
    ]
    with Traffic() as traffic, model.no_sync():
        backward(model, x)
        with model.no_sync():
            backward(model, y)
        model.finish_gradient_synchronization()
    assert traffic.sent == []
    backward(model, z)
    model.finish_gradient_synchronization()
    torch.testing.assert_close(gradients(model), expected)
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    model.zero_grad()
    backward(model, z)
    model.finish_gradient_synchronization()
    assert identical_on_all_ranks(gradients(model))


def accumulated_gradients_may_be_finished_without_another_backward(wrap, rank):
    model = wrap(Toy())
    x = torch.randn(3, 6)
    expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]
    with model.no_sync():
        backward(model, x)
    model.finish_gradient_synchronization()
    torch.testing.assert_close(gradients(model), expected)


def a_rank_without_a_backward_contributes_zeros(wrap, rank):
    model = wrap(Branches())
    x, used = torch.ones(1, 4), [0, 1, 2]
    local = local_gradients(model.module, model.module(x, used).square().sum())
    expected = [averaged(g * (rank.rank == 0)) for g in local]
    if rank.rank == 0:
        backward(model, x, used)
    model.finish_gradient_synchronization()
    torch.testing.assert_close(gradients(model), expected)
    model.zero_grad()
    model.finish_gradient_synchronization()
    assert gradients(model) == [None] * 8


def a_rank_that_runs_out_of_batches_finishes_instead(wrap, rank):
    model = wrap(Branches())
    x, used = torch.ones(1, 4), [0, 1, 2]
    for step in range(4):
        local = local_gradients(model.module, model.module(x, used).square().sum())
        has_batch = step < 2 or rank.rank == 0
        expected = [averaged(g * has_batch) for g in local]
        if has_batch:
            backward(model, x, used)
        else:
            model.finish_gradient_synchronization()
        torch.testing.assert_close(gradients(model), expected)
        model.zero_grad()


def a_step_needs_no_call_after_backward(wrap, rank):
    model, x = wrap(Toy()), torch.randn(3, 6)
    for _ in range(3):
        expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]
        backward(model, x)
        torch.testing.assert_close(gradients(model), expected)
        with Traffic() as traffic:
            model.finish_gradient_synchronization()
        assert traffic.sent == []
        torch.testing.assert_close(gradients(model), expected)
        model.zero_grad()


def a_second_backward_adds_its_average(wrap, rank):
    model = wrap(Toy())
    x, y = (torch.randn(3, 6) for _ in range(2))
    parts = [local_gradients(model.module, model.module(t).square().sum()) for t in (x, y)]
    expected = [averaged(a + b) for a, b in zip(*parts, strict=True)]
    backward(model, x)
    backward(model, y)
    torch.testing.assert_close(gradients(model), expected)
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(gradients(model), [2 * averaged(g) for g in parts[0]])


def a_backward_that_fails_is_finished_before_the_next_forward(wrap, rank):
    model, x = wrap(Toy()), torch.randn(2, 6)
    expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]

    def refuse(gradient):
        raise OverflowError("no gradient for you")

    if rank.rank == 1:
        handle = model.module.first.weight.register_hook(refuse)
        loss = model(x).square().sum()
        with pytest.raises(OverflowError):
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="leave.bias again before it had ended"):
            loss.backward()
        with pytest.raises(RuntimeError, match="the last backward failed midway: call finish_gradient_sync"):
            model(x)
        with torch.no_grad():
            model(x)
        handle.remove()
    else:
        backward(model, x)
    model.finish_gradient_synchronization()
    model.zero_grad()
    backward(model, x)
    torch.testing.assert_close(gradients(model), expected)


def two_forwards_may_come_before_their_backward(wrap, rank):
    model = wrap(Toy())
    (model(torch.randn(2, 6)) * model(torch.randn(2, 6))).sum().backward()
    model.finish_gradient_synchronization()
    assert identical_on_all_ranks(gradients(model))


def activations_may_be_checkpointed(wrap, rank):
    for reentrant in (False, True):
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model = wrap(module)
        x = torch.randn(3, 4, requires_grad=True)
        expected = [averaged(g) for g in local_gradients(module, module(x).square().sum())]
        model.module.forward = lambda x, run=module.forward, reentrant=reentrant: torch.utils.checkpoint.checkpoint(
            run, x, use_reentrant=reentrant
        )
        backward(model, x)
        model.finish_gradient_synchronization()
        torch.testing.assert_close(gradients(model), expected)


def segments_may_be_checkpointed(wrap, rank):
    for reentrant, n_checkpointed in itertools.product((False, True), (2, 3)):
        module = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def run(x, module=module, n=n_checkpointed, reentrant=reentrant):
            for i, layer in enumerate(module):
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant) if i < n else layer(x)
            return x

        model = wrap(module)
        model.module.forward = run
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            expected = [averaged(g) for g in local_gradients(module, module[2](module[1](module[0](x))).square().sum())]
            backward(model, x)
            torch.testing.assert_close(gradients(model), expected)
            model.zero_grad()


def a_wrapper_that_is_dropped_leaves_the_module_free(wrap, rank):
    module = Toy()
    for _ in range(2):
        model = wrap(module)
        backward(model, torch.randn(2, 6))
        model.finish_gradient_synchronization()
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        module.zero_grad()
    memory = StorageWeakRef(module.leave.weight.untyped_storage())
    del module
    gc.collect()
    assert memory.expired()


def copies_and_pickles_train_by_themselves(wrap, rank):
    """Rounds, because memory that is freed twice need not show at once."""

    def copies(model):
        yield copy.deepcopy(model)
        yield pickle.loads(pickle.dumps(model))
        yield torch.optim.swa_utils.AveragedModel(model).module
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        yield torch.load(file, weights_only=False)

    model, x = wrap(Toy()), torch.randn(3, 6)
    for _ in range(4):
        expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]
        backward(model, x)
        for other in copies(model):
            assert gradients(other) == [None] * 6
            for _ in range(2):
                backward(other, x)
                torch.testing.assert_close(gradients(other), expected)
                other.zero_grad(set_to_none=False)
            assert type(other) is type(model)
        torch.testing.assert_close(gradients(model), expected)
        del other
        gc.collect()
        backward(model, x)
        model.zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match="averaged by another wrapper already"):
        copy.copy(model)


CHECKS = [
    no_sync_accumulates_and_is_left_when_its_body_raises,
    accumulated_gradients_may_be_finished_without_another_backward,
    a_rank_without_a_backward_contributes_zeros,
    a_rank_that_runs_out_of_batches_finishes_instead,
    a_step_needs_no_call_after_backward,
    a_second_backward_adds_its_average,
    a_backward_that_fails_is_finished_before_the_next_forward,
    two_forwards_may_come_before_their_backward,
    activations_may_be_checkpointed,
    segments_may_be_checkpointed,
    a_wrapper_that_is_dropped_leaves_the_module_free,
    copies_and_pickles_train_by_themselves,
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), on_gpus(2)])
def test_every_way_of_a_step(world_size, device):
    on_ranks(run_on_every_rung, world_size, CHECKS, device=device)
