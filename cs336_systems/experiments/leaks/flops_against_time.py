"""Where the operations are and where the time goes: shares of FLOPs against shares of time of a training step.

    uv run scripts/abstraction_leaks/flops_against_time.py                       # eager and compiled
    uv run scripts/abstraction_leaks/flops_against_time.py --size medium --context-length 1024 --out results/

The abstraction: FLOPs are the cost of a model, and products are nearly all of them. It leaks because a product reuses
each number it has read some hundred times and everything else uses it once: norms, softmax, gates and the optimizer
run at the speed of memory, at one thousandth of the matrix units' rate per byte (Ivanov et al. 2020, "Data Movement Is
All You Need": 0.2 % of a BERT layer's FLOPs are in operators that take 40 % of its time).

**Prediction, before measuring.** Products hold over 99 % of the FLOPs of every named size but the tiniest. On an H200,
small in bf16 at batch 4 and context 512: eagerly they take only 30 to 40 % of the time, elementwise kernels as much
again (masks, rotary, casts to fp32 and back), softmax about 10 % and AdamW's dozen passes another 10 %. Compiling cuts
the elementwise and norm kernels to a third of their time, leaves products and the uncompiled optimizer as they were,
and so moves the products' share to 50 % or more. On a CPU memory is slow too, but arithmetic is far slower: products
take most of the time at once, and the gap between the shares is small; with the tiny model each operator costs a few
microseconds whatever it computes, and shares of time follow the *number* of operators.

**Method.** One step is recorded with torch.profiler after warm-up and read through the package's traces. What the
``optimizer`` phase launches is optimizer; else the kernel's class decides (``traces/kernels.py``), with whatever runs
inside an RMSNorm's range, forward or backward, counted as normalisation. In a compiled block there are no ranges: a
fused reduction counts as normalisation, or as softmax if it has one, with its elementwise neighbours inside. On a CPU
Inductor's fused kernels are asked to name themselves in the trace. FLOPs by ``costs/operator_flops.py``. Shares are of
the operators' summed time; time when none runs is reported beside (from a step without profiler).
"""

import gzip
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd
import torch
from matplotlib.axes import Axes

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.operator_flops import (
    ELEMENTWISE,
    FAMILIES,
    MATMUL,
    NORMALISATION,
    OPTIMIZER,
    SOFTMAX,
    step_flops_by_operator,
)
from cs336_systems.experiments.leaks.findings import Findings, run_experiment, where
from cs336_systems.harness.clock import WHOLE
from cs336_systems.harness.record import Metric
from cs336_systems.profiling.ranges import BACKWARD, STEP
from cs336_systems.profiling.traces import kernels, kineto
from cs336_systems.profiling.traces.queries import MS, n_steps, times
from cs336_systems.profiling.traces.tables import OPERATOR as OPERATOR_KIND
from cs336_systems.profiling.traces.tables import Trace, make_trace, require_kernels
from cs336_systems.profiling.workload import PreparedStep, Workload
from cs336_systems.report.console import check_device, complain, parse_for_device
from cs336_systems.report.figures import OKABE_ITO
from cs336_systems.report.show import Format
from cs336_systems.report.tables import Table, digits
from cs336_systems.training.precision import unsupported_reason

NAME = "flops_against_time"
_NORM_RANGE = re.compile(rf"(?:^|\.)(?:ln1|ln2|ln_final)(?:{re.escape(BACKWARD)})?$")
_FUSED_ON_CPU = re.compile(r"^(?:graph_\d+_)?(?P<kernel>cpp_fused_\w+)$")
_REDUCED = re.compile(r"_(mean|sum|amax|max|logsumexp|var)(_|$)")


