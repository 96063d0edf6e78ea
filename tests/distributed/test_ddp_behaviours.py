"""What users of data parallelism run into, on two ranks and on every rung; ranks are started once for all checks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.ddp import BucketedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import Rank
from cs336_systems.harness.traffic import Traffic

from .checks import on_gpus, on_ranks
from .replicas import averaged, backward, gradients, local_gradients, run_on_every_rung
from .test_ddp import LADDER, identical_on_all_ranks
from .toys import Branches, Mixed, Shifted, Toy

# --- checks, each a function of a rung's constructor ---------------------------------------------------------------


def branches_may_be_used_by_no_rank_or_by_some(wrap, rank):
    model = wrap(Branches())
    for step in range(6):
        used = {0: [0, 1], 1: [0]}[rank.rank] if step % 2 else {0: [1], 1: [0, 1]}[rank.rank]
        x = torch.randn(2, 4)
        local = torch.autograd.grad(model.module(x, used).square().sum(), list(model.parameters()), allow_unused=True)
        expected = [
            averaged(torch.zeros_like(p) if g is None else g) for p, g in zip(model.parameters(), local, strict=True)
        ]
        backward(model, x, used)
        model.finish_gradient_synchronization()
        unused = list(model.module.branches[2].parameters())
        assert all(parameter.grad is None for parameter in unused)
        torch.testing.assert_close(gradients(model)[:6], expected[:6])
        assert identical_on_all_ranks(gradients(model)[:6])
        model.zero_grad(set_to_none=step < 4)


def outputs_may_be_left_out_of_the_loss(wrap, rank):
    model = wrap(nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}))
    model.module.forward = lambda x: (model.module["a"](x), model.module["b"](x))
    for _ in range(2):
        model(torch.randn(2, 3))[rank.rank * 0].sum().backward()
        model.finish_gradient_synchronization()
        assert model.module["a"].weight.grad is not None
        assert model.module["b"].weight.grad is None
        model.zero_grad()


def frozen_parameters_stay_and_must_not_thaw(wrap, rank):
    model = wrap(Toy())
    backward(model, torch.randn(2, 6))
    model.finish_gradient_synchronization()
    assert all(parameter.grad is None for parameter in model.module.frozen.parameters())
    model.module.frozen.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen.bias was frozen when it was wrapped"):
        model.finish_gradient_synchronization()


def sparse_gradients_are_refused_by_name(wrap, rank):
    model = wrap(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="the gradient of 0.weight must be dense to be averaged, got .*sparse_coo"):
        backward(model, torch.tensor([1]))
    dist.barrier()


def dtypes_may_be_mixed(wrap, rank):
    model = wrap(Mixed())
    for _ in range(2):
        x = torch.randn(2, 4)
        expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]
        with Traffic() as traffic:
            backward(model, x)
            model.finish_gradient_synchronization()
        torch.testing.assert_close(gradients(model), expected)
        assert {event.dtype for event in traffic.sent} >= {torch.float32, torch.bfloat16, torch.float64}
        model.zero_grad()


def gradients_may_travel_in_bf16(wrap, rank):
    module = Toy()
    model = wrap(module, communication_dtype=torch.bfloat16)
    x = torch.randn(3, 6)
    exact = [averaged(g) for g in local_gradients(module, module(x).square().sum())]
    with Traffic() as traffic:
        backward(model, x)
        model.finish_gradient_synchronization()
    sent = [event for event in traffic.sent if event.dtype == torch.bfloat16]
    assert sum(event.n_bytes for event in sent) == 2 * sum(g.numel() for g in exact)
    assert all(g.dtype == torch.float32 for g in gradients(model))
    assert identical_on_all_ranks(gradients(model))
    torch.testing.assert_close(
        gradients(model), exact, rtol=3 * 2**-8, atol=1e-2
    )  # two casts and a sum round to 8 bits


def clipping_by_global_norm_bites_alike(wrap, rank):
    model = wrap(Toy())
    x = torch.randn(3, 6)
    expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]
    norm = torch.cat([g.reshape(-1) for g in expected]).norm()
    limit = 0.1 * norm.item()
    backward(model, x)
    model.finish_gradient_synchronization()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), limit), norm)
    torch.testing.assert_close(gradients(model), [g * limit / norm for g in expected])
    assert identical_on_all_ranks(gradients(model))


def autograds_views_of_one_gradient_are_kept_apart(wrap, rank):
    model = wrap(Shifted())
    for _ in range(3):
        x = torch.randn(1, 5)
        expected = [averaged(g) for g in local_gradients(model.module, model.module(x).sum())]
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        torch.testing.assert_close(gradients(model), expected)
        model.zero_grad()


def backward_works_inside_autocast(wrap, rank):
    model = wrap(Toy())
    with torch.autocast(rank.device.type, dtype=torch.bfloat16):
        backward(model, torch.randn(3, 6))
    model.finish_gradient_synchronization()
    assert all(g.dtype == torch.float32 for g in gradients(model))
    assert identical_on_all_ranks(gradients(model))


def one_rank_alone_may_evaluate(wrap, rank):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    if rank.rank == 1:
        model.eval()
        assert model(torch.randn(2, 4)).requires_grad
        model.train()
        with torch.no_grad():
            model(torch.randn(2, 4))
    with Traffic() as traffic:
        backward(model, torch.randn(2, 4))
        model.finish_gradient_synchronization()
    assert [event.kind for event in traffic.sent][:2] == ["broadcast"] * 2  # statistics and the count of batches
    mean = model.module[1].running_mean
    both = [torch.empty_like(mean) for _ in range(2)]
    dist.all_gather(both, mean)
    assert not torch.equal(*both)  # each rank's own since the broadcast
    model.zero_grad()
    model(torch.randn(2, 4))
    silent = wrap(nn.BatchNorm1d(4), broadcast_buffers=False)
    with Traffic() as traffic:
        silent(torch.randn(2, 4))
    assert traffic.sent == []


def zeroed_gradients_stay_where_they_were(wrap, rank):
    model = wrap(Toy())
    backward(model, torch.randn(2, 6))
    model.finish_gradient_synchronization()
    model.zero_grad()
    assert gradients(model) == [None] * 6
    places = []
    for _ in range(3):
        x = torch.randn(2, 6)
        expected = [averaged(g) for g in local_gradients(model.module, model.module(x).square().sum())]
        backward(model, x)
        model.finish_gradient_synchronization()
        torch.testing.assert_close(gradients(model), expected)
        places.append([g.data_ptr() for g in gradients(model)])
        model.zero_grad(set_to_none=False)
    assert places[0] == places[1] == places[2]


def what_cannot_work_is_an_error_on_all_ranks(wrap, rank):
    with pytest.raises(ValueError, match="differ across ranks at index 1: rank 0 has weight \\(3, 2\\)"):
        wrap(nn.Linear(2, 3 + rank.rank))
    with pytest.raises(ValueError, match="differ across ranks in number"):
        wrap(nn.Linear(2, 3, bias=rank.rank == 0))
    with pytest.raises(ValueError, match="differ across ranks"):
        wrap(nn.Linear(2, 3).requires_grad_(rank.rank == 0))
    with pytest.raises(ValueError, match="differ across ranks at index 0"):
        wrap(nn.Linear(2, 3), communication_dtype=(None, torch.bfloat16)[rank.rank])
    module = nn.Linear(2, 3)
    model = wrap(module)
    with pytest.raises(ValueError, match="weight is averaged by another wrapper already"):
        wrap(module)
    assert model.module is module
    with pytest.raises(ValueError, match="weight is on the meta device"):
        wrap(nn.Linear(2, 3, device="meta"))
    with pytest.raises(ValueError, match="must be a floating-point dtype, got torch.int32"):
        wrap(nn.Linear(2, 3), communication_dtype=torch.int32)


def a_sharded_module_is_refused(wrap, rank):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = FSDP(module)
    beside = nn.Sequential(nn.Linear(4, 4), FSDP(nn.LayerNorm(4)))
    for refused, place in ((sharded, "it"), (module, "its 0"), (beside, "its 1")):
        with pytest.raises(ValueError, match=f"cannot wrap {type(refused).__name__}: {place} is sharded by FSDP"):
            wrap(refused)


def a_module_without_trainable_parameters_is_only_replicated(wrap, rank):
    model = wrap(nn.Linear(2, 2).requires_grad_(False))
    model(torch.randn(1, 2))
    model.finish_gradient_synchronization()
    assert identical_on_all_ranks(model.parameters())


CHECKS = [
    branches_may_be_used_by_no_rank_or_by_some,
    outputs_may_be_left_out_of_the_loss,
    frozen_parameters_stay_and_must_not_thaw,
    sparse_gradients_are_refused_by_name,
    dtypes_may_be_mixed,
    gradients_may_travel_in_bf16,
    clipping_by_global_norm_bites_alike,
    autograds_views_of_one_gradient_are_kept_apart,
    backward_works_inside_autocast,
    one_rank_alone_may_evaluate,
    zeroed_gradients_stay_where_they_were,
    what_cannot_work_is_an_error_on_all_ranks,
    a_sharded_module_is_refused,
    a_module_without_trainable_parameters_is_only_replicated,
]


# --- further checks ----------------------------------------------------------------------------------------------


def buckets_follow_the_order_of_the_first_backward(rank):
    class Backwards(nn.Module):
        """Uses its layers in the reverse of their construction, and rank 1 would see yet another order."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
            self.spare = nn.Linear(4, 4, bias=False)

        def forward(self, x, order):
            for i in order:
                x = torch.tanh(self.layers[i](x))
            return x

    model = BucketedDDP(Backwards(), bucket_size_mb=2 * 64 / 2**20)
    layers = [layer.weight for layer in model.module.layers]
    spare = model.module.spare.weight

    def layout():
        return [[id(parameter) for parameter in bucket.parameters] for bucket in model._buckets]

    assert layout() == [[id(spare), id(layers[3])], [id(layers[2]), id(layers[1])], [id(layers[0])]]
    for _ in range(3):
        backward(model, torch.randn(2, 4), [[3, 2, 1, 0], [0, 1, 3, 2]][rank.rank])
        model.finish_gradient_synchronization()
        assert layout() == [[id(layers[0]), id(layers[1])], [id(layers[2]), id(layers[3])], [id(spare)]]
        assert identical_on_all_ranks([layer.grad for layer in layers])
        model.zero_grad()
    backward(model, torch.randn(2, 4), [3, 2, 1, 0])
    model.finish_gradient_synchronization()
    assert layers[0].grad.untyped_storage().data_ptr() == layers[1].grad.untyped_storage().data_ptr()
    assert layers[0].grad.untyped_storage().data_ptr() != layers[2].grad.untyped_storage().data_ptr()


