"""Formulas for the bytes of a training step: states, a reference block's activations, and the allocator's rounding.

The peak itself is found by running the step on tensors without storage (``training/dry_run.py``). On CUDA,
``torch.cuda.max_memory_allocated`` counts the allocator's blocks, not tensors, so that prediction includes the caching
allocator's rounding and cuBLAS's workspaces, which are computed here. ``block_saved_tensors`` names every tensor that
autograd saves for one reference block with materialised attention; their sum is what ``saved_tensors_hooks`` counts.
The low-precision copies of matrices that autocast makes and autograd saves are not included. Sizes are in bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.hardware import MIB

WIDE = 4
"""Bytes per element of norms, log-sum-exp and their saved inputs: at least fp32, whatever the parameters' dtype."""

CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""Bytes that torch allocates per cuBLAS handle on Hopper and Blackwell (8.1 MiB before); each thread has a handle, and
backward runs on a thread of its own (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

TABLE_SHARE = 8 / 4096
"""Device bytes per pinned host byte: the GPU's page tables have an entry for each pinned page. Measured on an H200:
0.739 GiB outside torch with nothing pinned, 0.878 GiB with 71.4 GiB pinned."""

CHUNK_BYTES = 5 * 2**27
"""The most bytes of a chunk's logits: 0.625 GiB, 2,048 tokens of 151,936 words in bf16. At 32,768 x 4096 an H200 takes
183.3, 185.4 and 185.0 ms in chunks of 2,048, 4,096 and 8,192 (LOG.md)."""
CHUNK_MULTIPLE = 256
"""The tokens of a chunk are a multiple of this, a multiple of the matmul tile sizes."""


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


def default_chunk(n_tokens: int, n_words: int, itemsize: int) -> int:
    """Tokens per chunk, for the fewest chunks of equal size whose logits take at most ``CHUNK_BYTES`` each."""
    most = max(CHUNK_MULTIPLE, CHUNK_BYTES // (n_words * itemsize) // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
    equal = -(-n_tokens // max(1, -(-n_tokens // most)))
    return max(1, -(-equal // CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


def parameter_bytes(config: ModelConfig, precision: Precision) -> int:
    """Bytes of all parameters, a tied embedding counted once; gradients take the same."""
    return config.n_parameters * precision.parameter_bytes


def rotary_bytes(config: ModelConfig) -> int:
    """Bytes of the tables of cosines and sines."""
    return 2 * config.context_length * (config.d_head // 2) * WIDE


PARTS = (
    "parameters",
    "gathered parameters",
    "optimizer state",
    "gradients",
    "activations",
    "loss",
    "temporaries",
    "tables and workspaces",
)
"""The parts of memory at a moment. Gathered parameters are those that FSDP holds unsharded for a while; activations are
those of blocks, with autocast's copies of their matrices; temporaries live while one operation runs."""


@dataclass(frozen=True)
class PeakMemory:
    """The peak of a pass and the bytes alive at each moment that was considered."""

    n_bytes: int
    moments: dict[str, int]
    parts: dict[str, int]
    """Bytes of each of ``PARTS`` that exists at the peak; they add up to the peak."""


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


def _norm_saved(name: str, rows: int, width: int, element_bytes: int) -> list[SavedTensor]:
    """The tensors that RMSNorm saves: its (widened) input, the inverse RMS, and the normalised input before the gain.

    Args:
        element_bytes: bytes of an element of the input.
    """
    return [
        SavedTensor(f"{name} input", "square, multiply", (rows, width), WIDE),
        SavedTensor(f"{name} inverse rms", "rsqrt, multiply", (rows, 1), WIDE),
        SavedTensor(f"{name} normalised", "multiply by gain", (rows, width), element_bytes),
    ]


def _linear_inputs(name: str, readers: list[str], tokens: int, width: int, precision: Precision) -> list[SavedTensor]:
    """The saved input of linear layers: one tensor for all ``readers``; under autocast, one cast for each."""
    if precision.autocast:
        return [
            SavedTensor(f"{name}, cast for {reader}", reader, (tokens, width), precision.matmul_bytes)
            for reader in readers
        ]
    return [SavedTensor(name, ", ".join(readers), (tokens, width), precision.matmul_bytes)]


def block_saved_tensors(config: ModelConfig, batch_size: int, seq_len: int, precision: Precision) -> list[SavedTensor]:
    """Every activation that one Transformer block keeps for backward (parameters and their casts excluded)."""
    tokens, d_model, narrow = batch_size * seq_len, config.d_model, precision.matmul_bytes
    heads = (batch_size, config.n_heads, seq_len, config.d_head)
    scores = (batch_size, config.n_heads, seq_len, seq_len)
    kept = [
        *_norm_saved("ln1", tokens, d_model, precision.parameter_bytes),
        *_linear_inputs("ln1 output", ["q_proj", "k_proj", "v_proj"], tokens, d_model, precision),
        SavedTensor("q, rotated and scaled", "q k^T", heads, narrow),
        SavedTensor("k, rotated", "q k^T", heads, narrow),
        SavedTensor("v", "probabilities v", heads, narrow),
        SavedTensor("causal mask", "masked_fill", (seq_len, seq_len), 1),
        SavedTensor("probabilities", "softmax", scores, precision.softmax_bytes),
        SavedTensor("attention output", "output_proj", (tokens, config.d_query), narrow),
    ]
    if config.qk_norm:
        kept += _norm_saved("q_norm", tokens * config.n_heads, config.d_head, narrow)
        kept += _norm_saved("k_norm", tokens * config.kv_heads, config.d_head, narrow)
    if precision.softmax_bytes != narrow:
        kept.append(SavedTensor("probabilities, cast", "probabilities v", scores, narrow))
    inner = (tokens, config.d_ff)
    return [
        *kept,
        *_norm_saved("ln2", tokens, d_model, precision.parameter_bytes),
        *_linear_inputs("ln2 output", ["w1", "w3"], tokens, d_model, precision),
        SavedTensor("gate", "silu", inner, narrow),
        SavedTensor("silu(gate)", "multiply", inner, narrow),
        SavedTensor("up", "multiply", inner, narrow),
        SavedTensor("silu(gate) * up", "w2", inner, narrow),
    ]
