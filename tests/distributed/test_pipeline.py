"""Training over the stages of a pipeline against one process: bits, meshes, checkpoints, messages, faults."""

import gc
import os
import re
import signal
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import LEVELS
from cs336_systems.costs.parallelism.schedules import Schedule, make_schedule
from cs336_systems.costs.parallelism.stages import divide, plan_of, stages_of_case
from cs336_systems.costs.parallelism.step import GATHER, REDUCE, SCATTER, SEND, pipeline_sent, sharded_sent
from cs336_systems.distributed.fsdp_parameters import GroupState
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.messages import GroupMessages, Mailbox, open_messages
from cs336_systems.distributed.pipeline import Pipeline
from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.ranked import PreparedStep, check_replicas
from cs336_systems.harness.traffic import Traffic
from cs336_systems.ranks import SCHEDULES, Parallel
from cs336_systems.training.assemble import assemble, mailbox_of, mesh_of, random_batch
from cs336_systems.training.dry_run import dry_run
from cs336_systems.training.step import local_gradients
from tests.training.shared import Shared

from .checks import checks_of, on_each, on_gpus, on_ranks, spawn
from .test_mesh import N_STEPS, WAYS, WIDE, alone, compare, compare_on_gpus, hand_over, ignoring
from .test_mesh import run_of as mesh_run
from .test_messages import Imagined

LLAMA = ModelConfig("tiny-llama", 32, 64, 5, 8, vocab_size=96, context_length=16, n_kv_heads=4)
TIED = replace(LLAMA, name="tiny-tied", qkv_bias=True, tie_embeddings=True)
NORMED = replace(LLAMA, name="tiny-normed", qk_norm=True, head_dim=8)
DEEP = replace(LLAMA, name="tiny-deep", n_layers=9)


@dataclass(frozen=True)
class Pulled(Shared):
    z_loss: float = 0.0


def run_of(pipeline, schedule, way="alone", config=LLAMA, accumulate=4, case=(), **others):
    wrapper, state = WAYS.get(way, ("none", "replicated"))
    others = {"bucket_size_mb": 0.01, "pipeline": pipeline, "pipeline_schedule": schedule} | others
    how = Parallel(wrapper, state, **others)
    fields = {"batch_size": 2, "keep": "products", "optimizer": "torch-fused", "seed": 3} | dict(case)
    return Pulled.of(config, how=how, accumulate=accumulate, **fields)


FP8 = {"matmul_dtype": "e4m3"}
KINDS = {GATHER: "_allgather_base", SCATTER: "reduce_scatter_tensor_coalesced", REDUCE: "allreduce"}
ON_TWO = [
    run_of(2, "zb-h1", config=NORMED, case={"z_loss": 1e-2}),
    *(run_of(2, name, config=TIED) for name in SCHEDULES),
]
ON_FOUR = [
    run_of(2, "zbv", "ddp"),
    run_of(2, "zb-h1", "ddp", TIED, accumulate=3),
    run_of(2, "zbv", "zero-1", NORMED, context=2),
    run_of(2, "zbv", config=TIED, tensor=2, tensor_by="copies"),
    *(run_of(4, name, config=TIED, accumulate=8) for name in ("1f1b", "zb-h1")),
]
FEWER_ON_FOUR = [
    *(run_of(2, "zbv", way) for way in ("zero-1", "zero-owned")),
    run_of(2, "1f1b", "zero-1", TIED),
    run_of(2, "zb-h1", "ddp", context=2, context_order="ring"),
    run_of(2, "zbv", config=TIED, tensor=2),
    run_of(2, "dualpipev", config=NORMED, tensor=2),
]
ON_EIGHT = [run_of(4, "1f1b", "ddp", TIED, tensor=2), run_of(2, "1f1b", "ddp", TIED)]
FEWER_ON_EIGHT = [
    run_of(2, "zbv", "zero-1", TIED, tensor=2),
    run_of(2, "zb-h1", "ddp", NORMED, tensor=2, context=2, tensor_by="copies"),
    run_of(2, "zbv", "fsdp", NORMED, tensor=2),
    run_of(2, "zb-h1", "fsdp", TIED, replicas=2),
]
SHARDED = [
    *(run_of(2, name, "fsdp", TIED) for name in SCHEDULES),
    run_of(2, "zb-h1", "fsdp", NORMED, accumulate=3),
    run_of(2, "zbv", "fsdp", NORMED, context=2),
]


