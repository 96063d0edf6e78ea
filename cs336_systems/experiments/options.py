"""Options of commands, and checks before anything runs: every fault is one sentence with the flag and the value.

``RunOptions`` is what every benchmark is asked, ``TrainingOptions`` what every benchmark of a training step is asked, a
set of values for each field of ``TrainingCase``. A benchmark's own options are a subclass. ``training_cells`` makes the
grid. Imports no torch.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from cs336_systems.case import UNCAPTURED_STEPS, TrainingCase, cuda_graph_reason
from cs336_systems.config import ATTENTIONS, resolve_size
from cs336_systems.costs.checkpointing import canonical_policy
from cs336_systems.costs.kept import default_keep, unserved_reason
from cs336_systems.costs.offload import offload_reason
from cs336_systems.report.command_line import Format

Dtype = Literal["fp32", "tf32", "bf16", "autocast-bf16", "autocast-fp16"]
Mode = Literal["forward", "backward", "step"]
Switch = Literal["off", "on"]
Compile = Literal["off", "on", "whole-model"]
OptimizerName = Literal["reference", "torch-fused", "fused"]
Kernels = Literal["reference", "fused"]
Master = Literal["none", "fp32"]
MatmulDtype = Literal["same", "e4m3"]
GradientDtype = Literal["e4m3", "e5m2"]
Scaling = Literal["tensor", "row", "block"]

MODES: tuple[Mode, ...] = get_args(Mode)
MAX_TIMEOUT_S = 1e6

_POSITIVE = (
    *("context_length", "batch_size", "steps", "local_steps", "recorded_steps", "repeat", "bucket_size_mb", "calls"),
    *("rounds", "accumulate", "length", "d_head", "samples", "rows", "width", "layers"),
)
_NOT_NEGATIVE = ("warmup", "later_warmup", "prefetch", "losses", "max_ctas", "fp8_skip_first", "fp8_skip_last")


@dataclass(frozen=True)
class RunOptions:
    """What every benchmark is asked."""

    CPU_DEFAULTS: ClassVar[dict[str, Any]] = {}
    """Where there is no GPU defaults shrink, so that a bare command ends in under a minute."""
    MULTIPLIES: ClassVar[bool] = True
    """Whether ``--dtype`` is that of matrix products, which the device must have."""

    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run; several ranks use NCCL on cuda and gloo on cpu."""
    seed: int = 0
    """Seed of parameters and data."""
    out: Path | None = None
    """Folder to which rows are appended, and where figures are drawn."""
    format: Format = "auto"
    """Format of tables: auto draws them on a terminal and writes Markdown elsewhere."""
    timeout: float = 900.0
    """Seconds after which a cell, or a collective in it, is abandoned."""

    @classmethod
    def default(cls, device: str) -> Self:
        """The defaults on a device."""
        return cls() if device == "cuda" else cls(device="cpu", **cls.CPU_DEFAULTS)


