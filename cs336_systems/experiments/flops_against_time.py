"""Where are the FLOPs, and where does the time go? Shares of both of a training step, by kind of operator.

``scripts/abstraction_leaks/flops_against_time.py`` states the prediction and the method.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.case import TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.costs import flops as costs
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.findings import Findings, leak_experiment, medians, where
from cs336_systems.experiments.options import RunOptions, cell_of, resolved_sizes
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.traces.tables import Trace

NAME = "flops_against_time"
_NORM_RANGE = re.compile(r"(?:^|\.)(?:ln1|ln2|ln_final)$")
"""The names of ranges around RMSNorms."""


@dataclass(frozen=True)
class StepCell:
    """One training step, eager or compiled, with reference attention and nothing recomputed; the fields are columns."""

    device: str = "cuda"
    size: str = like(TrainingCase, "size", plain="small", asked=...)
    batch_size: int = like(TrainingCase, "batch_size", plain=4, asked=..., several=False)
    context_length: int = like(TrainingCase, "context_length", plain=512, asked=..., several=False)
    dtype: str = like(TrainingCase, "dtype", plain="bf16", asked=..., several=False)
    compile: str = option(
        "off",
        "torch.compile of each block and of the loss; --compile alone means on.",
        values=("off", "on"),
        asked=("off", "on"),
    )
    optimizer: str = like(TrainingCase, "optimizer", asked=..., several=False)
    warmup: int = option(3, "Steps before the recorded ones.", several=False)
    steps: int = option(5, "Timed steps without profiler, and recorded ones.", several=False, sign="positive")
    seed: int = 0

    @property
    def variant(self) -> str:
        return "compiled" if self.compile == "on" else "eager"

    def __str__(self) -> str:
        return f"{self.size} batch {self.batch_size} context {self.context_length} {self.dtype} {self.variant}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """Share of FLOPs against share of time by kind of operator."""

    CPU_DEFAULTS: ClassVar = {
        **{"size": ("tiny",), "context_length": 128, "dtype": "fp32", "compile": ("off",), "warmup": 1, "steps": 3}
    }


Options: Any = options_of(StepCell, Asked)


def make_cells(options: Any) -> list[StepCell]:
    """Every size, eager and compiled next to each other; raises ValueError for a value that no cell can have."""
    if options.warmup < 1:
        raise ValueError(f"--warmup must be at least 1 (compiling happens there), got {options.warmup}")
    compiles = options.compile or ("on",)
    if options.device == "cpu" and "on" in compiles:
        raise ValueError("--compile on needs --device cuda: a CPU's trace does not name fused kernels")
    return [
        cell_of(StepCell, options, size=size, compile=compiled)
        for size in dict.fromkeys(resolved_sizes(options.size, [options.context_length]))
        for compiled in dict.fromkeys(compiles)
    ]


def family(name: str, *, in_norm: bool, in_optimizer: bool) -> str:
    """Which of ``FAMILIES`` an operation's time belongs to.

    Args:
        name: of the kernel or operator.
        in_norm: whether a range of an RMSNorm holds it.
        in_optimizer: whether the optimizer phase does.
    """
    from cs336_systems.profiling.traces import kernels

    kind = kernels.kernel_class(name)
    if in_optimizer:
        return costs.OPTIMIZER
    if kind in (kernels.MATMUL, kernels.ATTENTION):
        return costs.MATMUL
    if kind == kernels.SOFTMAX:
        return costs.SOFTMAX
    if in_norm or (name.startswith("triton_") and kind == kernels.REDUCTION):
        return costs.NORMALISATION
    return costs.ELEMENTWISE


def family_times(trace: Trace) -> dict[str, float]:
    """Summed milliseconds per recorded step of each family; every operation of a step is counted once."""
    from cs336_systems.profiling.ranges import BACKWARD, STEP
    from cs336_systems.profiling.traces.queries import MS, n_steps

    windows = trace.instances(STEP)
    ops = trace.operations(windows)
    inside = trace.during(trace.ranges, windows)
    norms = inside[inside["name"].str.removesuffix(BACKWARD).str.contains(_NORM_RANGE)]
    in_norm = set() if norms.empty else set(trace.operations(norms).index)
    in_optimizer = set(trace.operations(trace.instances("optimizer", inside=STEP)).index)
    sums = dict.fromkeys(costs.FAMILIES, 0.0)
    for index, name, start, end in ops[["name", "start", "end"]].itertuples(name=None):
        sums[family(name, in_norm=index in in_norm, in_optimizer=index in in_optimizer)] += (end - start) / MS
    return {label: total / n_steps(trace) for label, total in sums.items()}


def measure(cell: StepCell) -> list[Metric]:
    """The time of steps without a profiler; then, of as many recorded ones, time and FLOPs of each family, per step.

    Raises:
        TraceError: the recording failed, or it holds no kernels though it ran on a GPU.
    """
    from cs336_systems.harness.clock import WHOLE
    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.ranges import STEP
    from cs336_systems.profiling.recording import RunnableWorkload, Workload
    from cs336_systems.profiling.traces import kineto
    from cs336_systems.profiling.traces.queries import times
    from cs336_systems.profiling.traces.tables import require_kernels

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json.gz"
        runnable = RunnableWorkload(Workload(**asdict(cell)))
        step_ms = runnable.run(cell.warmup, cell.steps, annotated=False).samples_ms[WHOLE]
        with kineto.recording(path, runnable.device):
            runnable.run(1, cell.steps, annotated=True)
        trace = kineto.read(path)
    if cell.device == "cuda":
        require_kernels(trace)
    busy = times(trace, trace.instances(STEP))
    metrics = [Metric("step", "ms", step_ms), Metric("busy", "ms", [busy.unioned_ms], derived=True)]
    metrics.append(Metric("operations", "count", [busy.operations], derived=True))
    metrics += [Metric(f"{name}_time", "ms", [ms], derived=True) for name, ms in family_times(trace).items()]
    flops = costs.step_flops_by_operator(resolve_size(cell.size), cell.batch_size, cell.context_length)
    return metrics + [Metric(f"{name}_flops", "GFLOP", [n / 1e9], derived=True) for name, n in flops.items()]


def values(rows: pd.DataFrame) -> pd.DataFrame:
    """GFLOP per step (``FLOPs``) and ms per step of each way (columns) by family; rows of one size."""
    import pandas as pd

    found, hows = medians(rows, "metric", "variant"), list(dict.fromkeys(rows["variant"]))
    flops = [found[hows[0]][f"{name}_flops"] for name in costs.FAMILIES]
    times = {how: [found[how][f"{name}_time"] for name in costs.FAMILIES] for how in hows}
    return pd.DataFrame({"FLOPs": flops} | times, index=list(costs.FAMILIES))


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per size with eager and compiled side by side, the shares as main figures, and a figure of the first."""
    if rows.empty:
        return Findings([], {"steps": {}})
    tables, figures = [], {}
    for size, own in rows.groupby("size", sort=False):
        found, whole = values(own), medians(own, "metric", "variant")
        shares = 100 * found / found.sum()
        tables.append(_table(own, found, shares, whole))
        for how in found.columns[1:]:
            figures[f"{size} {how}"] = {
                "step_ms": whole[how]["step"],
                "busy_ms": whole[how]["busy"],
                "matmul_flops_percent": round(shares["FLOPs"][costs.MATMUL], 2),
                "matmul_time_percent": round(shares[how][costs.MATMUL], 1),
                "elementwise_time_percent": round(shares[how][costs.ELEMENTWISE], 1),
            }
    first = rows[rows["size"] == rows["size"].iloc[0]]
    title = f"A training step of {_what(first)}, on {where(rows)}"
    return Findings(tables, {"steps": figures}, partial(_draw, values(first)), title, (8.5, 3.6))


