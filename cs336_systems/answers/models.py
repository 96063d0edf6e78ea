"""Blocks and quoted numbers about whole models on one GPU, from the parts of ``scripts/measure_models.sh``."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from cs336_systems.answers.committed import Committed
from cs336_systems.answers.quotes import Term
from cs336_systems.config import HANDOUT_SIZES, PRECISIONS
from cs336_systems.experiments.model.cells import CEILING
from cs336_systems.experiments.model.figure import draw_step_figure
from cs336_systems.experiments.model.speedups import draw_speedups
from cs336_systems.experiments.model.table import step_table
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.runs import median_of
from cs336_systems.report.tables import Table

PHASES = ("forward", "backward", "optimizer")
MEASURED_SIZES = HANDOUT_SIZES[:5]
"""Sizes that fit one H200 in fp32."""

EARLIER_WORK = {
    ("small", "forward"): "45.3 ± 0.8",
    ("small", "backward"): "90.6",
    ("2.7b", "forward"): "876",
    ("2.7b", "backward"): "1822",
}
"""Milliseconds in fp32 at batch 4, context 512 that an earlier solution of the assignment gave for an older GPU."""


def blocks(committed: Committed) -> dict[str, Callable[[], str]]:
    """Tables by the names of their markers."""
    rows = committed.rows
    return {
        "h200-context-512": lambda: step_table(_of_mode(rows("context-512"), "step")).markdown(),
        "h200-forward": lambda: step_table(_of_mode(rows("context-512"), "forward")).markdown(),
        "h200-compiled": lambda: step_table(rows("compiled")).markdown(),
        "h200-grid": lambda: step_table(rows("grid")).markdown(),
        "h200-optimizers": lambda: step_table(rows("optimizers")).markdown(),
        "h200-earlier-work": lambda: earlier_work_table(rows("context-512")).markdown(),
        "h200-memory": lambda: memory_table(pd.concat([rows("grid"), rows("context-512")])).markdown(),
        "h200-warmup": lambda: warmup_table(rows("warmup")).markdown(),
        "h200-harness": lambda: harness_text(rows("harness", "benchmark_harness")),
        "h200-ceilings": lambda: ceilings_table(rows("context-512")).markdown(),
        "phases": lambda: phases_table(rows("context-512")).markdown(),
        "mixed-precision": lambda: mixed_precision_table(rows("context-512")).markdown(),
        "compiled": lambda: compiled_table(rows("compiled")).markdown(),
    }


def terms(committed: Committed) -> dict[str, Term]:
    """Numbers that prose quotes, by the first word of the quote."""

    def cell(part: str, mode: str = "step", **settings: str) -> pd.DataFrame:
        rows = committed.rows(part)
        rows = rows[(rows["mode"] == mode) & (rows["variant"] != CEILING)]
        for name, value in settings.items():
            rows = rows[rows[name].astype(str) == value]
        return rows

    def model(metric: str, size: str, dtype: str) -> float:
        return median_of(cell("context-512", size=size, dtype=dtype), metric)

    def statistic(metric: str, size: str, dtype: str, name: str) -> float:
        rows = cell("context-512", size=size, dtype=dtype)
        return float(rows[rows["metric"] == metric][name].iloc[-1])

    def grid(metric: str, size: str, dtype: str, context: str) -> float:
        return median_of(cell("grid", size=size, dtype=dtype, context_length=context), metric)

    def compiled(metric: str, size: str, dtype: str, switch: str) -> float:
        rows = cell("compiled", size=size, dtype=dtype, compile=switch)
        return float(rows[rows["metric"] == metric].drop_duplicates("repeat", keep="last")["median"].median())

    def compile_seconds(which: str) -> float:
        """The first step of the warm-up of compiled cells."""
        rows = cell("compiled", compile="on")
        return _extreme(which, [samples[0] / 1e3 for samples in rows[rows["metric"] == "warmup_step"]["samples"]])

    def optimizer(metric: str, size: str, name: str) -> float:
        return median_of(cell("optimizers", size=size, optimizer=name), metric)

    def forward_only(metric: str, size: str, dtype: str) -> float:
        return median_of(cell("context-512", "forward", size=size, dtype=dtype), metric)

    def passes(size: str, dtype: str) -> float:
        return model("forward", size, dtype) + model("backward", size, dtype)

    def backward_over_forward(which: str, dtype: str) -> float:
        ratios = [model("backward", size, dtype) / model("forward", size, dtype) for size in MEASURED_SIZES]
        return _extreme(which, ratios)

    def deviation(which: str, dtype: str) -> float:
        cells = [(phase, size, dtype) for size in MEASURED_SIZES for phase in PHASES]
        return _extreme(which, [statistic(*cell, "std") / statistic(*cell, "mean") for cell in cells])

    def warmup(size: str, steps: str, name: str) -> float:
        return _warmup(cell("warmup", size=size, warmup=steps))[name]

    return {
        "model": Term(model),
        "statistic": Term(statistic),
        "grid": Term(grid),
        "compiled": Term(compiled),
        "compile-seconds": Term(compile_seconds),
        "optimizer": Term(optimizer),
        "forward-only": Term(forward_only),
        "passes": Term(passes),
        "backward-over-forward": Term(backward_over_forward, ".2f"),
        "deviation": Term(deviation, "%.1f"),
        "warmup": Term(warmup),
        "peak-ratio": Term(peak_ratio, ".0f"),
    }


def figures(committed: Committed, folder: Path) -> dict[Path, Callable[[Path], object]]:
    """What to call with a figure's path."""
    parts = {"h200_grid.png": ("grid",), "h200_context_512.png": ("context-512", "compiled")}

    def drawing(names: tuple[str, ...]) -> Callable[[Path], object]:
        return lambda path: draw_step_figure(pd.concat([committed.rows(name) for name in names]), path)

    found = {folder / name: drawing(names) for name, names in parts.items()}
    return found | {
        folder / "h200_mixed_precision.png": lambda path: draw_speedups(committed.rows("context-512"), path)
    }


