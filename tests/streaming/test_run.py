"""Steps of a tiny model, executed on the CPU: the same bits under every plan, and those of plain training."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, head_ops, write_out
from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.streaming.fixed import EMBEDDING
from cs336_systems.streaming.lanes import Lanes, PretendedLink
from cs336_systems.streaming.layout import Chunks, Layout
from cs336_systems.streaming.optimizer import LayerAdamW
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.run import StreamedStep
from cs336_systems.streaming.schedule import Item, Kind, Schedule
from tests.streaming.plans import random_plan
from tests.streaming.resident import resident

CONFIG = ModelConfig(
    "toy", d_model=32, d_ff=48, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=61, context_length=32, qkv_bias=True
)
CPU = torch.device("cpu")


def work(context_length=32, chunk=32, config=CONFIG, dtype="fp32") -> StreamedWork:
    n = PRECISIONS[dtype].parameter_bytes
    return StreamedWork(config, context_length, chunk, PRECISIONS[dtype], (("exp_avg", n), ("exp_avg_sq", n)))


def plan_of(work_, *, chunks=1, rounds=1, order="sequential", level="products", clipping=False, **more) -> Plan:
    levels = ((level,) * chunks,) * work_.config.n_layers
    return Plan(work_, chunks, rounds, order, levels, more.pop("slots", ()), clipping=clipping, **more)


def chunks_of(plan: Plan) -> Chunks:
    return Chunks(plan.work.chunk, plan.work.context_length, plan.chunks, plan.rounds)


class WrittenOutNorm(torch.autograd.Function):
    """The final norm as a streamed step has it: its backward is the blocks', which rounds otherwise than autograd's."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        y, rstd = REFERENCE.rms_norm_forward(x.flatten(0, 1), gain, eps)
        ctx.save_for_backward(x, gain, rstd)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        x, gain, rstd = ctx.saved_tensors
        rows = x.flatten(0, 1)
        dx, dgain = REFERENCE.rms_norm_backward(dy.flatten(0, 1), rows, gain, rstd, torch.zeros_like(rows))
        return dx.view_as(x), dgain, None


def model_of(config: ModelConfig, dtype=torch.float32) -> TransformerLM:
    torch.manual_seed(0)
    ops = replace(head_ops("reference", REFERENCE_OPS), rms_norm=WrittenOutNorm.apply)
    model = TransformerLM(config, ops, dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    write_out(model, REFERENCE, "products")
    return model


def batches(chunks: Chunks, n: int, config=CONFIG) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = n, 2, chunks.n_sequences, chunks.seq_len
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    ids[:, 1, 0, :3] = -100
    return [(one, two) for one, two in ids]


class Recorded:
    """AdamW that keeps the gradients it was given, by a parameter's number."""

    def __init__(self) -> None:
        self.adamw = LayerAdamW(lr=0.01)
        self.gradients: dict[int, Tensor] = {}

    def __call__(self, first_number, state, *rest):
        self.gradients |= {first_number + i: gradient.clone() for i, gradient in enumerate(state["gradients"])}
        self.adamw(first_number, state, *rest)


def resident_step(plan: Plan, dtype=torch.float32, **more) -> StreamedStep:
    config, chunks = plan.work.config, chunks_of(plan)
    moments = dict(plan.work.moments) if dtype == torch.bfloat16 else None
    schedule = resident(plan, Layout.of(config, dtype, chunks, moments))
    how = {"moments": moments, "optimizer": Recorded(), **more}
    return StreamedStep(config, schedule, chunks, REFERENCE, CPU, dtype, **how)


def trained(step: StreamedStep, n: int = 5) -> dict[str, Tensor]:
    """Losses, gradients of the last step, and weights after ``n`` steps."""
    step.load(model_of(step.config, step.fixed.embedding.dtype).state_dict())
    losses = [step(ids, targets).clone() for ids, targets in batches(step.chunks, n, step.config)]
    return {"losses": torch.stack(losses), **step.state_dict()} | {
        f"gradient {number}": gradient for number, gradient in step.optimizer.gradients.items()
    }


def differing(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    assert all(tensor.isfinite().all() for tensor in expected.values())
    return [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, tie_embeddings=True)], ids=["untied", "tied"])