def a_bucket_larger_than_everything_is_one(rank):
    model = BucketedDDP(Toy(), bucket_size_mb=None)
    with Traffic() as traffic:
        backward(model, torch.randn(2, 6))
        model.finish_gradient_synchronization()
    assert [event.kind for event in traffic.sent].count("allreduce") == 2


def blocks_may_be_compiled(rank):
    for wrap in LADDER.values():
        module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
        model = wrap(module)
        x = torch.randn(3, 4)
        expected = [averaged(g) for g in local_gradients(module, module(x).square().sum())]
        module[1].compile(fullgraph=True, dynamic=False, backend="aot_eager")
        backward(model, x)
        model.finish_gradient_synchronization()
        torch.testing.assert_close(gradients(model), expected)


def transposed_weights_may_be_averaged(rank):
    for wrap in LADDER.values():
        module = nn.Linear(4, 3)
        module.weight = nn.Parameter(torch.randn(4, 3).t())
        model = wrap(module)
        x = torch.randn(3, 4)
        for _ in range(2):
            expected = [averaged(g) for g in local_gradients(module, module(x).square().sum())]
            backward(model, x)
            model.finish_gradient_synchronization()
            torch.testing.assert_close(gradients(model), expected)
            model.zero_grad()


def backward_may_run_on_another_stream(rank):
    if rank.device.type != "cuda":
        return
    for wrap in LADDER.values():
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        model = wrap(module)
        x = torch.randn(4096, 512)
        for _ in range(3):
            expected = [averaged(g) for g in local_gradients(module, module(x).square().mean())]
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                model(x).square().mean().backward()
                model.finish_gradient_synchronization()
            torch.cuda.current_stream().wait_stream(stream)
            torch.testing.assert_close(gradients(model), expected)
            model.zero_grad()


MORE_CHECKS = [
    buckets_follow_the_order_of_the_first_backward,
    a_bucket_larger_than_everything_is_one,
    blocks_may_be_compiled,
    backward_may_run_on_another_stream,
    transposed_weights_may_be_averaged,
]


def every_behaviour(rank: Rank):
    """All checks in turn; what fails ends them with the check's own traceback."""
    run_on_every_rung(rank, CHECKS)
    with rank.device:
        for check in MORE_CHECKS:
            torch.manual_seed(rank.rank)
            check(rank)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "device"), [(2, "cpu"), on_gpus(2)])
def test_every_behaviour(world_size, device):
    on_ranks(every_behaviour, world_size, device=device)