def peak_ratio(dtype: str, other: str) -> float:
    """How many times as many FLOP/s an H200's datasheet promises for one dtype as for another."""
    h200 = find_hardware("NVIDIA H200")
    peaks = [h200.peak(PRECISIONS[name].matmul_dtype) if h200 else None for name in (dtype, other)]
    if peaks[0] is None or peaks[1] is None:
        raise LookupError(f"no peak of {dtype} or {other}")
    return peaks[0] / peaks[1]


def _extreme(which: str, values: list[float]) -> float:
    return {"least": min, "most": max}[which](values)


def _of_mode(rows: pd.DataFrame, mode: str) -> pd.DataFrame:
    """By model size, eager before compiled; otherwise in the order measured."""
    order = {size: i for i, size in enumerate(HANDOUT_SIZES)}
    rows = rows[rows["mode"] == mode]
    return rows.sort_values(["size", "compile"], key=lambda c: c.map(order) if c.name == "size" else c, kind="stable")


def _step_cells(rows: pd.DataFrame, dtype: str) -> pd.DataFrame:
    return rows[(rows["dtype"] == dtype) & (rows["mode"] == "step") & (rows["variant"] == "eager")]


def phases_table(rows: pd.DataFrame, dtype: str = "fp32") -> Table:
    """Mean and standard deviation of each phase of the step, a line per size; a cell that did not run says why."""
    lines = []
    for size in HANDOUT_SIZES:
        own = _step_cells(rows, dtype)
        own = own[own["size"] == size]
        found = {row["metric"]: row for _, row in own.iterrows() if row["metric"]}
        status = own["status"].iloc[-1]
        line = {"size": size}
        for phase in (*PHASES, "step"):
            row = found.get(phase)
            label = f"{'whole step' if phase == 'step' else phase} ms"
            line[label] = "–" if row is None else f"{row['mean']:.2f} ± {row['std']:.2f}"
        ratio = "–" if "forward" not in found else f"{found['backward']['mean'] / found['forward']['mean']:.2f}"
        lines.append(line | {"backward / forward": ratio, "status": status if status == "ok" else _why(own)})
    return Table(f"Batch 4, context 512, {dtype}: mean ± standard deviation of ten steps.", pd.DataFrame(lines))


