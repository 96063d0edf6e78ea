"""How much arithmetic is free in an elementwise kernel, beside its traffic to memory?

``scripts/abstraction_leaks/roofline_knee.py`` states the prediction and the method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import PRECISIONS
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.report.results import MAIN, Column, Line, ResultTable
from cs336_systems.report.tables import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

    from cs336_systems.harness.record import Metric

BYTES, FLOP = 8, 2
"""Bytes per element (four read, four written), and FLOPs per multiply-add."""
CEILING, COMPILED, EAGER = "ceiling", "compiled", "eager"
_MOST_CHAINS = 64
"""Chains that are compiled in one process; Inductor unrolls each, so that one of 512 takes seconds."""
_MOST_EAGER = 16
"""Multiply-adds of the longest eager chain, as its time is a straight line."""


@dataclass(frozen=True)
class ChainCell:
    """One length of the chain, run one way; ``ceiling`` stands for the machine's own matmul and copy."""

    device: str = "cuda"
    how: str = COMPILED
    fmas: int = option(
        *(1, "Multiply-adds per element."),
        asked=(1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512),
        sign="positive",
    )
    elements: int = option(
        2**26, "fp32 numbers; input and output should be larger than any cache.", several=False, sign="positive"
    )
    samples: int = option(20, "Timed calls per point and repeat.", several=False, sign="positive")
    repeat: int = 0
    seed: int = 0

    @property
    def variant(self) -> str:
        return self.how

    def __str__(self) -> str:
        return "matmul and copy ceilings" if self.how == CEILING else f"{self.how} {self.fmas} repeat {self.repeat}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """How much arithmetic is free in an elementwise kernel, beside its traffic to memory?"""

    CPU_DEFAULTS: ClassVar = {"fmas": (1, 4, 16, 32, 64, 96, 128), "elements": 2**24, "samples": 5}
    repeat: int = 2
    """How often all points are run."""


Options: Any = options_of(ChainCell, Asked)


def make_cells(options: Any) -> list[ChainCell]:
    """The ceilings, then every point, repeat by repeat."""
    return [
        ChainCell(options.device, CEILING, 0, 0, 0, 0, options.seed),
        *(
            cell_of(ChainCell, options, how=how, fmas=fmas, repeat=repeat)
            for repeat in range(options.repeat)
            for fmas in sorted(set(options.fmas))
            for how in ((COMPILED, EAGER) if fmas <= _MOST_EAGER else (COMPILED,))
        ),
    ]


def chain(fmas: int) -> Callable[[Tensor, Tensor], None]:
    """A function of (x, out), equal shapes, that writes x after ``fmas`` multiply-adds to ``out``."""
    import torch

    def run(x: Tensor, out: Tensor) -> None:
        torch.mul(x, 0.999, out=out).add_(0.001)
        for _ in range(fmas - 1):
            out.mul_(0.999).add_(0.001)

    return run


@functools.cache
def compiled_chain(fmas: int) -> Callable[[Tensor, Tensor], None]:
    """The chain as one kernel; the same function for every repeat in this process."""
    import torch

    options: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
    return torch.compile(chain(fmas), fullgraph=True, dynamic=False, options=options)


def measure(cell: ChainCell) -> list[Metric]:
    """Time one chain; or the machine's matmul and copy."""
    import torch
    import torch._dynamo

    from cs336_systems.harness.clock import measure_ceilings, time_kernel
    from cs336_systems.harness.record import Metric

    device = torch.device(cell.device)
    torch.manual_seed(cell.seed)
    if cell.how == CEILING:
        return measure_ceilings(PRECISIONS["fp32"], device)
    x = torch.randn(cell.elements, device=device)
    run, out = (chain if cell.how == EAGER else compiled_chain)(cell.fmas), torch.empty_like(x)
    with torch._dynamo.config.patch(recompile_limit=_MOST_CHAINS):  # every chain is a variant of one function
        samples_ms = time_kernel(lambda: run(x, out), device=device, warmup=2, samples=cell.samples)
    return [Metric("time", "ms", samples_ms)]


