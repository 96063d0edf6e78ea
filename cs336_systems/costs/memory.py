"""Bytes that a training step needs: states, saved activations tensor by tensor, and the peak.

States follow from the parameter count. Activations are listed: ``block_saved_tensors`` names every tensor that autograd
keeps for one block of the reference model (materialised attention, no checkpointing), and the sum equals what
``saved_tensors_hooks`` counts. The peak is the largest of a few moments, each the sum of what is alive then:

    forward   attention or feed-forward of a block, or the loss over the vocabulary, above the parameters
    backward  the loss's backward (all activations alive), attention of the last block, of the first block (almost all
              gradients alive), or the end (all gradients)
    step      the same above parameters and optimizer state, or the optimizer's own temporaries

On CUDA, ``torch.cuda.max_memory_allocated`` counts blocks, not tensors: the caching allocator's rounding and cuBLAS's
workspaces are part of the prediction there. Limits: eager execution; fragmentation and the CUDA context come on top
(``nvidia-smi`` shows them, ``max_memory_allocated`` does not); compiled models save less.

Sizes are in bytes. B batch, S sequence, D d_model, F d_ff, H heads, E d_head, V vocabulary; tokens T = B S.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cs336_systems.config import MODES, OPTIMIZERS, ModelConfig, Precision

WIDE = 4
"""Norms, log-sum-exp and their saved inputs are at least fp32, whatever the parameters' dtype."""

MIB = 1024**2

CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""What torch allocates per cuBLAS handle on Hopper and Blackwell (8.1 MiB before); each thread has a handle, and
backward runs on a thread of its own (aten/src/ATen/cuda/CublasHandlePool.cpp)."""


def cuda_block_bytes(n_bytes: int) -> int:
    """Bytes that torch's caching allocator sets aside for a tensor, the remainder of its segment included.

    Blocks are multiples of 512 bytes, cut from segments of 2 MiB (tensors up to 1 MiB), 20 MiB (up to 10 MiB) or the
    next multiple of 2 MiB; a remainder of at most 1 MiB is not cut off but counted with the last tensor, here spread
    evenly (c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kMinLargeAlloc, kLargeBuffer, kRoundLarge, should_split).
    """
    n_bytes = -(-n_bytes // 512) * 512
    if n_bytes <= MIB:
        return n_bytes
    segment = 20 * MIB if n_bytes < 10 * MIB else -(-n_bytes // (2 * MIB)) * 2 * MIB
    per_segment, remainder = divmod(segment, n_bytes)
    return n_bytes + remainder // per_segment if remainder <= MIB else n_bytes


def _exact_bytes(n_bytes: int) -> int:
    return n_bytes


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd keeps from forward to backward."""

    name: str
    kept_by: str
    shape: tuple[int, ...]
    bytes_per_element: int

    @property
    def n_bytes(self) -> int:
        n_bytes = self.bytes_per_element
        for size in self.shape:
            n_bytes *= size
        return n_bytes


def total_bytes(tensors: Iterable[SavedTensor]) -> int:
    """Sum over the tensors."""
    return sum(tensor.n_bytes for tensor in tensors)


def parameter_bytes(config: ModelConfig, precision: Precision) -> int:
    """All parameters, a tied embedding counted once; gradients take the same."""
    return config.n_parameters * precision.parameter_bytes


def adamw_state_bytes(config: ModelConfig, precision: Precision) -> int:
    """Two moments per parameter, in the parameter's dtype."""
    return 2 * parameter_bytes(config, precision)


def adamw_traffic_bytes(config: ModelConfig, precision: Precision) -> int:
    """Least bytes that one AdamW step moves: reads parameter, gradient, both moments; writes all but the gradient."""
    return 7 * parameter_bytes(config, precision)


def block_parameter_sizes(config: ModelConfig) -> list[int]:
    """Elements of each parameter of one Transformer block."""
    d_model, d_kv = config.d_model, config.d_kv
    matrices = [d_model * d_model] * 2 + [d_model * d_kv] * 2 + [d_model * config.d_ff] * 3
    return matrices + [d_model] * 2 + ([d_model, d_kv, d_kv] if config.qkv_bias else [])


