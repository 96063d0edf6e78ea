"""The launchers' choices: supported strides, precision, and the tile of each kernel.

Tiles are in a small committed table, so that there is no autotuning at run time.

Its keys are kernel, head-dim bucket and element size. Half-precision entries up to head dim 128 were timed on an H200
(bf16, causal, length 16,384); profiles/results/h200/attention-tiles has every candidate, and percentages are relative
to the entry. fp32 entries up to head dim 128 were timed on an H200, too (causal, 16 heads, length 4,096, three TF32
products for one of fp32), by a search whose rows are not committed. The others were chosen by compiling for sm_90
(Triton 3.6, causal; "N registers, M blocks" means registers per thread and blocks per SM). Criteria:

* no spills, as a rule;
* wgmma, which needs 64 rows per group of four warps; below that Triton falls back to the slower mma instructions;
* more than one block per SM if registers allow: Triton waits for each matmul before the softmax, so only another block
  keeps the tensor cores busy meanwhile.

TF32 shares the fp32 entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KERNELS = ("forward", "dkdv", "dq")


@dataclass(frozen=True)
class Tile:
    """One kernel's tile and how Triton is to compile it."""

    block_q: int
    """Queries per tile: what a program of ``forward`` and ``dq`` owns, and what one of ``dkdv`` steps over."""
    block_k: int
    """Keys per tile: the reverse."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline that loads tiles ahead."""

    def launch_options(self) -> dict[str, int]:
        """Keyword arguments of a kernel's launch."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


TILES: dict[tuple[str, int, int], Tile] = {
    # (kernel, head dim up to, bytes per element)
    ("forward", 64, 2): Tile(64, 64, 4, 3),  # 1.26 ms; 128 x 64 at 4 or 8 warps +8 %, 64 x 128 +6 %
    ("forward", 128, 2): Tile(128, 128, 8, 3),  # 4.20 ms; 128 x 64 +1 %, 64 x 64 at 4 warps +6 %
    ("forward", 256, 2): Tile(128, 64, 8, 2),  # 255 registers, 1 block; 64 x 64 at 4 warps spills
    ("dkdv", 64, 2): Tile(128, 64, 4, 2),  # 2.20 ms, though it spills; 64 x 64 in 3 stages +4 %, in 2 +14 %
    ("dkdv", 128, 2): Tile(64, 128, 8, 3),  # 7.41 ms; 64 x 64 at 4 warps +4 %, 2 stages +11 %
    ("dkdv", 256, 2): Tile(32, 32, 4, 2),  # 253 registers, 2 blocks, mma instead of wgmma; 32 x 64 spills
    ("dq", 64, 2): Tile(128, 64, 8, 3),  # 1.37 ms; 64 x 128 at 4 warps -3 %, but +7 % at B8 H16 S2048
    ("dq", 128, 2): Tile(128, 64, 8, 3),  # 5.19 ms; 64 x 64 at 4 warps +7 %, 2 stages +23 %
    ("dq", 256, 2): Tile(64, 64, 8, 2),  # 253 registers, 1 block; 64 x 32 at 4 warps spills
    ("forward", 64, 4): Tile(32, 64, 4, 2),  # 0.96 ms; 128 x 64 at 8 warps +3 %; 32 x 32 of IEEE products 3.54 ms
    ("forward", 128, 4): Tile(32, 64, 4, 2),  # 1.86 ms, though it spills; 32 x 32 +1 %, 1 stage +6 %
    ("forward", 256, 4): Tile(32, 32, 8, 2),  # 192 registers
    ("dkdv", 64, 4): Tile(64, 128, 8, 1),  # 2.00 ms; 64 x 32 at 4 warps +3 %; 16 x 32 of IEEE products 12.3 ms
    ("dkdv", 128, 4): Tile(64, 32, 8, 1),  # 4.15 ms; 32 x 32 at 4 warps in 2 stages +2 %, 64 x 32 at 4 warps +79 %
    ("dkdv", 256, 4): Tile(16, 32, 8, 2),  # 167 registers
    ("dq", 64, 4): Tile(128, 64, 8, 1),  # 1.24 ms; 64 x 64 at 4 warps +5 %; 32 x 32 of IEEE products 6.15 ms
    ("dq", 128, 4): Tile(32, 64, 4, 1),  # 2.90 ms; 64 x 32 and 64 x 64 at 4 warps +49 %
    ("dq", 256, 4): Tile(32, 32, 8, 2),  # 188 registers
}


def tile_for(kernel: str, d_head: int, element_size: int) -> Tile:
    """The tile for one of ``KERNELS``, for head dims up to 256 and 2 or 4 bytes per element."""
    return TILES[kernel, 64 if d_head <= 64 else 128 if d_head <= 128 else 256, element_size]


MAX_ROW_STRIDE = 2**23
"""Offsets inside a tile are int32, and a tile has at most 128 rows: 2^23 leaves a factor of two."""


def with_short_rows(x_BHSD: Tensor) -> Tensor:
    """``x`` if the kernels support its strides, else a contiguous copy.

    They support any strides of batch, head and sequence, also zero and overlapping ones; columns must be contiguous.
    """
    return x_BHSD if _has_short_rows(x_BHSD) else x_BHSD.contiguous()


def writable(x_BHSD: Tensor) -> Tensor:
    """``x`` if the kernels can write with its strides, else contiguous memory for its values."""
    return x_BHSD if _has_short_rows(x_BHSD) else torch.empty_like(x_BHSD, memory_format=torch.contiguous_format)


def _has_short_rows(x_BHSD: Tensor) -> bool:
    return x_BHSD.stride(-1) == 1 and x_BHSD.stride(-2) < MAX_ROW_STRIDE


def input_precision(d_head: int) -> str:
    """How ``tl.dot`` multiplies fp32; half-precision matmuls ignore it.

    By default a number is split into two TF32 numbers, and a matmul is the sum of three on the tensor cores. At
    head dim 64 and length 16,384 the relative errors of o, dq and dk against fp64 are 3.6, 5.6 and 6.8e-7, those of
    eager fp32 4.7, 5.3 and 15.5e-7, and forward and backward take 5.1 ms instead of the 25.6 of IEEE products
    (profiles/results/h200/attention-flash-fp32). Beyond head dim 128 matmuls are IEEE fp32, as no tile of a short
    search ran there. A single TF32 matmul is used only if torch's settings allow TF32.
    """
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "tf32x3" if d_head <= 128 else "ieee"
