"""Floating-point operations of a Transformer step: those that the model needs, and those that the hardware executes.

A matmul (m, k) x (k, n) is 2 m k n operations. Only matmuls are counted (but in ``step_flops_by_operator``): norms,
rotations, softmax and the optimizer are limited by memory, and no peak of a matrix unit applies to them. Backward takes
two matmuls for each of forward's (one for the input's gradient, one for the weight's), so forward : backward = 1 : 2.

Two questions:

* **Model FLOPs**: what the mathematics requires, however it is computed. Two conventions are in use and differ at long
  context: ``causal`` counts the half of the score matrix that a causal model needs; ``palm`` counts all of it
  (Chowdhery et al. 2022, appendix B). MFU is model FLOP/s over the peak.
* **Hardware FLOPs**: what is executed: attention that materialises every score, masked ones included; the scores that
  FlashAttention recomputes, and hand-written blocks do (their backward is then 2.5 x forward: five matmuls for two);
  blocks that activation checkpointing recomputes, and matmuls that hand-written blocks have not kept. HFU is hardware
  FLOP/s over the peak.

Embedding lookups count nothing; the output head counts. Sequence lengths are in tokens, results are integers.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from cs336_systems.config import MODES, ModelConfig, check_known
from cs336_systems.costs.checkpointing import (
    KEEP_ATTENTION,
    is_selective,
    make_plan,
    recomputed_blocks,
    selective_policies,
)
from cs336_systems.costs.kept import keep_of_blocks, recomputed_flops

Convention = Literal["causal", "palm"]
AttentionKind = Literal["materialised", "flash"]


@dataclass(frozen=True)
class ForwardFlops:
    """Matrix-product operations of one forward pass, by component."""

    projections: int
    """Query, key, value and output projections of every block."""
    attention: int
    """q k^T and probabilities times v of every block."""
    feed_forward: int
    """The three SwiGLU matrices of every block."""
    head: int
    """The output head over the vocabulary."""

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.feed_forward + self.head


def forward_flops(
    config: ModelConfig, batch_size: int, seq_len: int, convention: Convention = "causal"
) -> ForwardFlops:
    """Model FLOPs of one forward pass over (batch_size, seq_len) tokens, by component.

    Raises:
        ValueError: no such convention.
    """
    check_known("convention", convention, get_args(Convention))
    tokens = batch_size * seq_len
    scores = config.n_layers * 4 * tokens * seq_len * config.d_query
    return ForwardFlops(
        projections=config.n_layers * 2 * tokens * config.d_model * (config.d_qkv + config.d_query),
        attention=scores // 2 if convention == "causal" else scores,
        feed_forward=config.n_layers * 2 * tokens * 3 * config.d_model * config.d_ff,
        head=2 * tokens * config.d_model * config.vocab_size,
    )


def model_flops(
    config: ModelConfig, batch_size: int, seq_len: int, phase: str, convention: Convention = "causal"
) -> int:
    """Model FLOPs of a phase (``forward``, ``backward``, ``optimizer``) or of the whole ``step``.

    Recomputation is excluded and the optimizer counts nothing.

    Raises:
        ValueError: no such phase.
    """
    multiples = {"forward": 1, "backward": 2, "optimizer": 0, "step": 3}
    check_known("phase", phase, multiples)
    return multiples[phase] * forward_flops(config, batch_size, seq_len, convention).total


def hardware_flops(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    mode: str,
    *,
    attention: AttentionKind = "materialised",
    checkpoint: str = "none",
    keep: str = "autograd",
    compiled: bool = False,
) -> int:
    """Matrix-product operations executed in one pass of ``mode`` (see ``config.MODES``).

    Args:
        attention: ``materialised`` computes all scores and keeps the probabilities for backward; ``flash`` skips the
            masked half and recomputes the scores in backward.
        checkpoint: the policy that says what backward recomputes (see ``costs/checkpointing.py``).
        keep: autograd, or what hand-written blocks keep (see ``costs/kept.py``).
        compiled: whether each block is one compiled function, which cannot stop before its last product.

    Raises:
        ValueError: no such mode, attention, policy or level.
    """
    check_known("mode", mode, MODES)
    check_known("attention", attention, get_args(AttentionKind))
    flash = attention == "flash"
    forward = forward_flops(config, batch_size, seq_len, "causal" if flash else "palm")
    hand_written, n_layers = keep != "autograd", config.n_layers
    again = _recomputed_flops(config, batch_size * seq_len, forward, flash, checkpoint, compiled)
    if hand_written:
        attention_each = forward.attention // n_layers
        keeps = keep_of_blocks(keep, n_layers)
        again += sum(recomputed_flops(config, batch_size, seq_len, each, attention_each) for each in keeps)
    if mode == "forward":
        return forward.total
    scores_again = flash or hand_written
    backward = 2 * (forward.total - forward.attention) + (5 if scores_again else 4) * forward.attention // 2
    return forward.total + backward + again


def _recomputed_flops(
    config: ModelConfig, tokens: int, forward: ForwardFlops, flash: bool, checkpoint: str, compiled: bool
) -> int:
    """FLOPs of matmuls that backward recomputes: those of blocks, without kept ones and ones that are not needed."""
    blocks, segments = recomputed_blocks(make_plan(checkpoint, config.n_layers))
    attention = forward.attention // config.n_layers
    block = (forward.projections + forward.feed_forward) // config.n_layers + attention
    if is_selective(checkpoint):
        blocks = segments = selective_policies(checkpoint, config.n_layers).count(KEEP_ATTENTION)
        block -= attention if flash else attention // 2
    elif compiled:
        segments = 0
    return blocks * block - segments * 2 * tokens * config.d_ff * config.d_model


FAMILIES = ("matmul", "softmax", "normalisation", "elementwise", "optimizer")
"""Kinds of operators, in the order in which tables and figures show them."""
MATMUL, SOFTMAX, NORMALISATION, ELEMENTWISE, OPTIMIZER = FAMILIES


def step_flops_by_operator(config: ModelConfig, batch_size: int, seq_len: int) -> dict[str, int]:
    """Operations of forward, backward and AdamW over (batch_size, seq_len) tokens, by family of operator.

    Nearly all of them are matmuls. An operation between two numbers, a comparison, and a call of exp, log, sqrt or
    sigmoid count as one each. Attention materialises its scores, as the reference does, and nothing is recomputed.
    """
    tokens = batch_size * seq_len
    scores = config.n_layers * batch_size * config.n_heads * seq_len**2
    stream = config.n_layers * tokens * config.d_model
    rotated = config.n_layers * tokens * (config.d_query + config.d_kv)
    gated = config.n_layers * tokens * config.d_ff
    # Operations per number, forward + backward:
    elementwise = (1 + 1) * scores  # the mask
    elementwise += (3 + 3) * rotated  # two products and a sum
    elementwise += (3 + 8) * gated  # sigmoid, two products; both factors' gradients and silu's derivative
    elementwise += (3 + 6) * stream  # scaling q, two residual sums; scaling, five sums of gradients
    elementwise += (4 + 3) * tokens * config.vocab_size  # log-sum-exp; subtract, exp and a product
    elementwise += tokens * config.d_model  # the embedding's gradient
    return {
        MATMUL: hardware_flops(config, batch_size, seq_len, "step"),
        SOFTMAX: (5 + 4) * scores,  # maximum, subtract, exp, sum, divide
        NORMALISATION: (4 + 8) * (2 * config.n_layers + 1) * tokens * config.d_model,  # square, sum, two products
        ELEMENTWISE: elementwise,
        OPTIMIZER: 14 * config.n_parameters,  # AdamW's two moments, their correction, weight decay and the update
    }
