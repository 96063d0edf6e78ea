"""Counted operations against what torch dispatches, exactly; the conventions; the formulas that reports quote."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.blocks import REFERENCE, write_out
from cs336_systems.config import MODEL_SIZES, MODES, ModelConfig
from cs336_systems.costs.flops import forward_flops, hardware_flops, model_flops
from cs336_systems.costs.kept import LEVELS, SWITCHES
from cs336_systems.model import REFERENCE_OPS, TransformerLM
from cs336_systems.training import cross_entropy
from cs336_systems.training.activation_checkpointing import checkpointed_stack

PLAIN = ModelConfig(name="plain", d_model=24, d_ff=40, n_layers=3, n_heads=4, vocab_size=50, context_length=64)
GROUPED = replace(PLAIN, n_kv_heads=2, qkv_bias=True, tie_embeddings=True, n_layers=2)
QK_NORM = replace(PLAIN, n_kv_heads=2, head_dim=10, qk_norm=True, n_layers=2)
MULTI_QUERY = replace(PLAIN, n_kv_heads=1, d_ff=7, vocab_size=3)

CASES = [
    pytest.param(PLAIN, 2, 16, id="plain"),
    pytest.param(PLAIN, 1, 1, id="one-token"),
    pytest.param(PLAIN, 3, 13, id="odd-lengths"),
    pytest.param(GROUPED, 2, 16, id="grouped-biases-tied"),
    pytest.param(replace(PLAIN, qkv_bias=True), 5, 3, id="biases"),
    pytest.param(replace(PLAIN, tie_embeddings=True), 1, 64, id="tied"),
    pytest.param(MULTI_QUERY, 2, 7, id="multi-query"),
    pytest.param(QK_NORM, 2, 7, id="norms-of-queries-and-keys"),
    pytest.param(MODEL_SIZES["small"], 4, 512, id="small"),
    pytest.param(MODEL_SIZES["qwen2.5-0.5b"], 1, 77, id="qwen2.5-0.5b"),
]


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


@pytest.mark.parametrize(("config", "batch_size", "seq_len"), CASES)
def test_operations_are_those_that_torch_dispatches(config, batch_size, seq_len):
    forward, backward = dispatched_flops(config, batch_size, seq_len)
    assert hardware_flops(config, batch_size, seq_len, "forward") == forward
    assert hardware_flops(config, batch_size, seq_len, "backward") == forward + backward
    assert hardware_flops(config, batch_size, seq_len, "step") == forward + backward
    assert model_flops(config, batch_size, seq_len, "forward", "palm") == forward
    assert model_flops(config, batch_size, seq_len, "backward", "palm") == backward
    assert model_flops(config, batch_size, seq_len, "step", "palm") == forward + backward


@pytest.mark.parametrize(("config", "batch_size", "seq_len"), CASES)
def test_causal_is_palm_minus_half_of_attention(config, batch_size, seq_len):
    causal, palm = (forward_flops(config, batch_size, seq_len, convention) for convention in ("causal", "palm"))
    assert causal == forward_flops(config, batch_size, seq_len), "causal is the default"
    assert causal == replace(palm, attention=causal.attention)
    assert 2 * causal.attention == palm.attention > 0
    assert palm.total - causal.total == causal.attention


@pytest.mark.parametrize("convention", ["causal", "palm"])
def test_components_add_up_and_backward_is_twice_forward(convention):
    parts = forward_flops(GROUPED, 2, 16, convention)
    assert parts.total == parts.projections + parts.attention + parts.feed_forward + parts.head
    phases = {phase: model_flops(GROUPED, 2, 16, phase, convention) for phase in ("forward", "backward", "optimizer")}
    assert phases == {"forward": parts.total, "backward": 2 * parts.total, "optimizer": 0}
    assert model_flops(GROUPED, 2, 16, "step", convention) == sum(phases.values())


def test_components_by_hand():
    """B 2, S 16, so 32 tokens; D 24, F 40, V 50; two blocks; two of four key/value heads, so 12 of 24 columns."""
    parts = forward_flops(GROUPED, 2, 16, "palm")
    assert parts.projections == 2 * (2 * 32 * 24 * (24 + 12 + 12 + 24))
    assert parts.attention == 2 * (2 * 32 * 16 * 24 + 2 * 32 * 16 * 24)
    assert parts.feed_forward == 2 * (3 * 2 * 32 * 24 * 40)
    assert parts.head == 2 * 32 * 24 * 50


@pytest.mark.parametrize(("config", "batch_size", "seq_len"), CASES)
def test_flash_attention_is_three_and_a_half_forwards_of_the_causal_half(config, batch_size, seq_len):
    parts = forward_flops(config, batch_size, seq_len)
    rest = parts.total - parts.attention
    flash = {mode: hardware_flops(config, batch_size, seq_len, mode, attention="flash") for mode in MODES}
    assert flash["forward"] == rest + parts.attention == model_flops(config, batch_size, seq_len, "forward")
    assert 2 * (flash["step"] - 3 * rest) == 7 * parts.attention
    assert flash["backward"] == flash["step"]


POLICIES = (
    "full",
    "every-2",
    "every-3",
    "every-9",
    "first-1",
    "first-5",
    "recursive",
    "keep-matmuls",
    "keep-attention",
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("config", [PLAIN, GROUPED, replace(PLAIN, n_layers=7)], ids=["three", "two-grouped", "seven"])
def test_what_a_policy_runs_again_is_what_torch_dispatches(config, policy):
    forward, backward = dispatched_flops(config, 2, 16, policy)
    assert hardware_flops(config, 2, 16, "forward", checkpoint=policy) == forward
    for mode in ("backward", "step"):
        assert hardware_flops(config, 2, 16, mode, checkpoint=policy) == forward + backward
    plain = hardware_flops(config, 2, 16, "step")
    assert (forward + backward > plain) == (policy != "keep-matmuls")


def test_eager_recomputation_leaves_out_the_last_matrix_of_a_segment_and_compiled_blocks_cannot():
    """torch stops at the last saved tensor, the input of w2: w2's product is not run a second time."""
    parts = forward_flops(PLAIN, 2, 16, "palm")
    eager, compiled = (hardware_flops(PLAIN, 2, 16, "step", checkpoint="full", compiled=flag) for flag in (False, True))
    assert compiled - hardware_flops(PLAIN, 2, 16, "step") == parts.total - parts.head
    assert compiled - eager == PLAIN.n_layers * 2 * 32 * PLAIN.d_ff * PLAIN.d_model
    with set_checkpoint_early_stop(False):
        assert sum(dispatched_flops(PLAIN, 2, 16, "full")) == compiled
    for policy in ("keep-matmuls", "keep-attention"):
        selective = {hardware_flops(PLAIN, 2, 16, "step", checkpoint=policy, compiled=flag) for flag in (False, True)}
        assert len(selective) == 1, "what nobody needs is no part of a compiled backward"


