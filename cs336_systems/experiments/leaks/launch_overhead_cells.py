"""Options of ``launch_overhead.py``, and its grid, small sizes first. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from cs336_systems.experiments.options import RunOptions, Switch, cell_of

_SIZES: dict[tuple[str, str], tuple[int, ...]] = {
    ("cuda", "matmul"): (32, 64, 128, 256, 512, 1024, 2048, 4096),
    ("cuda", "elementwise"): tuple(2**power for power in (8, 12, 16, 18, 20, 22, 24, 26)),
    ("cpu", "matmul"): (4, 16, 32, 64, 128, 256),
    ("cpu", "elementwise"): tuple(2**power for power in (4, 8, 12, 14, 16, 20)),
}
_LARGEST = {"matmul": 2**15, "elementwise": 2**31}


@dataclass(frozen=True)
class Options(RunOptions):
    """At which size does a chain of small operations turn from host bound to device bound?"""

    CPU_DEFAULTS: ClassVar = {"depth": 10}
    operation: tuple[Literal["matmul", "elementwise"], ...] = ("matmul", "elementwise")
    """matmul: n x n by n x n; elementwise: a multiplication of n numbers by a constant."""
    size: tuple[int, ...] = ()
    """n; by default a range around the expected turn for each operation and device."""
    depth: int = 20
    """Operations in a chain, each on the result of the last."""
    samples: int = 100
    """Timed chains per variant."""
    compile: Switch = "on"
    """Also measure torch.compile, which takes most of the script's time."""


@dataclass(frozen=True)
class ChainCell:
    """One operation at one size, every way; the fields are columns."""

    device: str
    operation: str
    size: int
    dtype: str
    depth: int
    samples: int
    compile: str
    seed: int

    @property
    def variant(self) -> str:
        return self.operation

    def __str__(self) -> str:
        return f"{self.operation} n={self.size}"


def make_cells(options: Options) -> list[ChainCell]:
    """Every operation at every size, small ones first; raises ValueError for a value that no cell can have."""
    if options.size and min(options.size) < 1:
        raise ValueError(f"--size must be positive, got {min(options.size)}")
    if not 2 <= options.depth <= 500:
        raise ValueError(f"--depth must lie in 2..500 (CUDA queues about a thousand launches), got {options.depth}")
    for operation in options.operation:
        if options.size and max(options.size) > _LARGEST[operation]:
            raise ValueError(f"--size of {operation} must be at most {_LARGEST[operation]}, got {max(options.size)}")
    dtype = "bf16" if options.device == "cuda" else "fp32"
    return [
        cell_of(ChainCell, options, operation=operation, size=size, dtype=dtype)
        for operation in dict.fromkeys(options.operation)
        for size in sorted(set(options.size or _SIZES[options.device, operation]))
    ]
