"""Activations of the reference model, tensor by tensor: kept for backward, or alive only for a moment.

The lists name every tensor that autograd keeps for one block (materialised attention) and for the head, and their sums
equal what ``saved_tensors_hooks`` counts; ``selected_tensors`` are what a selective checkpointing policy keeps besides.
``transient_bytes`` are alive only while an operation runs; ``costs/memory.py`` adds both up to a peak.

Sizes are in bytes. B batch, S sequence, D d_model, F d_ff, H heads, E d_head, V vocabulary; tokens T = B S.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.costs.checkpointing import KEEP_ATTENTION, KEEP_MATMULS

WIDE = 4
"""Norms, log-sum-exp and their saved inputs are at least fp32, whatever the parameters' dtype."""


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd keeps from forward to backward."""

    name: str
    kept_by: str
    shape: tuple[int, ...]
    bytes_per_element: int

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.bytes_per_element


def total_bytes(tensors: Iterable[SavedTensor]) -> int:
    return sum(tensor.n_bytes for tensor in tensors)


def _norm_saved(name: str, tokens: int, d_model: int, precision: Precision) -> list[SavedTensor]:
    """RMSNorm keeps its (widened) input, the inverse RMS, and the normalised input that its gain multiplies."""
    return [
        SavedTensor(f"{name} input", "square, multiply", (tokens, d_model), WIDE),
        SavedTensor(f"{name} inverse rms", "rsqrt, multiply", (tokens, 1), WIDE),
        SavedTensor(f"{name} normalised", "multiply by gain", (tokens, d_model), precision.parameter_bytes),
    ]


def _linear_inputs(name: str, readers: list[str], tokens: int, width: int, precision: Precision) -> list[SavedTensor]:
    """One tensor shared by its readers; under autocast each reader makes and keeps a cast of its own."""
    if precision.autocast:
        return [
            SavedTensor(f"{name}, cast for {reader}", reader, (tokens, width), precision.matmul_bytes)
            for reader in readers
        ]
    return [SavedTensor(name, ", ".join(readers), (tokens, width), precision.matmul_bytes)]


def attention_saved_tensors(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision
) -> list[SavedTensor]:
    """What the attention half of one block keeps: norm, projections, scores."""
    tokens, d_model, narrow = batch_size * seq_len, config.d_model, precision.matmul_bytes
    heads = (batch_size, config.n_heads, seq_len, config.d_head)
    scores = (batch_size, config.n_heads, seq_len, seq_len)
    kept = [
        *_norm_saved("ln1", tokens, d_model, precision),
        *_linear_inputs("ln1 output", ["q_proj", "k_proj", "v_proj"], tokens, d_model, precision),
        SavedTensor("q, rotated and scaled", "q k^T", heads, narrow),
        SavedTensor("k, rotated", "q k^T", heads, narrow),
        SavedTensor("v", "probabilities v", heads, narrow),
        SavedTensor("causal mask", "masked_fill", (seq_len, seq_len), 1),
        SavedTensor("probabilities", "softmax", scores, precision.softmax_bytes),
        SavedTensor("attention output", "output_proj", (tokens, config.d_query), narrow),
    ]
    if config.qk_norm:
        kept += _norm_saved("q_norm", tokens * config.n_heads, config.d_head, precision)
        kept += _norm_saved("k_norm", tokens * config.kv_heads, config.d_head, precision)
    if precision.softmax_bytes != narrow:
        kept.append(SavedTensor("probabilities, cast", "probabilities v", scores, narrow))
    return kept


def feed_forward_saved_tensors(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision
) -> list[SavedTensor]:
    """What the feed-forward half of one block keeps: norm and SwiGLU."""
    tokens, d_model, narrow = batch_size * seq_len, config.d_model, precision.matmul_bytes
    inner = (tokens, config.d_ff)
    return [
        *_norm_saved("ln2", tokens, d_model, precision),
        *_linear_inputs("ln2 output", ["w1", "w3"], tokens, d_model, precision),
        SavedTensor("gate", "silu", inner, narrow),
        SavedTensor("silu(gate)", "multiply", inner, narrow),
        SavedTensor("up", "multiply", inner, narrow),
        SavedTensor("silu(gate) * up", "w2", inner, narrow),
    ]


def block_saved_tensors(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> list[SavedTensor]:
    """Every activation that one Transformer block keeps for backward (parameters and their casts excluded)."""
    work = (config, batch_size, seq_len, precision)
    return attention_saved_tensors(*work) + feed_forward_saved_tensors(*work)


def selected_tensors(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, checkpoint: str
) -> list[SavedTensor]:
    """Results that a selective policy keeps for one block besides its input, in the order in which they are made."""
    tokens, narrow = batch_size * seq_len, precision.matmul_bytes
    heads = (batch_size, config.n_heads, seq_len, config.d_head)

    def product(name: str, shape: tuple[int, ...]) -> SavedTensor:
        return SavedTensor(name, checkpoint, shape, narrow)

    attention = product("probabilities v", heads)
    if checkpoint == KEEP_ATTENTION:
        return [attention]
    if checkpoint != KEEP_MATMULS:
        return []
    return [
        product("q_proj x", (tokens, config.d_query)),
        product("k_proj x", (tokens, config.d_kv)),
        product("v_proj x", (tokens, config.d_kv)),
        product("q k^T", (batch_size, config.n_heads, seq_len, seq_len)),
        attention,
        product("output_proj x", (tokens, config.d_model)),
        product("w1 x", (tokens, config.d_ff)),
        product("w3 x", (tokens, config.d_ff)),
        product("w2 x", (tokens, config.d_model)),
    ]


def head_saved_tensors(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> list[SavedTensor]:
    """What the final norm, the output head and the cross entropy keep."""
    tokens = batch_size * seq_len
    return [
        *_norm_saved("ln_final", tokens, config.d_model, precision),
        *_linear_inputs("ln_final output", ["lm_head"], tokens, config.d_model, precision),
        SavedTensor("logits, fp32", "logsumexp", (tokens, config.vocab_size), WIDE),
        SavedTensor("log-sum-exp", "logsumexp", (tokens,), WIDE),
    ]


def block_cast_bytes(config: ModelConfig, precision: Precision) -> int:
    """Low-precision copies of one block's matrices that autocast makes in forward and autograd keeps.

    Biases are cast as well, but adding one keeps nothing for backward.
    """
    if not precision.autocast:
        return 0
    norms = 2 * config.d_model
    biases = config.d_qkv if config.qkv_bias else 0
    return (config.n_block_parameters - norms - biases) * precision.matmul_bytes


def qkv_cast_bytes(config: ModelConfig, precision: Precision) -> int:
    """Of those, what is left when backward has reached the scores: the matrices of queries, keys and values."""
    return config.d_qkv * config.d_model * precision.matmul_bytes if precision.autocast else 0


def head_cast_bytes(config: ModelConfig, precision: Precision) -> int:
    """The same for the output head."""
    return config.vocab_size * config.d_model * precision.matmul_bytes if precision.autocast else 0


def saved_bytes(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> int:
    """All activations that forward leaves for backward, casts of weights included."""
    work = (config, batch_size, seq_len, precision)
    block = total_bytes(block_saved_tensors(*work)) + block_cast_bytes(config, precision)
    return config.n_layers * block + total_bytes(head_saved_tensors(*work)) + head_cast_bytes(config, precision)


def transient_bytes(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> dict[str, int]:
    """Tensors alive for a moment only, read off the reference operations line by line."""
    tokens = batch_size * seq_len
    wide, narrow, softmax = precision.parameter_bytes, precision.matmul_bytes, precision.softmax_bytes
    n_residual, n_inner, n_logits = tokens * config.d_model, tokens * config.d_ff, tokens * config.vocab_size
    n_scores = batch_size * config.n_heads * seq_len**2
    cast_scores = narrow if softmax != narrow else 0
    return {
        # Probabilities times v: residual, norm output, q, k, v (and its contiguous copy), output; scores twice; mask.
        "attention": n_residual * (2 * wide + 5 * narrow) + n_scores * (narrow + softmax + cast_scores) + seq_len**2,
        # SwiGLU: residual, norm output; gate, silu(gate), up and the product.
        "feed-forward": 2 * n_residual * wide + 4 * n_inner * narrow,
        # Log-sum-exp: last residual, fp32 logits and their exponentials; narrow logits are gone by then.
        "loss": n_residual * wide + n_logits * 2 * WIDE,
        # Gradient of the target's logit, then of log-sum-exp with one temporary, all in fp32.
        "loss backward": 3 * n_logits * WIDE,
        # Residual gradient; gradients of the product and its two factors, less the product itself; w2's gradient.
        "feed-forward backward": n_residual * wide + (2 * n_inner + config.d_ff * config.d_model) * narrow,
        # Gradients of residual, v, probabilities and scores, less the saved v and output.
        "attention backward": n_residual * (wide - narrow) + 2 * n_scores * softmax,
    }
