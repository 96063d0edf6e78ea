"""Options of ``benchmark_kernels.py``, its list of kernels, their peers, and its grid. Imports no torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from cs336_systems.config import resolve_size
from cs336_systems.experiments.options import RunOptions

KERNELS = (
    *("weighted_sum", "rms_norm", "add_rms_norm", "swiglu", "rotary"),
    *("linear_cross_entropy", "adamw", "grad_norm", "column_sums"),
    *("absmax", "rms_norm.absmax", "swiglu.absmax", "adamw.absmax"),
    *("quantize", "quantize.transposed", "quantize_blocks", "quantize_parts"),
    *("rms_norm_quantize", "swiglu_quantize", "transpose_bytes"),
)
"""Each a file in ``cs336_systems/kernels`` and one in this folder; after a dot, a form of it that writes more."""

BY_FLOPS = ("linear_cross_entropy",)
"""Those whose bound is FLOPs and not bytes. They take long beside their launches."""

PEERS = {
    "torch": ("rms_norm", "adamw", "grad_norm"),
    "liger": ("rms_norm", "add_rms_norm", "swiglu", "rotary", "linear_cross_entropy"),
    "liger-large-chunks": ("linear_cross_entropy",),
    "ours-small-chunks": ("linear_cross_entropy",),
    "cut-cross-entropy": ("linear_cross_entropy",),
    "cut-cross-entropy-filtered": ("linear_cross_entropy",),
}
"""Kernels of others for the same, by whose they are, and ours in another configuration; ``peers.py`` says in which they
run."""

How = Literal[
    "ours",
    "eager",
    "compiled",
    "torch",
    "liger",
    "liger-large-chunks",
    "ours-small-chunks",
    "cut-cross-entropy",
    "cut-cross-entropy-filtered",
]


@dataclass(frozen=True)
class Options(RunOptions):
    """How fast is each fused kernel?"""

    CPU_DEFAULTS: ClassVar = {
        "how": ("ours", "eager"),  # compiling takes half a minute there
        "dtype": ("fp32",),
        "rows": (1024,),
        "size": ("qwen2.5-0.5b",),
        "samples": 10,
    }

    kernel: tuple[str, ...] = KERNELS
    """Kernels to measure; by default all."""
    how: tuple[How, ...] = get_args(How)
    """ours, for the loss also with smaller chunks; eager and compiled, the formula in plain PyTorch; torch, its own
    fused kernel; liger, for the loss also with larger chunks; cut cross entropy of Apple, exact, and with its filter
    for gradients."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ("bf16",)
    """Dtype of the tensors."""
    rows: tuple[int, ...] = (16384,)
    """Numbers of tokens."""
    size: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama3-8b", "qwen2.5-14b")
    """Models whose widths are measured: d_ff for swiglu, d_model for the others."""
    width: tuple[int, ...] = ()
    """Elements per row, instead of the widths of --size: of swiglu's output, of all of rotary's query heads of 128
    together."""
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

    @property
    def module(self) -> str:
        """The kernel's file."""
        return self.kernel.partition(".")[0]

    @property
    def form(self) -> str:
        """Of the kernel, beside the plain one, which is "": ``absmax`` or ``transposed``."""
        return self.kernel.partition(".")[2]

    def __str__(self) -> str:
        return f"{self.kernel} {self.how} {self.dtype} {self.rows} x {self.width}"


def make_cells(options: Options) -> list[KernelCell]:
    """The grid, ways of computing the same next to each other; a peer that has no such kernel is left out.

    Raises:
        ValueError: an unknown kernel or size, or peers that have none of the kernels.
    """
    for kernel in options.kernel:
        if kernel not in KERNELS:
            raise ValueError(f"--kernel {kernel}: known are {', '.join(KERNELS)}")
    cells = [
        KernelCell(options.device, kernel, dtype, rows, width, how, options.samples, options.seed)
        for kernel in options.kernel
        for dtype, rows, width, how in itertools.product(
            options.dtype, options.rows, options.width or widths(kernel, options.size), options.how
        )
        if kernel in PEERS.get(how, KERNELS)
    ]
    if not cells:
        theirs = "; ".join(f"{how} has {', '.join(PEERS[how])}" for how in options.how)
        raise ValueError(f"--how {' '.join(options.how)} has no --kernel {' '.join(options.kernel)}: {theirs}")
    return cells


def widths(kernel: str, sizes: Sequence[str]) -> list[int]:
    """Elements per row of a kernel in models, each once, from narrow to wide."""
    configs = [resolve_size(size) for size in sizes]
    return sorted({config.d_ff if kernel.startswith("swiglu") else config.d_model for config in configs})
