"""Where are the FLOPs, and where does the time go? Shares of both of a training step, by kind of operator.

The prediction and the method are told by ``scripts/abstraction_leaks/flops_against_time.py``.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.case import TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.costs import flops as costs
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.findings import Findings, leak_experiment, where
from cs336_systems.experiments.options import RunOptions, cell_of, resolved_sizes
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.traces.tables import Trace

NAME = "flops_against_time"
_NORM_RANGE = re.compile(r"(?:^|\.)(?:ln1|ln2|ln_final)$")
_FUSED_ON_CPU = re.compile(r"^(?:graph_\d+_)?(?P<kernel>cpp_fused_\w+)$")
_REDUCED = re.compile(r"_(mean|sum|amax|max|logsumexp|var)(_|$)")


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

    CPU_DEFAULTS: ClassVar = {"size": ("tiny",), "context_length": 128, "dtype": "fp32", "warmup": 1, "steps": 3}


Options: Any = options_of(StepCell, Asked)


def make_cells(options: Any) -> list[StepCell]:
    """Every size, eager and compiled next to each other; raises ValueError for a value that no cell can have."""
    if options.warmup < 1:
        raise ValueError(f"--warmup must be at least 1 (compiling happens there), got {options.warmup}")
    return [
        cell_of(StepCell, options, size=size, compile=compiled)
        for size in dict.fromkeys(resolved_sizes(options.size, [options.context_length]))
        for compiled in dict.fromkeys(options.compile or ("on",))
    ]


def fused_cpu_kernels(path: Path) -> pd.DataFrame:
    """Inductor's C++ kernels of a Chrome trace, as rows of ``Trace.ops``; the reader knows only torch's operators."""
    import pandas as pd

    from cs336_systems.profiling.traces.tables import OPERATOR

    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    rows = []
    for event in events:
        if event.get("ph") == "X" and (match := _FUSED_ON_CPU.match(str(event.get("name")))):
            start, tid = round(1000 * float(event["ts"])), int(event["tid"])
            row = {"name": match["kernel"], "kind": OPERATOR, "pid": int(event["pid"]), "device": -1}
            row |= {"start": start, "end": start + round(1000 * float(event["dur"]))}
            row |= {"stream": tid, "launch_tid": tid, "launch_start": start, "correlation": -1}
            rows.append(row)
    return pd.DataFrame(rows)


def family(name: str, *, in_norm: bool, in_optimizer: bool) -> str:
    """Which of ``FAMILIES`` an operation's time belongs to.

    Args:
        name: of the kernel or operator.
        in_norm: whether a range of an RMSNorm holds it.
        in_optimizer: whether the optimizer phase does.
    """
    from cs336_systems.profiling.traces import kernels

    if in_optimizer:
        return costs.OPTIMIZER
    if name.startswith("cpp_fused"):
        kind = kernels.SOFTMAX if "softmax" in name else kernels.REDUCTION if _REDUCED.search(name) else ""
        kind = kind or kernels.ELEMENTWISE
    else:
        kind = kernels.kernel_class(name)
    if kind in (kernels.MATMUL, kernels.ATTENTION):
        return costs.MATMUL
    if kind == kernels.SOFTMAX:
        return costs.SOFTMAX
    fused = name.startswith(("cpp_fused", "triton_"))
    if in_norm or (fused and kind == kernels.REDUCTION):
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


def record(cell: StepCell) -> tuple[list[float], Trace]:
    """Milliseconds of whole steps without a profiler, and a trace of as many with it.

    Raises:
        TraceError: the recording failed, or it holds no kernels though it ran on a GPU.
    """
    import pandas as pd
    import torch._inductor.config as inductor

    from cs336_systems.harness.clock import WHOLE
    from cs336_systems.profiling.recording import RunnableWorkload, Workload
    from cs336_systems.profiling.traces import kineto
    from cs336_systems.profiling.traces.tables import make_trace, require_kernels

    with tempfile.TemporaryDirectory() as folder, inductor.patch({"cpp.enable_kernel_profile": True}):
        path = Path(folder) / "step.json.gz"
        runnable = RunnableWorkload(Workload(**asdict(cell)))
        step_ms = runnable.run(cell.warmup, cell.steps, annotated=False).samples_ms[WHOLE]
        with kineto.recording(path, runnable.device):
            runnable.run(1, cell.steps, annotated=True)
        trace = kineto.read(path)
        if trace.has_gpu:
            return step_ms, require_kernels(trace)
        fused = fused_cpu_kernels(path)
        ops = trace.ops if fused.empty else pd.concat([trace.ops, fused])
        return step_ms, make_trace(ops, trace.ranges.drop(columns="depth"), path)


def measure(cell: StepCell) -> list[Metric]:
    """Step time, and time and FLOPs of each family, per step."""
    from cs336_systems.harness.record import Metric
    from cs336_systems.profiling.ranges import STEP
    from cs336_systems.profiling.traces.queries import times

    step_ms, trace = record(cell)
    metrics = [Metric("step", "ms", step_ms)]
    busy = times(trace, trace.instances(STEP))
    metrics.append(Metric("busy", "ms", [busy.unioned_ms], derived=True))
    metrics.append(Metric("operations", "count", [busy.operations], derived=True))
    metrics += [Metric(f"{name}_time", "ms", [ms], derived=True) for name, ms in family_times(trace).items()]
    flops = costs.step_flops_by_operator(resolve_size(cell.size), cell.batch_size, cell.context_length)
    return metrics + [Metric(f"{name}_flops", "GFLOP", [n / 1e9], derived=True) for name, n in flops.items()]


def shares(values: dict[str, float]) -> dict[str, float]:
    """Percent of the sum; zeros if the sum is zero."""
    total = sum(values.values())
    return {name: 100 * value / total if total else 0.0 for name, value in values.items()}


def family_values(rows: pd.DataFrame, what: str) -> dict[str, float]:
    """The newest ``time`` (ms) or ``flops`` (GFLOP) of each family in the rows of one cell."""
    newest = rows.drop_duplicates("metric", keep="last").set_index("metric")["median"]
    return {name: float(newest[f"{name}_{what}"]) for name in costs.FAMILIES}


def step_and_busy_ms(rows: pd.DataFrame) -> tuple[float, float]:
    """Milliseconds of a step in the rows of one cell, and of the time in it that something runs."""
    step, busy = (median(rows[rows["metric"] == metric]["median"]) for metric in ("step", "busy"))
    return step, busy


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per size with eager and compiled side by side, the shares as main figures, and a figure of the first."""
    tables, figures = [], {}
    for size, own in rows.groupby("size", sort=False):
        hows = {str(how): cell for how, cell in own.groupby("variant", sort=False)}
        tables.append(_table(str(size), hows))
        for how, cell in hows.items():
            time_shares = shares(family_values(cell, "time"))
            step_ms, busy_ms = step_and_busy_ms(cell)
            figures[f"{size} {how}"] = {
                "step_ms": step_ms,
                "busy_ms": busy_ms,
                "matmul_flops_percent": round(shares(family_values(cell, "flops"))[costs.MATMUL], 2),
                "matmul_time_percent": round(time_shares[costs.MATMUL], 1),
                "elementwise_time_percent": round(time_shares[costs.ELEMENTWISE], 1),
            }
    if rows.empty:
        return Findings([], {"steps": {}})
    first = rows.iloc[0]
    title = (
        f"A training step of {first['size']}, {first['dtype']}, batch {first['batch_size']}, context "
        f"{first['context_length']}, on {where(rows)}"
    )
    return Findings(tables, {"steps": figures}, partial(_draw, rows[rows["size"] == first["size"]]), title, (8.5, 3.6))


