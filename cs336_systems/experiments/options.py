"""Options of commands, and checks before anything runs: every fault is one sentence with the flag and the value.

``RunOptions`` is what every benchmark is asked besides its cell, ``TrainingRun`` and ``RankedRun`` what every benchmark
of a training step is. ``options_of`` (``declared.py``) adds an option for each field of the question's cell, of which
``training_cells`` makes the grid. Imports no torch.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from cs336_systems.case import RECIPE, UNCAPTURED_STEPS, TrainingCase, kept_as
from cs336_systems.config import resolve_size
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.kept import default_keep
from cs336_systems.declared import flag, like, names_in, option, option_name, options_in, sign_refusal
from cs336_systems.ranks import Parallel
from cs336_systems.refusals import command_refusal
from cs336_systems.report.command_line import Format

Compile = Literal["off", "on", "whole-model", "loss"]

MAX_TIMEOUT_S = 1e6


@dataclass(frozen=True)
class RunOptions:
    """The options of every benchmark."""

    CPU_DEFAULTS: ClassVar[dict[str, Any]] = {}
    """Where there is no GPU defaults shrink, so that a bare command ends in under a minute."""

    device: Literal["cpu", "cuda"] = "cuda"
    """Device on which to run; several ranks use NCCL on cuda and gloo on cpu."""
    seed: int = 0
    """Seed of parameters and data."""
    out: Path | None = None
    """Folder to which rows are appended and figures are written."""
    format: Format = "auto"
    """Format of tables: auto draws them on a terminal and writes Markdown elsewhere."""
    timeout: float = 900.0
    """Seconds after which a cell, or a collective in it, is stopped and reported as timeout."""

    @classmethod
    def default(cls, device: str) -> Self:
        return cls() if device == "cuda" else cls(device="cpu", **cls.CPU_DEFAULTS)


@dataclass(frozen=True)
class TrainingRun(RunOptions):
    """The options of every benchmark of a training step besides those of its cell."""

    CPU_DEFAULTS: ClassVar = {"size": ("tiny",), "context_length": (128,), "batch_size": (1,)}
    repeat: int = option(
        1,
        "How often the whole grid is run, every second time in reverse order, so that cells are interleaved.",
        sign="positive",
    )


@dataclass(frozen=True)
class RankedRun(TrainingRun):
    """The options of every benchmark of a step on several ranks besides those of its cell."""

    later_warmup: int | None = option(
        None,
        "Warm-up steps in every repeat after the first. Under torchrun fewer suffice, because kernels are loaded and "
        "links are made by then. By default as --warmup.",
        sign="not negative",
    )


@dataclass(frozen=True)
class TimedCase(TrainingCase):
    """A training case and how often it is run; the fields are columns."""

    warmup: int = option(5, "Warm-up steps, which are not recorded.", several=False, sign="not negative")
    steps: int = option(10, "Recorded steps.", several=False, sign="positive")
    repeat: int = 0
    """Which turn of the whole grid."""


@dataclass(frozen=True)
class RankedCase(TimedCase):
    """A timed case of several ranks; sizes are per data rank."""

    optimizer: str = like(TrainingCase, "optimizer", asked=("torch-fused",))
    world_size: int = option(
        1,
        "Numbers of ranks on this machine, each measured separately. By default one rank per GPU, or two on a CPU; "
        "under torchrun as many as it has started.",
        asked=None,
    )

    def sharing(self, wrapper: str, **own: Any) -> Parallel:
        """How the ranks share a step: the settings of ``Parallel`` that are fields of the cell, but for its ``own``."""
        return cell_of(Parallel, self, wrapper=wrapper, **own)


TORCH_AT_ITS_FASTEST: dict[str, Any] = {
    **{name: getattr(TrainingCase, name) for name in ("master", "offload", "kernels", *RECIPE)},
    **{"keep": "autograd", "attention": "sdpa-cudnn", "compile": "on", "optimizer": "torch-fused"},
}
"""The settings of a training case in which torch's own ways to share it are as fast as they can be."""

Cell = TypeVar("Cell", bound=TimedCase)
AnyCell = TypeVar("AnyCell")
Kinds = Sequence[Mapping[str, Any]]
"""Columns that depend on each other, a mapping for each combination."""


def every(cell_type: type[AnyCell], options: Any, **sets: Iterable[Any]) -> list[AnyCell]:
    """A cell for each combination of the options that may have several values; ``sets`` stand in for theirs."""
    several = {each.name: getattr(options, option_name(each)) for each, of in options_in(cell_type) if of.several}
    return grid_of(cell_type, options, [_kinds(name, values) for name, values in (several | sets).items()])


def grid_of(cell_type: type[AnyCell], options: Any, dimensions: Iterable[Kinds]) -> list[AnyCell]:
    """A cell for each combination of the kinds of all dimensions, the last fastest."""
    turn = {"repeat": 0} if hasattr(cell_type, "repeat") else {}
    chosen = (functools.reduce(operator.or_, map(dict, kinds), turn) for kinds in itertools.product(*dimensions))
    return [cell_of(cell_type, options, **own) for own in chosen]


def _kinds(name: str, values: Iterable[Any]) -> Kinds:
    return [{name: value} for value in values]


