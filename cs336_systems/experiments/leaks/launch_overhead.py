"""When is the GPU an expensive paperweight? The size at which a chain of operations turns from host to device bound.

    uv run scripts/abstraction_leaks/launch_overhead.py
    uv run scripts/abstraction_leaks/launch_overhead.py --operation matmul --size 64 256 1024 4096 --out results/

A chain ``x = x @ w`` or ``x = x * 0.999`` of ``--depth`` operations is issued by the host one call at a time. While an
operation runs on the device for less than the host needs to issue one, the device waits for the host: the time per
operation is flat, whatever the size. A CUDA graph issues the whole recorded chain with one call and leaves the device's
own time, so *the turn is where the graph's time per operation equals the host's eager issue time*.

**Prediction, before measuring.** H200, torch.compile and eager alike launch through cuBLAS: about 5 us per operation by
the host (Python, dispatcher, driver), 1 to 2 us per small kernel inside a graph. A multiplication of n bf16 numbers
moves 4 n bytes; 5 us at 4 TB/s are 20 MB, so the turn is at n = 2^22 (within the 50 MB L2 it runs faster than memory,
which moves it up to about 2^23). A product takes 5 us of a rate far below peak: 2 n^3 at 200 to 400 TFLOP/s give n =
800 to 1000. Below the turn the graph wins 3 to 5 times. Compiling makes one kernel of the chain of multiplications
(time per operation falls by nearly the depth) but cannot fuse products: there it only trims the host's share. On a CPU
each call costs a few microseconds of the same dispatcher, then the core does the work itself: no graphs (they need
CUDA), no asynchrony, and the turn is where an operation takes twice the least: n = 2^13 to 2^15 numbers (fp32, a few
vectors per nanosecond from L1 and L2), products of n = 32 to 64.

**Method.** All ways of one operation and size run in turns within a cell, so their ratios are of neighbours. Wall time
from the first call until the device is done, by the host's clock, over the depth; *issue* is the same clock when the
last call has returned. L2 stays warm: the chain's own intermediates are what an operation finds there in a model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from cs336_systems.experiments.leaks.findings import Findings, run_experiment, where
from cs336_systems.experiments.leaks.knees import crossing
from cs336_systems.harness.clock import synchronize
from cs336_systems.harness.record import Metric
from cs336_systems.report.console import check_device, complain, parse_for_device
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.show import Format
from cs336_systems.report.tables import Table, digits

NAME = "launch_overhead"
EAGER, ISSUE, COMPILED, GRAPH = "eager", "issue", "compiled", "graph"
WAYS = (EAGER, COMPILED, GRAPH)
"""Metrics are microseconds per operation, named after these; ``issue`` is the host's part of eager."""

Operation = Literal["matmul", "elementwise"]

_GPU_SIZES: dict[str, tuple[int, ...]] = {
    "matmul": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "elementwise": tuple(2**power for power in (8, 12, 16, 18, 20, 22, 24, 26)),
}
_CPU_SIZES: dict[str, tuple[int, ...]] = {
    "matmul": (4, 16, 32, 64, 128, 256),
    "elementwise": tuple(2**power for power in (4, 8, 12, 14, 16, 20)),
}
_LARGEST: dict[str, int] = {"matmul": 2**15, "elementwise": 2**31}


@dataclass(frozen=True)
class Options:
    """At which size does a chain of small operations turn from host bound to device bound?"""

    operation: tuple[Operation, ...] = ("matmul", "elementwise")
    """matmul: n x n by n x n; elementwise: a multiplication of n numbers by a constant."""
    size: tuple[int, ...] = ()
    """n; by default a range around the expected turn for each operation and device."""
    depth: int = 20
    """Operations in a chain, each on the result of the last."""
    samples: int = 100
    """Timed chains per way."""
    compile: Literal["off", "on"] = "on"
    """Whether torch.compile is among the ways; it takes most of the script's time."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run: bf16 on cuda, fp32 on cpu."""
    seed: int = 0
    """Of the data."""
    out: Path | None = None
    """Folder to which rows are appended (launch_overhead.csv) and where the figure is drawn."""
    format: Format = "auto"
    """Of the tables."""


@dataclass(frozen=True)
class ChainCell:
    """One operation at one size, every way; the fields are columns."""

    device: str
    operation: str
    size: int
    dtype: str
    depth: int
    samples: int
    compile: str
    seed: int

    @property
    def variant(self) -> str:
        return self.operation


def default_options(device: str) -> Options:
    """The defaults on a device."""
    return Options() if device == "cuda" else Options(device="cpu", depth=10)


