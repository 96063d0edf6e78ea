"""Checkpointed steps against plain ones: the same bits, the same parameter names, and the blocks that run again."""

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention.dispatch import attention_op
from cs336_systems.config import MODEL_SIZES, PRECISIONS, ModelConfig
from cs336_systems.costs.checkpointing import make_plan, recomputed_blocks
from cs336_systems.model import REFERENCE_OPS, ModelOps, TransformerLM
from cs336_systems.training import TrainingCase, TrainStep, assemble
from cs336_systems.training.activation_checkpointing import FUSED_ATTENTION, checkpointed_stack, unsupported_reason
from cs336_systems.training.dry_run import dry_run

CONFIG = replace(
    MODEL_SIZES["tiny"], name="five", d_model=32, d_ff=64, vocab_size=97, context_length=16, n_layers=5, n_kv_heads=2
)
POLICIES = (
    *("full", "every-2", "every-3", "every-5", "every-99", "first-1", "first-3", "first-99", "recursive"),
    *("keep-matmuls", "keep-attention"),
)
SELECTIVE = ("keep-matmuls", "keep-attention")


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(CONFIG.vocab_size, (2, 2, 16), generator=generator)
    return ids, targets


class Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.update([func.name()])
        return func(*args, **(kwargs or {}))


def after_backward(
    policy: str, config: ModelConfig = CONFIG, precision: str = "fp32", ops: ModelOps = REFERENCE_OPS, **options: str
) -> TrainStep:
    """A step whose forward and backward have run."""
    step = assemble(TrainingCase.of(config, dtype=precision, checkpoint=policy, **options), ops=ops)
    phases = step.phases("step", *batch())
    phases["forward"]()
    phases["backward"]()
    return step


def assert_same_bits(actual: TrainStep, expected: TrainStep) -> None:
    assert torch.equal(actual.loss, expected.loss)
    named = dict(expected.model.named_parameters())
    assert named.keys() == dict(actual.model.named_parameters()).keys()
    for name, parameter in actual.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, named[name].grad), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16"])
def test_gradients_have_the_same_bits(policy, precision):
    assert_same_bits(after_backward(policy, precision=precision), after_backward("none", precision=precision))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_layers", [1, 4])
def test_any_number_of_layers_will_do(policy, n_layers):
    config = replace(CONFIG, n_layers=n_layers, qkv_bias=True, tie_embeddings=True)
    assert_same_bits(after_backward(policy, config), after_backward("none", config))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ["tiled", "sdpa-flash"])
