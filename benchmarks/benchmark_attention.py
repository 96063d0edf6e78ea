"""Which attention for these shapes? Time, memory and error of every implementation, beside the limit.

    uv run benchmarks/benchmark_attention.py                                  # the grid that fits this machine
    uv run benchmarks/benchmark_attention.py --grid training --impl hopper flash sdpa-cudnn flex --repeat 3
    uv run benchmarks/benchmark_attention.py --grid flash --d-head 64 --length 1024 4096 --dtype bf16 --out results/

Grids: ``pytorch``, the handout's first (batch 8, no head dimension, plain and compiled); ``flash``, its second (batch
1, causal, every implementation); ``training``, the shapes at which training runs; ``variants``, masks and score
modifications, FlexAttention beside torch's attention with a dense mask. ``measurement/attention.py`` says how each cell
is measured. What a cell would need is predicted first; what cannot fit is a row, and is not run. Cells that share
implementation, dtype and head dimension share a process, so that kernels are compiled once. With ``--repeat`` the
implementations take turns at each shape, all in one process: a GPU's clock follows its temperature and its power, and
what is compared should meet the same of both.
"""

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from cs336_systems.config import ATTENTIONS
from cs336_systems.measurement.attention import (
    MATERIALISED,
    VARIANT_IMPLEMENTATIONS,
    VARIANTS,
    AttentionCell,
    measure,
)
from cs336_systems.measurement.record import RowFile
from cs336_systems.measurement.sweep import Outcome, cell_columns, outcome_rows, run_sweep
from cs336_systems.report.attention import attention_table, tile_table
from cs336_systems.report.console import Format, check_device, complain, exit_with, finish, parse_for_device, show
from cs336_systems.report.options import check_positive

BENCHMARK = "benchmark_attention"
TRAINING_SHAPES = (
    (1, 16, 16_384, 64),
    (1, 32, 16_384, 128),
    (4, 32, 4096, 128),
    (8, 16, 2048, 64),
    (2, 32, 32_768, 128),
)
"""(batch, heads, length, d_head); the first is the 2025 leaderboard's."""

KNOWN = tuple(dict.fromkeys(ATTENTIONS + VARIANT_IMPLEMENTATIONS))
CPU_LENGTHS = (256, 1024)
CPU_NOTE = (
    "On a CPU the defaults shrink: --length 256 1024 and --d-head 64 (on a GPU all), and no reference-compiled, whose "
    "kernels take half a minute to compile; --impl asks for it."
)
VARIANT_SHAPE = (4, 16, 4096, 64)


@dataclass(frozen=True)
class Options:
    """Which attention for these shapes?"""

    grid: tuple[Literal["pytorch", "flash", "training", "variants"], ...] = ("pytorch", "flash")
    """Sets of shapes; see above."""
    impl: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--attention"])] = ()
    """Implementations; by default those that the grid compares."""
    length: tuple[int, ...] = ()
    """Only these sequence lengths of the grids; by default all."""
    d_head: tuple[int, ...] = ()
    """Only these head dimensions of the grids; by default all."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ()
    """By default fp32 for pytorch, both for flash, bf16 for training and variants."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    autotune: bool = False
    """Search the tiles of flash again at each shape, list them, and measure with the fastest."""
    repeat: int = 1
    """Times that the whole grid is run, so that implementations at a shape are measured in turns."""
    seed: int = 0
    """Of the data."""
    out: Path | None = None
    """Folder to which rows are appended (benchmark_attention.csv)."""
    format: Format = "auto"
    """Of the table."""
    timeout: float = 300.0
    """Seconds after which a cell is killed."""


def default_options(device: str) -> Options:
    """The defaults on a device; a CPU gets one head dimension, the short lengths, and nothing that compiles."""
    if device == "cuda":
        return Options()
    impls = tuple(impl for impl in KNOWN if impl != "reference-compiled")
    return Options(device="cpu", impl=impls, length=CPU_LENGTHS, d_head=(64,))


def parse_options(arguments: list[str] | None = None) -> Options:
    """Options from the command line, with the defaults of the device that they name."""
    return parse_for_device(default_options, arguments, __doc__)


