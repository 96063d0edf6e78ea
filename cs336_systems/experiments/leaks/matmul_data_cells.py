"""Options of ``matmul_data.py``, and its grid, the kinds of data in turning order. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from cs336_systems.experiments.options import RunOptions, cell_of

REFERENCE = "normal"
"""What the other kinds are compared with."""

Data = Literal["zeros", "ones", "sparse-bits", "integers", "subnormal", "uniform", "normal"]


@dataclass(frozen=True)
class Options(RunOptions):
    """Does the speed of a matrix product depend on its data?"""

    CPU_DEFAULTS: ClassVar = {"size": (1024,), "dtype": "fp32", "seconds": 0.5, "warmup_seconds": 0.2}
    data: tuple[Data, ...] = get_args(Data)
    """Kinds of data; normal is always measured, as the reference."""
    size: tuple[int, ...] = (8192,)
    """Rows and columns of the square matrices."""
    dtype: Literal["fp32", "tf32", "bf16"] = "bf16"
    """Dtype of the matrices."""
    seconds: float = 1.0
    """Time recorded per kind and repeat."""
    warmup_seconds: float = 1.0
    """Unrecorded time before that, so that power and clock settle."""
    repeat: int = 2
    """How often all kinds are run, every second time in reverse order."""


@dataclass(frozen=True)
class DataCell:
    """One kind of data, once."""

    device: str
    data: str
    size: int
    dtype: str
    seconds: float
    warmup_seconds: float
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.data

    def __str__(self) -> str:
        return f"{self.data} n={self.size} {self.dtype} repeat {self.repeat}"


def make_cells(options: Options) -> list[DataCell]:
    """Every kind at every size, in turning order; raises ValueError for a value that no cell can have."""
    if min(options.size) < 1:
        raise ValueError(f"--size must be positive, got {min(options.size)}")
    if not 0 < options.seconds <= 600 or not 0 <= options.warmup_seconds <= 600:
        raise ValueError(
            f"--seconds must lie in (0, 600] and --warmup-seconds in [0, 600], "
            f"got {options.seconds:g} and {options.warmup_seconds:g}"
        )
    kinds = list(dict.fromkeys([*options.data, REFERENCE]))
    return [
        cell_of(DataCell, options, data=data, size=size, repeat=repeat)
        for size in options.size
        for repeat in range(options.repeat)
        for data in (kinds if repeat % 2 == 0 else kinds[::-1])
    ]