def test_other_attentions_have_the_same_bits(policy, attention):
    if reason := unsupported_reason(policy, attention):
        with pytest.raises(ValueError, match="hidden or many"):
            after_backward(policy, attention=attention)
        assert policy in SELECTIVE and attention == "tiled", reason
        return
    assert_same_bits(after_backward(policy, attention=attention), after_backward("none", attention=attention))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_embedding_feeds_blocks_that_still_learn(policy):
    """The first block's input needs no gradient then, which the older kind of checkpointing takes for all of it."""
    gradients = []
    for checkpoint in ("none", policy):
        step = assemble(TrainingCase.of(CONFIG, checkpoint=checkpoint))
        step.model.token_embeddings.requires_grad_(False)
        step.model.layers[2].ffn.requires_grad_(False)
        phases = step.phases("step", *batch())
        phases["forward"]()
        phases["backward"]()
        gradients.append({name: parameter.grad for name, parameter in step.model.named_parameters()})
    plain, checkpointed = gradients
    frozen = {name for name, gradient in plain.items() if gradient is None}
    assert frozen == {"token_embeddings.weight", *(f"layers.2.ffn.w{i}.weight" for i in (1, 2, 3))}
    assert {name for name, gradient in checkpointed.items() if gradient is None} == frozen
    assert all(torch.equal(checkpointed[name], plain[name]) for name in plain.keys() - frozen)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_keep_their_names_and_steps_stay_the_same(policy):
    checkpointed, plain = (assemble(TrainingCase.of(CONFIG, checkpoint=name)) for name in (policy, "none"))
    assert list(checkpointed.model.state_dict()) == list(TransformerLM(CONFIG).state_dict())
    for seed in range(2):
        assert torch.equal(checkpointed(*batch(seed)), plain(*batch(seed)))
    for ours, theirs in zip(checkpointed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def block_runs(policy: str, mode: str) -> Counter[int]:
    """How often each block of the model is run in one pass of ``mode``, by index."""
    step = assemble(TrainingCase.of(CONFIG, checkpoint=policy))
    runs: Counter[int] = Counter()
    for i, block in enumerate(step.model.layers):
        block.register_forward_pre_hook(lambda *_, i=i: runs.update([i]))
    for phase in step.phases(mode, *batch()).values():
        phase()
    return runs


@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_blocks_run_again_as_the_plan_says(policy):
    assert block_runs(policy, "forward") == dict.fromkeys(range(5), 1)
    blocks, _ = recomputed_blocks(make_plan(policy, 5))
    assert block_runs(policy, "step").total() == 5 + blocks


def test_nothing_but_the_input_of_a_segment_is_kept():
    x = torch.randn(2, 16, 32, requires_grad=True)
    model = TransformerLM(CONFIG)
    kept: list[Tensor] = []
    stack = checkpointed_stack("every-2", REFERENCE_OPS.stack)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        stack(list(model.layers), x, *model.rotary(16))
    shared = {table.data_ptr() for table in model.rotary(16)}
    assert [tuple(t.shape) for t in kept if t.numel() and t.data_ptr() not in shared] == [(2, 16, 32)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "products"), [("keep-matmuls", 0), ("keep-attention", 4 + 2 + 1), ("full", 9 - 1)])
def test_selective_policies_multiply_again_what_they_did_not_keep(policy, products):
    """A block has nine: four projections, two of attention, three of the feed-forward, whose last is always spared."""

    def matmuls(checkpoint: str) -> int:
        with Operators() as seen:
            after_backward(checkpoint)
        return seen.counts["aten::mm"] + seen.counts["aten::bmm"]

    again = matmuls(policy) - matmuls("none")
    assert again == CONFIG.n_layers * products


def test_the_stack_that_the_operations_bring_is_the_one_that_is_checkpointed():
    lengths = []

    def stack(blocks, x, cos, sin):
        lengths.append(len(blocks))
        return REFERENCE_OPS.stack(blocks, x, cos, sin)

    for policy in ("none", "full", "keep-matmuls"):
        after_backward(policy, ops=replace(REFERENCE_OPS, stack=stack))
    assert lengths == [5] + [1] * (2 * 5) + [5]


@pytest.fixture
def backend(monkeypatch):
    """Compiles without a code generator: traces, splits into forward and backward, and runs what was traced."""
    really_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: really_compile(*args, **kwargs, backend="aot_eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        ("every-2", "fp32"),
        ("recursive", "autocast-bf16"),
        ("keep-attention", "fp32"),
        ("keep-matmuls", "autocast-bf16"),
    ],
)
def test_compiled_blocks_have_the_same_bits_in_one_graph_for_all(backend, policy, precision):
    """Selective policies are in the graph: the eager modes would see no operator of a compiled block."""
    step = after_backward(policy, precision=precision, compile="on")
    assert_same_bits(step, after_backward("none", precision=precision))
    assert backend["stats"]["unique_graphs"] == 2, "one for all blocks, one for the loss"
    assert not backend["graph_break"]
    assert any(block._compiled_call_impl is not None for block in step.model.layers) == (policy not in SELECTIVE)


