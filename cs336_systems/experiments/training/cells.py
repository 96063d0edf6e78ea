"""What ``benchmark_training.py`` is asked, and its runs. Imports no torch."""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cs336_systems.config import ATTENTIONS, resolve_size
from cs336_systems.costs.kept import check_known
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.pretraining.options import TrainOptions

How = Literal["ours", "transformers"]


@dataclass(frozen=True)
class Options(RunOptions):
    """How fast does a run train?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": ("tiny",), "how": ("ours",), "context_length": 128, "batch_size": 4, "total_batch_tokens": 1024},
        **{"dtype": "fp32", "keep": ("autograd",), "attention": ("reference",), "cuda_graph": ("off",)},
        **{"warmup": 3, "seconds": 5.0},
    }
    size: tuple[str, ...] = ("qwen2.5-0.5b",)
    """Named model sizes."""
    how: tuple[How, ...] = ("ours", "transformers")
    """The trainer of train.py; or transformers' model with Liger's kernels, compiled, in a plain loop."""
    context_length: int = 1024
    """Tokens per sequence."""
    batch_size: int = 32
    """Sequences per micro-batch."""
    total_batch_tokens: int = 524_288
    """Tokens per step."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of parameters, gradients, moments and products."""
    keep: tuple[str, ...] = ("products",)
    """Of ours: what blocks keep for backward, as for train.py."""
    attention: tuple[str, ...] = ("hopper",)
    """Of ours."""
    cuda_graph: tuple[Literal["off", "on"], ...] = ("on",)
    """Of ours."""
    warmup: int = 6
    """Steps before those that are recorded."""
    seconds: float = 60.0
    """Of recorded steps, at least."""


@dataclass(frozen=True)
class TrainingRunCell:
    """A run; the fields are columns."""

    device: str
    size: str
    how: str
    context_length: int
    batch_size: int
    total_batch_tokens: int
    dtype: str
    keep: str
    attention: str
    cuda_graph: str
    warmup: int
    seconds: float
    seed: int
    data: str = "random tokens"
    """Of which the speed does not depend."""

    @property
    def variant(self) -> str:
        return self.how

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folders."""
        ours: dict[str, Any] = {}
        if self.device == "cpu":
            ours = {name: TrainOptions.CPU_DEFAULTS[name] for name in ("optimizer", "kernels")}
        if self.keep:
            ours |= {"keep": self.keep, "attention": self.attention, "cuda_graph": self.cuda_graph}
        return TrainOptions(
            device=self.device,  # type: ignore[arg-type]
            size=self.size,
            context_length=self.context_length,
            batch_size=self.batch_size,
            total_batch_tokens=self.total_batch_tokens,
            dtype=self.dtype,  # type: ignore[arg-type]
            evaluate_every=None,
            save_every=None,
            export=False,
            steps=1_000_000,
            seed=self.seed,
            **ours,
        )

    def __str__(self) -> str:
        shape = f"{self.size} {self.batch_size} x {self.context_length} {self.dtype}"
        graph = " CUDA graph" if self.cuda_graph == "on" else ""
        return f"{shape} {self.how} {self.keep} {self.attention}{graph}".rstrip()


def make_cells(options: Options) -> list[TrainingRunCell]:
    """Each size in each way; keep, attention and graph are ours.

    Raises:
        ValueError: a value that no run can have.
    """
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds must be positive and finite, got {options.seconds:g}")
    for name in options.attention:
        check_known("attention", name, ATTENTIONS)
    cells = []
    for size, how in itertools.product(options.size, options.how):
        resolve_size(size)
        ways = list(itertools.product(options.keep, options.attention, options.cuda_graph))
        for keep, attention, cuda_graph in ways if how == "ours" else [("", "", "")]:
            own = {"size": size, "how": how, "keep": keep, "attention": attention, "cuda_graph": cuda_graph}
            cell = cell_of(TrainingRunCell, options, data=TrainingRunCell.data, **own)
            if how == "ours":
                cell.train_options.check()
            cell.train_options.micro_batches(1)
            cells.append(cell)
    return cells