def gradients_on(rank: Rank | None, cases, n_steps=2):
    """By case: losses of all steps, gradients by name of the first and the last; of one process without ``rank``."""
    found = []
    for case in cases:
        step, gradients, losses = assemble(case, rank), {}, []
        for number in range(n_steps):
            *passes, update = step.phases("step", *ignoring(random_batch(case, rank))).values()
            for each in passes:
                each()
            losses.append(step.loss)
            if number in (0, n_steps - 1):
                module = getattr(step.model, "module", step.model)
                gradients |= {(number, name): p.grad.detach().clone() for name, p in module.named_parameters()}
            update()
        found.append((torch.stack(losses), gradients))
    return found


def compare_bits(world_size, cases, n_steps=2):
    """Losses and gradients of every case are the bits of the first one in one process, with as many micro-batches."""
    ((losses, gradients),) = gradients_on(None, [replace(cases[0], how=Parallel())], n_steps)
    found = zip(*on_ranks(gradients_on, world_size, cases, n_steps), strict=True)
    for case, of_ranks in zip(cases, found, strict=True):
        for own_losses, own in of_ranks:
            torch.testing.assert_close(own_losses, losses, rtol=1e-6, atol=0)
            assert torch.equal(own_losses, of_ranks[0][0])
            differing = [name for name, each in own.items() if not torch.equal(each, gradients[name])]
            assert not differing, (str(case), differing[:5])
        assert set().union(*(own for _, own in of_ranks)) == gradients.keys()


def test_every_schedule_has_the_bits_of_one_process():
    compare_bits(2, [run_of(2, name) for name in SCHEDULES], N_STEPS)
    compare_bits(2, [run_of(2, name, "fsdp") for name in SCHEDULES])
    compare_bits(2, [run_of(2, name, case={"dtype": "bf16", "keep": "input"}) for name in SCHEDULES])


def both_ways(rank: Rank, cases):
    """The losses and gradients that differ if messages go by copies, on a simulated driver, and fill each mailbox."""
    expected = gradients_on(rank, cases)
    imagined = lambda mesh, *_: Imagined(mesh.rank, mesh.devices.get_group("pipeline"), Mailbox(1000))  # noqa: E731
    with patch.object(Mesh, "messages", imagined):
        found = gradients_on(rank, cases)
    return [
        (str(case), name)
        for case, (losses, own), (same, whole) in zip(cases, found, expected, strict=True)
        for name in ["losses"] * (not torch.equal(losses, same)) + [n for n in own if not torch.equal(own[n], whole[n])]
    ]


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_messages_by_copies_give_the_same_bits(n_ranks):
    """On four ranks two pipelines of two stages, whose numbers are not their ranks', and one of four."""
    cases = [run_of(2, name, config=TIED) for name in ("gpipe", "interleaved", "zbv")]
    if n_ranks == 4:
        cases = [run_of(2, "zbv", "ddp", TIED), *(run_of(4, name, config=TIED) for name in ("1f1b", "zb-h1"))]
    assert on_ranks(both_ways, n_ranks, cases) == [[]] * n_ranks


class Recorder:
    """Messages that keep in mind between whom they go."""

    copied = True

    def __init__(self, stage):
        self.stage, self.found = stage, []

    def connect(self, pairs):
        pass

    def send(self, tensor, peer):
        self.found.append((self.stage, peer))
        return Mock()

    def receive(self, tensor, peer):
        self.found.append((peer, self.stage))
        return Mock()


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_send_and_receive_in_the_order_of_the_schedule(name):
    like = torch.zeros(1)
    for stages, microbatches in ((2, 4), (4, 8), (4, 16)):
        plan = make_schedule(name, stages, microbatches, 2, {"F": 1.0, "B": 1.9, "W": 0.7})
        for each, stage in product((plan, plan.forwards(microbatches), plan.forwards(1)), range(stages)):
            recorder = Recorder(stage)
            Pipeline(each, stage, recorder).run(lambda operation, given: like, like)
            assert recorder.found == each.messages(stage)


def test_a_mailbox_has_room_for_the_forwards_alone():
    random = Random(5)
    durations = [{kind: random.uniform(0.5, 2) for kind in "FBW"} for _ in range(12)]
    plan = make_schedule("zbv", 6, 18, 2, durations)
    assert (plan.messages_ahead, plan.forwards(18).messages_ahead) == (3, 4)
    assert mailbox_of(run_of(2, "zbv"), plan).n_pieces == 2 * 4


