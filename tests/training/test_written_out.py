"""Steps with a written-out backward train as the reference does: alone, among ranks, and beside transformers."""

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cs336_systems.blocks import WrittenOutBlock
from cs336_systems.case import Parallel, TrainingCase, Unsupported
from cs336_systems.config import MODEL_SIZES, ModelConfig
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import spawn
from cs336_systems.harness.fit import is_predictable
from cs336_systems.model import TransformerLM
from cs336_systems.model.hf_weights import to_hf_name
from cs336_systems.training import AdamW, TrainStep, assemble, check_supported, random_batch

from .test_parallel import WAYS, Shared, whole

assembly = sys.modules["cs336_systems.training.assemble"]  # the package has a function of that name

HANDOUT = replace(MODEL_SIZES["tiny"], name="tinier", d_model=32, d_ff=64, vocab_size=97, context_length=16)
LLAMA = replace(HANDOUT, name="tinier-llama", n_heads=4, n_kv_heads=2)
QWEN = replace(LLAMA, name="tinier-qwen", n_kv_heads=1, qkv_bias=True, tie_embeddings=True, rms_norm_eps=1e-6)


def trained(step: TrainStep, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Losses of the steps, and how far all parameters went, in fp64."""
    start = [parameter.detach().double().clone() for parameter in step.model.parameters()]
    losses = torch.stack([step(*batch).double() for batch in batches])
    pairs = zip(step.model.parameters(), start, strict=True)
    return losses, torch.cat([(parameter.detach().double() - before).flatten() for parameter, before in pairs])


def check_within_the_references_error(
    steps: dict[str, TrainStep], batches: list[tuple[Tensor, Tensor]], *, factor: float
) -> None:
    """The reference in fp64 is the truth; ``ours`` may be ``factor`` times as far from it as ``reference``.

    Adam divides by the root of the second moment, so that where gradients nearly vanish roundings become steps: both
    are as far apart as chance has it, which the factor allows for. A loss may round once more.
    """
    truth = trained(steps["truth"], batches)
    found = (trained(steps[name], batches) for name in ("ours", "reference"))
    for what, true, mine, plain in zip(("losses", "movement"), truth, *found, strict=True):
        ours, reference = ((each - true).norm() / true.norm() for each in (mine, plain))
        print(f"{what}: ours {ours:.1e}, reference {reference:.1e}")
        eps = max(torch.finfo(p.dtype).eps for p in steps["ours"].model.parameters())
        assert ours <= factor * reference + eps, what
    assert truth[0][-1] < truth[0][0], "it learns"


def in_fp64(step: TrainStep) -> TrainStep:
    step.model.double()
    return step


@pytest.mark.parametrize("keep", ["input", "products-residual", "1xinput+all"])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config.name)
def test_ten_steps_agree_with_the_reference(config, keep):
    case = TrainingCase.of(config, batch_size=2, seed=5)
    steps = {
        "truth": in_fp64(assemble(case)),
        "reference": assemble(case),
        "ours": assemble(replace(case, keep=keep)),
    }
    assert all(isinstance(block, WrittenOutBlock) for block in steps["ours"].model.layers)
    check_within_the_references_error(steps, [random_batch(case)] * 10, factor=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernels": "fused", "keep": "all"}, "kernels fused need device cuda, got cpu"),
        ({"keep": "all", "attention": "flash"}, "attention flash: flash is compiled for CUDA devices"),
    ],
)
def test_what_no_step_has_is_unsupported(fields, message):
    with pytest.raises(Unsupported, match=message):
        assemble(TrainingCase.of(HANDOUT, **fields))


def test_unknown_names_are_told():
    for fields, message in (({"kernels": "fuse"}, "did you mean 'fused'"), ({"keep": "al"}, "did you mean 'all'")):
        with pytest.raises(ValueError, match=message):
            assemble(TrainingCase.of(HANDOUT, **fields))


def test_memory_is_not_predicted_for_blocks_that_are_written_out():
    case = TrainingCase.of(HANDOUT)
    assert [is_predictable(replace(case, keep=keep)) for keep in ("autograd", "all")] == [True, False]


@pytest.mark.parametrize("compute", ["same", "bf16"])
def test_attention_is_asked_for_the_dtype_in_which_weights_are_gathered(compute, monkeypatch):
    asked = []
    monkeypatch.setattr(assembly, "attention_reason", lambda name, q, k, v, **_: asked.append(q.dtype))
    check_supported(Shared.of(HANDOUT, how=Parallel("fsdp", compute_dtype=compute)), torch.device("cpu"))
    assert asked == [torch.bfloat16 if compute == "bf16" else torch.float32]


def test_targets_that_are_no_words_are_refused():
    step, (ids, targets) = assemble(TrainingCase.of(HANDOUT, keep="all")), torch.zeros(2, 1, 16, dtype=torch.int64)
    targets[0, 3] = 97
    with pytest.raises(ValueError, match=r"target 97 is neither in \[0, 97\) nor -100"):
        step(ids, targets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["flash", "hopper"])
@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config.name)
def test_ten_steps_of_fused_kernels_agree_with_the_reference(config, attention, dtype):
    config = replace(config, d_model=256, d_ff=512, context_length=200, vocab_size=1003)
    case = TrainingCase.of(config, batch_size=2, seed=5, device="cuda", dtype=dtype)
    ours = replace(case, kernels="fused", keep="products", attention=attention)
    try:
        steps = {"truth": in_fp64(assemble(replace(case, dtype="fp32"))), "reference": assemble(case)}
        steps["ours"] = assemble(ours)
    except Unsupported as reason:
        pytest.skip(str(reason))
    steps["truth"].model.load_state_dict(steps["reference"].model.state_dict())
    check_within_the_references_error(steps, [random_batch(case)] * 10, factor=3)


# --- two ranks, each with half of the batch ---------------------------------------------------------------------------

LEADERBOARD = Parallel("fsdp", update="under-backward")
SHARED = (
    *((config, "products", way) for config in (LLAMA, QWEN) for way in WAYS),
    *((LLAMA, keep, Parallel(wrapper)) for wrapper in ("fsdp", "fsdp2") for keep in ("input", "all")),
    *((config, "1xall+products-residual", LEADERBOARD) for config in (LLAMA, QWEN)),
    *((QWEN, "attention", Parallel(wrapper, compute_dtype="bf16")) for wrapper in ("fsdp", "fsdp2")),
)


def shared_case(config: ModelConfig, keep: str, way: Parallel) -> Shared:
    return Shared.of(config, how=way, batch_size=2, seed=3, keep=keep)


def train_all(rank: Rank) -> list[tuple[Tensor, list[Tensor]]]:
    """Of each way, this rank's losses, and all parameters after five steps."""
    trained = []
    for config, keep, way in SHARED:
        case = shared_case(config, keep, way)
        step = assemble(case, rank)
        losses = torch.stack([step(*random_batch(case, rank)) for _ in range(5)])
        names = [name for name, _ in TransformerLM(config, device="meta").named_parameters()]  # a tied one once
        if way.wrapper == "fsdp":
            full = step.model.gather_full_params()
        else:
            full = dict(zip(names, whole(step.model), strict=True))
        trained.append((losses, [full[name] for name in names]))
    return trained


@pytest.fixture(scope="module")
def world() -> list[list[tuple[Tensor, list[Tensor]]]]:
    return spawn(train_all, 2, timeout_s=200)


@functools.cache
def alone(config: ModelConfig) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Losses of the reference on both ranks' batches, and parameters before five steps and after them."""
    case = TrainingCase.of(config, batch_size=2, seed=3)
    batches = [random_batch(case, Rank(number, number, 2, torch.device("cpu"), "gloo")) for number in range(2)]
    step = assemble(case)
    start = [parameter.detach().clone() for parameter in step.model.parameters()]
    losses = [step(*(torch.cat(parts) for parts in zip(*batches, strict=True))) for _ in range(5)]
    return torch.stack(losses), start, whole(step.model)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SHARED)))
