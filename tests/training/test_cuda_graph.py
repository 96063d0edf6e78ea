"""Captured steps are the uncaptured ones to the bit; what cannot be captured is said in one sentence."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.case import UNCAPTURED_STEPS, Unsupported
from cs336_systems.config import MODEL_SIZES, Lora
from cs336_systems.distributed import process_group
from cs336_systems.distributed.process_group import Rank
from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.ranks import Parallel
from cs336_systems.training import TrainingCase, TrainStep, assemble
from cs336_systems.training.assemble import build_model, finish
from cs336_systems.training.clipping import GradientGuard
from cs336_systems.training.cuda_graph import CapturedStep
from cs336_systems.training.step import masked_cross_entropy
from tests.distributed.checks import on_gpus, on_ranks, spawn
from tests.training.emulated_graph import EmulatedGraph, emulate
from tests.training.shared import Shared

CONFIG = replace(MODEL_SIZES["tiny"], name="tiniest", d_model=16, d_ff=32, n_layers=1, vocab_size=31, context_length=8)
SHARED = replace(CONFIG, vocab_size=32, n_kv_heads=2)
QUANTIZED = replace(CONFIG, d_model=64, d_ff=96, context_length=16)


@dataclass(frozen=True)
class Adapting(TrainingCase):
    """Adapters are trained."""

    @property
    def lora(self) -> Lora:
        return Lora(rank=8, alpha=16.0)


def batches(n: int, case: TrainingCase) -> list[tuple[Tensor, Tensor]]:
    """As many batches, each its own."""
    generator = torch.Generator().manual_seed(7)
    shape = (n, 2, case.accumulate * case.batch_size, case.context_length)
    ids = torch.randint(case.config.vocab_size, shape, generator=generator).to(case.device)
    return [(batch[0], batch[1]) for batch in ids]


def conversations(n: int, case: TrainingCase) -> list[tuple[Tensor, Tensor]]:
    """Batches whose documents begin elsewhere in each, with targets that are ignored."""
    found = []
    for i, (ids, targets) in enumerate(batches(n, case)):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        found.append(
            (torch.stack((ids, places - places % (i % 5 + 2)), dim=-1), targets.where(targets % 3 > 0, IGNORED))
        )
    return found


def same_bits(one: TrainStep, other: TrainStep) -> bool:
    """Of all that is trained: what is frozen may be in fp8 alone."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if a.requires_grad)


def train_both(
    captured: TrainStep, plain: TrainStep, case: TrainingCase, n_steps: int = 10, of: Callable = batches
) -> None:
    """Step by step: the same losses; in the end the same weights, no gradients, and states of as many steps."""
    for i, batch in enumerate(of(n_steps, case)):
        losses = captured(*batch), plain(*batch)
        assert torch.equal(*losses), f"step {i}: {losses}"
    assert same_bits(captured, plain)
    assert all(parameter.grad is None for parameter in captured.model.parameters())
    steps = [{int(state["step"]) for state in step.optimizer.state.values()} for step in (captured, plain)]
    assert steps[0] == steps[1] == {n_steps}


def pair(
    monkeypatch: pytest.MonkeyPatch, kind: type[TrainingCase] = TrainingCase, **fields: object
) -> tuple[CapturedStep, TrainStep, TrainingCase]:
    """A step whose graphs are emulated, and a plain one."""
    emulate(monkeypatch)
    case = replace(kind.of(CONFIG, batch_size=2, optimizer="torch-fused"), **fields)
    step, plain = assemble(case), assemble(case)
    of = step.model, step.optimizer, step.precision, step.loss_function, step.accumulate
    captured = CapturedStep(*of)
    return captured, plain, case


