"""When does the GPU wait for the host? Chains of small operations issued one by one, compiled and as a CUDA graph.

``scripts/abstraction_leaks/launch_overhead.py`` states the prediction and the method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

    from cs336_systems.harness.record import Metric

EAGER, ISSUE, COMPILED, GRAPH = "eager", "issue", "compiled", "graph"
"""Metrics, in microseconds per operation; ``issue`` is the host's part of eager."""

_SIZES = {
    "matmul": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "elementwise": tuple(2**power for power in (8, 12, 16, 18, 20, 22, 24, 26)),
}
"""Sizes around the one from which the device is expected to take longer than the host."""
_WARMUP = 3
"""Unrecorded calls of each way, the first of which compiles."""


@dataclass(frozen=True)
class ChainCell:
    """One operation at one size, every way; the fields are columns."""

    device: str = "cuda"
    operation: str = option(
        "matmul",
        "matmul: n x n by n x n; elementwise: a multiplication of n numbers by a constant.",
        values=tuple(_SIZES),
        asked=tuple(_SIZES),
    )
    size: int = option(1, "n; by default a range around where the device is the slower.", asked=None, sign="positive")
    dtype: str = "bf16"
    depth: int = option(20, "Operations in a chain, each on the result of the last.", several=False, sign="positive")
    samples: int = option(100, "Timed chains per variant.", several=False, sign="positive")
    seed: int = 0

    @property
    def variant(self) -> str:
        return self.operation

    def __str__(self) -> str:
        return f"{self.operation} n={self.size}"


Options: Any = options_of(ChainCell, RunOptions)


def make_cells(options: Any) -> list[ChainCell]:
    """Every operation at every size, small ones first; raises ValueError without a GPU."""
    if options.device != "cuda":
        raise ValueError("launches that a device waits for, and CUDA graphs, need --device cuda, got --device cpu")
    return [
        cell_of(ChainCell, options, operation=operation, size=size)
        for operation in dict.fromkeys(options.operation)
        for size in sorted(set(options.size or _SIZES[operation]))
    ]


def make_chain(cell: ChainCell) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The chain as a function of its start, and the start; numbers neither grow nor vanish along it."""
    import torch

    is_matmul = cell.operation == "matmul"
    x, weight = torch.randn(2, *([cell.size] * (2 if is_matmul else 1)), device=cell.device).bfloat16()
    weight *= cell.size**-0.5

    def chain(x: Tensor) -> Tensor:
        for _ in range(cell.depth):
            x = x @ weight if is_matmul else x * 0.999
        return x

    return chain, x


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
        torch._dynamo.reset()  # each size is one more variant of the same code, of which dynamo takes eight
        compiled = torch.compile(chain, fullgraph=True, dynamic=False)
        runs |= {COMPILED: lambda: compiled(x), GRAPH: captured(chain, x)[0].replay}
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


def _eager_over_graph(line: Line) -> float | None:
    eager, graph = line.median(EAGER), line.median(GRAPH)
    return eager / graph if eager and graph else None


TIMES = ResultTable(
    settings=("gpu", "dtype", "depth", "operation", "size"),
    always=("operation", "size"),
    labels={"size": "n"},
    columns=(
        Column("host issues us", ISSUE, rank=MAIN, note="host time of the call"),
        *(Column(f"{way} us", way, rank=MAIN) for way in (EAGER, COMPILED, GRAPH)),
        Column(
            "eager / graph", _eager_over_graph, ".2f", note="the device waits for the host while it is well above 1"
        ),
    ),
)


def time_figure(rows: pd.DataFrame) -> Figure | None:
    """Time per operation against bytes of one operand, a curve for each operation and way."""
    from cs336_systems.report.figures import lines

    rows = rows[rows["metric"].isin((EAGER, COMPILED, GRAPH))]
    if rows.empty:
        return None
    first, numbers = rows.iloc[0], rows["size"] ** rows["operation"].map({"matmul": 2, "elementwise": 1})
    rows = rows.assign(kib=2 * numbers / 1024, way=rows["operation"] + ", " + rows["metric"])
    points = rows.groupby(["way", "kib"], sort=False)["median"].median().reset_index().sort_values("kib")
    figure, panels = lines(points, x="kib", colour="way", log="xy", width=6)
    axes = panels[""]
    axes.set_xlabel("size of one operand, KiB")
    axes.set_ylabel("time per operation, µs (median)")
    axes.set_title(f"Chains of {first['depth']} operations, {first['dtype']}, on {first['gpu'] or first['host']}")
    return figure


EXPERIMENT = Experiment(
    "launch_overhead",
    ChainCell,
    make_cells,
    one_stage(measure, share=lambda cell: True),
    presented(TIMES.of, {"": time_figure}),
    (ISSUE, EAGER, COMPILED, GRAPH),
    options=Options,
)
