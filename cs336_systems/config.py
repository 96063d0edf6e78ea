"""The shapes of the models that are measured, as frozen values; every named size is defined once, here.

A ``ModelConfig`` fixes the architecture and nothing else: no batch, no precision, no device. The named sizes are those
of the CS336 handout (2025 and 2026 editions) and of the published Llama 3, Qwen2.5 and Qwen3 base models, so that one
name means the same matrices in every benchmark, calculator and test.

    config = resolve_size("xl").at_context(1024)
    config.n_parameters            # 1_998_235_200

Sources: CS336 assignment 2 handout, table 1; the ``config.json`` files that Meta and Qwen publish with their weights.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rescaling of RoPE frequencies, which stretches a trained context (Llama 3 report, section 3.4.2).

    Wavelengths longer than ``original_context_length / low_freq_factor`` are slowed down ``factor`` times, those
    shorter than ``original_context_length / high_freq_factor`` are kept, and the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only Transformer with pre-norm RMSNorm, RoPE, SwiGLU and causal attention, without biases.

    Raises:
        ValueError: a size is not a positive integer, ``n_heads`` does not divide ``d_model`` and no ``head_dim`` is
            given, ``n_kv_heads`` does not divide ``n_heads``, a head has an odd dimension (RoPE rotates pairs), or the
            context is longer than ``max_context_length``.
    """

    name: str
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    vocab_size: int = 10_000
    context_length: int = 512
    """The longest sequence, in tokens, that the rotary tables cover."""
    n_kv_heads: int | None = None
    """The number of key/value heads of grouped-query attention; None means one per query head."""
    head_dim: int | None = None
    """The dimension of one attention head; None means ``d_model / n_heads``."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases (Qwen2.5); no other layer ever has one."""
    qk_norm: bool = False
    """Whether heads of queries and keys pass an RMSNorm before they are rotated (Qwen3; Henry et al. 2020)."""
    tie_embeddings: bool = False
    """Whether the output head reuses the token embedding matrix."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_context_length: int | None = None
    """The context, in tokens, that published weights were trained for; None allows any length."""

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
        if not 0 < self.rope_theta < math.inf or not 0 <= self.rms_norm_eps < math.inf:
            got = f"{self.rope_theta} and {self.rms_norm_eps}"
            raise ValueError(f"rope_theta must be positive and rms_norm_eps not negative, both finite, got {got}")
        if self.max_context_length is not None and self.context_length > self.max_context_length:
            raise ValueError(
                f"context length {self.context_length} is beyond the {self.max_context_length} tokens of {self.name}"
            )

    def part(self, n_ranks: int) -> "ModelConfig":
        """The shape of what each of ``n_ranks`` tensor ranks holds: of heads, feed-forward width and words its share.

        Raises:
            ValueError: one of them cannot be divided.
        """
        sizes: dict[str, Any] = {
            "n_heads": self.n_heads,
            "n_kv_heads": self.kv_heads,
            "d_ff": self.d_ff,
            "vocab_size": self.vocab_size,
        }
        if odd := [f"{name} {size}" for name, size in sizes.items() if size % n_ranks]:
            raise ValueError(f"tensor {n_ranks} does not divide {', '.join(odd)} of {self.name}")
        return replace(self, **{name: size // n_ranks for name, size in sizes.items()}, head_dim=self.d_head)

    @property
    def d_head(self) -> int:
        """The dimension of one attention head."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def d_query(self) -> int:
        """The width of the query projection, and of attention's output."""
        return self.n_heads * self.d_head

    @property
    def d_kv(self) -> int:
        """The width of the key projection, and of the value projection."""
        return self.kv_heads * self.d_head

    @property
    def d_qkv(self) -> int:
        """The width of queries, keys and values together."""
        return self.d_query + 2 * self.d_kv

    @property
    def block_shapes(self) -> dict[str, tuple[int, int]]:
        """(columns read, columns written) of a block's products in forward, by the names of ``ADAPTED``."""
        d_model, d_ff = self.d_model, self.d_ff
        whole = (d_model, self.d_qkv), (self.d_query, d_model), (d_model, 2 * d_ff), (d_ff, d_model)
        return dict(zip(ADAPTED, whole, strict=True))

    @property
    def n_block_parameters(self) -> int:
        """The number of parameters of one block: four attention projections, three SwiGLU matrices, norms, biases."""
        biases = self.d_qkv if self.qkv_bias else 0
        norms = 2 * self.d_model + (2 * self.d_head if self.qk_norm else 0)
        return self.n_block_matrices + biases + norms

    @property
    def n_block_matrices(self) -> int:
        """The number of elements of one block's matrices."""
        return self.d_model * (self.d_qkv + self.d_query + 3 * self.d_ff)

    @property
    def n_parameters(self) -> int:
        """The number of all trainable parameters; a tied embedding counts once."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * self.n_block_parameters + self.d_model

    def at_context(self, context_length: int) -> "ModelConfig":
        """Return the same model with rotary tables for ``context_length`` tokens.

        Raises:
            ValueError: the length is not positive, or beyond what the published weights were trained for.
        """
        return replace(self, context_length=context_length)


_LLAMA_3_1_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)
_LLAMA_3_2_SCALING = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)
_llama3 = partial(ModelConfig, n_heads=32, n_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0)
_llama3_1 = partial(_llama3, rope_scaling=_LLAMA_3_1_SCALING, max_context_length=131_072)
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
        _llama3("llama3-70b", 8192, 28_672, 80, n_heads=64, max_context_length=8192),
        _llama3_1("llama3.1-8b", 4096, 14_336, 32),
        _llama3_1("llama3.1-405b", 16_384, 53_248, 126, n_heads=128),
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

SIZE_ALIASES = {"xl-2026": "2.7b"}
"""The 2026 handout calls the 2025 handout's 2.7b row "xl"."""


