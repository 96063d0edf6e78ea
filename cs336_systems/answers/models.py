"""Tables and numbers about whole models on one GPU, from the parts of ``scripts/measure_models.sh``."""

import math

import pandas as pd

from cs336_systems.answers.committed import caption
from cs336_systems.config import HANDOUT_SIZES, PRECISIONS
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.runs import median_of, newest
from cs336_systems.report.tables import Table

PHASES = ("forward", "backward", "optimizer")
_SETTINGS = ["batch_size", "context_length", "dtype"]


EARLIER_WORK = {
    ("small", "forward"): "45.3 ± 0.8",
    ("small", "backward"): "90.6",
    ("2.7b", "forward"): "876",
    ("2.7b", "backward"): "1822",
}
"""Milliseconds in fp32 at batch 4, context 512 that an earlier solution of the assignment gave for an older GPU."""


def _said(rows: pd.DataFrame, note: str, settings: list[str] = _SETTINGS) -> str:
    return caption(rows[rows["metric"].isin((*PHASES, "step"))], settings, note)


def peak_ratio(dtype: str, other: str) -> float:
    """How many times as many FLOP/s an H200's datasheet promises for one dtype as for another."""
    h200 = find_hardware("NVIDIA H200")
    peaks = [h200.peak(PRECISIONS[name].matmul_dtype) if h200 else None for name in (dtype, other)]
    if peaks[0] is None or peaks[1] is None:
        raise LookupError(f"no peak of {dtype} or {other}")
    return peaks[0] / peaks[1]


def backward_over_forward(steps: pd.DataFrame) -> list[float]:
    """Of every size that ran, from its median times."""
    medians = steps.pivot_table(index="size", columns="metric", values="median", aggfunc="last")
    return list(medians["backward"] / medians["forward"])


def deviations(steps: pd.DataFrame) -> list[float]:
    """Standard deviation over mean of every phase of every size that ran."""
    phases = steps[steps["metric"].isin(PHASES)]
    return list(phases["std"] / phases["mean"])


def compile_seconds(compiled: pd.DataFrame) -> list[float]:
    """The first step of the warm-up of each compiled cell."""
    return [samples[0] / 1e3 for samples in compiled[compiled["metric"] == "warmup_step"]["samples"]]


_ALONE = "(alone): forward without gradients, of a model whose step did not run"