def copies_or_messages(rank: Rank, case):
    messages = mesh_of(case, rank).messages("copies", Mailbox())
    return type(messages) is GroupMessages


def test_cpus_send_messages():
    assert all(on_ranks(copies_or_messages, 2, run_of(2, "1f1b", pipeline_by="copies")))


def test_gpus_that_cannot_copy_send_messages_unless_copies_are_asked_for(monkeypatch):
    monkeypatch.setattr("cs336_systems.distributed.messages.why_not_mapped", lambda *_: "ranks are on 2 hosts")
    opened = Mock()
    monkeypatch.setattr("cs336_systems.distributed.messages.GroupMessages", opened)
    rank, group = Mock(device=torch.device("cuda")), Mock()
    assert open_messages(rank, group) is opened.return_value
    assert opened.call_args.args[-1] == "ranks are on 2 hosts"
    with pytest.raises(ValueError, match="ranks cannot copy into each other's memory, as ranks are on 2 hosts"):
        open_messages(rank, group, "copies")


def test_mailboxes_count_in_predicted_memory():
    by_messages, by_copies = (
        dry_run(replace(run_of(2, "1f1b", pipeline_by=by), device="cuda"), world_size=2).n_bytes
        for by in ("messages", "auto")
    )
    assert by_copies - by_messages == Mailbox().n_bytes(2)


def compare_stages_on_gpus(world_size, device, by):
    wide = replace(WIDE, name="wide-deep", n_layers=9)
    two = {"way": "ddp" if world_size > 2 else "alone", "config": wide, "pipeline_by": by}
    cases = [run_of(2, name, **two) for name in ("1f1b", "interleaved", "zb-h1", "zbv")]
    four = {"config": wide, "accumulate": 8, "pipeline_by": by}
    cases += [run_of(4, name, **four) for name in ("zbv", "dualpipev")] * (world_size > 2)
    compare_on_gpus(world_size, device, cases)


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2), on_gpus(4)])
def test_gpus_train_what_one_trains(world_size, device):
    compare_stages_on_gpus(world_size, device, "messages")


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2, copies=True), on_gpus(4, copies=True)])
def test_gpus_that_copy_train_what_one_trains(world_size, device):
    compare_stages_on_gpus(world_size, device, "copies")


def test_every_level_of_what_is_kept_has_the_same_bits():
    compare_bits(2, [run_of(2, "zb-h1", case={"keep": keep}) for keep in (*LEVELS, "2xall+products-residual")])


def test_parts_of_a_tied_embedding_are_added_up_alike():
    """On two stages each adds up its part in the order of micro-batches, under whichever schedule."""
    cases = [run_of(2, name, config=TIED) for name in ("gpipe", "1f1b", "zb-h1")]
    first, *others = zip(*on_ranks(gradients_on, 2, cases), strict=True)
    for other in others:
        for (losses, gradients), (own_losses, own) in zip(first, other, strict=True):
            assert torch.equal(losses, own_losses)
            assert all(torch.equal(each, own[name]) for name, each in gradients.items())
    (_, one), (_, two) = first
    assert torch.equal(one[1, EMBEDDING], two[1, EMBEDDING])


@pytest.mark.slow
def test_more_stages_and_quantized_products_have_the_bits_of_one_process():
    """Of three unequal stages too; and of weights that fp8 products remember between micro-batches."""
    small = replace(LLAMA, n_layers=3, n_kv_heads=8)
    quantized = (("zb-h1", "alone"), ("1f1b", "alone"), ("zb-h1", "fsdp"))
    compare_bits(2, [run_of(2, name, way, config=small, accumulate=2, case=FP8) for name, way in quantized])
    compare_bits(3, [run_of(3, name, accumulate=6) for name in ("gpipe", "1f1b", "zb-h1")], N_STEPS)
    longer = "interleaved", "zb-h1", "zbv"
    compare_bits(4, [run_of(4, name, config=DEEP, accumulate=8) for name in longer], N_STEPS)
    compare_bits(4, [run_of(4, name, config=DEEP, accumulate=8) for name in SCHEDULES if name not in longer])


def test_two_stages_train_what_one_process_trains():
    compare(2, ON_TWO, N_STEPS)


