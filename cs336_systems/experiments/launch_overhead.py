"""When does the GPU wait for the host? Chains of small operations issued one by one, compiled and as a CUDA graph.

``scripts/abstraction_leaks/launch_overhead.py`` states the prediction and the method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.declared import option, options_of
from cs336_systems.experiments.findings import Findings, crossing, leak_experiment, logarithmic, medians, where
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
        1, "n; by default a range around the size that is expected to turn.", asked=None, sign="positive"
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
    by_matmul = cell.operation == "matmul"
    shape = (cell.size, cell.size) if by_matmul else (cell.size,)
    weight = (torch.randn(shape, device=device) * cell.size**-0.5).to(dtype) if by_matmul else None

    def chain(x: Tensor) -> Tensor:
        for _ in range(cell.depth):
            x = x * 0.999 if weight is None else x @ weight
        return x

    return chain, torch.randn(shape, device=device).to(dtype)


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


def measure(cell: ChainCell) -> list[Metric]:
    """Microseconds per operation eagerly, compiled and as a graph, samples interleaved, and of the host to issue one.

    Each is timed by the host, until it is free again (*issue*) and until the device is done.
    """
    import torch
    import torch._dynamo

    from cs336_systems.harness.clock import synchronize
    from cs336_systems.harness.record import Metric

    device = torch.device(cell.device)
    torch.manual_seed(cell.seed)
    chain, x = make_chain(cell)
    runs: dict[str, Callable[[], Any]] = {EAGER: lambda: chain(x)}
    times: dict[str, list[float]] = {}
    with torch.no_grad():
        if cell.compile == "on":
            torch._dynamo.reset()  # each size is one more variant of the same code, of which dynamo takes eight
            compiled = torch.compile(chain, fullgraph=True, dynamic=False)
            runs[COMPILED] = lambda: compiled(x)
        if device.type == "cuda":
            graph, _ = captured(chain, x)
            runs[GRAPH] = graph.replay
        for sample in range(-_WARMUP, cell.samples):
            for way, run in runs.items():
                synchronize(device)
                start = time.perf_counter()
                run()
                issued = time.perf_counter()
                synchronize(device)
                if sample >= 0:
                    times.setdefault(way, []).append((time.perf_counter() - start) * 1e6 / cell.depth)
                    if way == EAGER:
                        times.setdefault(ISSUE, []).append((issued - start) * 1e6 / cell.depth)
    return [Metric(name, "us per operation", values) for name, values in times.items()]


_WARMUP = 3
"""Unrecorded calls of each way, the first of which compiles."""


def turn(table: pd.DataFrame) -> float | None:
    """The size at which the device's own time per operation reaches the host's; None if it does not up to the last.

    With graphs: theirs against the host's issue time. Without: eager time against twice its least value.
    """
    if GRAPH in table:
        return crossing(table[GRAPH], table[ISSUE])
    return crossing(table[EAGER], 2 * float(table[EAGER].min()))


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per operation, the turns as main figures, and time per operation against bytes."""
    if rows.empty:
        return Findings([], {"operations": {}})
    tables: list[Table] = []
    figures: dict[str, dict[str, float | None]] = {}
    found = {str(name): medians(own, "size") for name, own in rows.groupby("operation", sort=False)}
    for operation, table in found.items():
        size, least = turn(table), table.iloc[0]
        figures[operation] = {"turn_n": None if size is None else round(size)}
        figures[operation] |= {f"{name}_us": round(float(least[name]), 2) for name in (ISSUE, *WAYS) if name in table}
        if GRAPH in table:
            figures[operation]["graph_speedup"] = round(float(least[EAGER] / least[GRAPH]), 2)
        tables.append(_table(operation, table, size, rows))
    first = rows.iloc[0]
    title = f"Chains of {first['depth']} operations, {first['dtype']}, on {where(rows)}"
    draw = partial(_draw, found, 2 if first["dtype"] == "bf16" else 4)
    return Findings(tables, {"operations": figures}, draw, title, (8.5, 4.8))


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
    first = rows.iloc[0]
    meaning = "the graph's time reaches the host's" if GRAPH in table else "an operation takes twice the least time"
    caption = (
        f"Time per operation in a chain of {first['depth']}, {operation}, {first['dtype']}, on {where(rows)}. The "
        f"turn, where {meaning}: {'beyond the last size' if size is None else f'at n = {size:,.0f}'}."
    )
    return Table(caption, pd.DataFrame(lines))


def _draw(found: dict[str, pd.DataFrame], width: int, axes: Axes) -> None:
    """Microseconds per operation against bytes of one operand; colour is the way, marker and dash the operation.

    Args:
        width: bytes of one number.
    """
    from cs336_systems.report.figures import OKABE_ITO

    colours = dict(zip((GRAPH, EAGER, COMPILED), OKABE_ITO, strict=False))
    for (operation, table), style in zip(found.items(), ("o-", "s--"), strict=False):
        power = 2 if operation == "matmul" else 1
        kib = [width * float(n) ** power / 1024 for n in table.index]
        for way in WAYS:
            if way in table:
                axes.plot(kib, table[way], style, color=colours[way], label=f"{operation}, {way}", markersize=5)
        if (size := turn(table)) is not None:
            label = f"{operation} turns at n = {float(f'{size:.3g}'):,.0f}"
            at, face = width * size**power / 1024, "black" if style == "o-" else "white"
            axes.plot(at, table[ISSUE].iloc[0], "*", color="black", markersize=13, markerfacecolor=face, label=label)
    logarithmic(axes)
    axes.set_xlabel("size of one operand, KiB")
    axes.set_ylabel("time per operation, µs (median)")
    axes.legend(frameon=False, fontsize=8)


EXPERIMENT = leak_experiment(
    NAME, ChainCell, Options, make_cells, measure, analyse, lambda cell: 2.5 if cell.compile == "on" else 0.5
)
