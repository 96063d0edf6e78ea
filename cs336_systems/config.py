"""The models that are measured: Transformer shapes as frozen values, and every named size once.

A ``ModelConfig`` fixes the architecture and nothing else: no batch, no precision, no device. The named sizes are the
CS336 handout's (both editions) and the published Llama-3, Qwen2.5 and Qwen3 base models, so that one name means the
same matrices in every benchmark, calculator and test.

    config = resolve_size("xl").at_context(1024)
    config.n_parameters            # 1_998_235_200

Sources: CS336 assignment 2 handout, table 1; the ``config.json`` files that Meta and Qwen publish with their weights.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's frequency rescaling, which stretches a trained context (Llama 3 report, section 3.4.2).

    Wavelengths longer than ``original_context_length / low_freq_factor`` are slowed down ``factor`` times, those
    shorter than ``original_context_length / high_freq_factor`` are kept, and the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only Transformer: pre-norm RMSNorm, RoPE, SwiGLU, causal attention, no biases unless said.

    Raises:
        ValueError: a size is not positive, ``n_heads`` does not divide ``d_model`` and no ``head_dim`` is given,
            ``n_kv_heads`` does not divide ``n_heads``, or a head has an odd dimension (RoPE rotates pairs).
    """

    name: str
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    vocab_size: int = 10_000
    context_length: int = 512
    """Longest sequence, in tokens, that the rotary tables cover."""
    n_kv_heads: int | None = None
    """Key/value heads of grouped-query attention; None means one per query head."""
    head_dim: int | None = None
    """Dimension of one attention head; None means ``d_model / n_heads``."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Each head of queries and keys passes an RMSNorm of its own before it is rotated (Qwen3; Henry et al. 2020)."""
    tie_embeddings: bool = False
    """The output head reuses the token embedding matrix."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_context_length: int | None = None
    """Context that published weights were trained for; None where there are none, and any length may be asked for."""

    def __post_init__(self) -> None:
        sizes = ("d_model", "d_ff", "n_layers", "n_heads", "vocab_size", "context_length")
        for field in (*sizes, "n_kv_heads", "head_dim", "max_context_length"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model, got d_model={self.d_model} and n_heads={self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_kv_heads must divide n_heads, got n_kv_heads={self.kv_heads} and n_heads={self.n_heads}"
            )
        if self.d_head % 2:
            raise ValueError(f"the dimension of a head must be even for rotary embeddings, got {self.d_head}")
        if self.max_context_length is not None and self.context_length > self.max_context_length:
            raise ValueError(
                f"context length {self.context_length} is beyond the {self.max_context_length} tokens of {self.name}"
            )

    @property
    def d_head(self) -> int:
        """Dimension of one attention head."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def d_query(self) -> int:
        """Width of the query projection, and of attention's output."""
        return self.n_heads * self.d_head

    @property
    def d_kv(self) -> int:
        """Width of the key (and of the value) projection."""
        return self.kv_heads * self.d_head

    @property
    def d_qkv(self) -> int:
        """Width of query, key and value beside each other."""
        return self.d_query + 2 * self.d_kv

    @property
    def n_block_parameters(self) -> int:
        """Parameters of one Transformer block: four attention projections, three SwiGLU matrices, norms, biases."""
        attention = self.d_model * (self.d_qkv + self.d_query)
        biases = self.d_qkv if self.qkv_bias else 0
        norms = 2 * self.d_model + (2 * self.d_head if self.qk_norm else 0)
        return attention + biases + 3 * self.d_model * self.d_ff + norms

    @property
    def n_parameters(self) -> int:
        """All trainable parameters, a tied embedding counted once."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * self.n_block_parameters + self.d_model

    def at_context(self, context_length: int) -> "ModelConfig":
        """The same model with rotary tables for ``context_length`` tokens.

        Raises:
            ValueError: the length is not positive, or beyond what the published weights were trained for.
        """
        return replace(self, context_length=context_length)


_LLAMA_3_2_SCALING = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)
_llama3 = partial(ModelConfig, n_heads=32, n_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0)
_llama3_2 = partial(_llama3, tie_embeddings=True, rope_scaling=_LLAMA_3_2_SCALING)
_qwen25 = partial(ModelConfig, vocab_size=152_064, qkv_bias=True, rope_theta=1_000_000.0, rms_norm_eps=1e-6)
_qwen25_tied = partial(_qwen25, n_kv_heads=2, vocab_size=151_936, tie_embeddings=True)
_qwen3 = partial(ModelConfig, n_kv_heads=8, vocab_size=151_936, max_context_length=32_768)
_qwen3 = partial(_qwen3, qk_norm=True, rope_theta=1_000_000.0, rms_norm_eps=1e-6)
_qwen3_tied = partial(_qwen3, tie_embeddings=True)

MODEL_SIZES: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        # name, d_model, d_ff, layers, heads
        ModelConfig("tiny", 64, 192, 2, 4, vocab_size=256, context_length=128),
        ModelConfig("small", 768, 3072, 12, 12),
        ModelConfig("medium", 1024, 4096, 24, 16),
        ModelConfig("large", 1280, 5120, 36, 20),
        ModelConfig("xl", 1600, 6400, 48, 25),
        ModelConfig("2.7b", 2560, 10_240, 32, 32),
        ModelConfig("10b", 4608, 12_288, 50, 36),
        ModelConfig("leaderboard-8b", 4096, 11_008, 34, 32, vocab_size=151_936, context_length=32_768),
        _llama3_2("llama3-1b", 2048, 8192, 16, max_context_length=131_072),
        _llama3("llama3-8b", 4096, 14_336, 32, max_context_length=8192),
        _qwen25_tied("qwen-100m", 768, 3072, 12, 12, vocab_size=16_384),  # of Qwen2.5's shape, for runs from scratch
        _qwen25_tied("qwen2.5-0.5b", 896, 4864, 24, 14, max_context_length=32_768),
        _qwen25_tied("qwen2.5-1.5b", 1536, 8960, 28, 12, max_context_length=131_072),
        _qwen25_tied("qwen2.5-3b", 2048, 11_008, 36, 16, max_context_length=32_768),
        _qwen25("qwen2.5-7b", 3584, 18_944, 28, 28, n_kv_heads=4, max_context_length=131_072),
        _qwen25("qwen2.5-14b", 5120, 13_824, 48, 40, n_kv_heads=8, max_context_length=131_072, rms_norm_eps=1e-5),
        _qwen25("qwen2.5-32b", 5120, 27_648, 64, 40, n_kv_heads=8, max_context_length=131_072, rms_norm_eps=1e-5),
        _qwen3_tied("qwen3-0.6b", 1024, 3072, 28, 16, head_dim=128),
        _qwen3_tied("qwen3-1.7b", 2048, 6144, 28, 16),
        _qwen3_tied("qwen3-4b", 2560, 9728, 36, 32, head_dim=128),
        _qwen3("qwen3-8b", 4096, 12_288, 36, 32),
    )
}

HANDOUT_SIZES = ("small", "medium", "large", "xl", "2.7b", "10b")

SIZE_ALIASES = {"xl-2026": "2.7b"}
"""The 2026 handout calls the 2025 handout's 2.7b row "xl"."""


