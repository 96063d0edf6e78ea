"""How many multiply-adds per element until an elementwise kernel takes twice as long as with one?

The prediction and the method are told by ``scripts/abstraction_leaks/roofline_knee.py``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import PRECISIONS
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.findings import (
    FAR,
    Findings,
    Knee,
    crossing,
    fit_knee,
    leak_experiment,
    logarithmic,
    where,
)
from cs336_systems.experiments.options import RunOptions, cell_of
from cs336_systems.hardware import find_hardware
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch import Tensor

    from cs336_systems.harness.record import Metric

NAME = "roofline_knee"
BYTES = 8
"""Bytes per element: four read, four written."""
FLOP = 2
"""FLOPs per multiply-add."""
CEILING, LAUNCH, COMPILED, EAGER = "ceiling", "launch", "compiled", "eager"
LONGEST_CHAIN = 512
"""Multiply-adds that a chain may have: Inductor unrolls it, and beyond this compiling takes minutes."""
_MOST_EAGER = 16
"""Multiply-adds of the longest eager chain: its time is a straight line, and more would only take longer."""
_SLOWER = 1.02
"""Times the shortest chain's time from which a chain counts as slower."""


@dataclass(frozen=True)
class ChainCell:
    """One length of the chain, run one way.

    ``how`` ceiling stands for the machine's own limits, launch for the shortest compiled chain on a single number.
    """

    device: str = "cuda"
    how: str = COMPILED
    fmas: int = option(1, "Multiply-adds per element.", asked=(1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512))
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
        return "product and copy ceilings" if self.how == CEILING else f"{self.how} {self.fmas} repeat {self.repeat}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """How many multiply-adds per element until an elementwise kernel takes twice as long as with one?"""

    CPU_DEFAULTS: ClassVar = {"fmas": (1, 4, 16, 32, 64, 96, 128), "elements": 2**24, "samples": 5}
    repeat: int = 2
    """How often all points are run."""


Options: Any = options_of(ChainCell, Asked)


def make_cells(options: Any) -> list[ChainCell]:
    """The ceilings, a launch, then every point, repeat by repeat; raises ValueError for what gives no knee."""
    chains = sorted(set(options.fmas))
    if len(chains) < 4 or chains[0] != 1:
        raise ValueError(f"--fmas needs four different values or more, 1 among them, got {list(options.fmas)}")
    if chains[-1] > LONGEST_CHAIN:
        raise ValueError(f"--fmas must be at most {LONGEST_CHAIN}, got {chains[-1]}")
    return [
        ChainCell(options.device, CEILING, 0, 0, 0, 0, options.seed),
        cell_of(ChainCell, options, how=LAUNCH, fmas=1, elements=1, repeat=0),
        *(
            cell_of(ChainCell, options, how=how, fmas=fmas, repeat=repeat)
            for repeat in range(options.repeat)
            for fmas in chains
            for how in ((COMPILED, EAGER) if fmas <= _MOST_EAGER else (COMPILED,))
        ),
    ]


def chain(fmas: int) -> Callable[[Tensor, Tensor], None]:
    """A function of (x, out), equal shapes, that writes x after ``fmas`` multiply-adds to ``out``."""

    def run(x: Tensor, out: Tensor) -> None:
        y = x
        for _ in range(fmas):
            y = y * 0.999 + 0.001
        out.copy_(y)

    return run


def eager_chain(fmas: int) -> Callable[[Tensor, Tensor], None]:
    """The same, one kernel per operation, each in place after the first."""
    import torch

    def run(x: Tensor, out: Tensor) -> None:
        torch.mul(x, 0.999, out=out).add_(0.001)
        for _ in range(fmas - 1):
            out.mul_(0.999).add_(0.001)

    return run


@functools.cache
def compiled_chain(fmas: int) -> Callable[[Tensor, Tensor], None]:
    """The fused chain; the same one for every repeat in this process."""
    import torch

    options: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
    return torch.compile(chain(fmas), fullgraph=True, dynamic=False, options=options)


def compile_metrics(run: Callable[[Tensor, Tensor], None], x: Tensor, out: Tensor) -> list[Metric]:
    """First call of a compiled chain: what compiling took and how many kernels came of it; none if it was warm."""
    import torch._dynamo
    import torch._inductor.metrics as inductor

    from cs336_systems.harness.clock import synchronize
    from cs336_systems.harness.record import Metric

    inductor.reset()
    started = time.perf_counter()
    with torch._dynamo.config.patch(recompile_limit=2 * LONGEST_CHAIN):  # every chain is a variant of one function
        run(x, out)
    synchronize(x.device)
    if not inductor.generated_kernel_count:
        return []
    return [
        Metric("compile", "s", [time.perf_counter() - started]),
        Metric("kernels", "count", [inductor.generated_kernel_count]),
    ]


def measure(cell: ChainCell) -> list[Metric]:
    """Time one chain; or the machine's product and copy."""
    import torch

    from cs336_systems.harness.clock import measure_ceilings, time_kernel
    from cs336_systems.harness.record import Metric

    device = torch.device(cell.device)
    torch.manual_seed(cell.seed)
    if cell.how == CEILING:
        return measure_ceilings(PRECISIONS["fp32"], device)
    x = torch.randn(cell.elements, device=device)
    out = torch.empty_like(x)
    run = eager_chain(cell.fmas) if cell.how == EAGER else compiled_chain(cell.fmas)
    metrics = [] if cell.how == EAGER else compile_metrics(run, x, out)
    samples_ms = time_kernel(lambda: run(x, out), device=device, warmup=2, samples=cell.samples)
    return [Metric("time", "ms", samples_ms), *metrics]