@dataclass(frozen=True)
class Options:
    """Share of FLOPs against share of time by kind of operator."""

    size: tuple[str, ...] = ("small",)
    """Named model sizes."""
    context_length: int = 512
    """Tokens per sequence."""
    batch_size: int = 4
    """Sequences per step."""
    dtype: Literal["fp32", "tf32", "bf16", "autocast-bf16", "autocast-fp16"] = "bf16"
    """How numbers are stored and multiplied."""
    compile: tuple[Literal["off", "on"], ...] = ("off", "on")
    """torch.compile of each block and of the loss."""
    optimizer: Literal["reference", "torch-fused"] = "reference"
    """AdamW written out, or torch's fused kernel."""
    warmup: int = 3
    """Steps before the recorded ones."""
    steps: int = 5
    """Timed steps without profiler, and recorded ones."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    seed: int = 0
    """Of parameters and tokens."""
    out: Path | None = None
    """Folder to which rows are appended (flops_against_time.csv) and where the figure is drawn."""
    format: Format = "auto"
    """Of the tables."""


@dataclass(frozen=True)
class StepCell:
    """One training step, eager or compiled; the fields are columns."""

    device: str
    size: str
    batch_size: int
    context_length: int
    dtype: str
    compile: str
    optimizer: str
    warmup: int
    steps: int
    seed: int

    @property
    def variant(self) -> str:
        return "compiled" if self.compile == "on" else "eager"

    @property
    def workload(self) -> Workload:
        """The step to run: reference attention, nothing recomputed."""
        names = ("device", "size", "batch_size", "context_length", "dtype", "compile", "optimizer", "warmup", "steps")
        return Workload(**{name: getattr(self, name) for name in names}, seed=self.seed)


def default_options(device: str) -> Options:
    """The defaults on a device; a CPU gets the tiny model."""
    if device == "cuda":
        return Options()
    return Options(device="cpu", size=("tiny",), context_length=128, dtype="fp32", warmup=1, steps=3)


def make_cells(options: Options) -> list[StepCell]:
    """Every size, eager and compiled next to each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    check_device(options.device)
    for name in ("size", "compile"):
        if not getattr(options, name):
            raise ValueError(f"--{name} needs at least one value, got none")
    for name in ("batch_size", "context_length", "steps"):
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    if options.warmup < 1 or not 0 <= options.seed < 2**63:
        raise ValueError(
            f"--warmup must be at least 1 (compiling happens there) and --seed lie in 0..2^63-1, "
            f"got {options.warmup} and {options.seed}"
        )
    if reason := unsupported_reason(PRECISIONS[options.dtype], torch.device(options.device)):
        raise ValueError(f"--dtype {options.dtype}: {reason}")
    sizes = dict.fromkeys(resolve_size(size).name for size in options.size)
    for size in sizes:
        resolve_size(size).at_context(options.context_length)
    return [
        StepCell(
            options.device,
            size,
            options.batch_size,
            options.context_length,
            options.dtype,
            compiled,
            options.optimizer,
            options.warmup,
            options.steps,
            options.seed,
        )
        for size in sizes
        for compiled in dict.fromkeys(options.compile)
    ]