@pytest.mark.parametrize("level", ["products", "input"])
def test_a_step_of_one_chunk_is_that_of_plain_training(config, level):
    step, model = resident_step(plan_of(work(16, 32, config), level=level)), model_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step.load(model.state_dict())
    for ids, targets in batches(step.chunks, 3):
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(step(ids, targets), loss.detach())
    assert not differing(step.state_dict(), model.state_dict())


def test_clipping_is_that_of_plain_training():
    step, model = (
        resident_step(plan_of(work(16, 32), clipping=True), torch.float64, max_norm=0.05),
        model_of(CONFIG, torch.float64),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step.load(model.state_dict())
    for ids, targets in batches(step.chunks, 3):
        optimizer.zero_grad()
        model(ids, targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        step(ids, targets)
        assert norm > 0.1
        torch.testing.assert_close(step.guard.norm, norm, rtol=1e-12, atol=0)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(step.state_dict()[name], weight, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, tie_embeddings=True)], ids=["untied", "tied"])
@pytest.mark.parametrize("length", [4, 32])
def test_rounds_of_chunks_are_the_whole_batch(length, config):
    """Four sequences of 32 in chunks of 8, or two short ones a chunk: gradients against plain training, in fp64."""
    step = resident_step(plan_of(work(length, 8, config), chunks=8, rounds=2), torch.float64)
    model = model_of(config, torch.float64)
    step.load(model.state_dict())
    ((ids, targets),) = batches(step.chunks, 1)
    loss = model(ids, targets)
    loss.backward()
    torch.testing.assert_close(step(ids, targets), loss.detach(), rtol=1e-13, atol=0)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        got, size = step.optimizer.gradients[number], max(1.0, parameter.grad.abs().max().item())
        assert (got - parameter.grad).abs().max() <= 500 * torch.finfo(torch.float64).eps * size, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [4, 32])
def test_order_and_levels_change_no_bit(length, dtype):
    config = replace(CONFIG, tie_embeddings=True)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    plan = plan_of(work(length, 8, config, name), chunks=4, rounds=3)
    expected = trained(resident_step(plan, dtype), 2)
    for order in ("sequential", "interleaved"):
        for level in ("input", "attention"):
            other = plan_of(plan.work, chunks=4, rounds=3, order=order, level=level)
            assert not differing(trained(resident_step(other, dtype), 2), expected), (order, level)


def uncapped(plan: Plan, n: int) -> dict[str, Tensor]:
    """Of the plan's chunks and rounds with nothing moved: everything resident, in the plainest order."""
    levels = (("products",) * plan.chunks,) * plan.work.config.n_layers
    plain = Plan(plan.work, plan.chunks, plan.rounds, "sequential", levels, (), clipping=plan.clipping)
    return trained(resident_step(plain, torch.bfloat16, max_norm=0.1), n)


def capped(plan: Plan, schedule: Schedule, lanes: Lanes, n: int) -> dict[str, Tensor]:
    how = {"moments": dict(plan.work.moments), "optimizer": Recorded(), "max_norm": 0.1, "lanes": lanes}
    step = StreamedStep(plan.work.config, schedule, chunks_of(plan), REFERENCE, CPU, torch.bfloat16, **how)
    for memory in (step.memory.device_slab.memory, step.memory.host_slab.memory):
        memory.fill_(0xFF)
    return trained(step, n)