def outer_parameter_sizes(config: ModelConfig) -> list[int]:
    """Elements of each parameter outside the blocks: embedding, final norm, and the output head unless it is tied."""
    return [config.vocab_size * config.d_model] * (1 if config.tie_embeddings else 2) + [config.d_model]


def rotary_bytes(config: ModelConfig) -> int:
    """The cos and sin tables."""
    return 2 * config.context_length * (config.d_head // 2) * WIDE


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
        SavedTensor("attention output", "output_proj", (tokens, d_model), narrow),
    ]
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
    return [
        *attention_saved_tensors(config, batch_size, seq_len, precision),
        *feed_forward_saved_tensors(config, batch_size, seq_len, precision),
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
    biases = config.d_model + 2 * config.d_kv if config.qkv_bias else 0
    return (config.n_block_parameters - norms - biases) * precision.matmul_bytes


def head_cast_bytes(config: ModelConfig, precision: Precision) -> int:
    """The same for the output head."""
    return config.vocab_size * config.d_model * precision.matmul_bytes if precision.autocast else 0


def saved_bytes(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> int:
    """All activations that forward leaves for backward, casts of weights included."""
    block = total_bytes(block_saved_tensors(config, batch_size, seq_len, precision))
    head = total_bytes(head_saved_tensors(config, batch_size, seq_len, precision))
    casts = config.n_layers * block_cast_bytes(config, precision) + head_cast_bytes(config, precision)
    return config.n_layers * block + head + casts


@dataclass(frozen=True)
class PeakMemory:
    """The largest moment of a pass, and every moment that was considered, in bytes alive."""

    moment: str
    n_bytes: int
    moments: dict[str, int]


def peak_memory(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: Precision,
    mode: str,
    *,
    optimizer: str = "reference",
    device_type: str = "cuda",
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> PeakMemory:
    """Predict the peak of allocated memory of one pass of ``mode`` of the reference model in eager execution.

    Args:
        optimizer: ``reference`` holds one temporary as large as the largest parameter; ``torch-fused`` holds none.
        device_type: ``cuda`` counts the allocator's blocks, workspaces and autocast's fp32 softmax; ``cpu`` counts
            tensors.
        workspace_bytes: cuBLAS's, per thread that multiplies; ignored on the CPU.

    Raises:
        ValueError: no such mode, optimizer or device type.
    """
    for name, value, known in (
        ("mode", mode, MODES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("device type", device_type, ("cuda", "cpu")),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: known are {', '.join(known)}")
    precision = precision.on(device_type)
    block_bytes = cuda_block_bytes if device_type == "cuda" else _exact_bytes

    def states(sizes: list[int]) -> int:
        return sum(block_bytes(size * precision.parameter_bytes) for size in sizes)

    def saved(tensors: list[SavedTensor]) -> int:
        return sum(block_bytes(tensor.n_bytes) for tensor in tensors)

    block_parameters = states(block_parameter_sizes(config))
    outer_parameters = states(outer_parameter_sizes(config))
    parameters = outer_parameters + config.n_layers * block_parameters
    base = parameters + rotary_bytes(config)
    if device_type == "cuda":
        base += workspace_bytes * (1 if mode == "forward" else 2)
    if mode == "step":
        base += 2 * parameters
    transient = _Transients(config, batch_size, seq_len, precision)

    if mode == "forward":
        base += transient.casts_all
        moments = {
            "attention": base + transient.attention_forward,
            "feed-forward": base + transient.feed_forward_forward,
            "loss": base + transient.loss_forward,
        }
    else:
        attention = saved(attention_saved_tensors(config, batch_size, seq_len, precision))
        feed_forward = saved(feed_forward_saved_tensors(config, batch_size, seq_len, precision))
        block = attention + feed_forward + block_cast_bytes(config, precision)
        head = saved(head_saved_tensors(config, batch_size, seq_len, precision)) + head_cast_bytes(config, precision)
        head_gradient = states([config.vocab_size * config.d_model])
        # Embedding and head each bring a gradient for a tied matrix; torch adds them in place only if autocast made a
        # fresh copy of the head's (torch/csrc/autograd/input_buffer.cpp, accumulate).
        tied_gradients = (1 if precision.autocast else 2) * head_gradient if config.tie_embeddings else 0
        before_last = base + (config.n_layers - 1) * block + head_gradient
        before_first = base + (config.n_layers - 1) * block_parameters + head_gradient
        moments = {
            "loss backward": base + config.n_layers * block + head + transient.loss_backward,
            "last block's feed-forward backward": before_last + block + transient.feed_forward_backward,
            "last block's attention backward": before_last + attention + transient.attention_backward,
            "first block's feed-forward backward": before_first + block + transient.feed_forward_backward,
            "first block's attention backward": before_first + attention + transient.attention_backward,
            "end of backward": base + parameters + tied_gradients,
        }
        if mode == "step":
            largest = states([max(config.vocab_size, config.d_ff) * config.d_model])
            moments["optimizer"] = base + parameters + (largest if optimizer == "reference" else 0)
    moment = max(moments, key=lambda name: moments[name])
    return PeakMemory(moment, moments[moment], moments)


class _Transients:
    """Tensors alive for a moment only, each property read off the reference operations line by line."""

    def __init__(self, config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> None:
        self.config = config
        self.precision = precision
        self.tokens = batch_size * seq_len
        self.n_scores = batch_size * config.n_heads * seq_len**2
        self.n_residual = self.tokens * config.d_model
        self.n_inner = self.tokens * config.d_ff
        self.n_logits = self.tokens * config.vocab_size
        self.n_mask = seq_len**2
        self.casts_all = config.n_layers * block_cast_bytes(config, precision) + head_cast_bytes(config, precision)

    @property
    def attention_forward(self) -> int:
        """Probabilities times v: residual, norm output, q, k, v (and its contiguous copy), output; scores twice."""
        wide, narrow, softmax = (
            self.precision.parameter_bytes,
            self.precision.matmul_bytes,
            self.precision.softmax_bytes,
        )
        cast = narrow if softmax != narrow else 0
        scores = self.n_scores * (narrow + softmax + cast)
        return 2 * self.n_residual * wide + 5 * self.n_residual * narrow + scores + self.n_mask

    @property
    def feed_forward_forward(self) -> int:
        """SwiGLU: residual, norm output; gate, silu(gate), up and the product."""
        wide, narrow = self.precision.parameter_bytes, self.precision.matmul_bytes
        return 2 * self.n_residual * wide + 4 * self.n_inner * narrow

    @property
    def loss_forward(self) -> int:
        """Log-sum-exp: last residual, fp32 logits and their exponentials; narrow logits are gone by then."""
        return self.n_residual * self.precision.parameter_bytes + self.n_logits * 2 * WIDE

    @property
    def loss_backward(self) -> int:
        """Gradient of the target's logit, then of log-sum-exp with one temporary, all in fp32."""
        return 3 * self.n_logits * WIDE

    @property
    def feed_forward_backward(self) -> int:
        """Residual gradient; gradients of the product and of its two factors, and w2's weight gradient."""
        wide, narrow = self.precision.parameter_bytes, self.precision.matmul_bytes
        weight = self.config.d_ff * self.config.d_model * narrow
        return self.n_residual * wide + 3 * self.n_inner * narrow + weight

    @property
    def attention_backward(self) -> int:
        """Gradients of residual and v, the feed-forward's weight gradients, gradients of probabilities and scores."""
        wide, narrow, softmax = (
            self.precision.parameter_bytes,
            self.precision.matmul_bytes,
            self.precision.softmax_bytes,
        )
        weights = (3 * self.config.d_ff + self.config.d_model) * self.config.d_model * wide
        return self.n_residual * (wide + narrow) + 2 * self.n_scores * softmax + weights