@dataclass(frozen=True)
class TrainingOptions(RunOptions):
    """What every benchmark of a training step is asked; options that take several values make a grid."""

    CPU_DEFAULTS: ClassVar = {"size": ("tiny",), "context_length": (128,), "batch_size": (1,)}
    size: tuple[str, ...] = ("small",)
    """Named model sizes: tiny; the handout's small, medium, large, xl, 2.7b (xl-2026), 10b; leaderboard-8b; llama3-1b,
    llama3-8b; qwen2.5-0.5b, -1.5b, -3b, -7b, -14b."""
    context_length: tuple[int, ...] = (512,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (4,)
    """Sequences per micro-batch and rank."""
    dtype: tuple[str, ...] = ("fp32",)
    """How numbers are stored and multiplied: fp32, tf32, bf16, autocast-bf16, autocast-fp16."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations: reference, reference-compiled, tiled, flash, hopper, sdpa-flash, sdpa-cudnn, sdpa-efficient,
    flex."""
    compile: tuple[Compile, ...] = ("off",)
    """torch.compile of each block and of the loss; --compile alone means on. whole-model compiles the blocks as one."""
    checkpoint: tuple[str, ...] = ("none",)
    """Activation checkpointing: none; full (every block); every-K (segments of K blocks); first-M (the first M blocks);
    recursive (halves of halves); keep-matmuls, keep-attention (full, but keeping their results)."""
    optimizer: tuple[OptimizerName, ...] = ("reference",)
    """AdamW: reference, written out; torch-fused, torch's fused kernel; fused, this suite's, with stochastic rounding
    of bf16, on CUDA devices."""
    kernels: tuple[Kernels, ...] = ("reference",)
    """Operations between matrix products: reference, plain PyTorch; fused, one Triton kernel each, on CUDA devices,
    with --attention flash or hopper, in blocks whose backward is written out, and a loss that never has all logits."""
    keep: tuple[str, ...] | None = None
    """What blocks with a written-out backward keep for it: input; attention (also its output); products (also the
    results of matrix products); all; or a level without some parts, as all-norm-swiglu (norm, qkv, attention, residual,
    ffn, swiglu). autograd: backward is left to autograd. By default products for fused kernels and fp8, else
    autograd."""
    master_weights: tuple[Master, ...] = ("none",)
    """fp32: the optimizer also keeps fp32 master weights; with --dtype bf16 and --optimizer fused."""
    offload: tuple[str, ...] = ("none",)
    """Kept in host memory: m, v, master, gradients (all with --optimizer fused), residual (inputs of blocks whose
    backward is written out); several joined by hyphens, as m-v."""
    matmul_dtype: tuple[MatmulDtype, ...] = ("same",)
    """Dtype of matrix products in blocks with a written-out backward: same, as tensors are stored; or e4m3, quantized
    to fp8."""
    gradient_dtype: tuple[GradientDtype, ...] = ("e4m3",)
    """Dtype of activation gradients in fp8 matrix products: e4m3; or e5m2, with more range and less precision."""
    scaling: tuple[Scaling, ...] = ("tensor",)
    """Numbers that share a scale in fp8 matrix products: a tensor; a row along the summed dimension; or a block of 128
    of it."""
    fp8_skip_first: int = 0
    """First blocks that stay out of fp8."""
    fp8_skip_last: int = 0
    """Last blocks that stay out of fp8."""
    accumulate: tuple[int, ...] = (1,)
    """Micro-batches per optimizer step; their gradients are added up."""
    cuda_graph: tuple[Switch, ...] = ("off",)
    """on: capture the whole step and replay it; faster where a step waits for launches. Needs --device cuda, one rank,
    --mode step, --optimizer torch-fused or fused, and at least 4 steps of --warmup."""
    warmup: int | tuple[int, ...] = 5
    """Steps before the recorded ones."""
    steps: int = 10
    """Recorded steps."""
    repeat: int = 1
    """How often the whole grid is run, every second time in reverse order, so that cells are measured in turns."""


@dataclass(frozen=True)
class RankedOptions(TrainingOptions):
    """What every benchmark of a step on several ranks is asked besides."""

    optimizer: tuple[OptimizerName, ...] = ("torch-fused",)
    later_warmup: int | None = None
    """Steps before the timed ones in turns after the first, where kernels are loaded, links made and clocks up under
    torchrun; by default as many."""
    world_size: tuple[int, ...] | None = None
    """Numbers of ranks on this machine, each a world of its own; by default all GPUs, or two ranks on a CPU. Under
    torchrun it is torchrun's number."""


@dataclass(frozen=True)
class TimedCase(TrainingCase):
    """A training case and how often it is run; the fields are columns."""

    warmup: int = 5
    steps: int = 10
    repeat: int = 0
    """Which turn of the whole grid."""


@dataclass(frozen=True)
class RankedCase(TimedCase):
    """A timed case of several ranks; sizes are per rank."""

    world_size: int = 1


Cell = TypeVar("Cell", bound=TimedCase)
AnyCell = TypeVar("AnyCell")

_SETS = (
    *("size", "batch_size", "context_length", "dtype", "attention", "compile", "checkpoint", "optimizer"),
    *("offload", "accumulate", "cuda_graph"),
)
RECIPE = ("matmul_dtype", "gradient_dtype", "scaling", "fp8_skip_first", "fp8_skip_last")
"""Columns that are a recipe of quantized products."""


def training_cells(
    cell_type: type[Cell], options: TrainingOptions, *, inner: Sequence[Mapping[str, Any]] = ({},)
) -> list[Cell]:
    """The grid of training cases: the product of all options that are sets, worlds slowest, once for each repeat.

    Every second repeat takes it backwards, so that of two cells each is measured first once.

    Args:
        inner: the cell's own columns that vary fastest, a mapping for each combination: what is compared is so next to
            each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    worlds = {"world_size": options.world_size or ()} if isinstance(options, RankedOptions) else {}
    sets = worlds | {name: getattr(options, name) for name in _SETS}
    sets |= {
        "master": options.master_weights,
        "size": resolved_sizes(options.size, options.context_length),
        "compile": options.compile or ("on",),
        "checkpoint": tuple(dict.fromkeys(canonical_policy(policy) for policy in options.checkpoint)),
    }
    for name in options.attention:
        if name not in ATTENTIONS:
            raise ValueError(f"--attention {name}: known are {', '.join(ATTENTIONS)}")
    if "fused" in options.optimizer and options.device != "cuda":
        raise ValueError(f"--optimizer fused needs --device cuda, got {options.device}: Triton kernels run on GPUs")
    blocks = [
        {"kernels": kernels, "keep": keep} | recipe
        for kernels in options.kernels
        for recipe in _recipes(options)
        for keep in options.keep or (default_keep(kernels, recipe["matmul_dtype"]),)
    ]
    grid = [
        cell_of(cell_type, options, repeat=0, **dict(zip(sets, values, strict=True)), **kind, **own)
        for *values, kind, own in itertools.product(*sets.values(), blocks, inner)
    ]
    for cell in grid:
        if reason := unserved_reason(cell) or offload_reason(cell):
            raise ValueError(reason)
        if reason := cuda_graph_reason(cell):
            raise ValueError(f"--cuda-graph on: {reason}")
        if cell.cuda_graph == "on" and cell.warmup <= UNCAPTURED_STEPS:
            least = UNCAPTURED_STEPS + 1
            raise ValueError(f"--cuda-graph on captures step {least}, in --warmup {least} or more, got {cell.warmup}")
    turns = (grid, grid[::-1])
    return [replace(cell, repeat=repeat) for repeat in range(options.repeat) for cell in turns[repeat % 2]]


def _recipes(options: TrainingOptions) -> list[dict[str, Any]]:
    """Of all matmul dtypes, the quantized ones with each gradient and scaling."""
    plain = {name: getattr(TrainingCase, name) for name in RECIPE}
    quantized = [
        {"gradient_dtype": gradient, "scaling": scaling}
        for gradient, scaling in itertools.product(options.gradient_dtype, options.scaling)
    ]
    skips = {"fp8_skip_first": options.fp8_skip_first, "fp8_skip_last": options.fp8_skip_last}
    for name, usual in plain.items():
        given = getattr(options, name)
        if set(options.matmul_dtype) == {"same"} and given not in (usual, (usual,)):
            raise ValueError(f"{flag(name)} is for quantized products, and --matmul-dtype is same")
    return [
        recipe
        for name in options.matmul_dtype
        for recipe in ([plain] if name == "same" else [{"matmul_dtype": name} | one | skips for one in quantized])
    ]


def cell_of(cell_type: type[AnyCell], options: Any, **own: Any) -> AnyCell:
    """A cell whose fields are the options of the same name, but for its ``own``."""
    names = [field.name for field in fields(cell_type) if field.name not in own]  # type: ignore[arg-type]
    return cell_type(**{name: getattr(options, name) for name in names}, **own)


def check_options(options: RunOptions) -> None:
    """Raise ValueError for an empty set, a number out of range, a seed or timeout that no machine takes."""
    for field in fields(options):
        values = _values(getattr(options, field.name))
        if getattr(options, field.name) == () and field.default != () and field.name != "compile":  # alone it means on
            raise ValueError(f"{flag(field.name)} needs at least one value, got none")
        if field.name in _POSITIVE and (bad := [value for value in values if not value > 0]):
            raise ValueError(f"{flag(field.name)} must be positive, got {bad[0]:g}")
        if field.name in _NOT_NEGATIVE and (bad := [value for value in values if not value >= 0]):
            raise ValueError(f"{flag(field.name)} must not be negative, got {bad[0]:g}")
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
    usual, small = options.default("cuda"), options.CPU_DEFAULTS
    names = [field.name for field in fields(options) if field.name in small]
    shrunk = [name for name in names if getattr(options, name) == small[name] != getattr(usual, name)]
    if options.device != "cpu" or not shrunk:
        return ""
    here = ", ".join(f"{flag(name)} {_shown(small[name])}" for name in shrunk)
    return f"On a CPU the defaults shrink: {here} (on a GPU {', '.join(_shown(getattr(usual, n)) for n in shrunk)})."


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value)) or "all"
    return f"{value:g}" if isinstance(value, float) else str(value)
