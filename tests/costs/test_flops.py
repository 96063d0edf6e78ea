"""Counted operations against what torch dispatches, exactly; the conventions; operators counted one by one."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.blocks import REFERENCE, write_out
from cs336_systems.config import MODEL_SIZES, ModelConfig
from cs336_systems.costs import flops as costs
from cs336_systems.costs.flops import forward_flops, hardware_flops, model_flops
from cs336_systems.costs.kept import LEVELS
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training import TrainingCase, assemble, cross_entropy
from cs336_systems.training.activation_checkpointing import checkpointed_stack

PLAIN = ModelConfig(name="plain", d_model=24, d_ff=40, n_layers=3, n_heads=4, vocab_size=50, context_length=64)
GROUPED = replace(PLAIN, n_kv_heads=2, qkv_bias=True, tie_embeddings=True, n_layers=2)
QK_NORM = replace(PLAIN, n_kv_heads=2, head_dim=10, qk_norm=True, n_layers=2)
MULTI_QUERY = replace(PLAIN, n_kv_heads=1, d_ff=7, vocab_size=3)


def dispatched_flops(
    config: ModelConfig, batch_size: int, seq_len: int, checkpoint: str = "none", keep: str = "autograd"
) -> tuple[int, int]:
    """Operations of forward and of backward that torch's own counter sees, where it can on tensors without storage."""
    device = "meta" if keep == "autograd" else "cpu"
    ops = replace(REFERENCE_OPS, stack=checkpointed_stack(checkpoint, REFERENCE_OPS.stack))
    model = TransformerLM(config.at_context(seq_len), ops, device=device)
    if keep != "autograd":
        write_out(model, REFERENCE, keep)
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(ids), ids)
    in_place = {torch.ops.aten.addmm_: lambda into, a, b, out_shape, **_: 2 * prod(a) * b[1]}  # torch knows it not
    with FlopCounterMode(display=False, custom_mapping=in_place) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(
    ("config", "batch_size", "seq_len"),
    [(PLAIN, 1, 1), (GROUPED, 2, 16), (MULTI_QUERY, 3, 13), (QK_NORM, 2, 7)],
    ids=["one-token", "grouped-biases-tied", "multi-query", "qk-norm"],
)
def test_operations_are_those_that_torch_dispatches(config, batch_size, seq_len):
    work = config, batch_size, seq_len
    forward, backward = dispatched_flops(*work)
    assert hardware_flops(*work, "forward") == model_flops(*work, "forward", "palm") == forward
    assert hardware_flops(*work, "backward") == hardware_flops(*work, "step") == forward + backward
    assert model_flops(*work, "backward", "palm") == backward
    assert model_flops(*work, "step", "palm") == forward + backward
    palm, causal = forward_flops(*work, "palm"), forward_flops(*work)
    assert causal == replace(palm, attention=palm.attention // 2)
    flash = {mode: hardware_flops(*work, mode, attention="flash") for mode in ("forward", "step")}
    assert flash["forward"] == causal.total == model_flops(*work, "forward")
    assert 2 * (flash["step"] - 3 * (causal.total - causal.attention)) == 7 * causal.attention


def test_components_by_hand():
    """B 2, S 16, so 32 tokens; D 24, F 40, V 50; two blocks; two of four key/value heads, so 12 of 24 columns."""
    parts = forward_flops(GROUPED, 2, 16, "palm")
    assert parts.projections == 2 * (2 * 32 * 24 * (24 + 12 + 12 + 24))
    assert parts.attention == 2 * (2 * 32 * 16 * 24 + 2 * 32 * 16 * 24)
    assert parts.feed_forward == 2 * (3 * 2 * 32 * 24 * 40)
    assert parts.head == 2 * 32 * 24 * 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ("full", "every-2", "every-9", "first-1", "recursive", "keep-matmuls", "keep-attention", "keep-matmuls-3"),
)
def test_what_a_policy_recomputes_is_what_torch_dispatches(policy):
    config = replace(PLAIN, n_layers=5)
    forward, backward = dispatched_flops(config, 2, 16, policy)
    assert hardware_flops(config, 2, 16, "forward", checkpoint=policy) == forward
    assert hardware_flops(config, 2, 16, "step", checkpoint=policy) == forward + backward


def test_compiled_blocks_cannot_leave_out_the_last_matmul_of_a_segment():
    """Eager recomputation stops at the last saved tensor, the input of w2: w2's product is not run a second time."""
    with set_checkpoint_early_stop(False):
        assert sum(dispatched_flops(PLAIN, 2, 16, "full")) == hardware_flops(
            PLAIN, 2, 16, "step", checkpoint="full", compiled=True
        )
    for policy in ("keep-matmuls", "keep-attention", "keep-matmuls-1"):
        selective = {hardware_flops(PLAIN, 2, 16, "step", checkpoint=policy, compiled=flag) for flag in (False, True)}
        assert len(selective) == 1, "what nobody needs is no part of a compiled backward"