def test_two_ranks_train_what_one_process_trains_with_the_reference(world, number):
    config, _, way = SHARED[number]
    losses, start, expected = alone(config)
    # Adam's first steps are signs of gradients, so that those near zero go either way in bf16.
    of_losses, of_movement = (1e-2, 0.1) if way.compute_dtype == "bf16" else (1e-6, 1e-3)
    torch.testing.assert_close((world[0][number][0] + world[1][number][0]) / 2, losses, rtol=of_losses, atol=0)
    moved = sum((a - s).square().sum() for a, s in zip(expected, start, strict=True)).sqrt()
    for _, found in (ranks[number] for ranks in world):
        apart = sum((a - t).square().sum() for a, t in zip(expected, found, strict=True)).sqrt()
        assert apart < of_movement * moved, f"{apart:.2e} apart, moved {moved:.2e}"


# --- beside transformers ---------------------------------------------------------------------------------------------


class Theirs(nn.Module):
    """transformers' model with our weights, as a model of ours is called."""

    def __init__(self, ours: TransformerLM) -> None:
        super().__init__()
        config = ours.config
        shape = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_ff,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.kv_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": config.tie_embeddings,
        }
        model, configuration = (Qwen2ForCausalLM, Qwen2Config) if config.qkv_bias else (LlamaForCausalLM, LlamaConfig)
        self.names = [to_hf_name(name) for name, _ in ours.named_parameters()]
        self.model = model(configuration(**shape))
        self.model.load_state_dict({to_hf_name(name): each for name, each in ours.state_dict().items()})

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.model(token_ids).logits

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """In the order of ours."""
        return map(self.model.get_parameter, self.names)


@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config.name)
def test_ten_steps_agree_with_transformers(config):
    """Ours is at most three times as far from the truth as its implementation in fp32."""
    case = TrainingCase.of(config, batch_size=2, seed=5)
    theirs = Theirs(assemble(case).model)
    steps = {
        "truth": in_fp64(assemble(case)),
        "reference": TrainStep(theirs, AdamW(theirs.parameters()), case.precision),
        "ours": assemble(replace(case, keep="products")),
    }
    check_within_the_references_error(steps, [random_batch(case)] * 10, factor=3)