def _phases(cell: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Of one model in one dtype, its step's rows by metric; if it did not run, those of forward and " (alone)"."""
    step = cell[(cell["mode"] == "step") & (cell["status"] == "ok")]
    own, mark = (step, "") if len(step) else (cell[(cell["metric"] == "forward")], " (alone)")
    return own.drop_duplicates("metric", keep="last").set_index("metric"), mark


def phases_table(rows: pd.DataFrame) -> Table:
    """Mean and standard deviation of each phase of the step, a line per size; a cell that did not run says why.

    Args:
        rows: of whole steps, and of forward alone, which stands in where a step did not run.
    """
    lines, marks = [], set()
    for size, cell in rows.groupby("size", sort=False):
        found, mark = _phases(cell)
        line = {"size": str(size)}
        for phase in (*PHASES, "step"):
            label, there = f"{'whole step' if phase == 'step' else phase} ms", phase in found.index
            marks |= {mark} if there else set()
            line[label] = f"{found['mean'][phase]:.2f} ± {found['std'][phase]:.2f}{mark}" if there else "–"
        both = {"forward", "backward"} <= {*found.index}
        ratio = f"{found['mean']['backward'] / found['mean']['forward']:.2f}" if both else "–"
        last = cell[cell["mode"] == "step"].iloc[-1]
        why = last["status"] if last["status"] == "ok" else f"{last['status']}: {last['message']}"
        lines.append(line | {"backward / forward": ratio, "status": why})
    return Table(_said(rows, _note("mean ± standard deviation of {n} steps", marks)), pd.DataFrame(lines))


def mixed_precision_table(rows: pd.DataFrame) -> Table:
    """Forward and backward in fp32 and under bf16 autocast, and how many times as fast; ``rows`` as for phases."""
    lines, marks = [], set()
    for size in HANDOUT_SIZES:
        of_size = rows[rows["size"] == size]
        found = {dtype: _phases(of_size[of_size["dtype"] == dtype]) for dtype in ("fp32", "autocast-bf16")}
        line = {"size": size}
        for phase in ("forward", "backward", "step"):
            times = []
            for dtype, (medians, mark) in found.items():
                there = phase in medians.index
                marks |= {mark} if there else set()
                times += [medians["median"][phase]] if there else []
                line[f"{phase} {dtype} ms"] = f"{times[-1]:.1f}{mark}" if there else "–"
            line[f"{phase} ratio"] = f"{times[0] / times[1]:.1f}" if len(times) == 2 else "–"
        lines.append(line)
    return Table(_said(rows, _note("medians of {n} steps; ratio: fp32 over autocast", marks)), pd.DataFrame(lines))


def _note(note: str, marks: set[str]) -> str:
    return f"{note}; {_ALONE}" if any(marks) else note


def compiled_table(rows: pd.DataFrame) -> Table:
    """Eager and compiled blocks: forward, forward and backward, the whole step; of each cell its newest run, pooled.

    Where the whole model was compiled too, it stands beside its blocks; what did not run has dashes.
    """
    ran = newest(rows, ["dtype", "size", "compile"])
    ran = ran[ran["metric"].isin((*PHASES, "step"))]
    hows = {"on": ("compiled", "ratio"), "whole-model": ("whole model", "whole-model ratio")}
    lines = []
    for (dtype, size), own in ran.groupby(["dtype", "size"], sort=False):
        medians = own.set_index(["compile", "metric"])["median"]
        line = {"dtype": dtype, "size": size}
        for label, parts in (
            ("forward", ["forward"]),
            ("forward + backward", ["forward", "backward"]),
            ("step", ["step"]),
        ):
            eager = _sum(medians, "off", parts)
            line[f"{label} eager"] = _number(eager, ".1f")
            for how in (how for how in hows if how in set(ran["compile"])):
                compiled = _sum(medians, how, parts)
                line[f"{label} {hows[how][0]}"] = _number(compiled, ".1f")
                line[f"{label} {hows[how][1]}"] = _number(eager / compiled, ".2f")
        lines.append(line)
    return Table(_said(ran, "ms, medians of {n} steps; ratio: eager over compiled"), pd.DataFrame(lines))


def _sum(medians: pd.Series, how: str, parts: list[str]) -> float:
    return sum(medians.get((how, part), math.nan) for part in parts)


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def earlier_work_table(steps: pd.DataFrame) -> Table:
    """Our forward and backward beside what was reported for an older GPU."""
    lines = []
    for (size, phase), theirs in EARLIER_WORK.items():
        row = steps[(steps["size"] == size) & (steps["metric"] == phase)].iloc[0]
        ratio = float(theirs.split()[0]) / row["median"]
        lines.append(
            {"size": size, "phase": phase, "older GPU, ms": theirs}
            | {"H200, ms (mean ± std)": f"{row['mean']:.1f} ± {row['std']:.1f}", "older / H200": f"{ratio:.1f}"}
        )
    return Table(_said(steps, "{n} steps", [*_SETTINGS, "variant"]), pd.DataFrame(lines))


def memory_errors_table(rows: pd.DataFrame) -> Table:
    """Predicted against measured peak memory, by size and mode."""
    keys = ["size", "dtype", "mode", "context_length"]
    peaks = rows[rows["metric"].isin(["peak_memory", "predicted_peak_memory"])]
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


def first_and_rest(cell: pd.DataFrame) -> dict[str, float]:
    """The first recorded step of a cell in ms, and mean and standard deviation of the others."""
    samples = cell[cell["metric"] == "step"]["samples"].iloc[-1]
    rest = pd.Series(samples[1:])
    return {"first": samples[0], "rest": rest.mean(), "rest_std": rest.std()}


def warmup_table(steps: pd.DataFrame) -> Table:
    """First recorded step and the rest, a line for each size and number of warm-up steps."""
    lines = []
    for (size, warmup), own in steps.groupby(["size", "warmup"], sort=False):
        found, row = first_and_rest(own), own[own["metric"] == "step"].iloc[-1]
        lines.append(
            {
                "size": size,
                "warm-up steps": warmup,
                "first recorded step, ms": f"{found['first']:.1f}",
                "others, ms (mean ± std)": f"{found['rest']:.1f} ± {found['rest_std']:.2f}",
                "mean ± std of all, ms": f"{row['mean']:.1f} ± {row['std']:.1f}",
                "median, ms": f"{row['median']:.1f}",
            }
        )
    return Table(_said(steps, "whole steps, {n} recorded"), pd.DataFrame(lines))


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
        f"were steps, warm-up too; the other {overhead:.1f} s hold imports, ceilings, starting and filling processes."
        for i, (command, timed, overhead) in enumerate(spent)
    ]
    return "\n\n".join([Table("", pd.DataFrame(lines)).markdown(), *sentences])


def _ratio(rows: pd.DataFrame) -> str:
    row = rows[rows["metric"] == "time_kernel_over_do_bench"].iloc[-1]
    return f"{row['median']:.3f} ({row['p10']:.3f}–{row['p90']:.3f})"


def ceilings_table(ceilings: pd.DataFrame) -> Table:
    """The ceilings that each dtype's cells stand beside."""
    rows = ceilings.drop_duplicates(["dtype", "metric"], keep="first")
    lines = [
        {"dtype": dtype}
        | {
            "matmul 8192, TFLOP/s": f"{median_of(group, 'matmul_ceiling'):.1f}",
            "copy, read + write, GB/s": f"{median_of(group, 'copy_ceiling'):,.0f}",
        }
        for dtype, group in rows.groupby("dtype", sort=False)
    ]
    return Table("", pd.DataFrame(lines))
