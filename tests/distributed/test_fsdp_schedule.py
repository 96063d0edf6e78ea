"""What FSDP sends and holds, and when: collectives counted, weights freed, look-ahead bounded; compiled and recomputed.

Compilation stops at ``aot_eager``, which traces and partitions as Inductor does and generates no code.
"""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.fsdp import model_units, state_bytes, step_traffic
from cs336_systems.distributed import fsdp_averaging
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import GroupState
from cs336_systems.harness.traffic import MATMUL, Traffic
from cs336_systems.model import TransformerLM
from cs336_systems.model.transformer import TransformerBlock

from .checks import on_each
from .fsdp_models import Block, Blocks, full_gradients
from .test_fsdp import batches, loss_of, own_rows, wide_loss

KINDS = {
    "all-gather": "_allgather_base",
    "reduce-scatter": "reduce_scatter_tensor_coalesced",
    "all-reduce": "allreduce",
}


def by_blocks(module):
    return isinstance(module, (Block, TransformerBlock))


def whole_groups(fsdp):
    return [i for i, group in enumerate(fsdp.groups) if group.unsharded_bytes]


def collectives_of_the_model_are_those_predicted(rank):
    """Number, kind and bytes of a first step, of later ones, and of forward and backward by themselves."""
    config = MODEL_SIZES["tiny"]
    units, ids = model_units(config), own_rows(batches(1, 256)[0], rank)
    for compute_dtype, n_bytes in ((None, 4), (torch.bfloat16, 2)):
        fsdp = FSDP(TransformerLM(config), compute_dtype, units=by_blocks)
        for first in (True, False, False):
            expected = step_traffic(units, rank.world_size, compute_bytes=n_bytes, first=first)
            with CommDebugMode() as counted:
                with Traffic() as forward:
                    loss = loss_of(fsdp(ids), ids)
                with Traffic() as backward:
                    loss.backward()
                    fsdp.finish_gradient_synchronization()
            assert counted.get_total_counts() == sum(expected.counts.values())
            assert [event.kind for event in forward.sent] == [KINDS["all-gather"]] * len(fsdp.groups)
            events = forward.sent + backward.sent
            for name, kind in KINDS.items():
                own = [event for event in events if event.kind == kind]
                assert len(own) == expected.counts[name], name
                # An output of a reduce-scatter is one rank's part of the message.
                parts = rank.world_size if name == "reduce-scatter" else 1
                assert parts * sum(event.n_bytes for event in own) == expected.messages[name], name
            dtypes = {event.kind: event.dtype for event in events}
            assert dtypes[KINDS["all-gather"]] == (compute_dtype or torch.float32)
            assert dtypes[KINDS["reduce-scatter"]] == dtypes[KINDS["all-reduce"]] == torch.float32
            fsdp.zero_grad()
        with torch.no_grad(), Traffic() as evaluation:
            fsdp(ids)
        assert [event.kind for event in evaluation.sent] == [KINDS["all-gather"]] * len(fsdp.groups)
        assert whole_groups(fsdp) == []
        predicted = state_bytes(units, rank.world_size).parameters
        held = sum(parameter.untyped_storage().nbytes() for parameter in unique_storages(fsdp))
        assert predicted <= held <= 1.03 * predicted


def unique_storages(fsdp):
    return {parameter.untyped_storage().data_ptr(): parameter for parameter in fsdp.parameters()}.values()


def gloo_is_never_asked_for_a_coalesced_all_gather(rank):
    """It corrupts the heap, too seldom for a test to see: ``peer_memory.all_gather`` says how."""
    fsdp = FSDP(Blocks(), units=by_blocks)
    (ids,) = batches(1)
    with Traffic() as log:
        wide_loss(fsdp(ids), ids).backward()
        fsdp.finish_gradient_synchronization()
        fsdp.gather_full_params()
    assert {event.kind for event in log.sent} == set(KINDS.values())


