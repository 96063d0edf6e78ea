"""Options of ``benchmark_training.py``, and its runs. Imports no torch."""

import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

from cs336_systems.case import GatherBy
from cs336_systems.config import ATTENTIONS, resolve_size
from cs336_systems.costs.kept import check_known
from cs336_systems.experiments.fp8 import RECIPES, RecipeName
from cs336_systems.experiments.options import Kernels, RunOptions, Switch, cell_of
from cs336_systems.pretraining.options import TrainOptions

How = Literal["ours", "transformers", "transformers-liger", "torchao-tensorwise", "torchao-rowwise"]

TORCHAO: dict[str, RecipeName] = {"torchao-tensorwise": "e4m3-e5m2", "torchao-rowwise": "e4m3-row"}
"""Ways of torchao, and the recipe of ours that has the same formats and scales."""

LIBRARIES = {
    "ours": (),
    "transformers": ("transformers",),
    "transformers-liger": ("transformers", "liger-kernel"),
    **dict.fromkeys(TORCHAO, ("transformers", "torchao")),
}
"""Distributions that the ways are of."""


@dataclass(frozen=True)
class Options(RunOptions):
    """How fast does a run train?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": ("tiny",), "how": ("ours",), "context_length": 128, "batch_size": 4, "total_batch_tokens": 1024},
        **{"dtype": "fp32", "kernels": ("reference",), "keep": ("autograd",), "attention": ("reference",)},
        **{"cuda_graph": ("off",), "warmup": 3, "seconds": 5.0},
    }
    size: tuple[str, ...] = ("qwen2.5-0.5b",)
    """Named model sizes."""
    how: tuple[How, ...] = ("ours", "transformers", "transformers-liger")
    """The trainer of train.py; or a plain loop over transformers' model, compiled as a whole on a GPU; or the same with
    Liger's kernels, each block compiled by itself, as its chunked loss does not compile; or with torchao's float8 in
    blocks, with one scale per tensor or row, each block and the loss compiled by itself."""
    context_length: int = 1024
    """Tokens per sequence."""
    batch_size: int = 32
    """Sequences per micro-batch."""
    total_batch_tokens: int = 524_288
    """Tokens per step over all ranks."""
    world_size: tuple[int, ...] | None = None
    """Ranks, for ours; under torchrun those that it has started. [default: 1]"""
    zero: tuple[Literal[0, 1, 2, 3], ...] = (0,)
    """State sharded among ranks, as for train.py; what has nobody to share with is at 0."""
    gather_by: tuple[GatherBy, ...] = ("collectives",)
    """At --zero 3, as for train.py."""
    apart: tuple[Switch, ...] = ("off",)
    """For ours, ranks that train apart: each its own model on its share of the tokens, at the same time and without
    communication. The slowest one's steps count."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of parameters, gradients, moments and matrix products."""
    recipe: tuple[RecipeName, ...] = ("stored",)
    """For ours, matrix products of blocks: stored, in --dtype; e4m3 with one scale per tensor, or with scales by row,
    also with gradients in e5m2, or with scales by block. Those of one command are compared."""
    kernels: tuple[Kernels, ...] = ("fused",)
    """For ours, as for train.py."""
    keep: tuple[str, ...] = ("products",)
    """For ours, what blocks keep for backward, as for train.py."""
    attention: tuple[str, ...] = ("hopper",)
    """For ours, as for train.py."""
    cuda_graph: tuple[Switch, ...] = ("on",)
    """For ours, as for train.py."""
    lmhead_chunks: int | None = None
    """For ours, as for train.py."""
    warmup: int = 6
    """Steps before the recorded ones."""
    seconds: float = 60.0
    """Least duration of the recorded steps."""