def _what(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    return f"{first['size']}, {first['dtype']}, batch {first['batch_size']}, context {first['context_length']}"


def _table(rows: pd.DataFrame, found: pd.DataFrame, shares: pd.DataFrame, whole: pd.DataFrame) -> Table:
    import pandas as pd

    hows = found.columns[1:]
    frame = pd.DataFrame({"class": found.index, "GFLOP": found["FLOPs"].map(digits)})
    frame["% of FLOPs"] = shares["FLOPs"].map("{:.2f}".format)
    for how in hows:
        frame[f"{how} ms"] = found[how].map(digits)
        frame[f"% of {how} time"] = shares[how].map("{:.1f}".format)
        rates = (found["FLOPs"] / found[how]).where(found[how] > 0)
        frame[f"{how} TFLOP/s"] = rates.map(digits, na_action="ignore").fillna("–")
    notes = (
        f"{how} {digits(whole[how]['step'])} ms, of which operators run {digits(whole[how]['busy'])}" for how in hows
    )
    kind, optimizer = "kernels" if rows["device"].iloc[0] == "cuda" else "CPU operators", rows["optimizer"].iloc[0]
    caption = (
        f"FLOPs and time of {kind} in a training step of {_what(rows)}, AdamW {optimizer}, on {where(rows)}; step: "
        f"{'; '.join(notes)}."
    )
    return Table(caption, frame)


def _draw(found: pd.DataFrame, axes: Axes) -> None:
    """Stacked bars of 100 %: FLOPs above, time of each way below."""
    from cs336_systems.report.figures import OKABE_ITO

    shares = 100 * found / found.sum()
    bars = ["FLOPs", *(f"time, {how}" for how in found.columns[1:])]
    for name, colour in zip(costs.FAMILIES, (OKABE_ITO[i] for i in (0, 4, 2, 1, 3)), strict=True):
        left, widths = shares.loc[:name].sum() - shares.loc[name], shares.loc[name]
        drawn = axes.barh(bars, widths, left=left, color=colour, edgecolor="white", label=name)
        axes.bar_label(
            drawn, [f"{width:.0f} %" if width >= 5 else "" for width in widths.to_numpy(float)], label_type="center"
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(costs.FAMILIES), frameon=False, fontsize=9)


EXPERIMENT = leak_experiment(
    NAME, StepCell, Options, make_cells, measure, analyse, lambda cell: 20.0 if cell.compile == "on" else 5.0
)