def resolve_size(name: str) -> ModelConfig:
    """Return the configuration of a named size or alias; upper and lower case are the same.

    Raises:
        ValueError: there is no such size; the message names the nearest names and all known ones.
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

    ``parameter_bytes`` are the bytes of an element of parameters, gradients, optimizer state and (under autocast) the
    residual stream, ``matmul_bytes`` those of a matmul's operands. ``matmul_dtype`` names the hardware peak that bounds
    matmuls.
    """

    name: str
    parameter_bytes: int
    matmul_bytes: int
    matmul_dtype: str
    softmax_bytes: int
    """The bytes of a probability that softmax returns; CUDA's autocast widens probabilities to fp32."""

    @property
    def autocast(self) -> bool:
        """Whether matmul operands are cast from wider parameters on the fly."""
        return self.matmul_bytes < self.parameter_bytes


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", parameter_bytes=4, matmul_bytes=4, matmul_dtype="fp32", softmax_bytes=4),
        Precision("tf32", parameter_bytes=4, matmul_bytes=4, matmul_dtype="tf32", softmax_bytes=4),
        Precision("bf16", parameter_bytes=2, matmul_bytes=2, matmul_dtype="bf16", softmax_bytes=2),
        Precision("autocast-bf16", parameter_bytes=4, matmul_bytes=2, matmul_dtype="bf16", softmax_bytes=4),
    )
}


Adapted = Literal["qkv", "output", "gate_up", "down"]
ADAPTED: tuple[Adapted, ...] = get_args(Adapted)
"""The matrices of a block that may have adapters: q, k and v; attention's output; gate and up; down."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): x W^T + alpha / rank (x A^T) B^T, of which W is frozen.

    Each of q, k, v, gate and up has an A of its own, as in peft.
    """

    rank: int
    alpha: float
    on: tuple[str, ...] = ADAPTED
    """Names of ``ADAPTED``."""

    @property
    def scale(self) -> float:
        """The factor of the low-rank part."""
        return self.alpha / self.rank

    def n_parameters(self, config: "ModelConfig") -> int:
        """The number of parameters of all adapters of a model."""
        n_first = {"qkv": 3, "output": 1, "gate_up": 2, "down": 1}
        adapted = ((n_first[name], *config.block_shapes[name]) for name in self.on)
        return config.n_layers * self.rank * sum(n * read + written for n, read, written in adapted)

    def __str__(self) -> str:
        """In a few words, for people."""
        return f"rank {self.rank}, alpha {self.alpha:g}, on {' '.join(self.on)}"


