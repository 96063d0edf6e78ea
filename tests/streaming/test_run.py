"""Steps of a tiny model, executed on the CPU: the same bits under every plan, and those of plain training."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cs336_systems.blocks import REFERENCE, block_products, write_out
from cs336_systems.blocks.adapters import adapt
from cs336_systems.config import PRECISIONS, ModelConfig, Precision, Recipe
from cs336_systems.costs.kept import STORED
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.streaming.build import build, build_forward
from cs336_systems.streaming.lanes import Lanes, PretendedLink
from cs336_systems.streaming.memory import EMBEDDING
from cs336_systems.streaming.plan import Keep, Plan
from cs336_systems.streaming.run import LayerAdamW, StreamedStep
from cs336_systems.streaming.schedule import Item, Kind, Schedule
from cs336_systems.training.optimizer import decay_groups
from cs336_systems.training.precision import BY_BYTES
from tests.streaming.memory_model import without_wait
from tests.streaming.plans import LORA, random_plan, resident, roomy

CONFIG = ModelConfig(
    "toy", d_model=32, d_ff=48, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=61, context_length=32, qkv_bias=True
)
TIED = replace(CONFIG, tie_embeddings=True)
QK_NORM = replace(CONFIG, name="qk norm", qkv_bias=False, qk_norm=True, head_dim=12)
E4M3 = Recipe("e4m3")
FP64 = Precision("fp64", parameter_bytes=8, matmul_bytes=8, matmul_dtype="fp32", softmax_bytes=8)
CPU = torch.device("cpu")


def plan_of(length=16, chunk=32, config=CONFIG, precision=PRECISIONS["fp32"], *, chunks=1, rounds=1, **more) -> Plan:
    """Everything kept, unless ``keep`` says otherwise, and gradients not clipped."""
    n, pairs = precision.parameter_bytes, chunks * config.n_layers
    moments = (("exp_avg", n), ("exp_avg_sq", n))
    of_blocks = {"recipe": more.pop("recipe", STORED), "lora": more.pop("lora", None)}
    work = StreamedWork(config, length, chunk, precision, moments, **of_blocks)
    how = {"order": "sequential", "keep": Keep(pairs, pairs), "clipping": False, **more}
    return Plan(work, chunks, rounds, **how)


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


def model_of(plan: Plan) -> TransformerLM:
    torch.manual_seed(0)
    loss = partial(linear_cross_entropy, fused=False, every_row=True)
    ops = replace(REFERENCE_OPS, rms_norm=WrittenOutNorm.apply, linear_cross_entropy=loss)
    model = TransformerLM(plan.work.config, ops, dtype=BY_BYTES[plan.work.precision.parameter_bytes])
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    write_out(model, REFERENCE, "products", block_products("reference", plan.work.recipe))
    if (lora := plan.work.lora) is not None:
        adapt(model, lora)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def trained_of(model: TransformerLM) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def batches(plan: Plan, n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = n, 2, plan.n_sequences, plan.work.context_length
    ids = torch.randint(plan.work.config.vocab_size, shape, generator=generator)
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


def step_of(
    plan: Plan, schedule: Schedule | None = None, lanes: Lanes | None = None, max_norm=0.1, messages=None
) -> StreamedStep:
    """A step under a schedule, all of whose memory is NaN at first; resident without one."""
    how = {"optimizer": Recorded(), "max_norm": max_norm, "lanes": lanes, "messages": messages}
    how["products"] = block_products("reference", plan.work.recipe)
    step = StreamedStep(plan, schedule or resident(plan), REFERENCE, CPU, **how)
    for memory in (step.memory.device_slab.memory, step.memory.host_slab.memory) if schedule else ():
        memory.fill_(0xFF)
    load(step, model_of(plan))
    return step


def load(step: StreamedStep, model: TransformerLM) -> None:
    """The model's weights, and no steps made."""
    step.model().load_state_dict(model.state_dict(), strict=step.plan.work.share is None)
    step.begin_training()


def weights_of(step: StreamedStep) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in step.model().state_dict().items()}


def trained(step: StreamedStep, n: int) -> dict[str, Tensor]:
    """Losses, gradients of the last step, and weights after ``n`` steps."""
    losses = [step(ids, targets).clone() for ids, targets in batches(step.plan, n)]
    return {"losses": torch.stack(losses), **weights_of(step)} | {
        f"gradient {number}": gradient for number, gradient in step.optimizer.gradients.items()
    }


