"""Bytes that a training step needs as arithmetic: its states, the allocator's blocks, and the parts of a peak.

The peak itself is found by running the step on tensors without storage (``training/dry_run.py``). On CUDA,
``torch.cuda.max_memory_allocated`` counts blocks, not tensors, so the caching allocator's rounding and cuBLAS's
workspaces, which are here, are part of that prediction. Sizes are in bytes.
"""

from dataclasses import dataclass

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.costs.activations import WIDE

MIB = 1024**2

CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""Bytes that torch allocates per cuBLAS handle on Hopper and Blackwell (8.1 MiB before); each thread has a handle, and
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
"""The parts of memory at a moment. Gathered parameters are those that FSDP has whole for a while; activations are those
of blocks, autocast's copies of their matrices included; temporaries live while one operation runs."""


@dataclass(frozen=True)
class PeakMemory:
    """The largest moment of a pass, and every moment that was considered, in bytes alive."""

    moment: str
    n_bytes: int
    moments: dict[str, int]
    parts: dict[str, int]
    """Bytes at the largest moment by ``PARTS``, those that it has; they add up to it."""
