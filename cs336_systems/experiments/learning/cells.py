"""Options of ``benchmark_learning.py``, and its runs. Imports no torch."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from cs336_systems.config import resolve_size
from cs336_systems.experiments.fp8 import RECIPES, RecipeName
from cs336_systems.experiments.options import Kernels, RunOptions, Switch, cell_of
from cs336_systems.pretraining.options import TrainOptions


@dataclass(frozen=True)
class Options(RunOptions):
    """What does a run learn, and how fast, with matrix products in fp8?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": "tiny", "recipe": ("stored", "e4m3"), "seeds": 1, "steps": 40},
        **{"context_length": 64, "batch_size": 8, "total_batch_tokens": 512, "learning_rate": 3e-3, "dtype": "fp32"},
        **{"kernels": "reference", "attention": "reference", "cuda_graph": "off"},
    }
    data: Path = Path("data/stdlib-bpe4096")
    """Folder written by tokenize_data.py, with held-out tokens; the default one is made if it is not there."""
    recipe: tuple[RecipeName, ...] = ("stored", "e4m3", "e4m3-row", "e4m3-e5m2", "e4m3-block")
    """Matrix products of blocks: stored, in --dtype; e4m3 with one scale per tensor, or with scales by row, also with
    gradients in e5m2, or with scales by block."""
    seeds: int = 3
    """Number of seeds for each recipe, from --seed on."""
    steps: int = 240
    """Steps of each run, over which its learning rate decays."""
    size: str = "qwen-100m"
    """Named model size."""
    context_length: int = 1024
    """Tokens per sequence."""
    batch_size: int = 16
    """Sequences per micro-batch."""
    total_batch_tokens: int = 16_384
    """Tokens per step."""
    learning_rate: float = 6e-4
    """Highest learning rate."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of parameters, gradients, moments, and of matrix products that are not quantized."""
    kernels: Kernels = "fused"
    """As for train.py."""
    keep: str = "products"
    """As for train.py."""
    attention: str = "hopper"
    """As for train.py."""
    cuda_graph: Switch = "on"
    """As for train.py."""
    warmup: int = 10
    """Steps before those whose speed is recorded."""


@dataclass(frozen=True)
class LearningCell:
    """A run; the fields are columns."""

    device: str
    size: str
    recipe: str
    context_length: int
    batch_size: int
    total_batch_tokens: int
    steps: int
    learning_rate: float
    dtype: str
    kernels: str
    keep: str
    attention: str
    cuda_graph: str
    data: str
    warmup: int
    seed: int
    repeat: int
    """The round."""

    @property
    def variant(self) -> str:
        return self.recipe

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folder."""
        recipe = RECIPES[self.recipe]
        ours: dict[str, Any] = {}
        if self.device == "cpu":
            ours["optimizer"] = TrainOptions.CPU_DEFAULTS["optimizer"]
        names = ("device", "size", "context_length", "batch_size", "total_batch_tokens", "steps", "learning_rate")
        ours |= {name: getattr(self, name) for name in names}
        ours |= {name: getattr(self, name) for name in ("dtype", "kernels", "keep", "attention", "cuda_graph", "seed")}
        ours |= {"matmul_dtype": recipe.matmul, "gradient_dtype": recipe.gradient, "scaling": recipe.scaling}
        ours |= {"data": Path(self.data), "evaluate_every": self.steps, "evaluation_sequences": None}
        return TrainOptions(save_every=None, export=False, **ours)

    def __str__(self) -> str:
        return f"{self.size} {self.recipe}, {self.steps} steps on {Path(self.data).name}, seed {self.seed}"


def make_cells(options: Options) -> list[LearningCell]:
    """In rounds, each recipe with the round's seed.

    Raises:
        ValueError: a value that no run can have.
    """
    resolve_size(options.size)
    if options.seeds < 1:
        raise ValueError(f"--seeds must be positive, got {options.seeds}")
    if options.steps <= options.warmup:
        raise ValueError(f"--steps must be more than --warmup {options.warmup}, got {options.steps}")
    cells = [
        cell_of(LearningCell, options, repeat=repeat, seed=options.seed + repeat, recipe=recipe, data=str(options.data))
        for repeat, recipe in itertools.product(range(options.seeds), options.recipe)
    ]
    for cell in cells:
        cell.train_options.check()
        cell.train_options.micro_batches(1)
    return cells
