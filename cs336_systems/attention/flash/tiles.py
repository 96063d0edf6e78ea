"""The tile of each kernel: a small table, chosen by hand, so that nothing is tuned while a user waits.

Keyed by kernel, head-dim bucket and element size. None of the entries has been timed yet. They were chosen by compiling
for sm_90 (Triton 3.6, causal; "N registers, M blocks" means per thread, and blocks of one SM), on three grounds:

* no spills, except where an entry says so;
* wgmma, which needs 64 rows per group of four warps; below that Triton falls back to the slower mma instructions;
* more than one block on an SM where registers allow: Triton waits for each matmul before it goes on to the softmax, so
  only another block keeps the tensor cores busy meanwhile.

fp32 entries are for IEEE products, which run as scalar multiply-adds and need many registers; TF32 shares them.
"""

from dataclasses import dataclass

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

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k}, {self.num_warps} warps, {self.num_stages} stages"


TILES: dict[tuple[str, int, int], Tile] = {
    # (kernel, head dim up to, bytes per element)
    ("forward", 64, 2): Tile(128, 64, 4, 3),  # 246 registers, 2 blocks; 128 x 128 spills at 4 warps
    ("forward", 128, 2): Tile(128, 128, 8, 3),  # 255 registers, 1 block; 64 x 128 at 4 warps spills
    ("forward", 256, 2): Tile(128, 64, 8, 2),  # 255 registers, 1 block; 64 x 64 at 4 warps spills
    ("dkdv", 64, 2): Tile(64, 64, 4, 2),  # 212 registers, 2 blocks; 128 x 64 and 32 x 128 at 4 warps spill
    ("dkdv", 128, 2): Tile(64, 128, 8, 2),  # 255 registers and 8 bytes spilled, 1 block; 64 x 64 at 4 warps spills more
    ("dkdv", 256, 2): Tile(32, 32, 4, 2),  # 253 registers, 2 blocks, mma instead of wgmma; 32 x 64 spills
    ("dq", 64, 2): Tile(128, 64, 8, 3),  # 126 registers, 2 blocks
    ("dq", 128, 2): Tile(128, 64, 8, 2),  # 225 registers, 1 block; 128 x 128 spills
    ("dq", 256, 2): Tile(64, 64, 8, 2),  # 253 registers, 1 block; 64 x 32 at 4 warps spills
    ("forward", 64, 4): Tile(32, 32, 4, 2),  # 103 registers; 64 x 32 spills
    ("forward", 128, 4): Tile(32, 16, 4, 2),  # 194 registers; 32 x 32 spills
    ("forward", 256, 4): Tile(32, 32, 8, 2),  # 192 registers
    ("dkdv", 64, 4): Tile(16, 32, 4, 2),  # 104 registers; 32 x 32 takes 244
    ("dkdv", 128, 4): Tile(16, 32, 4, 2),  # 224 registers; 32 x 32 spills
    ("dkdv", 256, 4): Tile(16, 32, 8, 2),  # 167 registers
    ("dq", 64, 4): Tile(32, 32, 4, 2),  # 106 registers; 64 x 32 at 4 warps spills
    ("dq", 128, 4): Tile(32, 32, 4, 2),  # 154 registers
    ("dq", 256, 4): Tile(32, 32, 8, 2),  # 188 registers
}


def tile_for(kernel: str, d_head: int, element_size: int) -> Tile:
    """The table's tile for one of ``KERNELS``, a head dim up to 256, and 2 or 4 bytes per element."""
    return TILES[kernel, _bucket(d_head), element_size]


def use_tile(kernel: str, d_head: int, element_size: int, tile: Tile) -> None:
    """Let this process launch ``kernel`` with ``tile`` instead of the table's, for all head dims of the bucket."""
    TILES[kernel, _bucket(d_head), element_size] = tile


def _bucket(d_head: int) -> int:
    return 64 if d_head <= 64 else 128 if d_head <= 128 else 256