@pytest.mark.slow
def test_four_ranks_train_what_one_process_trains():
    compare(4, ON_FOUR, N_STEPS)
    compare(4, FEWER_ON_FOUR)


@pytest.mark.slow
def test_shards_of_stages_train_what_one_process_trains():
    compare(4, SHARDED)


@pytest.mark.slow
def test_eight_ranks_train_what_one_process_trains():
    compare(8, ON_EIGHT, N_STEPS)
    compare(8, FEWER_ON_EIGHT)


def handed(pipeline, schedule, way="alone", accumulate=2, **others):
    """Of the same batch of four sequences as the meshes of ``test_mesh``, whatever the data ranks."""
    return run_of(pipeline, schedule, way, accumulate=accumulate, case={"batch_size": 1}, **others)


HAND_OVER = {
    2: [handed(2, "zbv", accumulate=4), handed(2, "1f1b", accumulate=2)],
    1: [mesh_run(1, 1, "ddp")],
    4: [
        *(handed(2, "zbv", "zero-1"), handed(2, "zb-h1", tensor=2), mesh_run(2, 1, "fsdp"), handed(4, "gpipe")),
        handed(2, "zb-h1", "fsdp"),
        handed(2, "1f1b", "zero-1", bucket_size_mb=0.03),  # both ends cut a tied embedding, in different places
    ],
    8: [handed(2, "1f1b", "zero-1", tensor=2), handed(4, "zb-h1", "zero-owned"), handed(2, "zbv", "fsdp", context=2)],
}
HAND_OVER[8] += [handed(2, "gpipe", "fsdp", accumulate=1, replicas=2)]


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, TIED, NORMED], ids=lambda config: config.name)
def test_checkpoints_move_between_pipelines_and_meshes(tmp_path, config):
    runs = [(n, [replace(case, size=config) for case in HAND_OVER[n]]) for n in (2, 1, 4, 8, 1, 2)]
    losses, norms, *_ = alone(mesh_run(1, 1, "ddp", config), 2, sum(len(cases) for _, cases in runs))
    expected, first = torch.stack([losses, norms]), 0
    for world_size, cases in runs:
        for found in on_ranks(hand_over, world_size, tmp_path, cases, first):
            right = expected[:, first : first + len(cases)]
            torch.testing.assert_close(found, right, rtol=1e-4, atol=0)
        first += len(cases)


def counted(rank: Rank, cases):
    """Messages and bytes that a stage sends in a step, and those predicted."""
    found = []
    for case in cases:
        step, batch = assemble(case, rank), random_batch(case, rank)
        with Traffic() as log:
            step(*batch)
        sent = [event.n_bytes for event in log.sent if event.kind == "send"]
        part, n_rows = case.config.part(case.parallel.tensor), batch[0].numel() // case.accumulate
        asked = part, n_rows // case.parallel.tensor, plan_of(case), step.pipeline.stage
        predicted = pipeline_sent(*asked, case.precision.parameter_bytes)
        found.append((len(sent), sum(sent), predicted[SEND]))
        held = sum(p.numel() for p in step.model.parameters())
        assert held == stages_of_case(case)[step.pipeline.stage].n_parameters(part), str(case)
    return found