@dataclass(frozen=True)
class TrainingRunCell:
    """A run; the fields are columns."""

    device: str
    size: str
    how: str
    context_length: int
    batch_size: int
    total_batch_tokens: int
    world_size: int
    zero: int
    gather_by: str
    """Of weights at ZeRO 3; what else is gathered, and what is reduced, is in collectives."""
    apart: str
    """Whether each rank makes steps of its share of ``total_batch_tokens`` by itself."""
    dtype: str
    recipe: str
    kernels: str
    keep: str
    attention: str
    cuda_graph: str
    lmhead_chunks: int | None
    warmup: int
    seconds: float
    seed: int
    data: str = "random tokens"
    """Of which the speed does not depend."""
    library: str = ""
    """Others' libraries, with versions."""

    @property
    def variant(self) -> str:
        return self.how

    @property
    def n_together(self) -> int:
        """Ranks that share a step."""
        return 1 if self.apart == "on" else self.world_size

    @property
    def train_options(self) -> TrainOptions:
        """The run as train.py would be asked for it, without its folders; each rank's, of ranks that train apart."""
        ours: dict[str, Any] = {}
        if self.device == "cpu":
            ours = {name: TrainOptions.CPU_DEFAULTS[name] for name in ("optimizer", "kernels")}
        if self.how == "ours":
            names = ("zero", "gather_by", "kernels", "keep", "attention", "cuda_graph", "lmhead_chunks")
            ours |= {name: getattr(self, name) for name in names}
            recipe = RECIPES[self.recipe]
            ours |= {"matmul_dtype": recipe.matmul, "gradient_dtype": recipe.gradient, "scaling": recipe.scaling}
        return TrainOptions(
            device=self.device,  # type: ignore[arg-type]
            size=self.size,
            context_length=self.context_length,
            batch_size=self.batch_size,
            total_batch_tokens=self.total_batch_tokens * self.n_together // self.world_size,
            dtype=self.dtype,
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
        copies = " by copies" if self.gather_by == "copies" else ""
        ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
        ranks += f", ZeRO {self.zero}{copies}" if self.n_together > 1 else " apart" if ranks else ""
        recipe = "" if self.recipe == "stored" else self.recipe
        words = (shape, self.how, recipe, self.kernels, self.keep, self.attention)
        return " ".join(filter(None, words)) + graph + ranks


def make_cells(options: Options) -> list[TrainingRunCell]:
    """Each size in each way; what others do not have is asked of ours alone, and ranks that have nobody to share state
    with run at the lowest ZeRO level alone. Where no weights are gathered there is one way to do so, and one rank is
    not apart from others.

    Raises:
        ValueError: a value that no run can have.
    """
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds must be positive and finite, got {options.seconds:g}")
    for name in options.attention:
        check_known("attention", name, ATTENTIONS)
    if "off" not in options.apart and max(options.world_size or (1,)) == 1:
        raise ValueError("--apart on needs --world-size of 2 or more, got 1")
    words = ("kernels", "keep", "attention", "cuda_graph")
    of_ranks = {"world_size": (1,), "zero": (0,), "gather_by": ("collectives",), "apart": ("off",)}
    of_ours = {name: getattr(options, name) for name in (*of_ranks, *words, "recipe")}
    of_others = of_ranks | dict.fromkeys(words, ("",))
    cells = []
    for size, how in itertools.product(options.size, options.how):
        resolve_size(size)
        ways = of_ours if how == "ours" else of_others | {"recipe": (TORCHAO.get(how, "stored"),)}
        chunks = options.lmhead_chunks if how == "ours" else None
        for values in itertools.product(*ways.values()):
            own = {"size": size, "how": how, "lmhead_chunks": chunks, "library": _library(how)}
            own |= dict(zip(ways, values, strict=True))
            if own["world_size"] == 1:
                own["apart"] = "off"
            if own["world_size"] == 1 or own["apart"] == "on":
                own["zero"] = 0
            if own["zero"] != 3:
                own["gather_by"] = "collectives"
            cell = cell_of(TrainingRunCell, options, data=TrainingRunCell.data, **own)
            replace(cell, apart="off").train_options.micro_batches(cell.world_size)
            if how == "ours":
                cell.train_options.check()
            cells.append(cell)
    return list(dict.fromkeys(cells))


def _library(how: str) -> str:
    """Of a way, those that are installed."""
    found = []
    for name in LIBRARIES[how]:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