def training_cells(cell_type: type[Cell], options: Any, *, inner: Kinds = ({},)) -> list[Cell]:
    """The grid of training cases: the product of all options that are sets, worlds slowest, once for each repeat.

    Every second repeat takes it backwards, so that of two cells each is measured first once.

    Args:
        options: made by ``options_of`` for the type of cell.
        inner: they and the other columns of the question vary fastest, so that what is compared stands next to each
            other.

    Raises:
        ValueError: a value that no cell can have.
    """
    several = [each for each, of in options_in(cell_type) if of.several]
    sets: dict[str, Any] = {each.name: getattr(options, option_name(each)) for each in several} | {
        "size": resolved_sizes(options.size, options.context_length),
        "compile": options.compile or ("on",),
        "checkpoint": tuple(dict.fromkeys(canonical_policy(policy) for policy in options.checkpoint)),
    }
    blocks: Kinds = [
        {"kernels": kernels} | recipe | kept_as(keep)
        for kernels in options.kernels
        for recipe in _recipes(options)
        for keep in options.keep or (default_keep(kernels, recipe["matmul_dtype"]),)
    ]
    if options.checkpoint != ("none",) and any("checkpoint" in kind for kind in blocks):
        both = f"--checkpoint {' '.join(options.checkpoint)} and --keep {' '.join(options.keep)}"
        raise ValueError(f"{both} both name policies of activation checkpointing: give one of them")
    names = [name for name in sets if name not in ("kernels", "keep", *RECIPE, *inner[0])]
    outer = [name for name in ("world_size", *names_in(TrainingCase)) if name in names]
    of_case, of_question = (
        [_kinds(name, sets[name]) for name in group] for group in (outer, [name for name in names if name not in outer])
    )
    grid = grid_of(cell_type, options, [*of_case, blocks, *of_question, inner])
    for cell in grid:
        if reason := command_refusal(cell):
            raise ValueError(reason)
        if cell.cuda_graph == "on" and cell.warmup <= UNCAPTURED_STEPS:
            least = UNCAPTURED_STEPS + 1
            raise ValueError(f"--cuda-graph on captures step {least}, in --warmup {least} or more, got {cell.warmup}")
    turns = (grid, grid[::-1])
    return [replace(cell, repeat=repeat) for repeat in range(options.repeat) for cell in turns[repeat % 2]]


def in_turns(cells: Sequence[Cell], peers: Callable[[Cell], Iterable[Cell]]) -> list[Cell]:
    """The grid's repeats, each with the peers of its cells behind it, and every second one with them before it."""
    turns: list[Cell] = []
    for repeat, same in itertools.groupby(cells, lambda cell: cell.repeat):
        turn = list(same)
        beside = list(dict.fromkeys(peer for cell in turn for peer in peers(cell)))
        turns += [*turn, *beside] if repeat % 2 == 0 else [*reversed(beside), *turn]
    return turns


def _recipes(options: Any) -> list[dict[str, Any]]:
    """The recipes of all matmul dtypes, the quantized ones with each gradient dtype and scaling."""
    plain = {name: getattr(TrainingCase, name) for name in RECIPE}
    for name, usual in plain.items():
        if set(options.matmul_dtype) == {"same"} and (given := getattr(options, name)) not in (usual, (usual,)):
            raise ValueError(f"{flag(name)} is for quantized matmuls, and --matmul-dtype is same, got {given}")
    skips = (options.fp8_skip_first, options.fp8_skip_last)
    found = [
        plain if names[0] == "same" else dict(zip(RECIPE, (*names, *skips), strict=True))
        for names in itertools.product(options.matmul_dtype, options.gradient_dtype, options.scaling)
    ]
    return [recipe for i, recipe in enumerate(found) if recipe not in found[:i]]


def cell_of(cell_type: type[AnyCell], options: Any, **own: Any) -> AnyCell:
    """A cell whose fields are the options of the same name, if there are such, but for its ``own``."""
    names = {each.name: option_name(each) for each in fields(cell_type)}  # type: ignore[arg-type]
    given = {name: getattr(options, asked) for name, asked in names.items() if hasattr(options, asked)}
    return cell_type(**given | own)


def check_options(options: RunOptions) -> None:
    """Raise ValueError for an empty set, a number out of range, a seed or timeout that no machine takes.

    A whole number of which nothing is declared, such as ``--repeat``, must be positive.
    """
    signs: dict[str, str] = {each.name: of.sign for each, of in options_in(options)}
    for field in fields(options):
        name, given = field.name, getattr(options, field.name)
        if given == () and field.default != () and name != "compile":  # alone it means on
            raise ValueError(f"{flag(name)} needs at least one value, got none")
        sign = signs.get(name, "positive" if type(given) is int and name != "seed" else "")
        for value in given if isinstance(given, tuple) else (given,):
            if refusal := sign_refusal(name, value, sign):
                raise ValueError(refusal)
    if not 0 <= options.seed < 2**31:
        raise ValueError(f"--seed must lie in 0..2^31-1, got {options.seed}")
    if not (math.isfinite(options.timeout) and 0 < options.timeout <= MAX_TIMEOUT_S):
        raise ValueError(f"--timeout must be positive and at most {MAX_TIMEOUT_S:g} seconds, got {options.timeout:g}")


def resolved_sizes(sizes: Sequence[str], context_lengths: Sequence[int]) -> list[str]:
    """The names that ``--size`` means.

    Raises:
        ValueError: a size is unknown, or a context is longer than a model's.
    """
    names = [resolve_size(size).name for size in sizes]
    for name, context_length in itertools.product(names, context_lengths):
        resolve_size(name).at_context(context_length)
    return names


def small_defaults_note(options: RunOptions) -> str:
    """A sentence on which options stand at the smaller defaults of a machine without a GPU; "" if none do."""
    small = {name: value for name, value in options.CPU_DEFAULTS.items() if getattr(options, name) == value}
    if options.device != "cpu" or not small:
        return ""
    shown = {name: " ".join(map(str, value if isinstance(value, tuple) else (value,))) for name, value in small.items()}
    return f"On a CPU the defaults shrink: {', '.join(f'{flag(name)} {value}' for name, value in shown.items())}."
