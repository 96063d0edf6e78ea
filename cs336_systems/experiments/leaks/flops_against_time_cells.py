"""Options of ``flops_against_time.py``, and its grid, eager and compiled next to each other. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from cs336_systems.experiments.options import Dtype, OptimizerName, RunOptions, Switch, cell_of, resolved_sizes


@dataclass(frozen=True)
class Options(RunOptions):
    """Share of FLOPs against share of time by kind of operator."""

    CPU_DEFAULTS: ClassVar = {"size": ("tiny",), "context_length": 128, "dtype": "fp32", "warmup": 1, "steps": 3}
    size: tuple[str, ...] = ("small",)
    """Named model sizes."""
    context_length: int = 512
    """Tokens per sequence."""
    batch_size: int = 4
    """Sequences per step."""
    dtype: Dtype = "bf16"
    """How numbers are stored and multiplied."""
    compile: tuple[Switch, ...] = ("off", "on")
    """torch.compile of each block and of the loss; --compile alone means on."""
    optimizer: OptimizerName = "reference"
    """AdamW written out, or torch's fused kernel."""
    warmup: int = 3
    """Steps before the recorded ones."""
    steps: int = 5
    """Timed steps without profiler, and recorded ones."""


@dataclass(frozen=True)
class StepCell:
    """One training step, eager or compiled, with reference attention and nothing recomputed; the fields are columns."""

    device: str
    size: str
    batch_size: int
    context_length: int
    dtype: str
    compile: str
    optimizer: str
    warmup: int
    steps: int
    seed: int

    @property
    def variant(self) -> str:
        return "compiled" if self.compile == "on" else "eager"

    def __str__(self) -> str:
        return f"{self.size} batch {self.batch_size} context {self.context_length} {self.dtype} {self.variant}"


def make_cells(options: Options) -> list[StepCell]:
    """Every size, eager and compiled next to each other; raises ValueError for a value that no cell can have."""
    if options.warmup < 1:
        raise ValueError(f"--warmup must be at least 1 (compiling happens there), got {options.warmup}")
    return [
        cell_of(StepCell, options, size=size, compile=compiled)
        for size in dict.fromkeys(resolved_sizes(options.size, [options.context_length]))
        for compiled in dict.fromkeys(options.compile or ("on",))
    ]