def test_a_boundary_sends_a_micro_batch_of_rows_in_each_direction():
    cases = [run_of(2, name, case={"dtype": dtype}) for name in SCHEDULES for dtype in ("fp32", "bf16")]
    cases += [run_of(2, name, config=TIED) for name in ("1f1b", "zbv")]
    cases += [run_of(2, "interleaved", config=NORMED)]
    for case, *stages in zip(cases, *on_ranks(counted, 2, cases), strict=True):
        schedule, itemsize = case.parallel.pipeline_schedule, 2 if case.dtype == "bf16" else 4
        n_messages = 4 * {"interleaved": 3, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
        n_bytes = n_messages * 2 * 16 * 32 * itemsize
        if case.config.tie_embeddings and schedule == "1f1b":
            n_messages, n_bytes = n_messages + 1, n_bytes + 96 * 32 * itemsize
        assert stages == [(n_messages, n_bytes, n_bytes)] * 2, str(case)


def counted_of_shards(rank: Rank, cases):
    """Bytes of what FSDP sends on a stage in a second step by kind, and those predicted."""
    found = []
    for case in cases:
        step, batch, plan = assemble(case, rank), random_batch(case, rank), plan_of(case)
        step(*batch)  # in which no unit is expected
        with Traffic() as log:
            step(*batch)
        sent = Counter({kind: sum(e.n_bytes for e in log.sent if e.kind == KINDS[kind]) for kind in KINDS})
        if step.pipeline.stage == plan.places[-1][0]:
            sent[REDUCE] -= 8  # the number of targets that count
        shards = mesh_of(case, rank).shards.size()
        asked = case.config, plan, divide(plan, case.config), step.pipeline.stage, case.precision.parameter_bytes
        found.append((sent, sharded_sent(*asked, shards)))
        held = sum(p.shape.numel() for p in step.model.managed_parameters())
        assert held == stages_of_case(case)[step.pipeline.stage].n_parameters(case.config), str(case)
    return found


def test_shards_are_gathered_for_each_pass_and_reduced_once():
    cases = [run_of(2, name, "fsdp", config) for name in SCHEDULES for config in (LLAMA, TIED)]
    for of_rank in on_ranks(counted_of_shards, 4, cases):
        for case, (sent, predicted) in zip(cases, of_rank, strict=True):
            assert sent == predicted, (case.parallel.pipeline_schedule, str(case))


def begun_with(rank: Rank, case, ahead):
    """(Whether each operation of a second step found its first unit gathered, the shards after it)."""
    step, batch = assemble(case, rank), random_batch(case, rank)
    if not ahead:
        step.model.task = lambda *_, **how: nullcontext()
    step(*batch)
    found, gathering = [], step._gathering

    def observed(work, plan):
        inner = gathering(work, plan)

        def watch(operation, given):
            if operation.kind != "W":
                previous = step.model._order._complete[plan.part(step.pipeline.stage, operation.chunk)]
                unit = previous.units[0] if operation.kind == "F" else previous.runs[-1].unit
                found.append(all(group.state is not GroupState.SHARDED for group in unit.groups))
            return inner(operation, given)

        return watch

    step._gathering = observed
    step(*batch)
    left = [group for group in step.model.groups if group.state is not GroupState.SHARDED]
    assert not left and not step.model._order._reserved
    return found, [p.detach().clone() for p in step.model.parameters()]


def test_an_operation_finds_its_first_block_gathered():
    """By the one before; the bits are those without."""
    for name in ("1f1b", "zbv"):
        case = run_of(2, name, "fsdp")
        pairs = zip(*(on_ranks(begun_with, 4, case, ahead) for ahead in (True, False)), strict=True)
        for (ahead, shards), (without, others) in pairs:
            assert all(ahead[1:]) and not ahead[0] and without.count(False) > len(without) / 4
            assert all(map(torch.equal, shards, others))


@pytest.mark.slow
def test_messages_of_four_ranks():
    cases = [run_of(4, "zb-h1", config=TIED), run_of(2, "zbv", tensor=2), run_of(2, "1f1b", config=TIED, tensor=2)]
    of_ranks = on_ranks(counted, 4, cases)
    assert [[n for n, *_ in found] for found in of_ranks] == [[5, 8, 5], [8, 8, 5], [8, 8, 5], [5, 8, 5]]
    assert all(n_bytes == predicted for found in of_ranks for _, n_bytes, predicted in found)


def evaluated(rank: Rank | None, cases):
    """The loss of a batch of another size, and of the step's in every mode; nothing is left behind."""
    found = []
    for case in cases:
        step, batch = assemble(case, rank), random_batch(case, rank)
        other = ignoring(random_batch(replace(case, batch_size=3, accumulate=1), rank))
        before, losses = [p.detach().clone() for p in step.model.parameters()], []
        for mode in ("forward", "backward", "forward"):
            with torch.no_grad():
                losses.append(step.loss_of(*other))
            for phase in step.phases(mode, *batch).values():
                phase()
            losses.append(step.loss)
            assert all(p.grad is None for p in step.model.parameters())
        assert all(map(torch.equal, before, step.model.parameters()))
        found.append(torch.stack([*losses, step(*batch)]))
        with pytest.raises(ValueError, match="unknown mode 'sideways'"):
            step.phases("sideways", *batch)
        with pytest.raises(ValueError, match="7 sequences do not make 4"):
            step.phases("step", *(each[:7] for each in batch))
    return found


def test_evaluation_and_modes():
    cases = [run_of(2, name, case={"z_loss": 1e-2}) for name in SCHEDULES]
    cases += [run_of(2, name, "fsdp", case={"z_loss": 1e-2}) for name in ("1f1b", "zbv")]
    (right,) = evaluated(None, [replace(cases[0], how=Parallel())])
    for found in on_ranks(evaluated, 2, cases):
        torch.testing.assert_close(torch.stack(found), right.expand(len(cases), -1), rtol=1e-6, atol=0)


def swapped(rank: Rank, case):
    """As ``gradients_on``, while the first two messages to the second stage are taken for each other."""
    channel = Schedule.channel

    def wrong(self, source, target):
        first, second, *others = channel(self, 0, 1)
        return (second, first, *others) if (source, target) == (0, 1) else channel(self, source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "channel", wrong)
        return gradients_on(rank, [case])


def test_messages_in_another_order_would_show():
    case = run_of(2, "1f1b")
    ((losses, gradients),) = gradients_on(None, [replace(case, how=Parallel())])
    for ((own_losses, own),) in on_ranks(swapped, 2, case):
        assert not torch.equal(own_losses, losses)
        assert not all(torch.equal(each, gradients[name]) for name, each in own.items())


def check_outputs_of_a_stage_are_freed_when_they_have_been_taken(rank: Rank):
    """Under gpipe the first gradient comes when all outputs have been taken; autograd needs none of them."""
    case = run_of(2, "gpipe")
    step, outputs, alive = assemble(case, rank), [], []
    forward, backward = step._forward, torch.autograd.backward

    def noted(*arguments):
        y = forward(*arguments)
        outputs.append(weakref.ref(y))
        return y

    def counting(*arguments, **how):
        alive.append(sum(output() is not None for output in outputs))
        backward(*arguments, **how)

    step._forward = noted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", counting)
        step(*random_batch(case, rank))
    assert len(outputs) == len(alive) == 4
    assert alive == [0] * 4


def check_kernels_are_loaded_without_a_trace(rank: Rank):
    """Work on zeros, as before a GPU's first messages, leaves no gradients that a step would add to."""
    for way in ("alone", "fsdp"):
        case, kept = run_of(2, "zb-h1", way), []
        for loads in (False, True):
            step, batch = assemble(case, rank), random_batch(case, rank)
            if loads:
                device, step.device = step.device, SimpleNamespace(type="cuda")
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch.cuda, "synchronize", lambda _: None)
                    with local_gradients(step.model, step.optimizer):
                        step._load_kernels(*(each[:2] for each in batch), trains=True)
                step.device = device
            kept.append([step(*batch), step(*batch)])
        assert all(map(torch.equal, *kept)), way


