"""One training step: its phases and their order, what each leaves behind, dtypes, loss scaling, and its numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import MODEL_SIZES, MODES, OPTIMIZERS, PRECISIONS
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training import AdamW, TrainingCase, TrainStep, assemble, cross_entropy

CONFIG = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)
CPU_PRECISIONS = ("fp32", "bf16", "autocast-bf16", "autocast-fp16")
LOGITS_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "autocast-bf16": torch.bfloat16,
    "autocast-fp16": torch.float16,
}


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(CONFIG.vocab_size, (2, 2, 16), generator=generator)
    return ids, targets


def make_step(precision: str = "fp32", **setup) -> TrainStep:
    return assemble(TrainingCase.of(CONFIG, dtype=precision, **setup))


def weights(step: TrainStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def same_bits(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def gradients(step: TrainStep) -> list[Tensor | None]:
    return [parameter.grad for parameter in step.model.parameters()]


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("forward", ["forward"]),
        ("backward", ["forward", "backward"]),
        ("step", ["forward", "backward", "optimizer"]),
    ],
)
def test_phases_of_a_mode_come_in_the_order_of_work(mode, names):
    step = make_step()
    before = weights(step)
    assert list(step.phases(mode, *batch())) == names
    assert same_bits(weights(step), before), "nothing runs before it is called"


@pytest.mark.parametrize("mode", ["optimizer", "train", ""])
def test_an_unknown_mode_is_refused_by_name(mode):
    with pytest.raises(ValueError, match=f"unknown mode '{mode}': known are {', '.join(MODES)}"):
        make_step().phases(mode, *batch())


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_forward_mode_builds_no_graph(precision):
    step = make_step(precision)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        for phase in step.phases("forward", *batch()).values():
            phase()
    assert not kept
    assert step.loss is not None and not step.loss.requires_grad
    assert gradients(step) == [None] * len(gradients(step))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_backward_mode_drops_the_gradients_and_leaves_the_weights(precision):
    step = make_step(precision)
    before = weights(step)
    seen: list[torch.dtype] = []
    for parameter in step.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.dtype))
    for phase in step.phases("backward", *batch()).values():
        phase()
    assert seen == [before[0].dtype] * len(before), "every parameter had a gradient, in its own dtype"
    assert gradients(step) == [None] * len(before)
    assert same_bits(weights(step), before)
    assert not step.optimizer.state


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_a_step_clears_the_gradients_in_its_last_phase(precision):
    step = make_step(precision)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=step.scaler.is_enabled())
    for group in step.optimizer.param_groups:
        group["lr"] = 0.01  # 1e-3 is less than half the distance from 1 to its neighbour in bf16: gains would stay
    before = weights(step)
    phases = step.phases("step", *batch())
    phases["forward"]()
    assert gradients(step) == [None] * len(before)
    phases["backward"]()
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients(step))
    assert same_bits(weights(step), before)
    phases["optimizer"]()
    assert gradients(step) == [None] * len(before)
    assert not any(torch.equal(a, b) for a, b in zip(weights(step), before, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_loss_is_detached_and_the_same_in_every_mode(mode):
    step = make_step()
    with torch.no_grad():
        expected = cross_entropy(step.model(batch()[0]), batch()[1])
    for phase in step.phases(mode, *batch()).values():
        phase()
    assert step.loss is not None and step.loss.grad_fn is None
    assert torch.equal(step.loss, expected)


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_dtypes_of_parameters_logits_loss_and_gradients(precision):
    seen = []

    def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return cross_entropy(logits, targets)

    step = make_step(precision)
    step.loss_function = loss_function
    phases = step.phases("step", *batch())
    phases["forward"]()
    phases["backward"]()
    wide = torch.bfloat16 if precision == "bf16" else torch.float32
    assert seen == [LOGITS_DTYPES[precision]]
    assert step.loss is not None and step.loss.dtype == torch.float32
    assert {parameter.dtype for parameter in step.model.parameters()} == {wide}
    assert {gradient.dtype for gradient in gradients(step) if gradient is not None} == {wide}


@pytest.mark.parametrize(("precision", "inside"), [("fp32", "highest"), ("tf32", "high")])
def test_tf32_is_set_in_forward_and_backward_and_nowhere_else(precision, inside):
    """The flag alone, which a CPU keeps without heeding it."""
    seen = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        seen.append(("forward", torch.get_float32_matmul_precision()))
        out = REFERENCE_OPS.attention(q, k, v, causal=causal)
        out.register_hook(lambda gradient: seen.append(("backward", torch.get_float32_matmul_precision())))
        return out

    model = TransformerLM(CONFIG, replace(REFERENCE_OPS, attention=attention))
    step = TrainStep(model, AdamW(model.parameters()), PRECISIONS[precision])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        step(*batch())
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("forward", inside)] * CONFIG.n_layers + [("backward", inside)] * CONFIG.n_layers
    assert after == "medium"


@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=pytest.mark.slow) if name == "fused" else name for name in OPTIMIZERS]
)
@pytest.mark.parametrize("precision", CPU_PRECISIONS)
@pytest.mark.usefixtures("whole_chunks")
def test_a_batch_is_learnt_by_heart(precision, optimizer):
    """A random batch starts near ln 97 = 4.57 nats; weights and optimizer work if twenty steps take a tenth off."""
    step = make_step(precision, optimizer=optimizer)
    for group in step.optimizer.param_groups:
        group["lr"] = 3e-3
    losses = [step(*batch()).item() for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert losses[-1] == min(losses)


def test_a_step_is_the_loop_written_by_hand_bit_for_bit():
    step = make_step()
    torch.manual_seed(0)
    model = TransformerLM(CONFIG)
    optimizer = AdamW(model.parameters())
    for seed in range(4):
        ids, targets = batch(seed)
        loss = cross_entropy(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(step(ids, targets), loss.detach())
    assert same_bits(weights(step), list(model.parameters()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_phases_of_one_batch_may_be_run_again(optimizer):
    """As a benchmark does; two rounds of the same phases are two steps."""
    again, fresh = make_step(optimizer=optimizer), make_step(optimizer=optimizer)
    phases = again.phases("step", *batch())
    for _ in range(2):
        for phase in phases.values():
            phase()
        fresh(*batch())
    assert same_bits(weights(again), weights(fresh))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp16_skips_an_update_with_infinite_gradients_and_lowers_the_scale(optimizer):
    step = make_step("autocast-fp16", optimizer=optimizer)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    step(*batch())
    before = weights(step)
    assert step.scaler.get_scale() == 16.0

    step.loss_function = lambda logits, targets: cross_entropy(logits, targets) * float("inf")
    step(*batch())
    assert same_bits(weights(step), before)
    assert step.scaler.get_scale() == 8.0
    assert gradients(step) == [None] * len(before)

    step.loss_function = cross_entropy
    step(*batch())
    assert not same_bits(weights(step), before)
    assert all(weight.isfinite().all() for weight in weights(step))
    assert step.scaler.get_scale() == 8.0


def test_loss_scaling_cancels_in_the_update():
    """Scales are powers of two, which change no bit of a gradient that neither overflows nor underflows."""
    updated = []
    for scale in (1.0, 64.0):
        step = make_step("autocast-bf16")
        step.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        step(*batch())
        updated.append(weights(step))
    assert same_bits(*updated)


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_only_fp16_scales_its_loss(precision):
    assert make_step(precision).scaler.is_enabled() == (precision == "autocast-fp16")