Curve = dict[int, float]
"""Median milliseconds by length of chain, over the repeats."""


def curve(rows: pd.DataFrame, how: str) -> Curve:
    """The measured times of one way to run the chain."""
    own = rows[(rows["metric"] == "time") & (rows["how"] == how)].groupby("fmas")["median"].median()
    return {int(k): float(ms) for k, ms in zip(own.index, own, strict=True)}


def predicted_knee(flop_per_s: float, bytes_per_s: float) -> float:
    """Multiply-adds per element at which arithmetic takes as long as memory."""
    return (BYTES / bytes_per_s) * flop_per_s / FLOP


def analyse(rows: pd.DataFrame) -> Findings:
    """The measured knee beside the predicted ones, every point, and time against operations per byte."""
    fused, eager = curve(rows, COMPILED), curve(rows, EAGER)
    if len(fused) < 4:
        return Findings([], {"knee_fmas": None})
    elements = int(rows[rows["how"] == COMPILED]["elements"].iloc[0])
    ceilings = {
        metric: float(rows[rows["metric"] == metric]["median"].iloc[0])
        for metric in ("matmul_ceiling", "copy_ceiling")
        if (rows["metric"] == metric).any()
    }
    predictions = _predictions(rows, ceilings)
    points = _points_table(fused, eager, elements, where(rows))
    lengths, times = [float(k) for k in fused], list(fused.values())
    launch_ms = curve(rows, LAUNCH).get(1, 0.0)
    try:
        knee = fit_knee(lengths, times, launch_ms)
    except ValueError as error:
        return Findings([points], {"knee_fmas": None, "message": str(error)})
    doubling = crossing(lengths, times, 2 * times[0])
    figures = {
        "knee_fmas": round(knee.position, 1),
        "knee_flop_per_byte": round(knee.position * FLOP / BYTES, 2),
        "doubling_fmas": None if doubling is None else round(doubling, 1),
        "predicted_knee_fmas": {name: round(value, 1) for name, value in predictions.items()},
        "flat_gb_per_s": round(BYTES * elements / knee.flat / 1e6, 1),
        "rising_tflops": round(FLOP * elements / knee.slope / 1e9, 4),
        "launch_us": round(1e3 * launch_ms, 2) or None,
        "flat_up_to_fmas": max(k for k, ms in fused.items() if ms <= _SLOWER * times[0]),
        "corner_excess_percent": round(100 * max(ms / knee.at(k) - 1 for k, ms in fused.items()), 1),
        "kernels": max(map(int, rows[rows["metric"] == "kernels"]["median"]), default=None),
    }
    tables = [_knee_table(knee, doubling, predictions, ceilings, figures, where(rows)), points]
    title = f"{elements:,} fp32 numbers through a chain, on {where(rows)}"
    return Findings(tables, figures, functools.partial(_draw, fused, eager, knee, predictions), title, (7.5, 5.5))


def _predictions(rows: pd.DataFrame, ceilings: dict[str, float]) -> dict[str, float]:
    """Knees in multiply-adds, by where the rate comes from; bandwidth is the copy measured in the same run."""
    if "copy_ceiling" not in ceilings:
        return {}
    bandwidth = 1e9 * ceilings["copy_ceiling"]
    hardware = find_hardware(str(rows["gpu"].iloc[0]))
    rates = {
        "datasheet fp32": hardware.peak("fp32") if hardware else None,
        "measured fp32 product": 1e12 * ceilings["matmul_ceiling"],
    }
    return {name: predicted_knee(rate, bandwidth) for name, rate in rates.items() if rate}