def fused_cpu_kernels(path: Path) -> pd.DataFrame:
    """Inductor's C++ kernels of a Chrome trace, as rows of ``Trace.ops``; the reader knows only torch's operators."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    rows = []
    for event in events:
        if event.get("ph") == "X" and (match := _FUSED_ON_CPU.match(str(event.get("name")))):
            start = round(1000 * float(event["ts"]))
            rows.append(
                {
                    "name": match["kernel"],
                    "kind": OPERATOR_KIND,
                    "start": start,
                    "end": start + round(1000 * float(event["dur"])),
                    "pid": int(event["pid"]),
                    "device": -1,
                    "stream": int(event["tid"]),
                    "launch_tid": int(event["tid"]),
                    "launch_start": start,
                    "correlation": -1,
                }
            )
    return pd.DataFrame(rows)


def family(name: str, *, in_norm: bool, in_optimizer: bool) -> str:
    """Which of ``FAMILIES`` an operation's time belongs to.

    Args:
        name: of the kernel or operator.
        in_norm: whether a range of an RMSNorm holds it.
        in_optimizer: whether the optimizer phase does.
    """
    if in_optimizer:
        return OPTIMIZER
    if name.startswith("cpp_fused"):
        kind = kernels.SOFTMAX if "softmax" in name else kernels.REDUCTION if _REDUCED.search(name) else ""
        kind = kind or kernels.ELEMENTWISE
    else:
        kind = kernels.kernel_class(name)
    if kind in (kernels.MATMUL, kernels.ATTENTION):
        return MATMUL
    if kind == kernels.SOFTMAX:
        return SOFTMAX
    fused = name.startswith(("cpp_fused", "triton_"))
    if in_norm or (fused and kind == kernels.REDUCTION):
        return NORMALISATION
    return ELEMENTWISE


def family_times(trace: Trace) -> dict[str, float]:
    """Summed milliseconds per recorded step of each family; every operation of a step is counted once."""
    windows = trace.instances(STEP)
    ops = trace.operations(windows)
    inside = trace.during(trace.ranges, windows)
    norms = inside[inside["name"].str.contains(_NORM_RANGE)]
    in_norm = set() if norms.empty else set(trace.operations(norms).index)
    in_optimizer = set(trace.operations(trace.instances("optimizer", inside=STEP)).index)
    sums = dict.fromkeys(FAMILIES, 0.0)
    for index, name, start, end in ops[["name", "start", "end"]].itertuples(name=None):
        sums[family(name, in_norm=index in in_norm, in_optimizer=index in in_optimizer)] += (end - start) / MS
    return {label: total / n_steps(trace) for label, total in sums.items()}


def record(cell: StepCell) -> tuple[list[float], Trace]:
    """Milliseconds of whole steps without a profiler, and a trace of as many with it.

    Raises:
        TraceError: the recording failed, or it holds no kernels though it ran on a GPU.
    """
    import torch._inductor.config as inductor

    with tempfile.TemporaryDirectory() as folder, inductor.patch({"cpp.enable_kernel_profile": True}):
        path = Path(folder) / "step.json.gz"
        prepared = PreparedStep(cell.workload)
        step_ms = prepared.run(cell.warmup, cell.steps, annotated=False).samples_ms[WHOLE]
        with kineto.recording(path, prepared.device):
            prepared.run(1, cell.steps, annotated=True)
        trace = kineto.read(path)
        if trace.has_gpu:
            return step_ms, require_kernels(trace)
        fused = fused_cpu_kernels(path)
        ops = trace.ops if fused.empty else pd.concat([trace.ops, fused])
        return step_ms, make_trace(ops, trace.ranges.drop(columns="depth"), path)


def measure(cell: StepCell) -> list[Metric]:
    """Step time, and time and FLOPs of each family, per step."""
    step_ms, trace = record(cell)
    metrics = [Metric("step", "ms", step_ms)]
    busy = times(trace, trace.instances(STEP))
    metrics.append(Metric("busy", "ms", [busy.unioned_ms], derived=True))
    metrics.append(Metric("operations", "count", [busy.operations], derived=True))
    metrics += [Metric(f"{name}_time", "ms", [ms], derived=True) for name, ms in family_times(trace).items()]
    flops = step_flops_by_operator(resolve_size(cell.size), cell.batch_size, cell.context_length)
    return metrics + [Metric(f"{name}_flops", "GFLOP", [n / 1e9], derived=True) for name, n in flops.items()]


def shares(values: dict[str, float]) -> dict[str, float]:
    """Percent of the sum; zeros if the sum is zero."""
    total = sum(values.values())
    return {name: 100 * value / total if total else 0.0 for name, value in values.items()}


def family_values(rows: pd.DataFrame, what: str) -> dict[str, float]:
    """The newest ``time`` (ms) or ``flops`` (GFLOP) of each family in the rows of one cell."""
    newest = rows.drop_duplicates("metric", keep="last").set_index("metric")["median"]
    return {name: float(newest[f"{name}_{what}"]) for name in FAMILIES}


def analyse(rows: pd.DataFrame) -> Findings:
    """A table per size with eager and compiled side by side, the shares as main figures, and a figure of the first."""
    tables, figures = [], {}
    for size, own in rows.groupby("size", sort=False):
        hows = {str(how): cell for how, cell in own.groupby("variant", sort=False)}
        tables.append(_table(str(size), hows))
        for how, cell in hows.items():
            time_shares = shares(family_values(cell, "time"))
            step_ms, busy_ms = (median(cell[cell["metric"] == metric]["median"]) for metric in ("step", "busy"))
            figures[f"{size} {how}"] = {
                "step_ms": step_ms,
                "busy_ms": busy_ms,
                "matmul_flops_percent": round(shares(family_values(cell, "flops"))[MATMUL], 2),
                "matmul_time_percent": round(time_shares[MATMUL], 1),
                "elementwise_time_percent": round(time_shares[ELEMENTWISE], 1),
            }
    if rows.empty:
        return Findings([], {"steps": {}})
    first = rows.iloc[0]
    drawn = rows[rows["size"] == first["size"]]

    def draw(axes: Axes) -> None:
        _draw(axes, drawn)

    title = (
        f"A training step of {first['size']}, {first['dtype']}, batch {first['batch_size']}, context "
        f"{first['context_length']}, on {where(rows)}"
    )
    return Findings(tables, {"steps": figures}, draw, title, (8.5, 3.6))


def _table(size: str, hows: dict[str, pd.DataFrame]) -> Table:
    first = next(iter(hows.values()))
    flops = family_values(first, "flops")
    flop_shares = shares(flops)
    found = {how: family_values(cell, "time") for how, cell in hows.items()}
    lines = []
    for name in FAMILIES:
        line = {"class": name, "GFLOP": digits(flops[name]), "% of FLOPs": f"{flop_shares[name]:.2f}"}
        for how, ms in found.items():
            line[f"{how} ms"] = digits(ms[name])
            line[f"% of {how} time"] = f"{shares(ms)[name]:.1f}"
            line[f"{how} TFLOP/s"] = digits(flops[name] / ms[name]) if ms[name] else "–"
        lines.append(line)
    notes = []
    for how, cell in hows.items():
        step_ms, busy_ms = (median(cell[cell["metric"] == metric]["median"]) for metric in ("step", "busy"))
        notes.append(f"{how} {digits(step_ms)} ms, of which operators run {digits(busy_ms)}")
    row = first.iloc[0]
    kind = "kernels" if row["device"] == "cuda" else "CPU operators"
    caption = (
        f"FLOPs and time of {kind} in a training step of {size}, {row['dtype']}, batch {row['batch_size']}, context "
        f"{row['context_length']}, AdamW {row['optimizer']}, on {where(first)}; step: {'; '.join(notes)}."
    )
    return Table(caption, pd.DataFrame(lines))


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    """Stacked bars of 100 %: FLOPs above, time of each way below."""
    bars = {"FLOPs": shares(family_values(rows, "flops"))}
    for how, cell in rows.groupby("variant", sort=False):
        bars[f"time, {how}"] = shares(family_values(cell, "time"))
    colours = dict(zip(FAMILIES, (OKABE_ITO[0], OKABE_ITO[4], OKABE_ITO[2], OKABE_ITO[1], OKABE_ITO[3]), strict=True))
    left = dict.fromkeys(bars, 0.0)
    for name in FAMILIES:
        widths = [bar[name] for bar in bars.values()]
        axes.barh(list(bars), widths, left=list(left.values()), color=colours[name], edgecolor="white", label=name)
        for i, (label, width) in enumerate(zip(bars, widths, strict=True)):
            if width >= 5:
                ink = "white" if name == MATMUL else "black"
                axes.text(left[label] + width / 2, i, f"{width:.0f} %", ha="center", va="center", fontsize=9, color=ink)
            left[label] += width
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(FAMILIES), frameon=False, fontsize=9)


def describe(cell: StepCell) -> str:
    """A cell in a few words."""
    return f"{cell.size} batch {cell.batch_size} context {cell.context_length} {cell.dtype} {cell.variant}"


def main(arguments: list[str] | None = None) -> int:
    """Record every step, print a table per size."""
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
        expected_s=lambda cell: 20.0 if cell.compile == "on" else 5.0,
        out=options.out,
        form=options.format,
        timeout_s=600,
    )
