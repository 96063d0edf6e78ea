"""What users of data parallelism run into, on two ranks that are started once.

Each check is a test, and a function of a rung's constructor; it is run on two rungs.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.distributed.ddp import BucketedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic

from .checks import checks_of, name_of, on_gpus, on_ranks
from .toys import RUNGS, Branches, Toy, average_of, averaged, backward, gradients, same_on_all_ranks


def check_frozen_parameters_stay_and_must_not_thaw(wrap, rank):
    model = wrap(Toy())
    backward(model, torch.randn(2, 6))
    assert all(parameter.grad is None for parameter in model.module.frozen.parameters())
    model.module.frozen.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"frozen\.bias"):
        backward(model, torch.randn(2, 6))


def check_gradients_may_travel_in_bf16(wrap, rank):
    module = Toy()
    model = wrap(module, communication_dtype=torch.bfloat16)
    x = torch.randn(3, 6)
    exact = average_of(module, module(x).square().sum())
    with Traffic() as traffic:
        backward(model, x)
    sent = [event for event in traffic.sent if event.dtype == torch.bfloat16]
    assert sum(event.n_bytes for event in sent) == 2 * sum(g.numel() for g in exact)
    assert all(g.dtype == torch.float32 for g in gradients(model))
    assert same_on_all_ranks(gradients(model))
    # two casts and a sum round to 8 bits
    torch.testing.assert_close(gradients(model), exact, rtol=3 * 2**-8, atol=1e-2)


def check_what_cannot_work_is_an_error_on_all_ranks(wrap, rank):
    other = rank.rank == 1
    for module, options in (
        (nn.Linear(2, 3 + other), {}),
        (nn.Linear(2, 3, bias=other), {}),
        (nn.Linear(2, 3).requires_grad_(other), {}),
        (nn.Linear(2, 3), {"communication_dtype": torch.bfloat16 if other else None}),
    ):
        with pytest.raises(ValueError, match="differ across ranks"):
            wrap(module, **options)
    module = nn.Linear(2, 3)
    model = wrap(module)
    for refused, options, message in (
        (module, {}, "weight is averaged by another wrapper already"),
        (nn.Linear(2, 3, device="meta"), {}, "weight is on the meta device"),
        (nn.Linear(2, 3), {"communication_dtype": torch.int32}, "torch.int32"),
        (nn.Sequential(nn.Linear(4, 4), FSDP(nn.LayerNorm(4))), {}, "its 1 is sharded by FSDP"),
        (nn.LazyLinear(3), {}, "weight has no shape before the first forward"),
    ):
        with pytest.raises(ValueError, match=message):
            wrap(refused, **options)
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(model)
    model = wrap(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="the gradient of 0.weight must be dense.*sparse_coo"):
        backward(model, torch.tensor([1]))
    model = wrap(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="the gradient of (weight|bias) has a graph .*create_graph=True"):
        model(torch.ones(1, 4)).square().sum().backward(create_graph=True)


def check_accumulated_gradients_may_be_finished_without_another_backward(wrap, rank):
    """Also where the body of ``no_sync`` raises."""
    model, x = wrap(Toy()), torch.randn(3, 6)
    expected = average_of(model.module, model.module(x).square().sum())
    with pytest.raises(ZeroDivisionError), Traffic() as traffic, model.no_sync():
        with model.no_sync():
            backward(model, x)
        raise ZeroDivisionError
    assert traffic.sent == []
    model.finish_gradient_synchronization()
    torch.testing.assert_close(gradients(model), expected)


def check_a_rank_that_runs_out_of_batches_finishes_instead(wrap, rank):
    model = wrap(Branches())
    x, used = torch.ones(1, 4), [0, 1, 2]
    params = list(model.parameters())
    for has_batch in (True, rank.rank == 0, False):
        local = torch.autograd.grad(model.module(x, used).square().sum(), params)
        expected = [averaged(g * has_batch) for g in local]
        if has_batch:
            backward(model, x, used)
        else:
            model.finish_gradient_synchronization()
        if any(g.any() for g in expected):
            torch.testing.assert_close(gradients(model), expected)
        else:
            assert gradients(model) == [None] * 8
        model.zero_grad()


def check_clearing_in_place_begins_a_step_too(wrap, rank):
    model = wrap(nn.Linear(1, 1, bias=False))
    for scale, has_batch, clipped, expected in (
        (1.0, (True, True), False, 1.0),
        (2.0, (True, False), False, 1.0),
        (3.0, (False, False), False, 0.0),
        (3.0, (True, True), True, 3.0),
        (4.0, (False, True), True, 2.0),
    ):
        model.zero_grad(set_to_none=False)
        if has_batch[rank.rank]:
            model(torch.full((1, 1), scale)).sum().backward()
        else:
            model.finish_gradient_synchronization()
        if clipped and has_batch[rank.rank]:
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            model.finish_gradient_synchronization()
        gradient = model.module.weight.grad
        assert (0.0 if gradient is None else gradient.item()) == expected


def check_a_second_backward_adds_its_average(wrap, rank):
    model = wrap(Toy())
    x, y = (torch.randn(3, 6) for _ in range(2))
    parts = [average_of(model.module, model.module(t).square().sum()) for t in (x, y)]
    backward(model, x)
    torch.testing.assert_close(gradients(model), parts[0])
    with Traffic() as traffic:
        model.finish_gradient_synchronization()
    assert traffic.sent == []
    backward(model, y)
    torch.testing.assert_close(gradients(model), [a + b for a, b in zip(*parts, strict=True)])
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in parts[0]])


def check_a_backward_that_fails_is_finished_before_the_next_forward(wrap, rank):
    model, x = wrap(Toy()), torch.randn(2, 6)
    expected = average_of(model.module, model.module(x).square().sum())
    backward(model, x)
    model.zero_grad()

    def refuse(gradient):
        raise OverflowError("no gradient for you")

    if rank.rank == 1:
        handle = model.module.first.weight.register_hook(refuse)
        loss = model(x).square().sum()
        with pytest.raises(OverflowError):
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="leave.bias again before it had ended"):
            loss.backward()
        with pytest.raises(RuntimeError, match="the last backward failed midway"):
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


def check_segments_may_be_checkpointed(wrap, rank):
    for reentrant in (False, True):
        module = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def run(x, module=module, reentrant=reentrant):
            for layer in module[:2]:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            return module[2](x)

        model = wrap(module)
        model.module.forward = run
        x = torch.randn(3, 4, requires_grad=True)
        expected = average_of(module, module[2](module[1](module[0](x))).square().sum())
        backward(model, x)
        torch.testing.assert_close(gradients(model), expected)


def check_a_wrapper_that_is_dropped_leaves_the_module_free(wrap, rank):
    module = Toy()
    for _ in range(2):
        model = wrap(module)
        backward(model, torch.randn(2, 6))
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None
        module.zero_grad()
    memory = StorageWeakRef(module.leave.weight.untyped_storage())
    del module
    gc.collect()
    assert memory.expired()


def check_parameters_that_join_later_are_noticed(wrap, rank):
    for change, name in (
        (lambda module: module[0].append(nn.Linear(4, 4)), "0.1.weight"),
        (lambda module: setattr(module[1], "bias", nn.Parameter(torch.zeros(2))), "1.bias"),
    ):
        model = wrap(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)))
        model.module[1].register_module("unused", nn.ReLU())  # has no parameters
        backward(model, torch.ones(1, 4))
        change(model.module)
        with pytest.raises(RuntimeError, match=f"^{name} was added or replaced"):
            model(torch.ones(1, 4))


def check_backward_may_run_on_another_stream(wrap, rank):
    if rank.device.type != "cuda":
        return
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    model = wrap(module)
    x = torch.randn(4096, 512)
    for _ in range(3):
        expected = average_of(module, module(x).square().mean())
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x).square().mean().backward()
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(gradients(model), expected)
        model.zero_grad()


def on_both_rungs(rank: Rank, check):
    for wrap in RUNGS:
        torch.manual_seed(rank.rank)
        check(wrap, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), on_gpus(2)])
@pytest.mark.parametrize("check", checks_of(globals()), ids=name_of)
def test_every_behaviour(check, world_size, device):
    on_ranks(on_both_rungs, world_size, check, device=device)


def buckets_are_in_one_order_whatever_each_rank_does(rank: Rank):
    class Backwards(nn.Module):
        """Uses its layers in another order on each rank."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

        def forward(self, x, order):
            for i in order:
                x = torch.tanh(self.layers[i](x))
            return x

    torch.manual_seed(rank.rank)
    model = BucketedDDP(Backwards(), bucket_size_mb=2 * 64 / 2**20)
    layers = [layer.weight for layer in model.module.layers]
    backward(model, torch.randn(2, 4), [[3, 2, 1, 0], [0, 1, 3, 2]][rank.rank])
    assert same_on_all_ranks([layer.grad for layer in layers])
    memory = [layer.grad.untyped_storage().data_ptr() for layer in layers]
    assert memory[0] == memory[1] != memory[2] == memory[3]
    model = BucketedDDP(Toy(), bucket_size_mb=None)
    with Traffic() as traffic:
        backward(model, torch.randn(2, 6))
    assert [event.kind for event in traffic.sent].count("allreduce") == 2  # one bucket, and who has used what


def test_the_order_of_buckets():
    on_ranks(buckets_are_in_one_order_whatever_each_rank_does, 2)