def _rate(per_element: Callable[[int], int], scale: float, line: Line) -> float | None:
    """Work of all elements per second, over ``scale``; ``per_element`` gives one's work from its multiply-adds."""
    ms, settings = line.median("time"), line.settings
    return per_element(int(settings["fmas"])) * int(settings["elements"]) / ms / scale if ms else None


CHAINS = ResultTable(
    settings=("gpu", "device", "elements", "how", "fmas"),
    always=("how", "fmas"),
    labels={"fmas": "multiply-adds"},
    columns=(
        Column("ms", "time", rank=MAIN),
        Column("x the first", lambda line: line.over("time", line.peer(how=COMPILED, fmas=1)), ".2f", rank=MAIN),
        Column("GB/s", functools.partial(_rate, lambda fmas: BYTES, 1e6)),
        Column("TFLOP/s", functools.partial(_rate, lambda fmas: FLOP * fmas, 1e9)),
    ),
)


def knee_of(rows: pd.DataFrame) -> dict[str, float]:
    """The highest rates that fused chains reach, ``gb_per_s`` and ``tflops``, and ``fmas``, where the two meet."""
    fused = rows[(rows["metric"] == "time") & (rows["how"] == COMPILED)]
    times, elements = fused.groupby("fmas")["median"].median(), int(fused["elements"].iloc[0])
    gb_per_s = float((BYTES * elements / times / 1e6).max())
    tflops = float((FLOP * elements * times.index / times / 1e9).max())
    return {"gb_per_s": gb_per_s, "tflops": tflops, "fmas": 1e3 * tflops / gb_per_s * BYTES / FLOP}


def chain_table(rows: pd.DataFrame) -> Table:
    """A line for each chain; the caption says where its rates meet, and where those of a matmul and a copy do."""
    table = CHAINS.of(rows[rows["how"].isin((COMPILED, EAGER))])
    limits = rows.groupby("metric")["median"].first()
    if not ((rows["how"] == COMPILED) & (rows["metric"] == "time")).any() or "copy_ceiling" not in limits:
        return table
    predicted = 1e3 * limits["matmul_ceiling"] / limits["copy_ceiling"] * BYTES / FLOP
    found = "The rates of fused chains, {gb_per_s:,.0f} GB/s and {tflops:.3g} TFLOP/s, meet at {fmas:.0f} multiply-adds"
    beside = f"those of an fp32 matmul and a copy at {predicted:.0f}"
    return replace(table, caption=f"{table.caption}. {found.format(**knee_of(rows))}, {beside}.")


def time_figure(rows: pd.DataFrame) -> Figure | None:
    """Time against multiply-adds per number, fused and eager, and where the highest rates meet."""
    from cs336_systems.report.figures import lines

    rows = rows[(rows["metric"] == "time") & rows["how"].isin((COMPILED, EAGER))]
    if not (rows["how"] == COMPILED).any():
        return None
    found, first = knee_of(rows), rows.iloc[0]
    points = rows.groupby(["how", "fmas"], sort=False)["median"].median().reset_index().sort_values("fmas")
    figure, panels = lines(points, x="fmas", colour="how", log="xy", width=6)
    axes = panels[""]
    axes.axvline(found["fmas"], color="0.5", linestyle=":")
    axes.annotate(
        f"highest rates meet at {found['fmas']:.0f}", (found["fmas"], 0.02), xycoords=axes.get_xaxis_transform()
    )
    axes.set_xlabel("multiply-adds per number")
    axes.set_ylabel("time, ms (median)")
    axes.set_title(f"{first['elements']:,} fp32 numbers through a chain, on {first['gpu'] or first['host']}")
    return figure


EXPERIMENT = Experiment(
    "roofline_knee",
    ChainCell,
    make_cells,
    one_stage(measure, share=lambda cell: True),
    presented(chain_table, {"": time_figure}),
    ("matmul_ceiling", "copy_ceiling", "time"),
    options=Options,
)