@pytest.mark.parametrize("fields", [{"accumulate": 3}, {"tied": True}, {"accumulate": 2, "keep": "products"}], ids=str)
def test_replayed_steps_are_the_uncaptured_ones(monkeypatch, fields):
    size = replace(CONFIG, tie_embeddings=fields.pop("tied", False))
    captured, plain, case = pair(monkeypatch, size=size, **fields)
    train_both(captured, plain, case)
    assert captured._passes_graph.n_replays == 10 - UNCAPTURED_STEPS
    assert captured._update_graph is None, "torch's optimizer is not captured"


@pytest.mark.parametrize("fields", [{}, {"accumulate": 2, "keep": "products"}], ids=str)
def test_documents_and_ignored_targets_are_those_of_the_step(monkeypatch, fields):
    captured, plain, case = pair(monkeypatch, **fields)
    if not case.written_out:
        captured.loss_function = plain.loss_function = masked_cross_entropy
    train_both(captured, plain, case, of=conversations)
    assert captured._passes_graph.n_replays == 10 - UNCAPTURED_STEPS


def test_quantized_weights_are_those_of_the_step(monkeypatch):
    """Also where an evaluation has read them, or someone has changed them, before the capture or between replays."""
    fields = {"keep": "products", "matmul_dtype": "e4m3", "size": QUANTIZED, "context_length": 16}
    captured, plain, case = pair(monkeypatch, **fields)
    for i, batch in enumerate(batches(9, case)):
        assert torch.equal(captured(*batch), plain(*batch)), i
        with torch.no_grad():
            assert torch.equal(captured.model(*batch), plain.model(*batch)), i
            if i in (UNCAPTURED_STEPS - 1, 6):
                for each in (captured, plain):
                    each.model.layers[0].ffn.w2.weight.mul_(3)
    assert same_bits(captured, plain)


@pytest.mark.parametrize("recipe", ["same", "e4m3"])
def test_adapters_are_replayed_beside_frozen_weights(monkeypatch, recipe):
    fields = {"keep": "products", "matmul_dtype": recipe, "size": QUANTIZED, "context_length": 16, "accumulate": 2}
    captured, plain, case = pair(monkeypatch, Adapting, **fields)
    train_both(captured, plain, case, n_steps=6)
    assert captured._passes_graph.n_replays == 6 - UNCAPTURED_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["torch-fused", "fused"])
def test_a_learning_rate_may_change_and_a_state_be_loaded(monkeypatch, optimizer):
    """Ours stays captured whatever the schedule does, and is captured again with other states."""
    captured, plain, case = pair(monkeypatch, optimizer=optimizer)
    for i, batch in enumerate(batches(9, case)):
        for step in (captured, plain):
            step.optimizer.param_groups[0]["lr"] = 1e-3 * (i + 1)
            if i == 6:
                step.optimizer.load_state_dict(step.optimizer.state_dict())
        assert torch.equal(captured(*batch), plain(*batch))
    assert same_bits(captured, plain)
    if optimizer == "fused":
        assert captured._update_graph.n_replays == 2


def test_other_modes_and_shapes_are_refused(monkeypatch):
    captured, _, case = pair(monkeypatch)
    ((ids, targets),) = batches(1, case)
    for mode in ("forward", "backward"):
        with pytest.raises(Unsupported, match=f"a CUDA graph holds whole steps, mode step, got mode {mode}"):
            captured.phases(mode, ids, targets)
    with pytest.raises(ValueError, match="unknown mode 'train'"):
        captured.phases("train", ids, targets)
    for _ in range(UNCAPTURED_STEPS + 1):
        captured(ids, targets)
    with pytest.raises(ValueError, match=r"token ids and targets of shape \(2, 8\), got \(1, 8\)"):
        captured(ids[:1], targets[:1])