def resolve_size(name: str) -> ModelConfig:
    """The configuration of a named size or alias, whatever the case of its letters.

    Raises:
        ValueError: no such size; the message lists the nearest names, and all of them.
    """
    key = SIZE_ALIASES.get(name.lower(), name.lower())
    if key in MODEL_SIZES:
        return MODEL_SIZES[key]
    known = [*MODEL_SIZES, *SIZE_ALIASES]
    hint = did_you_mean(key, known, most=3, cutoff=0.4)
    raise ValueError(f"unknown model size {name!r}: {hint}known sizes are {', '.join(known)}")


@dataclass(frozen=True)
class Precision:
    """How numbers are stored and multiplied: the ``--dtype`` option as a value.

    ``parameter_bytes`` holds for parameters, gradients, optimizer state and (under autocast) the residual stream;
    ``matmul_bytes`` for what enters a matrix product; ``matmul_dtype`` names the hardware peak that bounds it.
    """

    name: str
    parameter_bytes: int
    matmul_bytes: int
    matmul_dtype: str
    softmax_bytes: int
    """Bytes of a probability that softmax returns: CUDA's autocast widens them to fp32."""

    @property
    def autocast(self) -> bool:
        """Whether matmul operands are cast from wider parameters on the fly."""
        return self.matmul_bytes < self.parameter_bytes

    def on(self, device_type: str) -> "Precision":
        """This precision as it is on ``cuda`` or ``cpu``: the CPU's autocast leaves softmax in the narrow dtype."""
        return replace(self, softmax_bytes=self.matmul_bytes) if device_type == "cpu" else self


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", parameter_bytes=4, matmul_bytes=4, matmul_dtype="fp32", softmax_bytes=4),
        Precision("tf32", parameter_bytes=4, matmul_bytes=4, matmul_dtype="tf32", softmax_bytes=4),
        Precision("bf16", parameter_bytes=2, matmul_bytes=2, matmul_dtype="bf16", softmax_bytes=2),
        Precision("autocast-bf16", parameter_bytes=4, matmul_bytes=2, matmul_dtype="bf16", softmax_bytes=4),
    )
}


