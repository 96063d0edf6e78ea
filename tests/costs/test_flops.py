"""Counted operations against what torch dispatches, exactly; the conventions; the formulas that reports quote."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.config import MODEL_SIZES, MODES, ModelConfig
from cs336_systems.costs.flops import forward_flops, hardware_flops, model_flops
from cs336_systems.model import TransformerLM
from cs336_systems.training import cross_entropy

PLAIN = ModelConfig(name="plain", d_model=24, d_ff=40, n_layers=3, n_heads=4, vocab_size=50, context_length=64)
GROUPED = replace(PLAIN, n_kv_heads=2, qkv_bias=True, tie_embeddings=True, n_layers=2)
MULTI_QUERY = replace(PLAIN, n_kv_heads=1, d_ff=7, vocab_size=3)

CASES = [
    pytest.param(PLAIN, 2, 16, id="plain"),
    pytest.param(PLAIN, 1, 1, id="one-token"),
    pytest.param(PLAIN, 3, 13, id="odd-lengths"),
    pytest.param(GROUPED, 2, 16, id="grouped-biases-tied"),
    pytest.param(replace(PLAIN, qkv_bias=True), 5, 3, id="biases"),
    pytest.param(replace(PLAIN, tie_embeddings=True), 1, 64, id="tied"),
    pytest.param(MULTI_QUERY, 2, 7, id="multi-query"),
    pytest.param(MODEL_SIZES["small"], 4, 512, id="small"),
    pytest.param(MODEL_SIZES["qwen2.5-0.5b"], 1, 77, id="qwen2.5-0.5b"),
]


def dispatched_flops(config: ModelConfig, batch_size: int, seq_len: int, checkpointed: int = 0) -> tuple[int, int]:
    """Operations of forward and of backward that torch's own counter sees, on tensors without storage."""
    model = TransformerLM(config.at_context(seq_len), device="meta")
    for block in model.layers[:checkpointed]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(ids), ids)
    with FlopCounterMode(display=False) as backward:
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


@pytest.mark.parametrize("checkpointed", [0, 1, 2, 3])
def test_checkpointing_runs_one_block_forward_more_per_block(checkpointed):
    forward, _ = dispatched_flops(PLAIN, 2, 16)
    assert hardware_flops(PLAIN, 2, 16, "forward", checkpointed_blocks=checkpointed) == forward
    with set_checkpoint_early_stop(False):
        dispatched = sum(dispatched_flops(PLAIN, 2, 16, checkpointed))
    predicted = {
        mode: hardware_flops(PLAIN, 2, 16, mode, checkpointed_blocks=checkpointed) for mode in ("backward", "step")
    }
    assert predicted == {"backward": dispatched, "step": dispatched}
    parts = forward_flops(PLAIN, 2, 16, "palm")
    assert 3 * (dispatched - hardware_flops(PLAIN, 2, 16, "step")) == checkpointed * (parts.total - parts.head)


def test_checkpointing_that_stops_early_leaves_out_the_last_matrix_only():
    """torch stops recomputing at the last saved tensor, the input of w2: w2's product is not run a second time."""
    tokens = 2 * 16
    w2 = 2 * tokens * PLAIN.d_ff * PLAIN.d_model
    with set_checkpoint_early_stop(True):
        dispatched = sum(dispatched_flops(PLAIN, 2, 16, checkpointed=3))
    assert dispatched == hardware_flops(PLAIN, 2, 16, "step", checkpointed_blocks=3) - 3 * w2


def test_checkpointing_with_flash_runs_the_causal_half_again():
    parts = forward_flops(PLAIN, 2, 16)
    once, twice = (hardware_flops(PLAIN, 2, 16, "step", attention="flash", checkpointed_blocks=n) for n in (0, 3))
    assert twice - once == parts.total - parts.head


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


@pytest.mark.parametrize("checkpointed", [-1, 4])
def test_more_checkpointed_blocks_than_blocks_are_refused(checkpointed):
    with pytest.raises(ValueError, match=rf"checkpointed_blocks must lie in 0\.\.3, got {checkpointed}"):
        hardware_flops(PLAIN, 1, 8, "step", checkpointed_blocks=checkpointed)
