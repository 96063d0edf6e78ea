"""Options of ``benchmark_collectives.py``, and its grid. Imports no torch."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from cs336_systems.experiments.options import RunOptions, cell_of

CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]

ALIGNMENT = 128
"""Bytes of which every rank's part is a multiple, so that no part begins in the middle of a memory sector."""

MOST_MB = 8000


@dataclass(frozen=True)
class Options(RunOptions):
    """What does a collective cost on this machine?"""

    MULTIPLIES = False
    CPU_DEFAULTS: ClassVar = {"size_mb": (1, 10), "calls": 1, "warmup": 1, "steps": 10}
    timeout: float = 300.0
    collective: tuple[CollectiveName, ...] = get_args(CollectiveName)
    """Collectives to time."""
    size_mb: tuple[float, ...] = (1, 10, 100, 1000)
    """Total sizes in MB of 1e6 bytes, rounded down so that each rank's part is a multiple of 128 bytes."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ("fp32",)
    """Dtype of the tensors; they hold a fixed pattern, so the seed is only recorded."""
    world_size: tuple[int, ...] | None = None
    """Numbers of ranks on this machine, each a world of its own; by default 2, 4 and 6 GPUs as far as there are any, or
    two ranks on a CPU. Under torchrun it is torchrun's number."""
    calls: int = 5
    """Calls per sample."""
    warmup: int = 5
    """Samples before the recorded ones."""
    steps: int = 20
    """Recorded samples."""


@dataclass(frozen=True)
class CollectiveCell:
    """One collective of one size in one world; the fields are columns."""

    device: str
    world_size: int
    dtype: str
    collective: str
    size_mb: float
    total_bytes: int
    calls: int
    warmup: int
    steps: int
    seed: int

    @property
    def variant(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def __str__(self) -> str:
        return f"{self.collective} {self.size_mb:g} MB {self.dtype} on {self.world_size} ranks ({self.variant})"


def make_cells(options: Options) -> list[CollectiveCell]:
    """The grid; raises ValueError for a size that the ranks cannot divide, or that is too large."""
    assert options.world_size is not None
    cells = []
    for n, dtype, collective, size_mb in itertools.product(
        options.world_size, options.dtype, options.collective, options.size_mb
    ):
        parts = int(size_mb * 1e6) // (n * ALIGNMENT) if 0 < size_mb <= MOST_MB else 0
        if parts < 1:
            raise ValueError(f"--size-mb must lie between {n * ALIGNMENT / 1e6:g} and {MOST_MB}, got {size_mb:g}")
        own = {"world_size": n, "dtype": dtype, "collective": collective, "size_mb": size_mb}
        cells.append(cell_of(CollectiveCell, options, **own, total_bytes=parts * n * ALIGNMENT))
    return cells
