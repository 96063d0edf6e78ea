"""The digest of a profiled workload: one Markdown page, two CSVs and a picture per mode, from traces and clock alone.

    write_digest(profiles, "small-...", where="NVIDIA H200", profiler="nsys", folder)

``profiles`` are one workload in its modes: the training step answers where its time goes, inference beside it how the
share of matrix products changes. Everything that is said is computed from the trace; nothing is typed.
"""

from pathlib import Path

import pandas as pd

from cs336_systems.costs.flops import hardware_flops
from cs336_systems.experiments.profile import tables
from cs336_systems.experiments.profile.tables import Profile
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling.traces.kernels import MATMUL
from cs336_systems.profiling.traces.queries import class_times, kernel_table, limits, overlap, range_table
from cs336_systems.report.tables import Table, digits
from cs336_systems.report.timeline import draw_timeline

_SETTINGS = (
    *("batch_size", "context_length", "dtype", "attention", "compile", "checkpoint", "optimizer", "kernels", "keep"),
)


def write_digest(profiles: list[Profile], name: str, where: str, profiler: str, folder: Path) -> Path:
    """Write ``<name>.md``, ``<name>-kernels.csv``, ``<name>-ranges.csv`` and ``<name>-<mode>.png``; returns the page.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels, ranges = [], []
    for profile in profiles:
        mode = profile.workload.mode
        for label, instances in profile.passes().items():
            kernels.append(kernel_table(profile.trace, *instances).assign(mode=mode, passes=label))
        ranges.append(range_table(profile.trace).assign(mode=mode))
        title = f"One {'training step' if mode == 'step' else mode + ' pass'} of {_heading(profile)} on {where}"
        draw_timeline(profile.trace, profile.phases, title, folder / f"{name}-{mode}.png")
    _write_csv(pd.concat(kernels), ["mode", "passes"], folder / f"{name}-kernels.csv")
    _write_csv(pd.concat(ranges), ["mode"], folder / f"{name}-ranges.csv")
    page = folder / f"{name}.md"
    page.write_text(digest(profiles, name, where, profiler))
    return page


def _write_csv(frame: pd.DataFrame, first: list[str], path: Path) -> None:
    columns = [*first, *(column for column in frame.columns if column not in first)]
    frame[columns].to_csv(path, index=False, float_format="%.6g")


def _heading(profile: Profile) -> str:
    workload = profile.workload
    return f"{workload.size}, batch {workload.batch_size}, context {workload.context_length}, {workload.dtype}"


def digest(profiles: list[Profile], name: str, where: str, profiler: str) -> str:
    """The page as Markdown; the modes' pictures are linked by their names beside it."""
    first = profiles[0]
    settings = ", ".join(f"{key.replace('_', ' ')} {getattr(first.workload, key)}" for key in _SETTINGS)
    parts = [
        f"# {_heading(first)}: where the time goes",
        f"{where}, recorded with {profiler}; {settings}; {first.workload.warmup} warm-up steps, "
        f"{first.workload.steps} recorded ones. Kernels and ranges in full: `{name}-kernels.csv`, `{name}-ranges.csv`.",
    ]
    if not first.trace.has_gpu:
        parts.append(
            "**Without a GPU.** The trace holds no kernels: times below are of CPU operators, and the sections about "
            "the GPU (limits, idle time, communication) are absent."
        )
    parts += ["## Phases", *(tables.phase_table(profile).markdown() for profile in profiles)]
    parts += ["## What measuring adds", tables.overhead_table(profiles).markdown()]
    parts.append("## Classes of kernels" if first.trace.has_gpu else "## Classes of operators")
    parts.append(tables.class_table(profiles).markdown())
    parts.append("## Top kernels" if first.trace.has_gpu else "## Top operators")
    parts += [tables.kernels_table(profile, label).markdown() for profile in profiles for label in profile.passes()]
    absent = "Absent: this attention does not call matmul and softmax one by one (it is fused or compiled)."
    for profile in profiles:
        table = tables.stage_table(profile)
        parts += [f"## Attention, mode {profile.workload.mode}", table.markdown() if table else absent]
    if first.trace.has_gpu:
        parts += ["## Limits", limits_table(profiles, where).markdown(), *map(verdict, profiles)]
        for profile in profiles:
            if len(communication := overlap(profile.trace)):
                caption = "Communication that other work hides, per step."
                parts.append(Table(caption, tables.rounded(communication, 3)).markdown())
    for profile in profiles:
        parts += [f"## Modules, mode {profile.workload.mode}", tables.module_table(profile).markdown()]
    parts.append("## Time line")
    parts += [f"![{profile.workload.mode}]({name}-{profile.workload.mode}.png)" for profile in profiles]
    return "\n\n".join(parts) + "\n"


def limits_table(profiles: list[Profile], where: str) -> Table:
    """The step's time split over what binds it, and the rate of its matrix products."""
    lines = []
    for profile in profiles:
        workload = profile.workload
        found = limits(profile.trace, profile.unprofiled_ms[WHOLE])
        matmul_ms = sum(
            class_times(profile.trace, profile.trace.instances(phase, inside="step")).get(MATMUL, 0.0)
            for phase in profile.phases
        )
        line = {
            "mode": workload.mode,
            "whole ms": digits(found.step_ms),
            "compute ms": digits(found.compute_ms),
            "memory ms": digits(found.memory_ms),
            "communication ms": digits(found.communication_ms),
            "GPU idle ms": digits(found.idle_ms),
            "GPU idle %": f"{found.idle_percent:.1f}",
            "late launches": f"{found.late_gaps:.0f}",
            "idle while recording ms": digits(found.traced_step_ms - found.step_ms + found.idle_ms),
        }
        if tables.stage_table(profile) is not None and matmul_ms:
            flops = hardware_flops(*workload.work, workload.mode, checkpoint=workload.checkpoint)
            rate = flops / matmul_ms / 1e9
            line["matmul TFLOP/s"] = digits(rate)
            hardware = find_hardware(where)
            if peak := hardware and hardware.peak(workload.precision.matmul_dtype):
                line["% of peak"] = f"{100 * rate / (peak / 1e12):.1f}"
        lines.append(line)
    caption = (
        "The whole is the unprofiled time. Compute: matrix products and fused attention run; memory: only other "
        "kernels and copies run; idle: what is left, since recording slows launches but not kernels. Late launches are "
        "times per recorded step that the GPU had finished all it was given. Matmul TFLOP/s: executed FLOPs over the "
        "time of matmul kernels."
    )
    return Table(caption, pd.DataFrame(lines))


def verdict(profile: Profile) -> str:
    """What limits this mode, in one sentence with its numbers."""
    found = limits(profile.trace, profile.unprofiled_ms[WHOLE])
    reasons = {
        "compute": f"matrix products run for {found.compute_ms / found.step_ms:.0%} of the time",
        "memory": f"kernels that are not matrix products run for {found.memory_ms / found.step_ms:.0%} of the time",
        "communication": f"collectives run alone for {found.communication_ms / found.step_ms:.0%} of the time",
        "overhead": f"the GPU has nothing to do for {found.idle_percent:.0f} % of the time",
    }
    return f"Mode {profile.workload.mode} is limited by **{found.verdict}**: {reasons[found.verdict]}."