class Unanswered:
    """Messages that no rank answers; it knows their memory, and does not keep it."""

    copied = False

    def __init__(self):
        self.memory = []

    def connect(self, pairs):
        pass

    def send(self, tensor, peer):
        self.memory.append(weakref.ref(tensor))
        return SimpleNamespace(wait=lambda: None)

    receive = send


def test_memory_that_messages_may_still_write_stays_after_a_pass_that_failed():
    """One result has been sent, and one is being received, when the second forward fails."""
    messages = Unanswered()
    pipeline = Pipeline(make_schedule("1f1b", 2, 3), 0, messages)

    def work(operation, given):
        if operation.microbatch == 1:
            raise ZeroDivisionError
        return torch.zeros(1)

    with pytest.raises(ZeroDivisionError):
        pipeline.run(work, torch.zeros(1))
    gc.collect()
    assert [each() is None for each in messages.memory] == [False, False]


def check_a_pass_that_failed_is_not_followed_by_another(rank: Rank):
    """Messages of the first may be under way still, and would be taken for those of the second."""
    case = run_of(2, "1f1b", "ddp")
    step, batch = assemble(case, rank), random_batch(case, rank)
    step(*batch)
    if rank.rank == 1:  # which has nothing to do in a step that fails at once
        return
    forward, step._forward = step._forward, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(*batch)
    step._forward = forward
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"stage {rank.rank} has failed in an earlier pass"):
            step(*batch)


test_on_two_ranks = on_each(2, checks_of(globals()))