def replayed_on_tensor_ranks(rank: Rank, **fields) -> int:
    """Train both steps on these ranks, with clipping; returns how many graphs hold collectives."""
    plain = {"how": Parallel(tensor=2), "batch_size": 2, "keep": "products", "optimizer": "torch-fused"}
    case = Shared.of(SHARED, **plain | fields)
    with pytest.MonkeyPatch.context() as patch:
        if rank.device.type == "cpu":
            emulate(patch)
        plain, step = (finish(build_model(case, rank), case, rank, guard=GradientGuard(0.1)) for _ in range(2))
        of = step.model, step.optimizer, step.precision, step.loss_function, step.accumulate, step.guard
        step = CapturedStep(*of)
        train_both(step, plain, case, n_steps=6)
        return len(process_group.captured)


def test_collectives_of_tensor_ranks_are_replayed():
    assert on_ranks(partial(replayed_on_tensor_ranks, accumulate=2), 2) == [1, 1]


def test_graphs_are_reset_before_a_group_is_left():
    """NCCL would wait for them."""
    graph = EmulatedGraph()
    graph.calls.append((dist.get_world_size, (), {}, []))
    with process_group.joined("cpu"):
        process_group.captured.add(graph)
        graph.reset = lambda: graph.calls.pop()[0]()  # fails where there is no group any more
    assert not graph.calls and not process_group.captured


@pytest.mark.gpu
@pytest.mark.parametrize(("world_size", "device"), [on_gpus(2)])
def test_collectives_of_tensor_ranks_are_replayed_on_gpus(world_size, device):
    """Leaving the group afterwards must not wait for the graphs."""
    how = {"device": device, "dtype": "bf16", "optimizer": "fused", "kernels": "fused", "attention": "flash"}
    assert spawn(partial(replayed_on_tensor_ranks, **how), world_size, device=device) == [2, 2]


FUSED = {"dtype": "bf16", "optimizer": "fused"}
CASES = {
    "bf16, torch": {"dtype": "bf16", "optimizer": "torch-fused"},
    "bf16, ours": FUSED,
    "bf16, ours, flash, four micro-batches": FUSED | {"attention": "flash", "accumulate": 4},
    "tf32, ours, checkpointed": {"dtype": "tf32", "optimizer": "fused", "checkpoint": "full"},
    "bf16, fused kernels, input kept, four micro-batches": FUSED
    | {"attention": "flash", "kernels": "fused", "keep": "input", "accumulate": 4},
    "fp32, written out": {"dtype": "fp32", "optimizer": "torch-fused", "attention": "flash", "keep": "all"},
    "bf16, ours, compiled": FUSED | {"attention": "flash", "compile": "on", "accumulate": 2},
}


def gpu_pair(kind: type[TrainingCase] = TrainingCase, **fields: object) -> tuple[CapturedStep, TrainStep, TrainingCase]:
    config = replace(MODEL_SIZES["tiny"], name="tinier", context_length=64, tie_embeddings=bool(fields.pop("tied", 0)))
    case = kind.of(config, device="cuda", batch_size=2, **fields)
    captured = assemble(replace(case, cuda_graph="on"))
    assert isinstance(captured, CapturedStep)
    return captured, assemble(case), case


@pytest.mark.gpu
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "compiled" in n else n for n in CASES])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ten_captured_steps_are_uncaptured_ones_on_a_gpu(name, tied):
    captured, plain, case = gpu_pair(tied=tied, **CASES[name])
    train_both(captured, plain, case)
    assert captured._passes_graph is not None
    assert (captured._update_graph is not None) == (CASES[name]["optimizer"] == "fused")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["same", "e4m3"])
def test_adapters_are_replayed_on_a_gpu(recipe):
    how = FUSED | {"attention": "flash", "kernels": "fused", "keep": "products", "accumulate": 2}
    captured, plain, case = gpu_pair(Adapting, matmul_dtype=recipe, **how)
    train_both(captured, plain, case)
    assert captured._passes_graph is not None and captured._update_graph is not None


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash", "hopper"])
def test_packed_conversations_are_replayed_on_a_gpu(attention):
    if attention == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    how = FUSED | {"attention": attention, "kernels": "fused", "keep": "products", "accumulate": 2}
    captured, plain, case = gpu_pair(**how)
    if attention == "hopper":  # whose sums of dq have no order
        for i, batch in enumerate(conversations(10, case)):
            torch.testing.assert_close(captured(*batch), plain(*batch), rtol=1e-2, atol=0, msg=f"step {i}")
    else:
        train_both(captured, plain, case, of=conversations)
    assert captured._passes_graph is not None and captured._update_graph is not None