def test_with_flash_the_causal_half_is_recomputed_unless_it_is_kept():
    parts, plain = forward_flops(PLAIN, 2, 16), hardware_flops(PLAIN, 2, 16, "step", attention="flash")
    w2 = PLAIN.n_layers * 2 * 32 * PLAIN.d_ff * PLAIN.d_model

    def again(**how) -> int:
        return hardware_flops(PLAIN, 2, 16, "step", attention="flash", **how) - plain

    without_attention = parts.projections + parts.feed_forward - w2
    assert again(checkpoint="full") == again(keep="input") == without_attention + parts.attention
    assert again(checkpoint="keep-attention") == again(keep="attention") == without_attention
    assert again(checkpoint="keep-matmuls-1") == without_attention * 2 // 3
    assert again(checkpoint="keep-matmuls") == again(keep="products") == again(keep="all") == 0


@pytest.mark.parametrize("keep", [*LEVELS, "all-ffn", "products-qkv-attention"])
def test_what_a_hand_written_block_has_not_kept_is_what_torch_dispatches(keep):
    forward, backward = dispatched_flops(GROUPED, 2, 16, keep=keep)
    assert hardware_flops(GROUPED, 2, 16, "forward", keep=keep) == forward
    assert hardware_flops(GROUPED, 2, 16, "step", keep=keep) == forward + backward


@pytest.mark.parametrize("name", ["small", "leaderboard-8b", "qwen2.5-1.5b"])
def test_model_flops_are_six_per_matrix_element_and_the_causal_half_of_attention(name):
    """6 N per token, N the matrices without the input embedding and with the head; 12 L S D x 1/2 per token."""
    config = MODEL_SIZES[name]
    model = TransformerLM(config.at_context(128), device="meta")
    n_matmul = sum(parameter.numel() for parameter in model.layers.parameters() if parameter.ndim == 2)
    n_matmul += model.lm_head.weight.numel()
    seq_len = config.context_length
    per_token = 6 * n_matmul + 6 * config.n_layers * seq_len * config.d_model
    assert model_flops(config, 2, seq_len, "step") == 2 * seq_len * per_token


def test_unknown_names_are_refused():
    for call, name in (
        (lambda: model_flops(PLAIN, 1, 8, "Forward"), "Forward"),
        (lambda: forward_flops(PLAIN, 1, 8, "full"), "full"),
        (lambda: hardware_flops(PLAIN, 1, 8, "optimizer"), "optimizer"),
        (lambda: hardware_flops(PLAIN, 1, 8, "step", attention="tiled"), "tiled"),
        (lambda: hardware_flops(PLAIN, 1, 8, "forward", checkpoint="half"), "half"),
        (lambda: hardware_flops(PLAIN, 1, 8, "forward", keep="half"), "half"),
    ):
        with pytest.raises(ValueError, match=f"'{name}'"):
            call()


PER_NUMBER = {
    **dict.fromkeys(("mul", "add", "sub", "div", "neg", "exp", "sqrt", "rsqrt", "square", "pow", "masked_fill"), 1),
    **dict.fromkeys(("sum", "mean"), 1),
    **{"silu": 2, "silu_backward": 6, "_softmax": 5, "_softmax_backward_data": 4, "logsumexp": 4},
    **{"addcmul_": 3, "addcdiv_": 3, "embedding_dense_backward": 1},
}
"""Operations per number that an operator reads (a reduction) or writes; a gradient's sum is an add."""


class Counting(TorchDispatchMode):
    """Counts operations by operator; products are counted from their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.counts["product"] += 2 * result.numel() * args[0].shape[-1]
        elif (bare := name if name in PER_NUMBER else name.rstrip("_")) in PER_NUMBER:
            reads = name in ("sum", "mean", "logsumexp")
            per_number = PER_NUMBER[bare] + (bare == "add" and (kwargs or {}).get("alpha", 1) != 1)
            self.counts[name] += per_number * (args[0] if reads else result).numel()
        return result


def test_operators_do_what_the_table_says():
    """Products, softmax and optimizer exactly; autograd writes other formulas with an operation more or less."""
    config = MODEL_SIZES["tiny"]
    ids, targets = torch.randint(config.vocab_size, (2, 2, config.context_length))
    phases = assemble(TrainingCase.of(config)).phases("step", ids, targets)
    counting, update = Counting(), Counting()
    with counting:
        phases["forward"]()
        phases["backward"]()
    with update:
        phases["optimizer"]()
    predicted, passes = costs.step_flops_by_operator(config, 2, config.context_length), counting.counts
    assert tuple(predicted) == costs.FAMILIES
    assert predicted[costs.MATMUL] == passes["product"]
    assert predicted[costs.SOFTMAX] == passes["_softmax"] + passes["_softmax_backward_data"]
    assert predicted[costs.OPTIMIZER] == sum(update.counts.values())
    rest = sum(passes.values()) - predicted[costs.MATMUL] - predicted[costs.SOFTMAX]
    assert predicted[costs.NORMALISATION] + predicted[costs.ELEMENTWISE] == pytest.approx(rest, rel=0.1)