def _knee_table(
    knee: Knee,
    doubling: float | None,
    predictions: dict[str, float],
    ceilings: dict[str, float],
    figures: dict[str, Any],
    place: str,
) -> Table:
    import pandas as pd

    def line(source: str, position: float, doubled: str, gb_per_s: float, tflops: float) -> dict[str, str]:
        return {
            "source": source,
            "knee, multiply-adds": f"{position:.1f}",
            "knee, FLOP/byte": f"{position * FLOP / BYTES:.1f}",
            "twice the time at": doubled,
            "GB/s": digits(gb_per_s),
            "TFLOP/s": digits(tflops),
        }

    lines = []
    for name, value in predictions.items():
        copy, doubled = ceilings["copy_ceiling"], f"{value + 1:.0f}–{2 * value:.0f}"
        lines.append(line(f"predicted: {name}, measured copy", value, doubled, copy, value * FLOP / BYTES * copy / 1e3))
    doubled = "beyond the last point" if doubling is None else f"{doubling:.0f}"
    rates = figures["flat_gb_per_s"], figures["rising_tflops"]
    lines.append(line("measured: far from the knee", knee.position, doubled, *rates))
    launch = figures["launch_us"]
    subtracted = f"less the {launch} µs of a launch" if launch else "launches included"
    caption = (
        f"Knee of a fused chain of multiply-adds on {place}: where its two rates meet. Measured GB/s of chains up to 1/"
        f"{FAR:g} of the knee, TFLOP/s of those from {FAR:g} times the knee on, work over whole time, {subtracted}. "
        f"At the corner a chain takes up to {figures['corner_excess_percent']:g} % longer than these rates say."
    )
    return Table(caption, pd.DataFrame(lines))


def _points_table(fused: Curve, eager: Curve, elements: int, place: str) -> Table:
    import pandas as pd

    first = next(iter(fused.values()))
    lines = [
        {
            "multiply-adds": str(k),
            "FLOP/byte": f"{k * FLOP / BYTES:g}",
            "fused ms": digits(ms),
            "times the first": f"{ms / first:.2f}",
            "GB/s": digits(BYTES * elements / ms / 1e6),
            "TFLOP/s": digits(FLOP * k * elements / ms / 1e9),
            "eager ms": digits(eager[k]) if k in eager else "–",
            "eager / fused": f"{eager[k] / ms:.1f}" if k in eager else "–",
        }
        for k, ms in fused.items()
    ]
    return Table(f"Time of a chain on {elements:,} fp32 numbers on {place}.", pd.DataFrame(lines))


def _draw(fused: Curve, eager: Curve, knee: Knee, predictions: dict[str, float], axes: Axes) -> None:
    """Measured points, the roofline of their rates, the predicted knees as verticals; operations per byte below."""
    from matplotlib.ticker import LogLocator, NullFormatter

    from cs336_systems.report.figures import OKABE_ITO

    scale = FLOP / BYTES
    last = max(fused)
    fitted = {k: knee.at(k) for k in (1 + (last - 1) * i / 400 for i in range(401))}
    found = f"knee of these rates: {scale * knee.position:.1f}"
    curves: list[tuple[dict[Any, float], str, int, str]] = [
        (fused, "o", 0, "fused, measured"),
        (fitted, "-", 0, "fused, rates far from the knee"),
        *([(eager, "s--", 1, "eager, measured")] if eager else []),
    ]
    for points, style, colour, label in curves:
        axes.plot([scale * k for k in points], list(points.values()), style, color=OKABE_ITO[colour], label=label)
    axes.plot(scale * knee.position, knee.at(0), "*", markersize=15, color=OKABE_ITO[6], label=found)
    for (name, value), colour, style in zip(predictions.items(), (2, 3), (":", "-."), strict=False):
        label = f"knee predicted, {name}: {scale * value:.1f}"
        axes.axvline(scale * value, color=OKABE_ITO[colour], linestyle=style, label=label)
    logarithmic(axes)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("operations per byte of memory traffic of the fused kernel, FLOP/byte")
    axes.set_ylabel("time, ms (median)")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


EXPERIMENT = leak_experiment(
    NAME,
    ChainCell,
    Options,
    make_cells,
    measure,
    analyse,
    lambda cell: 3.0 if cell.how != EAGER and cell.repeat == 0 else 0.5,
)
