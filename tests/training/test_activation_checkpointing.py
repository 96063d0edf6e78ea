"""Checkpointed steps against plain ones: the same bits, the same parameter names, and the blocks that run again."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import ModelConfig
from cs336_systems.costs.checkpointing import make_plan, recomputed_blocks
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training import TrainingCase, TrainStep, assemble
from cs336_systems.training.activation_checkpointing import checkpointed_stack
from tests.training import shared
from tests.training.shared import batch

CONFIG = replace(shared.CONFIG, name="five", n_layers=5, n_kv_heads=2)
SELECTIVE = ("keep-matmuls", "keep-attention", "keep-matmuls-2")
POLICIES = ("full", "every-2", "first-3", "recursive", *SELECTIVE)


def after_backward(
    policy: str, config: ModelConfig = CONFIG, precision: str = "fp32", frozen: bool = False, **options: str
) -> TrainStep:
    """A step whose forward and backward have run; blocks have run as often as the plan says.

    Where the embedding is frozen, the first block's input needs no gradient, which the older kind of checkpointing
    takes for all of it.
    """
    step = assemble(TrainingCase.of(config, dtype=precision, checkpoint=policy, **options))
    assert list(step.model.state_dict()) == list(TransformerLM(config).state_dict())
    if frozen:
        step.model.token_embeddings.requires_grad_(False)
        step.model.layers[2].ffn.requires_grad_(False)
    runs: list[int] = []
    for i, block in enumerate(() if "compile" in options else step.model.layers):  # hooks would be compiled, too
        block.register_forward_pre_hook(lambda *_, i=i: runs.append(i))
    phases = step.phases("step", *batch())
    phases["forward"]()
    once = len(runs)
    phases["backward"]()
    again, _ = recomputed_blocks(make_plan(policy, config.n_layers))
    assert "compile" in options or (once, len(runs)) == (config.n_layers, config.n_layers + again)
    return step


def assert_same_bits(actual: TrainStep, expected: TrainStep) -> None:
    assert torch.equal(actual.loss, expected.loss)
    named = dict(expected.model.named_parameters())
    for name, parameter in actual.model.named_parameters():
        ours, theirs = parameter.grad, named[name].grad
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "how",
    [
        {"precision": "autocast-bf16", "config": replace(CONFIG, n_layers=4, qkv_bias=True, tie_embeddings=True)},
        {"attention": "sdpa-flash", "frozen": True},
    ],
    ids=["autocast", "frozen"],
)
def test_gradients_have_the_same_bits_and_blocks_run_as_the_plan_says(policy, how):
    assert_same_bits(after_backward(policy, **how), after_backward("none", **how))


class Operators(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.update([func.name()])
        return func(*args, **(kwargs or {}))


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
@pytest.mark.parametrize(
    ("policy", "blocks", "products"),
    [
        ("keep-matmuls", 5, 0),
        ("keep-attention", 5, 4 + 2 + 1),
        ("keep-matmuls-2", 5 - 2, 4 + 2 + 1),
        ("full", 5, 9 - 1),
    ],
)
def test_selective_policies_multiply_again_what_they_did_not_keep(policy, blocks, products):
    """A block has nine: four projections, two of attention, three of the feed-forward, whose last is always spared."""

    def matmuls(checkpoint: str) -> int:
        with Operators() as seen:
            after_backward(checkpoint)
        return seen.counts["aten::mm"] + seen.counts["aten::bmm"]

    again = matmuls(policy) - matmuls("none")
    assert again == blocks * products


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
@pytest.mark.parametrize(("policy", "graphs"), [("keep-attention", 1), ("keep-matmuls-2", 2)])
def test_compiled_blocks_have_the_same_bits_in_one_graph_for_all_that_keep_the_same(backend, policy, graphs):
    """Selective policies are in the graph: the eager modes would see no operator of a compiled block."""
    precision = "autocast-bf16"
    step = after_backward(policy, precision=precision, compile="on")
    assert_same_bits(step, after_backward("none", precision=precision))
    assert backend["stats"]["unique_graphs"] == graphs + 1, "those of blocks, and one for the loss"
    assert not backend["graph_break"]
    assert any(block._compiled_call_impl is not None for block in step.model.layers) == (policy not in SELECTIVE)


def test_refusals():
    for policy in ("some", "every-0", "every-x", "keep-matmuls-0", ""):
        with pytest.raises(ValueError, match=f"unknown checkpoint policy {policy!r}"):
            assemble(TrainingCase.of(CONFIG, checkpoint=policy))
    with pytest.raises(ValueError, match="'tiled'"):
        assemble(TrainingCase.of(CONFIG, checkpoint="keep-matmuls", attention="tiled"))
    with pytest.raises(ValueError, match="'full' runs compiled blocks"):
        checkpointed_stack("full", REFERENCE_OPS.stack, compiled=True)
