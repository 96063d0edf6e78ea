"""How many multiply-adds per element until an elementwise kernel takes twice as long as with one?

``scripts/abstraction_leaks/roofline_knee.py`` states the prediction and the method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.config import PRECISIONS
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.findings import Findings, crossing, leak_experiment, logarithmic, medians, where
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
FLOP_PER_BYTE = FLOP / BYTES
"""Operations per byte of memory traffic that one multiply-add per element adds."""
CEILING, LAUNCH, COMPILED, EAGER = "ceiling", "launch", "compiled", "eager"
LONGEST_CHAIN = 512
"""Multiply-adds that a chain may have: Inductor unrolls it, and beyond this compiling takes minutes."""
_MOST_EAGER = 16
"""Multiply-adds of the longest eager chain: its time is a straight line, and more would only take longer."""
_SLOWER = 1.02
"""Times the shortest chain's time from which a chain counts as slower."""
FAR = 3.0
"""Points up to the knee over this are flat, those from the knee times this on rise; the others lie at the corner."""


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
    run, out = (eager_chain if cell.how == EAGER else compiled_chain)(cell.fmas), torch.empty_like(x)
    with torch._dynamo.config.patch(recompile_limit=2 * LONGEST_CHAIN):  # every chain is a variant of one function
        samples_ms = time_kernel(lambda: run(x, out), device=device, warmup=2, samples=cell.samples)
    return [Metric("time", "ms", samples_ms)]


@dataclass(frozen=True)
class Knee:
    """``ms = launch + max(flat, slope * multiply-adds)``: time is flat while memory binds, and rises with arithmetic.

    Each part is measured where the other is far away, so the two rates are what the resources give by themselves.
    Around the knee a real curve lies above both lines, as the resources are never shared perfectly.
    """

    flat: float
    slope: float
    launch: float = 0.0

    @property
    def position(self) -> float:
        """The multiply-adds at which the two parts meet."""
        return self.flat / self.slope

    def at(self, fmas: pd.Series) -> pd.Series:
        """The ms of the two lines."""
        return self.launch + (self.slope * fmas).clip(lower=self.flat)


def fit_knee(times: pd.Series, launch: float = 0.0) -> Knee:
    """The level of the points far below the knee and the proportionality of those far above it, both above ``launch``.

    The knee of the first and the last point alone decides which points are far. Errors count relatively, as times span
    decades.

    Args:
        times: ms by multiply-adds, in rising order.

    Raises:
        ValueError: a time that is not above the launch, or the last is not far above the first.
    """
    x, own = times.index.to_numpy(float), times.to_numpy(float) - launch
    if not (own > 0).all() or own[-1] < FAR * own[0]:
        raise ValueError(f"no knee up to {x[-1]:g}: times must be above a launch and rise {FAR:g} times, go further")
    estimate = x[-1] * own[0] / own[-1]
    low, per_x = own[x <= max(estimate / FAR, x[0])], (x / own)[x >= min(FAR * estimate, x[-1])]
    return Knee(float((1 / low).sum() / (1 / low**2).sum()), float(per_x.sum() / (per_x**2).sum()), launch)


