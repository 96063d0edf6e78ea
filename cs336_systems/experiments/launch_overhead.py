"""When does the GPU wait for the host? Chains of small operations issued one by one, compiled and as a CUDA graph.

The prediction and the method are told by ``scripts/abstraction_leaks/launch_overhead.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.declared import option, options_of
from cs336_systems.experiments.findings import Findings, crossing, leak_experiment, logarithmic, where
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.axes import Axes
    from torch import Tensor

    from cs336_systems.harness.record import Metric

NAME = "launch_overhead"
EAGER, ISSUE, COMPILED, GRAPH = "eager", "issue", "compiled", "graph"
WAYS = (EAGER, COMPILED, GRAPH)
"""Metrics are microseconds per operation, named after these; ``issue`` is the host's part of eager."""

_SIZES: dict[tuple[str, str], tuple[int, ...]] = {
    ("cuda", "matmul"): (32, 64, 128, 256, 512, 1024, 2048, 4096),
    ("cuda", "elementwise"): tuple(2**power for power in (8, 12, 16, 18, 20, 22, 24, 26)),
    ("cpu", "matmul"): (4, 16, 32, 64, 128, 256),
    ("cpu", "elementwise"): tuple(2**power for power in (4, 8, 12, 14, 16, 20)),
}
_LARGEST = {"matmul": 2**15, "elementwise": 2**31}


@dataclass(frozen=True)
class ChainCell:
    """One operation at one size, every way; the fields are columns."""

    device: str = "cuda"
    operation: str = option(
        "matmul",
        "matmul: n x n by n x n; elementwise: a multiplication of n numbers by a constant.",
        values=tuple(_LARGEST),
        asked=tuple(_LARGEST),
    )
    size: int = option(
        1, "n; by default a range around the expected turn for each operation and device.", asked=None, sign="positive"
    )
    dtype: str = "bf16"
    depth: int = option(20, "Operations in a chain, each on the result of the last.", several=False)
    samples: int = option(100, "Timed chains per variant.", several=False, sign="positive")
    compile: str = option(
        "on",
        "Also measure torch.compile, which takes most of the script's time.",
        values=("off", "on"),
        several=False,
    )
    seed: int = 0

    @property
    def variant(self) -> str:
        return self.operation

    def __str__(self) -> str:
        return f"{self.operation} n={self.size}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """At which size does a chain of small operations turn from host bound to device bound?"""

    CPU_DEFAULTS: ClassVar = {"depth": 10}


Options: Any = options_of(ChainCell, Asked)


def make_cells(options: Any) -> list[ChainCell]:
    """Every operation at every size, small ones first; raises ValueError for a value that no cell can have."""
    if not 2 <= options.depth <= 500:
        raise ValueError(f"--depth must lie in 2..500 (CUDA queues about a thousand launches), got {options.depth}")
    for operation in options.operation:
        if options.size and max(options.size) > _LARGEST[operation]:
            raise ValueError(f"--size of {operation} must be at most {_LARGEST[operation]}, got {max(options.size)}")
    dtype = "bf16" if options.device == "cuda" else "fp32"
    return [
        cell_of(ChainCell, options, operation=operation, size=size, dtype=dtype)
        for operation in dict.fromkeys(options.operation)
        for size in sorted(set(options.size or _SIZES[options.device, operation]))
    ]


def make_chain(cell: ChainCell) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The chain as a function of its start, and the start; numbers neither grow nor vanish along it."""
    import torch

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
    import torch

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
    """Seconds of each run, samples interleaved: until the host is free again, and until the device is done."""
    from cs336_systems.harness.clock import synchronize

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


def measure(cell: ChainCell) -> list[Metric]:
    """Microseconds per operation eagerly, compiled, as a graph, and of the host to issue one; compile time beside."""
    import torch
    import torch._dynamo

    from cs336_systems.harness.clock import synchronize
    from cs336_systems.harness.record import Metric

    device = torch.device(cell.device)
    torch.manual_seed(cell.seed)
    chain, x = make_chain(cell)
    runs: dict[str, Callable[[], Any]] = {EAGER: lambda: chain(x)}
    metrics = []
    with torch.no_grad():
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

    first = rows.iloc[0]
    title = f"Chains of {first['depth']} operations, {first['dtype']}, on {where(rows)}"
    return Findings(tables, {"operations": figures}, partial(_draw, found, rows), title, (8.5, 4.8))


def _table(operation: str, table: pd.DataFrame, size: float | None, rows: pd.DataFrame) -> Table:
    import pandas as pd

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


def _draw(found: dict[str, pd.DataFrame], rows: pd.DataFrame, axes: Axes) -> None:
    """Microseconds per operation against bytes of one operand; colour is the way, marker and dash the operation."""
    from cs336_systems.report.figures import OKABE_ITO

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
    logarithmic(axes)
    axes.set_xlabel("size of one operand, KiB")
    axes.set_ylabel("time per operation, µs (median)")
    axes.legend(frameon=False, fontsize=8)


EXPERIMENT = leak_experiment(
    NAME, ChainCell, Options, make_cells, measure, analyse, lambda cell: 2.5 if cell.compile == "on" else 0.5
)