@dataclass(frozen=True)
class Recipe:
    """How the four matmuls of a block multiply: as its tensors are stored, or quantized to eight-bit floats.

    A quantized tensor is multiplied by the largest scale that fits its largest magnitude into the format (current
    scaling), rounded to nearest even, and saturates. Embedding, head, attention, norms and residuals stay as they are.
    """

    matmul: str = "same"
    """The dtype of activations and weights: same, as they are stored, or e4m3, with three bits of mantissa."""
    gradient: str = "e4m3"
    """The dtype of activation gradients in quantized matmuls: e4m3, or e5m2, with more range and less precision."""
    scaling: str = "tensor"
    """The numbers that share a scale: tensor, all; row, those of one sum of a product; or block, 128 of those, and of
    weights 128 x 128."""
    skip_first: int = 0
    """Blocks at the input that are not quantized."""
    skip_last: int = 0
    """Blocks at the output that are not quantized."""
    fast_accumulation: bool = True
    """Whether forward's products add up in the tensor cores' own registers, whose 14 bits lose less than e4m3 has
    lost, and are 4 to 7 % faster on an H200. Backward's, whose sums over all tokens are longest, add up in fp32. So do
    torchao's recipes by tensor and by row; llm.q's sums are all in fp32, and so are all by block."""

    @property
    def quantized(self) -> bool:
        return self.matmul != "same"

    def quantizes(self, block: int, n_blocks: int) -> bool:
        """Whether the products of this block are quantized."""
        return self.quantized and self.skip_first <= block < n_blocks - self.skip_last

    @property
    def n_skipped(self) -> int:
        """Blocks whose products are as stored, of a model whose others are quantized."""
        return self.skip_first + self.skip_last if self.quantized else 0

    def __str__(self) -> str:
        """In a few words, for people."""
        skipped = f" skip {self.skip_first} and {self.skip_last}" if self.skip_first or self.skip_last else ""
        gradient = f" gradients {self.gradient}" if self.gradient != self.matmul else ""
        return f"{self.matmul}{gradient} by {self.scaling}{skipped}" if self.quantized else ""


MATMUL_DTYPES = ("same", "e4m3")
GRADIENT_DTYPES = ("e4m3", "e5m2")
SCALINGS = ("tensor", "row", "block")

ATTENTIONS = (
    "reference",
    "reference-compiled",
    "tiled",
    "flash",
    "hopper",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
)
"""Implementations of attention; ``attention/dispatch.py`` says what each is, and what it cannot serve."""

WRITTEN_OUT_ATTENTIONS = ("reference", "flash", "hopper")
"""Those that a block calls whose backward is written out."""

KERNELS = ("reference", "fused")
"""Operations between matrix products: plain PyTorch, or one Triton kernel each and, on Hopper, one for products of
forward where it is faster."""

OPTIMIZERS = ("reference", "torch-fused", "fused")
"""AdamW written out, torch's fused kernel, or ours, which rounds bf16 stochastically."""

MODES = ("forward", "backward", "step")
"""forward: without gradients; backward: forward and backward; step: forward, backward and optimizer."""


def phase_of(part: str) -> str:
    """The phase to which a part of a step belongs: ``forward 2``, of the second micro-batch, is part of ``forward``."""
    return part.partition(" ")[0]


def did_you_mean(
    given: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, show: Callable[[str], str] = str
) -> str:
    """A question that names what is nearest to an unknown name, with a space behind it; "" if nothing is near."""
    near = difflib.get_close_matches(given, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(show, near))}? " if near else ""