def _table(size: str, hows: dict[str, pd.DataFrame]) -> Table:
    import pandas as pd

    first = next(iter(hows.values()))
    flops = family_values(first, "flops")
    flop_shares = shares(flops)
    found = {how: family_values(cell, "time") for how, cell in hows.items()}
    lines = []
    for name in costs.FAMILIES:
        line = {"class": name, "GFLOP": digits(flops[name]), "% of FLOPs": f"{flop_shares[name]:.2f}"}
        for how, ms in found.items():
            line[f"{how} ms"] = digits(ms[name])
            line[f"% of {how} time"] = f"{shares(ms)[name]:.1f}"
            line[f"{how} TFLOP/s"] = digits(flops[name] / ms[name]) if ms[name] else "–"
        lines.append(line)
    notes = []
    for how, cell in hows.items():
        step_ms, busy_ms = step_and_busy_ms(cell)
        notes.append(f"{how} {digits(step_ms)} ms, of which operators run {digits(busy_ms)}")
    row = first.iloc[0]
    kind = "kernels" if row["device"] == "cuda" else "CPU operators"
    caption = (
        f"FLOPs and time of {kind} in a training step of {size}, {row['dtype']}, batch {row['batch_size']}, context "
        f"{row['context_length']}, AdamW {row['optimizer']}, on {where(first)}; step: {'; '.join(notes)}."
    )
    return Table(caption, pd.DataFrame(lines))


def _draw(rows: pd.DataFrame, axes: Axes) -> None:
    """Stacked bars of 100 %: FLOPs above, time of each way below."""
    from cs336_systems.report.figures import OKABE_ITO

    bars = {"FLOPs": shares(family_values(rows, "flops"))}
    for how, cell in rows.groupby("variant", sort=False):
        bars[f"time, {how}"] = shares(family_values(cell, "time"))
    colours = dict(
        zip(costs.FAMILIES, (OKABE_ITO[0], OKABE_ITO[4], OKABE_ITO[2], OKABE_ITO[1], OKABE_ITO[3]), strict=True)
    )
    left = dict.fromkeys(bars, 0.0)
    for name in costs.FAMILIES:
        widths = [bar[name] for bar in bars.values()]
        axes.barh(list(bars), widths, left=list(left.values()), color=colours[name], edgecolor="white", label=name)
        for i, (label, width) in enumerate(zip(bars, widths, strict=True)):
            if width >= 5:
                ink = "white" if name == costs.MATMUL else "black"
                axes.text(left[label] + width / 2, i, f"{width:.0f} %", ha="center", va="center", fontsize=9, color=ink)
            left[label] += width
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(costs.FAMILIES), frameon=False, fontsize=9)


EXPERIMENT = leak_experiment(
    NAME, StepCell, Options, make_cells, measure, analyse, lambda cell: 20.0 if cell.compile == "on" else 5.0
)