@dataclass(frozen=True)
class Recipe:
    """How the four matmuls of a block multiply: as its tensors are stored, or quantized to eight-bit floats.

    A tensor is quantized with the largest scale that fits its largest magnitude into the format (current scaling);
    numbers are rounded to nearest even and saturate. Embedding, head, attention, norms and residuals are not quantized.
    """

    matmul: str = "same"
    """The dtype of activations and weights in matmuls: same, as stored, or e4m3, with three bits of mantissa."""
    gradient: str = "e4m3"
    """The dtype of activation gradients in quantized matmuls: e4m3, or e5m2, with more range and less precision."""
    scaling: str = "tensor"
    """Which numbers share a scale: all of a tensor (tensor), a row along the summed dimension (row), or 128 numbers of
    such a row, and 128 x 128 of weights (block)."""
    skip_first: int = 0
    """The number of blocks at the input that are not quantized."""
    skip_last: int = 0
    """The number of blocks at the output that are not quantized."""
    fast_accumulation: bool = True
    """Whether forward's matmuls accumulate in the tensor cores' registers. That is 4 to 7 % faster on an H200, and
    these 14 bits lose less than rounding to e4m3 has lost. Backward's matmuls accumulate in fp32, because sums over all
    tokens are longest. torchao's recipes by tensor and by row do the same; llm.q and scales by block use fp32 alone."""

    @property
    def quantized(self) -> bool:
        """Whether any matmul is quantized."""
        return self.matmul != "same"

    def quantizes(self, block: int, n_blocks: int) -> bool:
        """Whether the matmuls of this block, counted from 0, are quantized."""
        return self.quantized and self.skip_first <= block < n_blocks - self.skip_last

    @property
    def n_skipped(self) -> int:
        """The number of blocks that are not quantized in a model whose others are; 0 if none is."""
        return self.skip_first + self.skip_last if self.quantized else 0

    def __str__(self) -> str:
        """In a few words, for people."""
        skipped = f" skip {self.skip_first} and {self.skip_last}" if self.skip_first or self.skip_last else ""
        gradient = f" gradients {self.gradient}" if self.gradient != self.matmul else ""
        return f"{self.matmul}{gradient} by {self.scaling}{skipped}" if self.quantized else ""


MATMUL_DTYPES = ("same", "e4m3")
GRADIENT_DTYPES = ("e4m3", "e5m2")
SCALINGS = ("tensor", "row", "block")
FP8_QUANTUM = 16
"""Divides both dimensions of a matrix that a matmul in fp8 takes."""

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
"""The implementations of attention; ``attention/dispatch.py`` says what each is, and what it cannot serve."""

FASTEST = "fastest"
"""The name in a run's options that the run replaces by one of them (``pretraining/choice.py``)."""

WRITTEN_OUT_ATTENTIONS = ("reference", "flash", "hopper")
"""The implementations that a block with a hand-written backward can call."""
PACKING = ("reference", "flash", "hopper")
"""The implementations that can mask documents in one sequence from each other."""

KERNELS = ("reference", "fused")
"""How operations between matmuls run: in plain PyTorch, or each in one Triton kernel. On Hopper, fused also has a
kernel for forward's matmuls at shapes where it is faster."""

OPTIMIZERS = ("reference", "torch-fused", "fused", "muon")
"""AdamW in plain PyTorch, torch's fused kernel, or this suite's, which rounds bf16 stochastically; Muon for matrices of
blocks with AdamW for all else."""

MODES = ("forward", "backward", "step")
"""forward: without gradients; backward: forward and backward; step: forward, backward and optimizer."""
PHASES = ("forward", "backward", "optimizer")
"""The phases of a step, in their order."""


def phase_of(part: str) -> str:
    """Return the phase of a part of a step: ``forward`` for ``forward 2``, that of the second micro-batch."""
    return part.partition(" ")[0]


def did_you_mean(
    given: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, show: Callable[[str], str] = str
) -> str:
    """Return a question that names the known names nearest to ``given``, with a space behind it; "" if none is near."""
    near = difflib.get_close_matches(given, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(show, near))}? " if near else ""


def check_known(what: str, value: str | int, known: Collection[str | int], where: str = "") -> None:
    """Raise ValueError, with the nearest of the known names, for a value that is none of them."""
    if value not in known:
        hint = did_you_mean(str(value), [each for each in known if isinstance(each, str)], show=repr)
        raise ValueError(f"unknown {what} {value!r}{where}: {hint}known are {', '.join(map(str, known))}")


def how_to_download(path: Path, kind: str = "") -> str:
    """Return the end of a sentence on a path that is not there: how to fetch it, if it looks like a name on the hub.

    Args:
        kind: arguments of ``hf download``, each with a blank behind it.
    """
    if path.is_absolute() or len(path.parts) != 2 or ".." in path.parts or Path(path.parts[0]).exists():
        return ""
    return f"; nothing is downloaded here: hf download {path} {kind}--local-dir {path.name} fetches it"
