"""Ranges: they nest as the calls do, mirror themselves in backward, change no bit, and are gone when taken off."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cs336_systems.config import MODEL_SIZES
from cs336_systems.model import REFERENCE_OPS
from cs336_systems.profiling import ranges
from cs336_systems.profiling.ranges import (
    BACKWARD,
    SCORES,
    SOFTMAX,
    STEP,
    VALUES,
    WARMUP,
    annotate,
    ranged_ops,
    ranged_phases,
)
from cs336_systems.training import TrainingCase, TrainStep, assemble

TINY = MODEL_SIZES["tiny"]


@dataclass
class FakeNvtx:
    """Records pushes and pops per thread; ``closed`` holds (thread, path of open names) at each pop."""

    stacks: dict[int, list[str]] = field(default_factory=dict)
    opened: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def push_range(self, name: str) -> None:
        thread = threading.get_ident()
        stack = self.stacks.setdefault(thread, [])
        stack.append(name)
        self.opened.append((thread, tuple(stack)))

    def pop_range(self) -> None:
        self.stacks[threading.get_ident()].pop()

    @property
    def paths(self) -> list[tuple[str, ...]]:
        return [path for _, path in self.opened]

    @property
    def names(self) -> list[str]:
        return [path[-1] for path in self.paths]

    @property
    def balanced(self) -> bool:
        return not any(self.stacks.values())


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    fake = FakeNvtx()
    monkeypatch.setattr(ranges, "nvtx", fake)
    return fake


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    token_ids, targets = (torch.randint(TINY.vocab_size, (2, 16), generator=generator) for _ in range(2))
    return token_ids, targets


def tiny_step(dtype: str = "fp32") -> TrainStep:
    return assemble(TrainingCase.of(TINY, dtype=dtype))


def test_every_module_and_stage_is_ranged_in_its_place(emitted, batch):
    step = tiny_step()
    with annotate(step.model):
        step.phases("forward", *batch)["forward"]()
    stages = ("TransformerLM", "layers.1", "layers.1.attn")
    for path in (
        ("TransformerLM", "token_embeddings"),
        ("TransformerLM", "layers.1", "layers.1.ffn", "layers.1.ffn.w2"),
        *((*stages, stage) for stage in ("layers.1.attn.q_proj", SCORES, SOFTMAX, VALUES)),
        ("TransformerLM", "lm_head"),
    ):
        assert path in emitted.paths
    calls = [name for name, module in step.model.named_modules() if not isinstance(module, nn.ModuleList)]
    assert len(emitted.names) == (n_ranges := len(calls) + 3 * TINY.n_layers)
    assert emitted.balanced
    step(*batch)
    assert len(emitted.names) == n_ranges, "nothing is ranged once annotations are taken off"


def test_operations_of_written_out_blocks_are_ranged_in_their_place(emitted, batch):
    step, plain = (assemble(TrainingCase.of(TINY, keep="attention")) for _ in range(2))
    phases, before = step.phases("backward", *batch), step.model.layers[0].block_ops
    with annotate(step.model):
        phases["forward"]()
        forward = emitted.paths
        phases["backward"]()
    inside = [path[-1].removeprefix("layers.1.") for path in forward if path[:-1] == ("TransformerLM", "layers.1")]
    assert inside == ["rms_norm", "rotate", "attention", "add_rms_norm", "swiglu"]
    within = ("TransformerLM" + BACKWARD, "layers.1" + BACKWARD)
    inside = [path[-1].removeprefix("layers.1.") for path in emitted.paths[len(forward) :] if path[:-1] == within]
    stages = ["add_rms_norm", "swiglu", "rms_norm", "rms_norm", "rotate", "attention", "rotate", "rms_norm"]
    again = {0, 3, 4}
    assert inside == [stage + BACKWARD * (i not in again) for i, stage in enumerate(stages)]
    assert emitted.balanced and step.model.layers[0].block_ops is before
    plain(*batch)
    assert torch.equal(step.loss, plain.loss)


def test_backward_ranges_hold_the_work_of_their_module(batch):
    """Also for the embedding, whose input needs no gradient, and whose work torch's own hooks would miss."""
    step = tiny_step()
    phases = step.phases("backward", *batch)
    with annotate(step.model), torch.profiler.profile(acc_events=True) as profiler:
        phases["forward"]()
        phases["backward"]()
    events = list(profiler.events())

    def inside(operator: str, name: str) -> int:
        (outer,) = [event for event in events if event.name == name]
        window = outer.time_range
        return sum(
            window.start <= event.time_range.start and event.time_range.end <= window.end
            for event in events
            if event.name == operator
        )

    assert inside("aten::embedding_dense_backward", "token_embeddings" + BACKWARD) == 1
    assert inside("aten::mm", "layers.0.ffn.w2" + BACKWARD) == 2
    assert inside("aten::mm", "lm_head" + BACKWARD) == 2
    assert inside("aten::_softmax_backward_data", "layers.0.attn" + BACKWARD) == 1
    assert inside("aten::mm", "TransformerLM" + BACKWARD) == 2 * (7 * TINY.n_layers + 1)


