"""Where are the FLOPs, and where does the time go? Shares of both of a training step, by kind of operator.

``scripts/abstraction_leaks/flops_against_time.py`` states the prediction and the method.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.case import TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.costs import flops as costs
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import RunOptions, cell_of, resolved_sizes
from cs336_systems.report.results import MAIN, Column, Line, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.traces.tables import Trace

_NORM_RANGE = re.compile(r"(?:^|\.)(?:ln1|ln2|ln_final)$")
"""The names of ranges around RMSNorms."""

_COMPILES = ("off", "on")


@dataclass(frozen=True)
class StepCell:
    """One training step, eager or compiled, with reference attention and nothing recomputed; the fields are columns."""

    device: str = "cuda"
    size: str = like(TrainingCase, "size", plain="small", asked=...)
    batch_size: int = like(TrainingCase, "batch_size", plain=4, asked=..., several=False)
    context_length: int = like(TrainingCase, "context_length", plain=512, asked=..., several=False)
    dtype: str = like(TrainingCase, "dtype", plain="bf16", asked=..., several=False)
    compile: str = option("off", "torch.compile of each block and of the loss.", values=_COMPILES, asked=_COMPILES)
    optimizer: str = like(TrainingCase, "optimizer", asked=..., several=False)
    warmup: int = option(3, "Steps before the recorded ones.", several=False, sign="positive")
    steps: int = option(5, "Timed steps without profiler, and recorded ones.", several=False, sign="positive")
    seed: int = 0

    @property
    def variant(self) -> str:
        return "compiled" if self.compile == "on" else "eager"

    def __str__(self) -> str:
        return f"{self.size} batch {self.batch_size} context {self.context_length} {self.dtype} {self.variant}"


CPU = {"size": ("tiny",), "context_length": 128, "dtype": "fp32", "compile": ("off",), "warmup": 1, "steps": 3}
Options: Any = options_of(StepCell, RunOptions, cpu=CPU)


def make_cells(options: Any) -> list[StepCell]:
    """Every size, eager and compiled next to each other."""
    compiles = dict.fromkeys(options.compile or ("on",))
    if options.device == "cpu" and "on" in compiles:
        raise ValueError("--compile on needs --device cuda: a CPU's trace does not name fused kernels")
    return [
        cell_of(StepCell, options, size=size, compile=compiled)
        for size in dict.fromkeys(resolved_sizes(options.size, [options.context_length]))
        for compiled in compiles
    ]


def family(name: str, *, in_norm: bool, in_optimizer: bool) -> str:
    """Which of ``FAMILIES`` the time of a kernel or operator belongs to, by what holds it and by its name."""
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
    metrics += [Metric(f"{name}_time", "ms", [ms], derived=True) for name, ms in family_times(trace).items()]
    flops = costs.step_flops_by_operator(resolve_size(cell.size), cell.batch_size, cell.context_length)
    return metrics + [Metric(f"{name}_flops", "GFLOP", [n / 1e9], derived=True) for name, n in flops.items()]


def _share(name: str, kind: str, line: Line) -> float | None:
    """A family's percentage of all ``time`` or ``flops``."""
    every = {each: line.median(f"{each}_{kind}") or 0.0 for each in costs.FAMILIES}
    return 100 * every[name] / sum(every.values()) if any(every.values()) else None


SHARES = ResultTable(
    settings=("gpu", "device", "size", "batch_size", "context_length", "dtype", "optimizer", "compile"),
    always=("size", "compile"),
    columns=(
        Column("step ms", "step", spread=True, rank=MAIN, note="without profiler"),
        Column("busy ms", "busy", note="operators run"),
        *(Column(f"{name}: % of time", partial(_share, name, "time"), ".1f") for name in costs.FAMILIES),
        *(Column(f"{name}: % of FLOPs", partial(_share, name, "flops"), ".2f", rank=2) for name in costs.FAMILIES),
    ),
)


def shares_figure(rows: pd.DataFrame) -> Figure | None:
    """Stacked bars of 100 % for the first size: FLOPs above, time eager and compiled below."""
    from cs336_systems.report.figures import OKABE_ITO, panels

    lines = SHARES.lines(rows[(rows["status"] == "ok") & (rows["size"] == rows["size"].iloc[0])])
    if not lines:
        return None
    bars = ["FLOPs", *(f"time, {line.last['variant']}" for line in lines)]
    figure, (axes,) = panels(1, 1, 7, 3)
    left = [0.0] * len(bars)
    for name, i in zip(costs.FAMILIES, (0, 4, 2, 1, 3), strict=True):
        widths = [_share(name, "flops", lines[0]) or 0.0, *(_share(name, "time", line) or 0.0 for line in lines)]
        drawn = axes.barh(bars, widths, left=left, color=OKABE_ITO[i], edgecolor="white", label=name)
        axes.bar_label(drawn, [f"{width:.0f} %" if width >= 5 else "" for width in widths], label_type="center")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("share, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(costs.FAMILIES), frameon=False, fontsize=9)
    first = rows.iloc[0]
    axes.set_title(f"A training step of {first['size']} in {first['dtype']}, on {first['gpu'] or first['host']}")
    return figure


EXPERIMENT = Experiment(
    "flops_against_time",
    StepCell,
    make_cells,
    one_stage(measure, share=lambda cell: True),
    presented(SHARES.of, {"": shares_figure}),
    ("step", "busy"),
    options=Options,
)