def reductions_are_issued_while_backward_goes_on(rank):
    fsdp = FSDP(Blocks(), units=by_blocks)
    for _ in range(2):
        (ids,) = batches(1)
        loss = wide_loss(fsdp(ids), ids)
        with Traffic() as backward:
            loss.backward()
        fsdp.finish_gradient_synchronization()
    kinds = [event.kind for event in backward.events if event.kind != KINDS["all-reduce"]]
    last_product = len(kinds) - 1 - kinds[::-1].index(MATMUL)
    reductions = [i for i, kind in enumerate(kinds) if kind == KINDS["reduce-scatter"]]
    assert len(reductions) == len(fsdp.groups) == 5
    assert sum(i < last_product for i in reductions) == 3  # all but the first block and the tied embedding
    # A gather is sent before the reduction that backward comes to with it: its weights are needed sooner.
    sent = [kind for kind in kinds if kind != MATMUL]
    gather, reduction = KINDS["all-gather"], KINDS["reduce-scatter"]
    assert sent == [gather, gather, *(2 * [gather, reduction]), *(3 * [reduction])]
    products_before_gathers = [kinds[:i].count(MATMUL) for i, kind in enumerate(kinds) if kind == KINDS["all-gather"]]
    assert products_before_gathers == [0, 2, 6, 10]  # each before the products of the unit that comes first


def micro_batches_begin_with_what_the_last_one_left(rank):
    """Under ``no_sync``, as far as is gathered ahead; anew where a rank has changed its rows, by value or by data."""
    for prefetch in (0, 1, 2):
        torch.manual_seed(0)
        reference = Blocks(tied=False).double()
        fsdp = FSDP(copy.deepcopy(reference), units=by_blocks, prefetch=prefetch)
        left = list(range(1 + prefetch))
        (ids,) = batches(1)

        def forward(fsdp=fsdp, ids=ids) -> tuple[torch.Tensor, int]:
            with Traffic() as log:
                output = fsdp(ids)
            return output, sum(event.kind == KINDS["all-gather"] for event in log.sent)

        def matches(output, reference=reference, ids=ids) -> bool:
            return torch.allclose(output, reference(ids), rtol=1e-12, atol=1e-12)

        n_groups, n_there = len(fsdp.groups), 0
        for change in ("none", "value", "data"):
            with fsdp.no_sync():
                output, n_gathers = forward()
                assert n_gathers == n_groups - n_there, change
                assert matches(output)
                output.mean().backward()
            assert whole_groups(fsdp) == left
            n_there = len(left) - (change != "none")
            with torch.no_grad():
                whole = reference.get_parameter(fsdp.groups[0].parameters[0].names[0])
                own = fsdp.groups[0].parameters[0]
                if change != "none":
                    whole[0] *= 3
                if rank.rank == 0 and change == "value":
                    own.sharded_param[0] *= 3
                if rank.rank == 0 and change == "data":
                    own.sharded_param.data = torch.cat([3 * own.sharded_param[:1], own.sharded_param[1:]])
        output, n_gathers = forward()
        assert n_gathers == n_groups - n_there
        assert matches(output)
        output.mean().backward()
        assert whole_groups(fsdp) == []
        with fsdp.no_sync():
            fsdp(ids).mean().backward()
        fsdp.finish_gradient_synchronization()
        assert whole_groups(fsdp) == []


def what_one_rank_alone_does_with_what_was_left_is_right_on_all(rank):
    """It finishes, alone or where others go on; or its backward fails, where others have come through."""
    torch.manual_seed(0)
    reference = Blocks().double()
    fsdp = FSDP(copy.deepcopy(reference), units=by_blocks)
    (ids,) = batches(1)

    def matches() -> bool:
        return torch.allclose(fsdp(ids), reference(ids), rtol=1e-12, atol=1e-12)

    def accumulate() -> None:
        with fsdp.no_sync():
            fsdp(ids).mean().backward()

    for _ in range(2):
        output = fsdp(ids)
        if rank.rank == 0:
            fsdp.finish_gradient_synchronization()
        output.mean().backward()
    with fsdp.no_sync():
        fsdp(ids).mean().backward()
        if rank.rank == 0:
            fsdp.finish_gradient_synchronization()
        assert matches()
    accumulate()
    with pytest.raises(RuntimeError, match="averages accumulated gradients"):
        if rank.rank == 0:
            fsdp.finish_gradient_synchronization()
        else:
            fsdp(ids)
    assert matches()
    accumulate()
    first = fsdp.units[0].module

    def fail(*_):
        raise ZeroDivisionError

    handle = first.register_full_backward_pre_hook(fail) if rank.rank == 0 else None
    with fsdp.no_sync(), pytest.raises(ZeroDivisionError) if rank.rank == 0 else nullcontext():
        fsdp(ids).mean().backward()
    if handle is not None:
        handle.remove()
    assert matches()