@pytest.mark.gpu
def test_a_schedule_and_clipping_are_replayed_and_nobody_waits_for_the_device():
    """As a trainer steps: from the fourth on whole steps are replayed, and the host asks the device for nothing."""
    case = TrainingCase.of(CONFIG, device="cuda", batch_size=2, accumulate=2, **FUSED)
    steps = []
    for cuda_graph in ("on", "off"):
        one = replace(case, cuda_graph=cuda_graph)
        guard = GradientGuard(0.1)
        steps.append(finish(build_model(one), one, guard=guard, decay="matrices", weight_decay=0.1))
    found = []
    for i, batch in enumerate(batches(10, case)):
        torch.cuda.set_sync_debug_mode("error" if i > UNCAPTURED_STEPS else "default")
        try:
            for step in steps:
                for group in step.optimizer.param_groups:
                    group["lr"] = 1e-3 * (i + 1)
                found.append((step(*batch), step.guard.loss.clone(), step.guard.norm.clone()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if i == UNCAPTURED_STEPS:
            graphs = steps[0]._passes_graph, steps[0]._update_graph
    for captured, plain in zip(found[::2], found[1::2], strict=True):
        assert all(map(torch.equal, captured, plain))
        assert torch.equal(captured[0].float(), captured[1])
    assert same_bits(*steps)
    assert None not in graphs and graphs == (steps[0]._passes_graph, steps[0]._update_graph)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_one_sentence_and_the_process_goes_on():
    """In a process of its own, as a capture that fails may leave traces."""
    result = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    said, went_on = result.stdout.splitlines()
    assert said.startswith("the step cannot be captured as a CUDA graph: ")
    assert went_on == "True True"


WAITS = """
import torch
from cs336_systems.case import TrainingCase, Unsupported
from cs336_systems.training import assemble, cross_entropy, random_batch

case = TrainingCase("cuda", "tiny", batch_size=2, context_length=64, optimizer="fused", cuda_graph="on")
step, batch = assemble(case), random_batch(case)
step.loss_function = lambda logits, targets: cross_entropy(logits, targets) * float(logits.isfinite().all())
for _ in range(3):
    step(*batch)
before = [parameter.detach().clone() for parameter in step.model.parameters()]
try:
    step(*batch)
except Unsupported as error:
    print(error)
torch.cuda.empty_cache()
unchanged = all(torch.equal(a, b) for a, b in zip(step.model.parameters(), before))
with torch.no_grad():
    print(unchanged, step.model(batch[0]).isfinite().all().item())
"""


def test_clipping_is_replayed_and_steps_after_one_that_is_not_finite_change_nothing(monkeypatch):
    emulate(monkeypatch)
    case = TrainingCase.of(CONFIG, batch_size=2, optimizer="torch-fused")
    step, plain = (finish(build_model(case), case, guard=GradientGuard(0.1)) for _ in range(2))
    captured = CapturedStep(step.model, step.optimizer, step.precision, step.loss_function, guard=step.guard)
    for i, batch in enumerate(batches(10, case)):
        losses = []
        for one in (captured, plain):
            weight = one.model.layers[0].ffn.w1.weight.data
            weight[0, 0] = torch.nan if i == 7 else 0.01 * i
            losses.append(one(*batch))
        assert torch.equal(*losses) == (i != 7)
        assert captured.guard.norm.equal(plain.guard.norm) == (i != 7)
    assert same_bits(captured, plain)
    assert {int(state["step"]) for state in captured.optimizer.state.values()} == {7}
