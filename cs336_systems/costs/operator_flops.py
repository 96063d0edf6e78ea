"""FLOPs of a training step by kind of operator; almost all are in matrix products.

``costs/flops.py`` counts matrix products only, because no other operation comes near a matrix unit's peak. This file
adds the rest, to show how little it is: an operation between two numbers is one, so is a comparison, and so is one call
of exp, log, sqrt or sigmoid. Per number:

    softmax        forward 5 (maximum, subtract, exp, sum, divide), backward 4, per score
    normalisation  forward 4 (square, sum, two products), backward 8, per number that an RMSNorm reads
    elementwise    forward and backward of: mask and scale of the scores, rotary embedding, SwiGLU's gate, residual sums
                   and sums of gradients, cross entropy over the vocabulary, gradients of the embedding
    optimizer      14 per parameter: AdamW's two moments, their correction, weight decay and the update

Limits: attention that materialises its scores, as the reference does; no recomputation. Whole operations per step.
"""

from cs336_systems.config import ModelConfig
from cs336_systems.costs.flops import hardware_flops

FAMILIES = ("matmul", "softmax", "normalisation", "elementwise", "optimizer")
"""In the order in which tables and figures show them."""
MATMUL, SOFTMAX, NORMALISATION, ELEMENTWISE, OPTIMIZER = FAMILIES

_ADAMW = 14
_SOFTMAX = 5 + 4
_RMS_NORM = 4 + 8
_ROTARY = 3 + 3
"""Two products and a sum for each number of a query or key, and the same backwards."""
_GATE = 3 + 8
"""silu(gate) * up: sigmoid and two products; backwards the two factors' gradients and silu's derivative."""
_WIDTH = (1 + 2) + (1 + 5)
"""Per number of the residual stream and layer: scaling the queries and two residual sums; backwards the scaling, and
sums of gradients where a tensor was read several times (five)."""
_MASK = 1 + 1
_LOSS = 4 + 3
"""log-sum-exp: maximum, subtract, exp, sum; backwards subtract, exp and a product."""


def step_flops_by_operator(config: ModelConfig, batch_size: int, seq_len: int) -> dict[str, int]:
    """Operations of forward, backward and AdamW over (batch_size, seq_len) tokens, by family of operator."""
    tokens = batch_size * seq_len
    scores = config.n_layers * batch_size * config.n_heads * seq_len**2
    stream = config.n_layers * tokens * config.d_model
    rotated = config.n_layers * tokens * (config.d_query + config.d_kv)
    gated = config.n_layers * tokens * config.d_ff
    return {
        MATMUL: hardware_flops(config, batch_size, seq_len, "step"),
        SOFTMAX: _SOFTMAX * scores,
        NORMALISATION: _RMS_NORM * (2 * config.n_layers + 1) * tokens * config.d_model,
        ELEMENTWISE: _MASK * scores
        + _ROTARY * rotated
        + _GATE * gated
        + _WIDTH * stream
        + _LOSS * tokens * config.vocab_size
        + tokens * config.d_model,
        OPTIMIZER: _ADAMW * config.n_parameters,
    }