def make_cells(options: Options) -> list[ChainCell]:
    """Every operation at every size, small ones first.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    if not options.operation:
        raise ValueError("--operation needs at least one value, got none")
    if options.size and min(options.size) < 1:
        raise ValueError(f"--size must be positive, got {min(options.size)}")
    if not 2 <= options.depth <= 500:
        raise ValueError(f"--depth must lie in 2..500 (CUDA queues about a thousand launches), got {options.depth}")
    if options.samples < 1 or not 0 <= options.seed < 2**63:
        raise ValueError(
            f"--samples must be positive and --seed lie in 0..2^63-1, got {options.samples} and {options.seed}"
        )
    defaults = _GPU_SIZES if options.device == "cuda" else _CPU_SIZES
    dtype = "bf16" if options.device == "cuda" else "fp32"
    cells = []
    for operation in dict.fromkeys(options.operation):
        for size in sorted(set(options.size or defaults[operation])):
            if size > _LARGEST[operation]:
                raise ValueError(f"--size of {operation} must be at most {_LARGEST[operation]}, got {size}")
            cells.append(
                ChainCell(
                    options.device,
                    operation,
                    size,
                    dtype,
                    options.depth,
                    options.samples,
                    options.compile,
                    options.seed,
                )
            )
    return cells


def make_chain(cell: ChainCell) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The chain as a function of its start, and the start; numbers neither grow nor vanish along it."""
    device = torch.device(cell.device)
    dtype = torch.bfloat16 if cell.dtype == "bf16" else torch.float32
    if cell.operation == "matmul":
        weight = (torch.randn(cell.size, cell.size, device=device) * cell.size**-0.5).to(dtype)

        def multiply(x: Tensor) -> Tensor:
            for _ in range(cell.depth):
                x = x @ weight
            return x

        return multiply, torch.randn(cell.size, cell.size, device=device).to(dtype)

    def scale(x: Tensor) -> Tensor:
        for _ in range(cell.depth):
            x = x * 0.999
        return x

    return scale, torch.randn(cell.size, device=device).to(dtype)


