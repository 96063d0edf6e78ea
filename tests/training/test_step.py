"""One training step: its phases and their order, what each leaves behind, dtypes, loss scaling, and its numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import MODES, PRECISIONS
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training import AdamW, TrainingCase, TrainStep, assemble, cross_entropy
from tests.training.shared import CONFIG, batch, same_bits

LOGITS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast-bf16": torch.bfloat16}


def make_step(precision: str = "fp32", **setup) -> TrainStep:
    return assemble(TrainingCase.of(CONFIG, dtype=precision, **setup))


def weights(step: TrainStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def gradients(step: TrainStep) -> list[Tensor | None]:
    return [parameter.grad for parameter in step.model.parameters()]


@pytest.mark.parametrize("precision", LOGITS_DTYPES)
def test_what_each_phase_leaves_behind(precision):
    """Forward keeps nothing for backward, backward drops its gradients, and a step clears them in its last phase."""
    step, seen = make_step(precision), []
    step.loss_function = lambda logits, targets: seen.append(logits.dtype) or cross_entropy(logits, targets)
    for group in step.optimizer.param_groups:
        group["lr"] = 0.01  # 1e-3 is less than half the distance from 1 to its neighbour in bf16: gains would stay
    before, nothing = weights(step), [None] * len(weights(step))
    wide = torch.bfloat16 if precision == "bf16" else torch.float32
    for mode in MODES:
        kept: list[Tensor] = []
        phases = step.phases(mode, *batch())
        assert list(phases) == ["forward", "backward", "optimizer"][: 1 + MODES.index(mode)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            phases["forward"]()
        assert bool(kept) == (mode != "forward")
        assert step.loss is not None and step.loss.dtype == torch.float32 and not step.loss.requires_grad
        assert gradients(step) == nothing
        if mode == "forward":
            first = step.loss.clone()
            continue
        phases["backward"]()
        assert same_bits(weights(step), before) and torch.equal(step.loss, first)
        assert (gradients(step) == nothing) == (mode == "backward")
    assert all(gradient.dtype == wide and gradient.isfinite().all() for gradient in gradients(step))
    phases["optimizer"]()
    assert gradients(step) == nothing and torch.is_grad_enabled()
    assert not any(torch.equal(a, b) for a, b in zip(weights(step), before, strict=True))
    assert set(seen) == {LOGITS_DTYPES[precision]} and {weight.dtype for weight in before} == {wide}


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


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_the_optimizer_holds_every_parameter_once_in_the_precisions_dtype(precision):
    config = replace(CONFIG, tie_embeddings=True)
    step = assemble(TrainingCase.of(config, dtype=precision, optimizer="torch-fused"))
    held = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == list(map(id, step.model.parameters()))
    assert sum(parameter.numel() for parameter in held) == config.n_parameters
    assert {parameter.dtype.itemsize for parameter in held} == {PRECISIONS[precision].parameter_bytes}


def test_the_loss_is_computed_where_the_model_computes_not_where_its_parameters_are():
    """FSDP2 can keep parameters on the host; ``meta`` stands for the GPU."""

    class ElsewhereComputed(torch.nn.Linear):
        def forward(self, token_ids: Tensor) -> Tensor:
            return self.weight.to(token_ids.device)[token_ids]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        assert targets.device == logits.device  # operators on meta do not compare
        return cross_entropy(logits, targets)

    model = ElsewhereComputed(CONFIG.vocab_size, CONFIG.vocab_size)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), PRECISIONS["fp32"], loss, accumulate=2)
    token_ids, targets = batch()
    for phase in step.phases("forward", token_ids.to("meta"), targets).values():
        phase()
    assert step.loss.device.type == "meta"