@pytest.mark.parametrize("seed", range(30))
def test_every_plan_gives_the_same_bits(seed):
    """Memory is full of NaN at first, and copies begin as early and end as late as the schedule lets them."""
    plan, schedule = random_plan(seed)
    expected = uncapped(plan, 5)
    for lanes in (PretendedLink(), PretendedLink(seed)):
        assert not differing(capped(plan, schedule, lanes, 5), expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_rehearsal_leaves_no_trace(seed):
    plan, schedule = random_plan(seed)
    steps = [resident_step(plan, torch.bfloat16, max_norm=0.1)]
    steps += [StreamedStep(plan.work.config, schedule, steps[0].chunks, REFERENCE, CPU, torch.bfloat16,
                           moments=dict(plan.work.moments), optimizer=Recorded(), max_norm=0.1)]  # fmt: skip
    first, *rest = batches(steps[0].chunks, 3, plan.work.config)
    for memory in (steps[1].memory.device_slab.memory, steps[1].memory.host_slab.memory):
        memory.fill_(0xFF)
    for step in steps:
        step.load(model_of(step.config, torch.bfloat16).state_dict())
    guard = steps[1].guard
    assert guard.norm is None
    steps[1].rehearse(*first)
    assert guard.norm == 0  # its kernels have run
    assert steps[1].fixed.gradients[EMBEDDING].any()  # and those of an embedding's backward
    for ids, targets in rest:
        assert torch.equal(steps[1](ids, targets), steps[0](ids, targets))
    assert not differing(steps[1].state_dict(), steps[0].state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_dependency_that_is_dropped_shows(seed):
    """Not under every order of copies, but under one of a few."""
    plan, schedule = random_plan(seed)
    expected = uncapped(plan, 2)
    waits = [(i, j) for i, operation in enumerate(schedule.operations) for j in operation.waits]
    for i, j in random.Random(seed).sample(waits, min(6, len(waits))):
        operations = list(schedule.operations)
        at, written = operations[i], {held.item for held in operations[j].writes}
        if at.kind is Kind.RECOMPUTE and Item("context", at.layer, at.round, at.chunk) in written:
            continue  # attention that is computed again writes its own keys and values again, the same bits
        operations[i] = replace(operations[i], waits=tuple(k for k in operations[i].waits if k != j))
        lame = replace(schedule, operations=tuple(operations))
        links = [PretendedLink(), *(PretendedLink(k) for k in range(20))]
        assert any(differing(capped(plan, lame, lanes, 2), expected) for lanes in links), (i, operations[i], j)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, tie_embeddings=True)], ids=["untied", "tied"])
def test_fresh_weights_are_those_of_a_new_model(config):
    """In distribution: means and deviations of each parameter."""
    step, model = resident_step(plan_of(work(16, 32, config))), TransformerLM(config)
    torch.manual_seed(3)
    step.reset_parameters()
    weights = step.state_dict()
    assert weights.keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        got, deviation = weights[name], expected.std() if expected.numel() > 1 else torch.zeros(())
        assert got.shape == expected.shape
        assert (got.mean() - expected.mean()).abs() <= 8 * deviation / expected.numel() ** 0.5, name
        torch.testing.assert_close(got.std(), expected.std(), rtol=0.25, atol=0, msg=name)


def test_state_that_no_optimizer_here_keeps_is_refused():
    for moments in ({"momentum": 2}, {"exp_avg": 8}):
        (name,) = moments
        with pytest.raises(ValueError, match=f"the optimizer keeps no {name} of . bytes a parameter beside torch.bfl"):
            Layout.of(CONFIG, torch.bfloat16, Chunks(8, 8, 1, 1), moments)


@pytest.mark.parametrize("shape", [(3, 32), (4, 16)])
def test_batches_of_another_size_are_refused(shape):
    step = resident_step(plan_of(work(16, 32)))
    with pytest.raises(ValueError, match=r"a step takes \(2, 16\) token ids and targets, got"):
        step(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 20, 8, 1), "a chunk of 8 tokens and sequences of 20 do not divide one another"),
        ((8, 32, 6, 1), "a round of 6 chunks ends within a sequence of 4 chunks"),
    ],
)
def test_chunks_that_do_not_divide_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Chunks(*numbers)