def predicted_knees(rows: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Knee in multiply-adds, GB/s and TFLOP/s by where the rate comes from; with the copy measured in the same run."""
    limits = rows.groupby("metric")["median"].first()
    if "copy_ceiling" not in limits:
        return {}
    hardware, copy = find_hardware(str(rows["gpu"].iloc[0])), float(limits["copy_ceiling"])
    peak = hardware.peak("fp32") if hardware else None
    rates = {"datasheet fp32": (peak or 0) / 1e12, "measured fp32 product": float(limits["matmul_ceiling"])}
    return {name: (1e3 * rate / copy / FLOP_PER_BYTE, copy, rate) for name, rate in rates.items() if rate}


def analyse(rows: pd.DataFrame) -> Findings:
    """The measured knee beside the predicted ones, every point, and time against operations per byte."""
    times = medians(rows[rows["metric"] == "time"], "fmas", "how")
    if COMPILED not in times or len(fused := times[COMPILED].dropna()) < 4:
        return Findings([], {"knee_fmas": None})
    eager = times[EAGER].dropna() if EAGER in times else fused[:0]
    launch_ms = float(times[LAUNCH].iloc[0]) if LAUNCH in times else 0.0
    elements, place = int(rows[rows["how"] == COMPILED]["elements"].iloc[0]), where(rows)
    points = _points_table(fused, eager, elements, place)
    try:
        knee = fit_knee(fused, launch_ms)
    except ValueError as error:
        return Findings([points], {"knee_fmas": None, "message": str(error)})
    predictions = predicted_knees(rows)
    figures = {
        "knee_fmas": round(knee.position, 1),
        "doubling_fmas": crossing(fused, 2 * fused.iloc[0]),
        "predicted_knee_fmas": {name: round(value, 1) for name, (value, _, _) in predictions.items()},
        "flat_gb_per_s": round(BYTES * elements / knee.flat / 1e6, 1),
        "rising_tflops": round(FLOP * elements / knee.slope / 1e9, 4),
        "launch_us": round(1e3 * launch_ms, 2) or None,
        "flat_up_to_fmas": int(fused.index[fused <= _SLOWER * fused.iloc[0]].max()),
        "corner_excess_percent": round(100 * (fused / knee.at(fused.index.to_series()) - 1).max(), 1),
    }
    title = f"{elements:,} fp32 numbers through a chain, on {place}"
    draw = functools.partial(_draw, fused, eager, knee, predictions)
    return Findings([_knee_table(figures, predictions, place), points], figures, draw, title, (7.5, 5.5))


def _knee_table(figures: dict[str, Any], predictions: dict[str, tuple[float, float, float]], place: str) -> Table:
    import pandas as pd

    doubling = figures["doubling_fmas"]
    measured = figures["knee_fmas"], figures["flat_gb_per_s"], figures["rising_tflops"]
    doubled = "beyond the last point" if doubling is None else f"{doubling:.0f}"
    lines = [
        (f"predicted: {name}, measured copy", f"{found[0] + 1:.0f}–{2 * found[0]:.0f}", found)
        for name, found in predictions.items()
    ]
    launch = f"less the {figures['launch_us']} µs of a launch" if figures["launch_us"] else "launches included"
    caption = (
        f"Knee of a fused chain of multiply-adds on {place}: where its two rates meet. Measured GB/s of chains up to 1/"
        f"{FAR:g} of the knee, TFLOP/s of those from {FAR:g} times the knee on, work over whole time, {launch}. "
        f"At the corner a chain takes up to {figures['corner_excess_percent']:g} % longer than these rates say."
    )
    frame = pd.DataFrame(
        {
            "source": source,
            "knee, multiply-adds": f"{knee:.1f}",
            "knee, FLOP/byte": f"{knee * FLOP_PER_BYTE:.1f}",
            "twice the time at": twice,
            "GB/s": digits(gb_per_s),
            "TFLOP/s": digits(tflops),
        }
        for source, twice, (knee, gb_per_s, tflops) in [*lines, ("measured: far from the knee", doubled, measured)]
    )
    return Table(caption, frame)


def _points_table(fused: pd.Series, eager: pd.Series, elements: int, place: str) -> Table:
    import pandas as pd

    fmas, slow = fused.index.to_series(), eager.reindex(fused.index)
    frame = pd.DataFrame(
        {
            "multiply-adds": fmas.map(str),
            "FLOP/byte": (FLOP_PER_BYTE * fmas).map("{:g}".format),
            "fused ms": fused.map(digits),
            "times the first": (fused / fused.iloc[0]).map("{:.2f}".format),
            "GB/s": (BYTES * elements / fused / 1e6).map(digits),
            "TFLOP/s": (FLOP * fmas * elements / fused / 1e9).map(digits),
            "eager ms": slow.map(digits, na_action="ignore").fillna("–"),
            "eager / fused": (slow / fused).map("{:.1f}".format, na_action="ignore").fillna("–"),
        }
    )
    return Table(f"Time of a chain on {elements:,} fp32 numbers on {place}.", frame)


def _draw(fused: pd.Series, eager: pd.Series, knee: Knee, predictions: dict[str, Any], axes: Axes) -> None:
    """Measured points, the roofline of their rates, the predicted knees as verticals; operations per byte below."""
    import pandas as pd

    from cs336_systems.report.figures import OKABE_ITO

    for points, style, colour, label in ((fused, "o", 0, "fused, measured"), (eager, "s--", 1, "eager, measured")):
        axes.plot(FLOP_PER_BYTE * points.index, points, style, color=OKABE_ITO[colour], label=label)
    corners = pd.Series([fused.index[0], knee.position, fused.index[-1]])
    found = f"rates far from the knee, which is at {FLOP_PER_BYTE * knee.position:.1f}"
    axes.plot(FLOP_PER_BYTE * corners, knee.at(corners), color=OKABE_ITO[0], label=found)
    for (name, (value, _, _)), ink in zip(predictions.items(), OKABE_ITO[2:], strict=False):
        label = f"knee predicted, {name}: {FLOP_PER_BYTE * value:.1f}"
        axes.axvline(FLOP_PER_BYTE * value, color=ink, linestyle=":", label=label)
    logarithmic(axes)
    axes.set_xlabel("operations per byte of memory traffic of the fused kernel, FLOP/byte")
    axes.set_ylabel("time, ms (median)")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


EXPERIMENT = leak_experiment(
    *(NAME, ChainCell, Options, make_cells, measure, analyse),
    expected_s=lambda cell: 3.0 if cell.how != EAGER and cell.repeat == 0 else 0.5,
)