def _why(rows: pd.DataFrame) -> str:
    return f"{rows['status'].iloc[-1]}: {rows['message'].iloc[-1]}"


def mixed_precision_table(rows: pd.DataFrame) -> Table:
    """Forward and backward in fp32 and under bf16 autocast, and how many times as fast."""
    lines = []
    for size in HANDOUT_SIZES:
        line = {"size": size}
        for phase in ("forward", "backward", "step"):
            times = []
            for dtype in ("fp32", "autocast-bf16"):
                own = _step_cells(rows, dtype)
                found = own[(own["size"] == size) & (own["metric"] == phase)]["median"]
                times += [float(found.iloc[-1])] if len(found) else []
                line[f"{phase} {dtype} ms"] = f"{times[-1]:.1f}" if len(found) else "–"
            line[f"{phase} ratio"] = f"{times[0] / times[1]:.1f}" if len(times) == 2 else "–"
        lines.append(line)
    return Table("Batch 4, context 512; medians of ten steps; ratio: fp32 over autocast.", pd.DataFrame(lines))


def compiled_table(rows: pd.DataFrame) -> Table:
    """Eager and compiled blocks: forward, forward and backward, the whole step; medians over repeats."""
    lines = []
    ran = rows[(rows["variant"] != CEILING) & rows["metric"].isin((*PHASES, "step"))]
    for (dtype, size), own in ran.groupby(["dtype", "size"], sort=False):
        medians = own.groupby(["compile", "metric"])["median"].median()
        line = {"dtype": dtype, "size": size}
        for label, parts in (
            ("forward", ["forward"]),
            ("forward + backward", ["forward", "backward"]),
            ("step", ["step"]),
        ):
            eager, compiled = (sum(medians[switch, part] for part in parts) for switch in ("off", "on"))
            line |= {f"{label} eager": f"{eager:.1f}", f"{label} compiled": f"{compiled:.1f}"}
            line[f"{label} ratio"] = f"{eager / compiled:.2f}"
        lines.append(line)
    return Table("Batch 4, context 512; ms; ratio: eager over compiled.", pd.DataFrame(lines))


def earlier_work_table(rows: pd.DataFrame) -> Table:
    """Our forward and backward beside what was reported for an older GPU."""
    rows = _step_cells(rows, "fp32")
    lines = []
    for (size, phase), theirs in EARLIER_WORK.items():
        row = rows[(rows["size"] == size) & (rows["metric"] == phase)].iloc[0]
        ratio = float(theirs.split()[0]) / row["median"]
        lines.append(
            {"size": size, "phase": phase, "older GPU, ms": theirs}
            | {"H200, ms (mean ± std)": f"{row['mean']:.1f} ± {row['std']:.1f}", "older / H200": f"{ratio:.1f}"}
        )
    return Table("Batch 4, context 512, fp32, eager.", pd.DataFrame(lines))


def memory_table(rows: pd.DataFrame) -> Table:
    """Predicted against measured peak memory, by size and mode, over the eager cells."""
    keys = ["size", "dtype", "mode", "context_length"]
    peaks = rows[rows["metric"].isin(["peak_memory", "predicted_peak_memory"]) & (rows["variant"] == "eager")]
    wide = peaks.pivot_table(index=keys, columns="metric", values="median", aggfunc="last", sort=False).reset_index()
    wide["error"] = 100 * (wide["predicted_peak_memory"] / wide["peak_memory"] - 1)
    lines = []
    for size in HANDOUT_SIZES:
        for mode in ("forward", "step"):
            cells = wide[(wide["size"] == size) & (wide["mode"] == mode)]
            if cells.empty:
                continue
            worst = cells.iloc[cells["error"].abs().argmax()]
            lines.append(
                {
                    "size": size,
                    "mode": mode,
                    "cells": len(cells),
                    "measured GiB": f"{cells['peak_memory'].min():.3g} to {cells['peak_memory'].max():.3g}",
                    "mean error %": f"{cells['error'].mean():+.1f}",
                    "worst error %": f"{worst['error']:+.1f} ({worst['dtype']}, context {worst['context_length']})",
                }
            )
    return Table("", pd.DataFrame(lines))