def test_annotation_changes_no_bit(batch):
    results = []
    for attached in (False, True):
        step = tiny_step("autocast-bf16")
        annotation = annotate(step.model) if attached else None
        losses = [step(*batch) for _ in range(2)]
        phases = step.phases("step", *batch)
        phases["forward"]()
        phases["backward"]()
        gradients = {name: parameter.grad for name, parameter in step.model.named_parameters()}
        results.append((losses, gradients))
        if annotation is not None:
            annotation.close()
    (losses, gradients), (ranged_losses, ranged_gradients) = results
    assert [float(loss) for loss in losses] == [float(loss) for loss in ranged_losses]
    for name, gradient in gradients.items():
        assert gradient is not None
        assert torch.equal(gradient, ranged_gradients[name]), name


def test_ranged_attention_is_the_same_bits(emitted):
    n_queries, n_keys, heads, kv_heads = 5, 23, 6, 2
    q = torch.randn(2, heads, n_queries, 16, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, n_keys, 16, requires_grad=True) for _ in range(2))
    upstream = torch.randn(2, heads, n_queries, 16)
    outputs = []
    for ops in (REFERENCE_OPS, ranged_ops(REFERENCE_OPS)):
        o = ops.attention(q, k, v, causal=True)
        outputs.append((o, *torch.autograd.grad(o, (q, k, v), upstream)))
    assert all(torch.equal(plain, other) for plain, other in zip(*outputs, strict=True))
    assert emitted.names == [SCORES, SOFTMAX, VALUES, *(name + BACKWARD for name in (VALUES, SOFTMAX, SCORES))]


@pytest.mark.slow
def test_compiled_modules_are_ranged_as_a_whole(emitted, batch):
    step, plain = tiny_step(), tiny_step()
    for block in step.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    with annotate(step.model):
        loss = step(*batch)
    torch.testing.assert_close(loss, plain(*batch))
    assert ("TransformerLM", "layers.0") in emitted.paths
    assert ("TransformerLM (backward)", "layers.0 (backward)") in emitted.paths
    assert not any("." in name.removeprefix("layers.") for name in emitted.names)
    assert emitted.balanced
    before = len(emitted.opened)
    step(*batch)
    assert len(emitted.opened) == before


def test_phases_stand_inside_warm_up_and_step(emitted):
    phases = ranged_phases({"forward": lambda: None, "backward": lambda: None}, warmup=1)
    for _ in range(3):
        for phase in phases.values():
            phase()
    one = [(STEP,), (STEP, "forward"), (STEP, "backward")]
    assert emitted.paths == [tuple(WARMUP if name == STEP else name for name in path) for path in one] + one + one
    assert emitted.balanced