def captured(chain: Callable[[Tensor], Tensor], x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The chain on ``x`` as one CUDA graph, and the tensor that every replay writes its result to.

    Warmed up on a side stream first, as capture demands: what a library allocates or loads on its first call must not
    happen inside. The graph owns the memory of its intermediates; a replay reads ``x`` as it is then.
    """
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            chain(x)
    torch.cuda.current_stream(x.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x)
    return graph, result


def time_in_turns(
    runs: dict[str, Callable[[], Any]], device: torch.device, samples: int, warmup: int = 3
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each run, one sample of each in turn: until the host is free again, and until the device is done."""
    issue: dict[str, list[float]] = {way: [] for way in runs}
    wall: dict[str, list[float]] = {way: [] for way in runs}
    for i in range(warmup + samples):
        for way, run in runs.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            issued = time.perf_counter()
            synchronize(device)
            done = time.perf_counter()
            if i >= warmup:
                issue[way].append(issued - start)
                wall[way].append(done - start)
    return issue, wall


@torch.no_grad()
def measure(cell: ChainCell) -> list[Metric]:
    """Microseconds per operation eagerly, compiled, as a graph, and of the host to issue one; compile time beside."""
    import torch._dynamo

    device = torch.device(cell.device)
    torch.manual_seed(cell.seed)
    chain, x = make_chain(cell)
    runs: dict[str, Callable[[], Any]] = {EAGER: lambda: chain(x)}
    metrics = []
    if cell.compile == "on":
        torch._dynamo.reset()  # each size is one more variant of the same code, of which dynamo takes eight
        compiled = torch.compile(chain, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        compiled(x)
        synchronize(device)
        metrics.append(Metric("compile", "s", [time.perf_counter() - start]))
        runs[COMPILED] = lambda: compiled(x)
    if device.type == "cuda":
        graph, _ = captured(chain, x)
        runs[GRAPH] = graph.replay
    issue, wall = time_in_turns(runs, device, cell.samples)
    per_operation = 1e6 / cell.depth
    for way, seconds in wall.items():
        metrics.append(Metric(way, "us per operation", [per_operation * value for value in seconds]))
    metrics.append(Metric(ISSUE, "us per operation", [per_operation * value for value in issue[EAGER]]))
    return metrics


def medians(rows: pd.DataFrame, operation: str) -> pd.DataFrame:
    """Sizes down, ways across: median microseconds per operation."""
    own = rows[rows["operation"] == operation]
    return own.pivot_table(index="size", columns="metric", values="median", aggfunc="median").sort_index()


def turn(table: pd.DataFrame) -> float | None:
    """The size at which the device's own time per operation reaches the host's; None if it does not up to the last.

    With graphs: theirs against the host's issue time. Without: eager time against twice its least value.
    """
    sizes = [float(size) for size in table.index]
    if GRAPH in table:
        return crossing(sizes, list(table[GRAPH]), list(table[ISSUE]))
    return crossing(sizes, list(table[EAGER]), 2 * float(table[EAGER].min()))


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per operation, the turns as main figures, and time per operation against bytes."""
    tables, figures = [], {}
    found = {operation: medians(rows, operation) for operation in dict.fromkeys(rows["operation"])}
    for operation, table in found.items():
        size = turn(table)
        least = table.iloc[0]
        figures[operation] = {
            "turn_n": None if size is None else round(size),
            "issue_us": round(float(least[ISSUE]), 2),
        } | {f"{way}_us": round(float(least[way]), 2) for way in WAYS if way in table}
        if GRAPH in table:
            figures[operation]["graph_speedup"] = round(float(least[EAGER] / least[GRAPH]), 2)
        tables.append(_table(operation, table, size, rows))
    if not found:
        return Findings([], {"operations": {}})

    def draw(axes: Axes) -> None:
        _draw(axes, found, rows)

    first = rows.iloc[0]
    title = f"Chains of {first['depth']} operations, {first['dtype']}, on {where(rows)}"
    return Findings(tables, {"operations": figures}, draw, title, (8.5, 4.8))


def _table(operation: str, table: pd.DataFrame, size: float | None, rows: pd.DataFrame) -> Table:
    lines = []
    for n, row in table.iterrows():
        line = {"n": f"{n:,}", "host issues, us": digits(row[ISSUE])}
        line |= {f"{way} us": digits(row[way]) for way in WAYS if way in table}
        if GRAPH in table:
            line["eager / graph"] = f"{row[EAGER] / row[GRAPH]:.2f}"
            line["device works %"] = f"{min(100.0, 100 * row[GRAPH] / row[EAGER]):.0f}"
        lines.append(line)
    meaning = (
        "the device's own time (graph) reaches the host's"
        if GRAPH in table
        else "an operation takes twice the least (CUDA graphs need CUDA: there is nothing to run ahead of on a CPU)"
    )
    found = "beyond the last size" if size is None else f"at n = {size:,.0f}"
    first = rows.iloc[0]
    caption = (
        f"Time per operation in a chain of {first['depth']}, {operation}, {first['dtype']}, on {where(rows)}. The "
        f"turn, where {meaning}: {found}."
    )
    return Table(caption, pd.DataFrame(lines))


def _draw(axes: Axes, found: dict[str, pd.DataFrame], rows: pd.DataFrame) -> None:
    """Microseconds per operation against bytes of one operand; colour is the way, marker and dash the operation."""
    width = 2 if rows["dtype"].iloc[0] == "bf16" else 4
    colours = {EAGER: OKABE_ITO[1], COMPILED: OKABE_ITO[2], GRAPH: OKABE_ITO[0]}
    for i, (operation, table) in enumerate(found.items()):
        numbers = [float(n) ** 2 if operation == "matmul" else float(n) for n in table.index]
        kib = [width * value / 1024 for value in numbers]
        style: dict[str, Any] = {"marker": "os"[i % 2], "linestyle": ("-", "--")[i % 2], "markersize": 5}
        for way in WAYS:
            if way in table:
                axes.plot(kib, table[way], color=colours[way], label=f"{operation}, {way}", **style)
        if (size := turn(table)) is not None:
            bytes_kib = width * (size**2 if operation == "matmul" else size) / 1024
            height = float(table[ISSUE].iloc[0]) if GRAPH in table else 2 * float(table[EAGER].min())
            label = f"{operation} turns at n = {float(f'{size:.3g}'):,.0f}"
            face = ("black", "white")[i % 2]
            axes.plot(bytes_kib, height, "*", color="black", markersize=13, markerfacecolor=face, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("size of one operand, KiB")
    axes.set_ylabel("time per operation, µs (median)")
    axes.legend(frameon=False, fontsize=8)


def describe(cell: ChainCell) -> str:
    """A cell in a few words."""
    return f"{cell.operation} n={cell.size}"


def main(arguments: list[str] | None = None) -> int:
    """Measure every size, print a table per operation."""
    options = parse_for_device(default_options, arguments, __doc__)
    try:
        cells = make_cells(options)
    except ValueError as error:
        return complain(NAME, str(error))
    return run_experiment(
        NAME,
        cells,
        measure,
        analyse,
        describe=describe,
        expected_s=lambda cell: 2.5 if cell.compile == "on" else 0.5,
        out=options.out,
        form=options.format,
        timeout_s=120,
    )