def _warmup(rows: pd.DataFrame) -> dict[str, float]:
    """Figures of one cell of the warm-up part; KeyError-free names for ``terms``."""
    row = rows[rows["metric"] == "step"].iloc[-1]
    rest = pd.Series(row["samples"][1:])
    found = {name: float(row[name]) for name in ("mean", "std", "median")}
    return found | {"first": row["samples"][0], "rest": rest.mean(), "rest-std": rest.std()}


def warmup_table(rows: pd.DataFrame) -> Table:
    """First recorded step and the rest, for 0, 1, 2 and 5 warm-up steps."""
    lines = []
    for (size, warmup), own in rows[rows["variant"] != CEILING].groupby(["size", "warmup"], sort=False):
        found = _warmup(own)
        lines.append(
            {
                "size": size,
                "warm-up steps": warmup,
                "first recorded step, ms": f"{found['first']:.1f}",
                "other nine, ms (mean ± std)": f"{found['rest']:.1f} ± {found['rest-std']:.2f}",
                "mean ± std of all ten, ms": f"{found['mean']:.1f} ± {found['std']:.1f}",
                "median, ms": f"{found['median']:.1f}",
            }
        )
    return Table("Whole steps, batch 4, context 512, fp32.", pd.DataFrame(lines))


def harness_text(rows: pd.DataFrame) -> str:
    """Our clock beside do_bench and the command's overhead, one column for each run of the part."""
    runs = [rows[rows["commit"] == commit] for commit in rows["commit"].unique()]
    lines = []
    for subject in rows["subject"].unique():
        of_subject = [run[run["subject"] == subject] for run in runs]
        if (of_subject[0]["metric"] == "do_bench").any():
            lines.append(
                {"kernel": subject, "do_bench, ms": f"{median_of(of_subject[0], 'do_bench'):.4f}"}
                | {f"time_kernel / do_bench, run {i + 1}": _ratio(run) for i, run in enumerate(of_subject)}
            )
    spent = [tuple(median_of(run, metric) for metric in ("command", "timed_steps", "overhead")) for run in runs]
    sentences = [
        f"In run {i + 1}, `benchmark_model.py --size small --mode step` took {command:.1f} s, of which {timed:.1f} s "
        f"were timed steps; {overhead:.1f} s went into imports, the ceilings, and starting and filling processes."
        for i, (command, timed, overhead) in enumerate(spent)
    ]
    return "\n\n".join([Table("", pd.DataFrame(lines)).markdown(), *sentences])


def _ratio(rows: pd.DataFrame) -> str:
    row = rows[rows["metric"] == "time_kernel_over_do_bench"].iloc[-1]
    return f"{row['median']:.3f} ({row['p10']:.3f}–{row['p90']:.3f})"


def ceilings_table(rows: pd.DataFrame) -> Table:
    """The ceilings that each dtype's cells stand beside."""
    rows = rows[rows["variant"] == CEILING].drop_duplicates(["dtype", "metric"], keep="first")
    lines = [
        {"dtype": dtype}
        | {
            "matmul 8192, TFLOP/s": f"{median_of(group, 'matmul_ceiling'):.1f}",
            "copy, read + write, GB/s": f"{median_of(group, 'copy_ceiling'):,.0f}",
        }
        for dtype, group in rows.groupby("dtype", sort=False)
    ]
    return Table("", pd.DataFrame(lines))
