"""What ``benchmark_kernels.py`` is asked, its list of kernels and its grid. Imports no torch."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from cs336_systems.experiments.options import RunOptions

KERNELS = (
    *("weighted_sum", "rms_norm", "add_rms_norm", "swiglu", "rotary"),
    *("linear_cross_entropy", "adamw", "grad_norm"),
)
"""Each a file in ``cs336_systems/kernels`` and one in this folder."""

How = Literal["ours", "eager", "compiled"]


@dataclass(frozen=True)
class Options(RunOptions):
    """How fast is each fused kernel?"""

    CPU_DEFAULTS: ClassVar = {
        "how": ("ours", "eager"),  # compiling takes half a minute there
        "dtype": ("fp32",),
        "rows": (1024,),
        "width": (1024,),
        "samples": 10,
    }

    kernel: tuple[str, ...] = KERNELS
    """Which to measure, by default all."""
    how: tuple[How, ...] = get_args(How)
    """Our kernel, or its formula in plain PyTorch, eager and compiled."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Of the tensors."""
    rows: tuple[int, ...] = (16384,)
    """Tokens."""
    width: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Elements per row: of swiglu's output, of rotary's heads of 128 together."""
    samples: int = 50
    """Recorded samples of forward and of backward."""


@dataclass(frozen=True)
class KernelCell:
    """One kernel computed in one way at one shape; the fields are columns."""

    device: str
    kernel: str
    dtype: str
    rows: int
    width: int
    how: str
    n_samples: int
    seed: int

    @property
    def variant(self) -> str:
        return self.how

    def __str__(self) -> str:
        return f"{self.kernel} {self.how} {self.dtype} {self.rows} x {self.width}"


def make_cells(options: Options) -> list[KernelCell]:
    """The grid, ways of computing the same next to each other; raises ValueError for an unknown kernel."""
    for kernel in options.kernel:
        if kernel not in KERNELS:
            raise ValueError(f"--kernel {kernel}: known are {', '.join(KERNELS)}")
    grid = itertools.product(options.kernel, options.dtype, options.rows, options.width, options.how)
    return [KernelCell(options.device, *values, options.samples, options.seed) for values in grid]