def what_was_made_in_inference_mode_runs(rank):
    (ids,) = batches(1)
    with torch.inference_mode():
        torch.manual_seed(0)
        reference = Blocks()
        fsdp = FSDP(copy.deepcopy(reference), units=by_blocks)
        for _ in range(2):
            assert torch.allclose(fsdp(ids), reference(ids))


def weights_are_whole_around_their_use_only(rank):
    """At every call and every gradient, the running unit and at most ``prefetch`` more; outside, 0 bytes."""
    for prefetch in (0, 1, 2):
        fsdp = FSDP(Blocks(tied=False), units=by_blocks, prefetch=prefetch)
        seen = {"forward": [], "backward": []}

        def note(phase, fsdp=fsdp, seen=seen):
            seen[phase].append(len(whole_groups(fsdp)))

        for unit in fsdp.units:
            unit.module.register_forward_pre_hook(lambda *_, note=note: note("forward"))
            unit.module.register_forward_hook(
                lambda module, args, output, note=note: output.register_hook(lambda _: note("backward")) and None
            )
        for first in (True, False):
            for counts in seen.values():
                counts.clear()
            (ids,) = batches(1)
            output = fsdp(ids)
            assert whole_groups(fsdp) == ([] if first else [5])  # the head, with which backward begins
            loss = wide_loss(output, ids)
            loss.backward()
            assert whole_groups(fsdp) == []
            assert all(group.state is GroupState.SHARDED for group in fsdp.groups)
            fsdp.finish_gradient_synchronization()
            assert len(seen["forward"]) == len(seen["backward"]) == 6
            assert max(seen["forward"]) == (1 if first else 1 + prefetch)
            assert max(seen["backward"]) <= 2 + prefetch  # a hook of ours runs before the unit's own frees the last
        assert not any(group.has_gradients for group in fsdp.groups)


def gradients_are_taken_while_few_weights_are_whole(rank):
    """Gradients are cast before backward looks ahead: with both the peak would be a unit's weights higher."""
    take, whole = fsdp_averaging.Reduction, []

    def noting(group):
        whole.append(len(whole_groups(fsdp)))
        return take(group)

    for prefetch in (0, 1, 2):
        fsdp = FSDP(Blocks(tied=False), torch.bfloat16, units=by_blocks, prefetch=prefetch)
        for _ in range(2):
            whole.clear()
            (ids,) = batches(1)
            loss = wide_loss(fsdp(ids).float(), ids)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fsdp_averaging, "Reduction", noting)
                loss.backward()
            assert whole == [min(prefetch, units_to_come) for units_to_come in (5, 4, 3, 2, 1, 0)]


def autograd_keeps_no_whole_weight_between_forward_and_backward(rank):
    """Storages of what backward has saved, that are as large as a weight, have no bytes; nothing is leaked after."""
    fsdp = FSDP(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))))
    for _ in range(2):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            output = fsdp(torch.rand(2, 16, requires_grad=True))
        weights = {t.untyped_storage().data_ptr(): t for t in saved if 16 in t.shape and t.numel() == 256}
        assert sum(t.untyped_storage().nbytes() > 0 for t in weights.values()) <= 1  # the last, for backward
        output.sum().backward()
        fsdp.finish_gradient_synchronization()
    ref = weakref.ref(fsdp)
    saved.clear()
    del output, weights, fsdp
    gc.collect()
    assert ref() is None