def drift(rank: Rank):
    """Of two stages by two data ranks, one rank's gain, then the embedding of both ranks of the second stage."""
    prepared = PreparedStep(run_of(2, "1f1b", "ddp", TIED), rank)
    for phase in prepared.phases().values():
        phase()
    check_replicas(prepared)
    gain, embedding = (prepared.step.model.module.get_parameter(name) for name in (GAINS[rank.rank // 2], EMBEDDING))
    for parameter, moved in ((gain, rank.rank == 3), (embedding, rank.rank >= 2)):
        before = parameter.detach().clone()
        parameter.data += 1e-3 * moved
        with pytest.raises(RuntimeError, match="1 parameters are not the same bits on all ranks"):
            check_replicas(prepared)
        parameter.data.copy_(before)
    check_replicas(prepared)


EMBEDDING, GAINS = "token_embeddings.weight", ("layers.0.ln1.weight", "ln_final.weight")


@pytest.mark.slow
def test_ranks_of_a_stage_that_drift_apart_and_both_ends_are_compared():
    on_ranks(drift, 4)


LOST_S = 8


def interrupted(rank: Rank, kill):
    """The second message of the second of three stages is lost in the second step, or its rank killed instead.

    A lost one is waited for until the time-out, which is short for messages of that step alone.
    """
    case = run_of(3, "1f1b")
    step, batch = assemble(case, rank), random_batch(case, rank)
    step(*batch)
    if not kill:
        dist.barrier()
        old, messages = step.pipeline, GroupMessages(replace(rank, timeout_s=LOST_S))
        step.pipeline = Pipeline(old.plan, old.stage, messages)
    send, sent = dist.isend, []

    def lose(tensor, **how):
        sent.append(tensor)
        if rank.rank != 1 or len(sent) != 2:
            return send(tensor, **how)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return SimpleNamespace(wait=lambda: None)

    dist.isend = lose
    try:
        step(*batch)
    except dist.DistError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "others"), [(False, (0, 1, 2)), (True, (0, 2))], ids=["lost", "killed"])
def test_a_message_that_is_lost_and_a_rank_that_is_killed_end_the_others(kill, others):
    ended = spawn(interrupted, 3, kill, apart=True)
    gone = r"Connection (closed|reset) by peer|Broken pipe"  # the first to time out leaves the others
    late = rf"Timed out waiting {1000 * LOST_S}ms"
    for number in others:
        assert ended[number].failure is None, ended[number].failure
        what = r"(waited for|sent) [FB] of micro-batch \d (of|to) stage \d"
        sentence = rf"stage {number} {what} in vain: .*({gone if kill else f'{gone}|{late}'}).*"
        assert re.fullmatch(sentence, ended[number].returned), ended[number].returned
    assert any("Timed out" in ended[number].returned for number in others) != kill
    assert ("SIGKILL" in (ended[1].failure or "")) == kill


def has_gone(*_, **__):
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("fails", "stage", "said"),
    [
        ("irecv", 1, "stage 1 waited for F of micro-batch 0 of stage 0"),
        ("received", 1, "stage 1 waited for F of micro-batch 0 of stage 0"),
        ("isend", 0, "stage 0 sent F of micro-batch 0 to stage 1"),
        ("sent", 0, "stage 0 sent F of micro-batch 0 to stage 1"),
    ],
)
def test_a_stage_that_has_gone_is_named_wherever_gloo_notices(monkeypatch, fails, stage, said):
    """Where a message begins, if the other has gone by then, else where it is waited for."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(GroupMessages, "_open", lambda *_: None)
    monkeypatch.setattr(GroupMessages, "connect", lambda *_: None)
    messages = GroupMessages(Rank(stage, stage, 2, torch.device("cpu"), "gloo"), SimpleNamespace())
    pipeline = Pipeline(make_schedule("1f1b", stages=2, microbatches=4), stage, messages)
    messages._up = messages._down = None
    for name, then in {"isend": "sent", "irecv": "received"}.items():
        work = SimpleNamespace(wait=has_gone if fails == then else lambda: None)
        monkeypatch.setattr(dist, name, has_gone if fails == name else lambda *_, work=work, **__: work)
    with pytest.raises(dist.DistError, match=f"^{said} in vain: Connection closed by peer$"):
        pipeline.run(lambda *_: torch.ones(1), torch.ones(1))
    with pytest.raises(dist.DistError, match=f"^stage {stage} exchanged gradients with stage {1 - stage} in vain: "):
        pipeline.exchange_ends(torch.ones(1))