def test_checkpointing_with_flash_runs_the_causal_half_again_unless_it_is_kept():
    parts = forward_flops(PLAIN, 2, 16)

    def again(policy: str) -> int:
        plain = hardware_flops(PLAIN, 2, 16, "step", attention="flash")
        return hardware_flops(PLAIN, 2, 16, "step", attention="flash", checkpoint=policy, compiled=True) - plain

    w2 = PLAIN.n_layers * 2 * 32 * PLAIN.d_ff * PLAIN.d_model
    assert again("full") == parts.total - parts.head
    assert again("keep-attention") == parts.projections + parts.feed_forward - w2
    assert again("keep-matmuls") == 0


@pytest.mark.parametrize("keep", [*LEVELS, *(f"all-{switch}" for switch in SWITCHES), "products-qkv-attention"])
@pytest.mark.parametrize("config", [PLAIN, GROUPED], ids=lambda config: config.name)
def test_what_a_written_out_block_has_not_kept_is_what_torch_dispatches(config, keep):
    forward, backward = dispatched_flops(config, 2, 16, keep=keep)
    assert hardware_flops(config, 2, 16, "forward", keep=keep) == forward
    assert hardware_flops(config, 2, 16, "step", keep=keep) == forward + backward


def test_written_out_blocks_with_flash_run_the_causal_half_again_unless_it_is_kept():
    parts, plain = forward_flops(PLAIN, 2, 16), hardware_flops(PLAIN, 2, 16, "step", attention="flash")
    w2 = PLAIN.n_layers * 2 * 32 * PLAIN.d_ff * PLAIN.d_model
    again = {keep: hardware_flops(PLAIN, 2, 16, "step", attention="flash", keep=keep) - plain for keep in LEVELS}
    assert again["input"] == parts.projections + parts.attention + parts.feed_forward - w2
    assert again["attention"] == parts.projections + parts.feed_forward - w2
    assert again["products"] == again["all"] == 0


@pytest.mark.parametrize("name", ["small", "2.7b", "leaderboard-8b", "llama3-8b", "qwen2.5-1.5b"])
def test_model_flops_are_six_per_matrix_element_and_the_causal_half_of_attention(name):
    """6 N per token, N the matrices without the input embedding and with the head; 12 L S D x 1/2 per token."""
    config = MODEL_SIZES[name]
    model = TransformerLM(config.at_context(128), device="meta")
    n_matmul = sum(parameter.numel() for parameter in model.layers.parameters() if parameter.ndim == 2)
    n_matmul += model.lm_head.weight.numel()
    batch_size, seq_len = 2, config.context_length
    attention_per_token = 12 * config.n_layers * seq_len * config.d_model
    tokens = batch_size * seq_len
    causal, palm = (model_flops(config, batch_size, seq_len, "step", convention) for convention in ("causal", "palm"))
    assert causal == tokens * (6 * n_matmul + attention_per_token // 2)
    assert palm == tokens * (6 * n_matmul + attention_per_token)


@pytest.mark.parametrize("phase", ["sideways", "Forward", ""])
def test_an_unknown_phase_is_refused_by_name(phase):
    with pytest.raises(ValueError, match=f"unknown phase '{phase}': known are forward, backward, optimizer, step"):
        model_flops(PLAIN, 1, 8, phase)


@pytest.mark.parametrize("mode", ["optimizer", "train"])
def test_an_unknown_mode_is_refused_by_name(mode):
    with pytest.raises(ValueError, match=f"unknown mode '{mode}': known are forward, backward, step"):
        hardware_flops(PLAIN, 1, 8, mode)


def test_an_unknown_policy_or_level_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown checkpoint policy 'half'"):
        hardware_flops(PLAIN, 1, 8, "forward", checkpoint="half")
    with pytest.raises(ValueError, match="unknown level 'half'"):
        hardware_flops(PLAIN, 1, 8, "forward", keep="half")