class Segments(nn.Module):
    """Blocks of which backward runs segments of ``length`` a second time."""

    def __init__(self, length):
        super().__init__()
        self.inner = Blocks()
        self.length = length

    def forward(self, ids):
        x = self.inner.embedding(ids)
        for i in range(0, len(self.inner.blocks), self.length):
            segment = nn.Sequential(*self.inner.blocks[i : i + self.length])
            x = checkpoint(segment, x, use_reentrant=False)
        return self.inner.head(x)


def recomputed_and_compiled_blocks_give_the_same_gradients(rank):
    torch.manual_seed(0)
    reference = Blocks().double()
    (ids,) = batches(1)
    wide_loss(reference(ids), ids).backward()
    for length, compiled in ((1, False), (2, False), (4, False), (1, True), (4, True)):
        module = Segments(length)
        module.inner = copy.deepcopy(reference)
        module.inner.zero_grad()
        if compiled:
            for block in module.inner.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        fsdp = FSDP(module, units=None if compiled else by_blocks)
        assert len(fsdp.groups) == 5
        for step in range(2):
            rows = own_rows(ids, rank)
            with nullcontext() if compiled else Traffic() as traffic:
                wide_loss(fsdp(rows), rows).backward()
                fsdp.finish_gradient_synchronization()
            if traffic is not None:
                # The tied embedding stays; a block is gathered forward and backward, and a third time if its segment
                # runs again before the look-ahead has reached it.
                inside = (4 // length) * max(0, length - 2)
                gathers = [event for event in traffic.sent if event.kind == KINDS["all-gather"]]
                assert len(gathers) == (3 if step == 0 else 1) + 2 * 4 + inside
            for name, gradient in full_gradients(fsdp).items():
                expected = reference.get_parameter(name.removeprefix("inner.")).grad
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
            fsdp.zero_grad()
        assert whole_groups(fsdp) == []


def compiled_blocks_are_compiled_once(rank):
    torch._dynamo.reset()
    module = Blocks(tied=False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in module.blocks:
        block.compile(backend=backend, fullgraph=True)
    fsdp = FSDP(module)
    assert [type(unit.module).__name__ for unit in fsdp.units] == ["FSDPEmbedding", *["FSDPBlock"] * 4, "FSDPLinear"]
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    for ids in batches(3):
        wide_loss(fsdp(ids), ids).backward()
        fsdp.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    assert len(graphs) == 1


def a_forward_that_changes_course_still_is_right(rank):
    """Blocks in another order than the last time: look-ahead guesses wrong, and results do not notice."""
    torch.manual_seed(0)
    reference = Blocks().double()
    fsdp = FSDP(copy.deepcopy(reference))
    for order in ([0, 1, 2, 3], [3, 1], [0, 1, 2, 3], [2]):
        for model in (reference, fsdp.module):
            model.zero_grad()
        whole = list(reference.blocks), list(fsdp.module.blocks)
        reference.blocks, fsdp.module.blocks = (nn.ModuleList(blocks[i] for i in order) for blocks in whole)
        (ids,) = batches(1)
        wide_loss(reference(ids), ids).backward()
        wide_loss(fsdp(own_rows(ids, rank)), own_rows(ids, rank)).backward()
        fsdp.finish_gradient_synchronization()
        reference.blocks, fsdp.module.blocks = nn.ModuleList(whole[0]), nn.ModuleList(whole[1])
        for name, gradient in full_gradients(fsdp).items():
            expected = reference.get_parameter(name).grad
            assert (gradient is None) == (expected is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
        assert whole_groups(fsdp) == []


CHECKS = [
    collectives_of_the_model_are_those_predicted,
    gloo_is_never_asked_for_a_coalesced_all_gather,
    reductions_are_issued_while_backward_goes_on,
    micro_batches_begin_with_what_the_last_one_left,
    what_one_rank_alone_does_with_what_was_left_is_right_on_all,
    what_was_made_in_inference_mode_runs,
    weights_are_whole_around_their_use_only,
    gradients_are_taken_while_few_weights_are_whole,
    autograd_keeps_no_whole_weight_between_forward_and_backward,
    recomputed_and_compiled_blocks_give_the_same_gradients,
    compiled_blocks_are_compiled_once,
    a_forward_that_changes_course_still_is_right,
]


test_on_two_ranks = pytest.mark.slow(on_each(2, CHECKS))