def make_cells(options: Options) -> list[AttentionCell]:
    """The grids, ordered so that cells which can share a process follow each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    for impl in options.impl:
        if impl not in KNOWN:
            raise ValueError(f"--impl {impl}: known are {', '.join(KNOWN)}")
    check_positive(options, "length", "d_head", "repeat")
    if options.autotune and options.repeat > 1:
        raise ValueError(f"--autotune searches once, got --repeat {options.repeat}")
    cells: list[AttentionCell] = []
    for name in options.grid:
        grid = _grid(name)
        kept = [
            shape
            for shape in sorted(grid.shapes, key=lambda shape: shape[3])
            if (not options.length or shape[2] in options.length) and (not options.d_head or shape[3] in options.d_head)
        ]
        impls = [impl for impl in options.impl or grid.impls if impl in grid.allowed]
        for impl, dtype, (batch, heads, length, d_head), mask in itertools.product(
            impls, options.dtype or grid.dtypes, kept, grid.masks
        ):
            cells.append(
                AttentionCell(
                    options.device,
                    name,
                    impl,
                    dtype,
                    d_head,
                    length,
                    batch,
                    heads,
                    grid.causal,
                    mask,
                    options.autotune and impl == "flash",
                    0,
                    options.seed,
                )
            )
    if not cells:
        lengths = f", with lengths {', '.join(map(str, options.length))}" if options.length else ""
        raise ValueError(
            f"no cell of --grid {' '.join(options.grid)} has the values asked for{lengths} (a CPU takes "
            f"{' and '.join(map(str, CPU_LENGTHS))} unless --length says more; training and variants have longer ones)"
        )
    return cells if options.repeat == 1 else _in_turns(cells, options.repeat)


def _in_turns(cells: list[AttentionCell], n_repeats: int) -> list[AttentionCell]:
    """Cells that differ in nothing but the implementation follow each other, each time with another one first."""
    peers: dict[AttentionCell, list[AttentionCell]] = {}
    for cell in cells:
        peers.setdefault(replace(cell, impl=""), []).append(cell)
    return [
        replace(group[(repeat + turn) % len(group)], repeat=repeat)
        for repeat in range(n_repeats)
        for group in peers.values()
        for turn in range(len(group))
    ]


@dataclass(frozen=True)
class Grid:
    """What a grid compares by default, and at which (batch, heads, length, d_head)."""

    impls: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: list[tuple[int, int, int, int]]
    causal: bool
    masks: tuple[str, ...] = ("",)
    allowed: tuple[str, ...] = ATTENTIONS


def _grid(name: str) -> Grid:
    if name == "pytorch":
        lengths = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536)  # the handout's five, and on until memory ends
        shapes = [(8, 0, length, d) for d in (16, 32, 64, 128) for length in lengths]
        return Grid(MATERIALISED, ("fp32",), shapes, causal=False)
    if name == "flash":
        shapes = [(1, 0, 2**power, d) for d in (16, 32, 64, 128) for power in range(7, 17)]
        return Grid(ATTENTIONS, ("bf16", "fp32"), shapes, causal=True)
    if name == "variants":
        impls = VARIANT_IMPLEMENTATIONS
        return Grid(impls, ("bf16",), [VARIANT_SHAPE], causal=False, masks=VARIANTS, allowed=impls)
    fast = ("flash", "hopper", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex")
    return Grid(fast, ("bf16",), list(TRAINING_SHAPES), causal=True)


def describe(cell: AttentionCell) -> str:
    """A cell in a few words."""
    heads = f" heads {cell.heads}" if cell.heads else ""
    mask = f" {cell.mask}" if cell.mask else ""
    return f"{cell.impl}{mask} {cell.dtype} batch {cell.batch_size}{heads} length {cell.length} d {cell.d_head}"


def main() -> int:
    """Run every cell, print a table per grid."""
    options = parse_options()
    csv = options.out / f"{BENCHMARK}.csv" if options.out else None
    try:
        cells = make_cells(options)
        row_file = RowFile(csv, cell_columns(AttentionCell)) if csv else None
    except ValueError as error:
        return complain(BENCHMARK, str(error))
    except OSError as error:
        return complain(BENCHMARK, f"{error.filename}: {error.strerror}")
    small = default_options("cpu")
    if options.device == "cpu" and (options.impl, options.d_head) == (small.impl, small.d_head):
        print(CPU_NOTE, file=sys.stderr)
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(
            run_sweep(
                BENCHMARK,
                cells,
                measure,
                row_file=row_file,
                timeout_s=options.timeout,
                describe=describe,
                cost=lambda cell: cell.work.forward_flops + 1e11,
                console=Console(stderr=True),
                share=lambda cell: options.repeat > 1 or (cell.grid, cell.impl, cell.dtype, cell.d_head),
            )
        )
    except OSError as error:
        return complain(BENCHMARK, f"rows could not be written to {csv}: {error.strerror}; every earlier row is there")
    rows = outcome_rows(outcomes)
    for grid in dict.fromkeys(rows["grid"]):
        show(attention_table(rows[rows["grid"] == grid]), options.format)
    if options.autotune:
        show(tile_table(rows), options.format)
    metrics = ("forward", "backward", "both", "both_tflops", "peak_memory")
    return finish(BENCHMARK, outcomes, describe, metrics, csv)


if __name__ == "__main__":
    exit_with(BENCHMARK, main)
