"""What does a training step of this model cost on this machine? Forward, backward and optimizer, each beside its limit.

    uv run benchmarks/benchmark_model.py                                   # the small model, under a minute anywhere
    uv run benchmarks/benchmark_model.py --size small medium --context-length 256 512 --dtype fp32 bf16
    uv run benchmarks/benchmark_model.py --size xl --mode forward --out results/
    uv run benchmarks/benchmark_model.py --size small --compare results/benchmark_model.csv
    uv run benchmarks/benchmark_model.py --size small --checkpoint none full every-3 keep-matmuls --mode step

Options that take several values make a grid; every cell of it runs in a process of its own. Parameters, tokens and
targets are random. Each cell's peak memory is predicted first, and a cell that cannot fit is reported, not run.
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from cs336_systems.config import PRECISIONS, Precision, resolve_size
from cs336_systems.costs.checkpointing import KEEP_MATMULS, canonical_policy
from cs336_systems.costs.flops import AttentionKind, hardware_flops
from cs336_systems.costs.memory import adamw_state_bytes, parameter_bytes, peak_memory
from cs336_systems.costs.planner import cheapest_policy
from cs336_systems.experiments.model.figure import draw_step_figure
from cs336_systems.experiments.model.frontier import draw_frontier
from cs336_systems.experiments.model.rates import step_rates
from cs336_systems.experiments.options import (
    check_attention,
    check_dtypes,
    check_given,
    check_not_negative,
    check_positive,
    check_seed,
    check_timeout,
    resolved_sizes,
    small_defaults_note,
)
from cs336_systems.harness.ceilings import measure_ceilings
from cs336_systems.harness.clock import time_phases
from cs336_systems.harness.memory import PeakMeter, cublas_workspace_bytes, free_bytes
from cs336_systems.harness.process import PredictedOutOfMemory, Unsupported
from cs336_systems.harness.record import Metric, RowFile
from cs336_systems.harness.sweep import Outcome, cell_columns, outcome_rows, run_sweep
from cs336_systems.report.compare import compare
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, parse_for_device, show
from cs336_systems.report.tables import CEILING, read_model_rows, step_table
from cs336_systems.training import TrainingSetup, assemble, unsupported_attention
from cs336_systems.training.activation_checkpointing import unsupported_reason as checkpointing_reason

BENCHMARK = "benchmark_model"
GIB = 1024**3
HEADLINES = (
    *("matmul_ceiling", "copy_ceiling", "forward", "backward", "optimizer", "step"),
    *("tokens_per_s", "model_tflops", "mfu", "peak_memory"),
)
"""Metrics of the JSON line."""

Mode = Literal["forward", "backward", "step"]
Dtype = Literal["fp32", "tf32", "bf16", "autocast-bf16", "autocast-fp16"]
Switch = Literal["off", "on"]
OptimizerName = Literal["reference", "torch-fused"]


@dataclass(frozen=True)
class Options:
    """What does a training step of this model cost on this machine?"""

    size: tuple[str, ...] = ("small",)
    """Named model sizes: tiny; the handout's small, medium, large, xl, 2.7b (xl-2026), 10b; leaderboard-8b; llama3-1b,
    llama3-8b; qwen2.5-0.5b, -1.5b, -3b, -7b, -14b."""
    context_length: tuple[int, ...] = (512,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (4,)
    """Sequences per step."""
    mode: tuple[Mode, ...] = get_args(Mode)
    """forward: without gradients; backward: forward and backward; step: forward, backward and optimizer."""
    dtype: tuple[Dtype, ...] = ("fp32",)
    """How numbers are stored and multiplied."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations: reference, reference-compiled, tiled, flash, hopper, sdpa-flash, sdpa-cudnn, sdpa-efficient,
    flex."""
    compile: tuple[Switch, ...] = ("off",)
    """torch.compile of each block and of the loss; --compile alone means on."""
    checkpoint: tuple[str, ...] = ("none",)
    """Activation checkpointing: none; full (every block); every-K (segments of K blocks); first-M (the first M blocks);
    recursive (halves of halves); keep-matmuls, keep-attention (full, but keeping their results)."""
    memory_budget_gib: float | None = None
    """Choose each cell's checkpointing: the least recomputation whose predicted peak fits."""
    optimizer: tuple[OptimizerName, ...] = ("reference",)
    """AdamW written out, or torch's fused kernel."""
    warmup: tuple[int, ...] = (5,)
    """Steps before the recorded ones."""
    steps: int = 10
    """Recorded steps."""
    repeat: int = 1
    """Times that the whole grid is run, so that repeats of a cell are interleaved with the other cells."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    seed: int = 0
    """Of parameters and tokens."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_model.csv) and where their figure is drawn."""
    compare: Path | None = None
    """CSV of an earlier run: print ratios to it, with a verdict."""
    format: Format = "auto"
    """Of the table: auto draws it on a terminal and writes Markdown elsewhere."""
    timeout: float = 900.0
    """Seconds after which a cell is killed."""
    force: bool = False
    """Run cells that are predicted not to fit."""