def differing(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    assert all(tensor.isfinite().all() for tensor in expected.values())
    return [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]


@pytest.mark.parametrize("config", [CONFIG, TIED, QK_NORM], ids=["untied", "tied", "qk norm"])
@pytest.mark.parametrize(("keep", "lora"), [(Keep(3, 3), None), (Keep(0, 0), None), (Keep(0, 0), LORA)])
@pytest.mark.parametrize("recipe", [STORED, E4M3, Recipe("e4m3", "e5m2")], ids=lambda recipe: str(recipe) or "stored")
def test_a_step_of_one_chunk_is_that_of_plain_training(config, keep, lora, recipe):
    plan = plan_of(config=config, keep=keep, lora=lora, recipe=recipe)
    step, model = step_of(plan), model_of(plan)
    optimizer = torch.optim.AdamW(decay_groups(trained_of(model).values()), lr=0.01, fused=True)
    for ids, targets in (*batches(plan, 3), *packed(batches(plan, 2)), *batches(plan, 1)):
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(step(ids, targets), loss.detach())
    assert not differing(weights_of(step), model.state_dict())


def packed(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same with documents that do not see each other, of another length in each sequence."""
    found = []
    for ids, targets in batches:
        places, lengths = torch.arange(ids.shape[1]), torch.arange(3, 3 + len(ids))[:, None]
        found.append((torch.stack((ids, places - places % lengths), dim=-1), targets))
    return found


def test_documents_do_not_share_a_sequence_that_chunks_cut():
    plan = plan_of(length=32, chunk=16, chunks=2)
    ((ids, targets),) = packed(batches(plan, 1))
    with pytest.raises(ValueError, match="documents share sequences of 32 tokens, which chunks of 16 would cut"):
        step_of(plan)(ids, targets)


def test_clipping_is_that_of_plain_training():
    plan = plan_of(precision=FP64, clipping=True)
    step, model = step_of(plan, max_norm=0.05), model_of(plan)
    optimizer = torch.optim.AdamW(decay_groups(model.parameters()), lr=0.01)
    for ids, targets in batches(plan, 3):
        optimizer.zero_grad()
        model(ids, targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        step(ids, targets)
        assert norm > 0.1
        torch.testing.assert_close(step.guard.norm, norm, rtol=1e-12, atol=0)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights_of(step)[name], weight, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("config", [CONFIG, TIED, QK_NORM], ids=["untied", "tied", "qk norm"])
@pytest.mark.parametrize("length", [4, 32])
@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_rounds_of_chunks_are_the_whole_batch(length, config, lora):
    """Four sequences of 32 in chunks of 8, or two short ones a chunk: gradients against plain training, in fp64."""
    plan = plan_of(length, 8, config, FP64, chunks=8, rounds=2, lora=lora)
    step, model = step_of(plan), model_of(plan)
    ((ids, targets),) = batches(plan, 1)
    loss = model(ids, targets)
    loss.backward()
    torch.testing.assert_close(step(ids, targets), loss.detach(), rtol=1e-13, atol=0)
    assert len(step.optimizer.gradients) == len(trained_of(model))
    for number, (name, parameter) in enumerate(trained_of(model).items()):
        got, size = step.optimizer.gradients[number], max(1.0, parameter.grad.abs().max().item())
        assert (got - parameter.grad).abs().max() <= 500 * torch.finfo(torch.float64).eps * size, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "dtype", "config", "recipe"),
    [
        (4, "bf16", QK_NORM, STORED),
        (32, "fp32", TIED, STORED),
        (32, "fp32", QK_NORM, STORED),
        (8, "bf16", TIED, E4M3),
        (64, "fp32", QK_NORM, E4M3),
    ],
)
def test_order_and_what_is_kept_change_no_bit(length, dtype, config, recipe):
    chunk = 16 if recipe.quantized else 8
    plan = plan_of(length, chunk, config, PRECISIONS[dtype], chunks=4, rounds=3, recipe=recipe)
    expected = trained(step_of(plan), 2)
    for order in ("sequential", "interleaved"):
        for keep in (Keep(0, 0), Keep(12, 0)):
            assert not differing(trained(step_of(replace(plan, order=order, keep=keep)), 2), expected), (order, keep)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_every_plan_gives_the_same_bits(seed):
    """Copies begin as early and end as late as the schedule lets them, and a rehearsal before leaves no trace."""
    plan, schedule = random_plan(seed)
    expected = trained(step_of(roomy(plan)), 4)
    rehearsed = step_of(plan, schedule, PretendedLink(seed))
    assert rehearsed.guard.norm is None
    rehearsed.rehearse(*batches(plan, 1)[0])
    assert rehearsed.guard.norm == 0  # its kernels have run
    if not plan.work.lora:
        assert rehearsed.fixed.gradients[EMBEDDING].any()  # and those of an embedding's backward
    for step in (step_of(plan, schedule, PretendedLink()), rehearsed):
        assert not differing(trained(step, 4), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_dependency_that_is_dropped_shows(seed):
    """Not under every order of copies, but under one of a few."""
    plan, schedule = random_plan(seed)
    expected = trained(step_of(roomy(plan)), 2)
    waits = [(i, j) for i, operation in enumerate(schedule.operations) for j in operation.waits]
    for i, j in random.Random(seed).sample(waits, min(6, len(waits))):
        at, written = schedule.operations[i], {held.item for held in schedule.operations[j].writes}
        if at.kind is Kind.RECOMPUTE and Item("context", at.layer, at.round, at.chunk) in written:
            continue  # attention that is recomputed writes its own keys and values again, the same bits
        lame = without_wait(schedule, i, j)
        links = [PretendedLink(), *(PretendedLink(k) for k in range(20))]
        assert any(differing(trained(step_of(plan, lame, link), 2), expected) for link in links), (i, at, j)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_an_evaluation_has_the_losses_of_a_step_and_leaves_no_trace(seed):
    plan, schedule = random_plan(seed)
    forward = build_forward(plan)
    assert (forward.slots, forward.places) == (schedule.slots, schedule.places)
    held = [held for operation in forward.operations for held in (*operation.reads, *operation.writes)]
    assert all(one.slot.number < schedule.rings[one.slot.ring].n_items for one in held)
    evaluated, plain = (step_of(plan, schedule, PretendedLink(seed + i)) for i in range(2))
    for i, (batch, (ids, targets)) in enumerate(
        zip(batches(plan, 2), batches(replace(plan, rounds=1), 2), strict=True)
    ):
        loss = evaluated.evaluate(ids, targets)
        assert torch.equal(loss, evaluated.evaluate(ids, targets))
        if plan.rounds == 1:
            assert torch.equal(loss, plain(ids, targets)) and torch.equal(loss, evaluated(ids, targets))
        elif i == 0:
            expected = model_of(plan)(ids, targets).detach()
            torch.testing.assert_close(loss, expected, rtol=2**-6, atol=0, check_dtype=False)
        assert torch.equal(evaluated(*batch), plain(*batch))
    assert not differing(weights_of(evaluated), weights_of(plain))


def test_what_was_in_the_place_of_missing_sequences_does_not_scale_those_that_are_there():
    """Of a chunk of four, with one scale for its tensors."""
    plan = plan_of(length=16, chunk=64, recipe=E4M3)
    step = step_of(plan, build(plan))
    load(step, model := model_of(plan))
    ids, targets = torch.randint(CONFIG.vocab_size, (2, 4, 16))
    for n in (1, 3):
        expected = model(ids[:n], targets[:n]).detach()
        step(ids, targets)
        load(step, model)
        torch.testing.assert_close(step.evaluate(ids[:n], targets[:n]), expected, rtol=1e-6, atol=0)


def test_an_evaluation_may_have_fewer_sequences_than_a_round():
    plan, schedule = next(one for one in map(random_plan, range(100)) if one[0].round_sequences >= 4)
    step, length, most = step_of(plan, schedule), plan.work.context_length, plan.round_sequences
    ids, targets = torch.randint(plan.work.config.vocab_size, (2, most, length))
    losses = torch.stack([step.evaluate(*pair) for pair in zip(ids.split(1), targets.split(1), strict=True)])
    torch.testing.assert_close(step.evaluate(ids, targets), losses.mean(), rtol=1e-6, atol=0)
    for shape in ((0, length), (most + 1, length), (1, 3)):
        wrong = torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"1 to {most} sequences of {length} "):
            step.evaluate(wrong, wrong)
        with pytest.raises(ValueError, match=rf"\({plan.n_sequences}, {length}\)"):
            step(wrong, wrong)