@pytest.mark.slow
def test_what_a_compiled_block_keeps_is_what_its_policy_says(backend):
    """Two sequences, four heads, 16 tokens: keep-matmuls has the scores, keep-attention its result alone."""
    model = TransformerLM(CONFIG)
    x = torch.randn(2, 16, 32, requires_grad=True)
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *model.rotary(16), x)}
    kept = {}
    for policy in SELECTIVE:
        stack = checkpointed_stack(policy, REFERENCE_OPS.stack, compiled=True)
        out = stack([model.layers[0]], x, *model.rotary(16))
        saved = out.grad_fn.saved_tensors
        kept[policy] = sorted(tensor.numel() for tensor in saved if tensor.data_ptr() not in known)
    scores, attention_result = 2 * 4 * 16 * 16, 2 * 4 * 16 * 8
    assert kept["keep-attention"] == [attention_result]
    assert scores in kept["keep-matmuls"]
    assert len(kept["keep-matmuls"]) == 8, "nine products, of which nothing needs the last"


def test_the_fused_attentions_are_operators_that_exist():
    q = torch.randn(1, 2, 16, 16, requires_grad=True)
    with Operators() as seen:
        attention_op("sdpa-flash")(q, q, q, causal=True)
    assert set(seen.counts) & set(FUSED_ATTENTION)
    for name in FUSED_ATTENTION:
        if name.startswith("aten::"):
            assert hasattr(torch.ops.aten, name.removeprefix("aten::")), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_on_a_gpu_the_peak_is_the_predicted_one_and_the_bits_are_the_same(policy):
    """Within 3 %: the small model at batch 4, context 512, whose step peaks at 4 GiB without checkpointing."""
    config, precision = MODEL_SIZES["small"], PRECISIONS["autocast-bf16"]
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(config.vocab_size, (2, 4, 512), generator=generator).cuda()
    gc.collect()  # models of earlier tests, which would go at some time in this one
    before = torch.cuda.memory_allocated()

    def measured(checkpoint: str) -> tuple[list[Tensor], int]:
        case = TrainingCase.of(config, dtype=precision.name, device="cuda", checkpoint=checkpoint)
        step = assemble(case)
        step(ids, targets)
        torch.cuda.reset_peak_memory_stats()
        phases = step.phases("step", ids, targets)
        phases["forward"]()
        phases["backward"]()
        gradients = [parameter.grad.cpu() for parameter in step.model.parameters()]
        phases["optimizer"]()
        return gradients, torch.cuda.max_memory_allocated() - before

    checkpointed, peak = measured(policy)
    plain, _ = measured("none")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(checkpointed, plain, strict=True))
    predicted = dry_run(TrainingCase("cuda", "small", 4, 512, precision.name, checkpoint=policy)).n_bytes
    print(f"{policy}: predicted {predicted / 2**30:.3f} GiB, allocated {peak / 2**30:.3f} GiB")
    assert predicted == pytest.approx(peak, rel=0.03)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("policy", "runs"), [("none", 5), ("full", 10), ("keep-attention", 5), ("keep-matmuls", 5)])
def test_on_a_gpu_flash_attention_is_kept_or_recomputed_blocks(policy, runs):
    config = replace(CONFIG, d_model=64)
    step = assemble(TrainingCase.of(config, dtype="bf16", device="cuda", attention="flash", checkpoint=policy))
    ids, targets = (tensor.cuda() for tensor in batch())
    with Operators() as seen:
        step(ids, targets)
    assert seen.counts["cs336_systems::flash_attention_forward"] == runs


@pytest.mark.parametrize(
    "policy", ["some", "every-0", "every--1", "every-", "every-x", "first-0", "Full", "", "every-1.5"]
)
def test_an_unknown_policy_is_refused_by_name(policy):
    with pytest.raises(ValueError, match="unknown checkpoint policy") as refusal:
        assemble(TrainingCase.of(CONFIG, checkpoint=policy))
    assert repr(policy) in str(refusal.value)
    for name in ("none", "full", "recursive", "keep-matmuls", "keep-attention", "every-K", "first-M"):
        assert name in str(refusal.value)


def test_policies_outside_of_the_blocks_are_not_compiled_themselves():
    with pytest.raises(ValueError, match="'full' runs compiled blocks"):
        checkpointed_stack("full", REFERENCE_OPS.stack, compiled=True)