@dataclass(frozen=True)
class ModelCell:
    """One configuration to measure; the fields are columns."""

    device: str
    size: str
    batch_size: int
    context_length: int
    dtype: str
    attention: str
    compile: str
    checkpoint: str
    optimizer: str
    mode: str
    warmup: int
    steps: int
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return "compiled" if self.compile == "on" else "eager"

    @property
    def predictable(self) -> bool:
        """Whether the prediction of memory is of this cell: it knows the reference attention, run eagerly."""
        return self.compile == "off" and self.attention == "reference"

    @property
    def attention_kind(self) -> AttentionKind:
        """How its attention is counted."""
        return "materialised" if self.attention.startswith("reference") else "flash"


@dataclass(frozen=True)
class CeilingCell(ModelCell):
    """The machine's own limits for one dtype, measured before the cells that stand beside them."""

    @property
    def variant(self) -> str:
        return CEILING


def default_options(device: str) -> Options:
    """The defaults on a device; without a GPU they shrink, so that a bare command ends in under a minute."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", context_length=(128,), batch_size=(1,), warmup=(1,), steps=3)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[ModelCell]:
    """The grid.

    Raises:
        ValueError: a value that no cell can have: unknown size, context beyond the model's, dtype the device lacks.
    """
    check_device(options.device)
    check_given(options, "size", "context_length", "batch_size", "mode", "dtype", "checkpoint", "optimizer", "warmup")
    check_positive(options, "context_length", "batch_size", "steps", "repeat")
    check_not_negative(options, "warmup")
    check_seed(options.seed)
    check_timeout(options.timeout)
    check_dtypes(options.dtype, options.device)
    check_attention(options.attention)
    policies = dict.fromkeys(canonical_policy(policy) for policy in options.checkpoint)
    if (budget := options.memory_budget_gib) is not None:
        if list(policies) != ["none"]:
            raise ValueError(f"--memory-budget-gib chooses the policy itself, got --checkpoint {' '.join(policies)}")
        if not 0 < budget < math.inf:
            raise ValueError(f"--memory-budget-gib must be positive and finite, got {budget:g}")
    sizes = resolved_sizes(options.size, options.context_length)
    grid: Iterator[Any] = itertools.product(
        (options.device,),
        sizes,
        options.batch_size,
        options.context_length,
        options.dtype,
        options.attention,
        options.compile or ("on",),
        policies,
        options.optimizer,
        options.mode,
        options.warmup,
        (options.steps,),
        (0,),
        (options.seed,),
    )
    cells = [ModelCell(*values) for values in grid]
    return [replace(cell, repeat=repeat) for repeat in range(options.repeat) for cell in cells]


def fit_to_budget(cells: list[ModelCell], budget_gib: float) -> tuple[list[ModelCell], list[str]]:
    """The cells with the policy that the planner picks for each, and a sentence for every distinct pick.

    Raises:
        ValueError: no policy fits a cell.
    """
    fitted, notes = [], []
    for cell in cells:
        device = torch.device(cell.device)
        choice = cheapest_policy(
            resolve_size(cell.size).at_context(cell.context_length),
            cell.batch_size,
            cell.context_length,
            PRECISIONS[cell.dtype],
            cell.mode,
            int(budget_gib * GIB),
            optimizer=cell.optimizer,
            attention=cell.attention_kind,
            selective=checkpointing_reason(KEEP_MATMULS, cell.attention) is None,
            device_type=device.type,
            workspace_bytes=cublas_workspace_bytes(device),
        )
        fitted.append(replace(cell, checkpoint=choice.policy))
        limit = (
            "" if cell.predictable else " (the peak is that of eager reference attention: this cell should need less)"
        )
        notes.append(f"{describe(cell)} within {budget_gib:g} GiB, least recomputation: {choice}{limit}")
    return fitted, list(dict.fromkeys(notes))


def measure_ceiling(cell: CeilingCell) -> list[Metric]:
    """The machine's matmul and copy ceilings in the cell's dtype, and the memory that is free for cells."""
    free = free_bytes(torch.device(cell.device))
    ceilings = measure_ceilings(PRECISIONS[cell.dtype], torch.device(cell.device))
    return [
        Metric("matmul_ceiling", "TFLOP/s", ceilings.matmul_tflops),
        Metric("copy_ceiling", "GB/s", ceilings.copy_gb_per_s),
        Metric("free_memory", "GiB", [free / GIB]),
    ]


def measure_model(cell: ModelCell, *, ceilings: dict[str, dict[str, float]], force: bool) -> list[Metric]:
    """Time the phases of one cell's step and put them beside prediction and limit.

    Raises:
        PredictedOutOfMemory: the predicted peak is more than what is free, and ``force`` is not set.
        FloatingPointError: the loss is not finite.
    """
    device, precision = torch.device(cell.device), PRECISIONS[cell.dtype]
    config = resolve_size(cell.size).at_context(cell.context_length)
    predicted = _predicted_bytes(cell, precision, device)
    free = free_bytes(device)
    if predicted > free and not force:
        least = "" if cell.predictable else "at least "
        raise PredictedOutOfMemory(f"needs {least}{predicted / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")

    meter = PeakMeter(device)
    setup = TrainingSetup(
        config,
        precision,
        cell.device,
        cell.optimizer,
        cell.compile == "on",
        cell.attention,
        cell.checkpoint,
        seed=cell.seed,
    )
    if reason := unsupported_attention(setup):
        raise Unsupported(f"attention {cell.attention}: {reason}")
    step = assemble(setup)
    shape = (cell.batch_size, cell.context_length)
    token_ids, targets = (torch.randint(config.vocab_size, shape, device=device) for _ in range(2))
    times = time_phases(step.phases(cell.mode, token_ids, targets), device=device, warmup=cell.warmup, steps=cell.steps)
    assert step.loss is not None
    if not math.isfinite(loss := step.loss.item()):
        raise FloatingPointError(f"loss is {loss}")

    metrics = [Metric(name, "ms", samples) for name, samples in times.samples_ms.items()]
    if times.warmup_ms:
        metrics.append(Metric("warmup_step", "ms", times.warmup_ms))
    metrics.append(Metric("peak_memory", "GiB", [meter.peak_bytes() / GIB]))
    if cell.predictable:
        metrics.append(Metric("predicted_peak_memory", "GiB", [predicted / GIB]))
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    executed = hardware_flops(
        config,
        *shape,
        cell.mode,
        attention=cell.attention_kind,
        checkpoint=cell.checkpoint,
        compiled=cell.compile == "on",
    )
    return metrics + step_rates(
        config,
        precision,
        cell.batch_size,
        cell.mode,
        times.samples_ms,
        executed,
        device_name,
        ceilings.get(cell.dtype, {}),
    )


def _predicted_bytes(cell: ModelCell, precision: Precision, device: torch.device) -> int:
    """Predicted peak of an eager reference cell; for any other the states alone, a lower bound."""
    config = resolve_size(cell.size).at_context(cell.context_length)
    if not cell.predictable:
        states = {"forward": 0, "backward": parameter_bytes(config, precision)}
        step = parameter_bytes(config, precision) + adamw_state_bytes(config, precision)
        return parameter_bytes(config, precision) + states.get(cell.mode, step)
    return peak_memory(
        config,
        cell.batch_size,
        cell.context_length,
        precision,
        cell.mode,
        optimizer=cell.optimizer,
        checkpoint=cell.checkpoint,
        device_type=device.type,
        workspace_bytes=cublas_workspace_bytes(device),
    ).n_bytes


def describe(cell: ModelCell) -> str:
    """A cell in a few words, for the progress display."""
    if isinstance(cell, CeilingCell):
        return f"ceilings of this machine in {cell.dtype}"
    return (
        f"{cell.size} batch {cell.batch_size} context {cell.context_length} {cell.dtype} {cell.mode}"
        f"{f' {cell.attention}' if cell.attention != 'reference' else ''}{' compiled' if cell.compile == 'on' else ''}"
        f"{f' checkpoint {cell.checkpoint}' if cell.checkpoint != 'none' else ''}"
    )


def expected_seconds(cell: ModelCell, *, ceilings: dict[str, dict[str, float]]) -> float:
    """What a cell should take: a process, filling the parameters, and its steps at half of the measured ceiling."""
    if isinstance(cell, CeilingCell):
        return 5.0 if cell.device == "cuda" else 10.0
    config = resolve_size(cell.size).at_context(cell.context_length)
    measured = ceilings.get(cell.dtype, {})
    free = measured.get("free_memory", math.inf) * GIB
    if _predicted_bytes(cell, PRECISIONS[cell.dtype], torch.device(cell.device)) > free:
        return 0.5
    flops = hardware_flops(config, cell.batch_size, cell.context_length, cell.mode, checkpoint=cell.checkpoint)
    steps = (cell.warmup + cell.steps) * flops / (0.5e12 * measured.get("matmul_ceiling", 0.1))
    filling = config.n_parameters / (2e10 if cell.device == "cuda" else 7e7)
    return (4.0 if cell.device == "cuda" else 1.0) + steps + filling + (10.0 if cell.compile == "on" else 0.0)


def run(options: Options, cells: list[ModelCell], row_file: RowFile | None, outcomes: list[Outcome]) -> None:
    """Measure the ceilings of every dtype, then every cell; ``outcomes`` fills as they finish.

    Raises:
        OSError: rows could not be written; ``outcomes`` holds them all.
    """
    ceiling_cells = [
        CeilingCell(options.device, "", 0, 0, dtype, "", "", "", "", "", 0, 0, 0, options.seed)
        for dtype in dict.fromkeys(options.dtype)
    ]
    ceilings: dict[str, dict[str, float]] = {}
    sweep = functools.partial(
        run_sweep,
        BENCHMARK,
        row_file=row_file,
        timeout_s=options.timeout,
        describe=describe,
        cost=functools.partial(expected_seconds, ceilings=ceilings),
        console=Console(stderr=True),
    )
    for outcome in sweep(ceiling_cells, measure_ceiling):
        outcomes.append(outcome)
        medians = {metric: outcome.median(metric) for metric in ("matmul_ceiling", "copy_ceiling", "free_memory")}
        ceilings[outcome.cell.dtype] = {name: value for name, value in medians.items() if value is not None}
    if outcomes[-1].status != "interrupted":
        outcomes.extend(sweep(cells, functools.partial(measure_model, ceilings=ceilings, force=options.force)))


def main() -> int:
    """Parse, check everything that can be checked before running, run, print."""
    options = parse_options()
    outcomes: list[Outcome] = []
    csv = options.out / f"{BENCHMARK}.csv" if options.out else None
    try:
        cells = make_cells(options)
        notes = [small_defaults_note(options, default_options, "batch_size", "context_length", "warmup", "steps")]
        if options.memory_budget_gib is not None:
            cells, choices = fit_to_budget(cells, options.memory_budget_gib)
            notes += choices
        before = read_model_rows(options.compare, cell_columns(ModelCell)) if options.compare else None
        row_file = RowFile(csv, cell_columns(ModelCell)) if csv else None
    except ValueError as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    for note in filter(None, notes):
        print(note, file=sys.stderr)
    write_error: OSError | None = None
    try:
        run(options, cells, row_file, outcomes)
    except OSError as error:
        write_error = error

    rows = outcome_rows(outcomes)
    if (rows["variant"] != CEILING).any():
        show(step_table(rows), options.format)
        if before is not None:
            show(compare(rows, before), options.format)
    if write_error is not None:
        return complain(
            BENCHMARK, f"rows could not be written to {csv}: {write_error.strerror}; every earlier row is there"
        )
    if csv:
        try:
            draw_step_figure(read_model_rows(csv), csv.with_suffix(".png"))
            draw_frontier(read_model_rows(csv), csv.with_name(f"{BENCHMARK}_frontier.png"))
        except OSError as error:
            return complain(BENCHMARK, f"the figure could not be written: {error.filename}: {error.strerror}")
    return finish(BENCHMARK, outcomes, describe, HEADLINES, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
