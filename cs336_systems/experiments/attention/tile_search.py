"""Which tile is fastest for the flash kernels at one shape? The search behind ``attention/flash/tiles.py``.

The table there is committed, so that nobody waits for a search; this repeats it, on another GPU or shape. Candidates
are tiles whose fp32 accumulators and scores take between ``_MIN_VALUES`` and ``_MAX_VALUES`` registers of a thread
(fewer leave the tensor cores idle, more spill) and, in half precision, own at least the 64 rows that wgmma needs. The
table's own tile is always among them.

    for timing in search_tiles(q, k, v, do, causal=True):
        use_tile(timing.kernel, d_head, q.element_size(), timing.best)
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from cs336_systems.attention.flash.backward import launch_backward
from cs336_systems.attention.flash.forward import launch_forward
from cs336_systems.attention.flash.tiles import KERNELS, Tile, committed_tile
from cs336_systems.harness.clock import time_kernel
from cs336_systems.kernels.launching import next_power_of_2

_MIN_VALUES, _MAX_VALUES = 48, 192
_ROUNDS = 3


@dataclass(frozen=True)
class TileTiming:
    """Samples of every candidate of one kernel; the first is the table's."""

    kernel: str
    samples_ms: dict[Tile, list[float]]
    refused: dict[Tile, str]
    """What the compiler or the launch said of the others."""

    @property
    def best(self) -> Tile:
        return min(self.samples_ms, key=lambda tile: statistics.median(self.samples_ms[tile]))


def candidates(kernel: str, d_head: int, element_size: int) -> list[Tile]:
    """Tiles worth timing, the table's first."""
    block_d = next_power_of_2(d_head)
    found = [committed_tile(kernel, d_head, element_size)]
    owned, walked = ((64, 128), (32, 64, 128)) if element_size == 2 else ((16, 32, 64), (16, 32, 64))
    for own, step, num_warps, num_stages in itertools.product(owned, walked, (4, 8), (2, 3)):
        block_q, block_k = (step, own) if kernel == "dkdv" else (own, step)
        values = {
            "forward": block_q * (block_d + block_k),
            "dkdv": 2 * block_k * (block_d + block_q),
            "dq": block_q * (block_d + 2 * block_k),
        }[kernel] / (32 * num_warps)
        tile = Tile(block_q, block_k, num_warps, num_stages)
        if _MIN_VALUES <= values <= _MAX_VALUES and tile not in found:
            found.append(tile)
    return found


def search_tiles(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool) -> Iterator[TileTiming]:
    """Time every candidate of every kernel, in interleaved rounds; q (batch, heads, n_queries, d_head), on a GPU.

    ``dkdv`` and ``dq`` include the preprocess kernel, which both need.
    """
    scale = q.shape[-1] ** -0.5
    o, lse = launch_forward(q, k, v, causal, scale)

    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def backward(wants_dq: bool, tile: Tile) -> None:
        if wants_dq:
            launch_backward(q, k, v, o, lse, do, dq, None, None, causal, scale, dq_tile=tile)
        else:
            launch_backward(q, k, v, o, lse, do, None, dk, dv, causal, scale, dkdv_tile=tile)

    launch: dict[str, Callable[[Tile], object]] = {
        "forward": lambda tile: launch_forward(q, k, v, causal, scale, tile),
        "dkdv": lambda tile: backward(False, tile),
        "dq": lambda tile: backward(True, tile),
    }
    for kernel in KERNELS:
        samples: dict[Tile, list[float]] = {}
        refused: dict[Tile, str] = {}
        for tile in candidates(kernel, q.shape[-1], q.element_size()):
            try:
                launch[kernel](tile)
                torch.cuda.synchronize()
                samples[tile] = []
            except (CompilationError, OutOfResources, PTXASError) as error:
                refused[tile] = str(error).splitlines()[0]
        for _ in range(_ROUNDS):
            for tile, times in samples.items():
                times += time_kernel(functools.partial(launch[kernel], tile), device=q.device, warmup=1, samples=5)
        yield TileTiming(kernel, samples, refused)
