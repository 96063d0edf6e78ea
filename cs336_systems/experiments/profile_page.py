"""The page of one workload's traces: Markdown, two CSVs and a picture per mode.

    write_page(profiles, "small-...", where="NVIDIA H200", profiler="nsys", folder)

``profiles`` are one workload in its modes. The page holds phases against the clock, classes of kernels, the top
kernels, attention's stages, and what limits the step; every kernel and range (each module is one) is in the CSVs. On a
GPU the columns are GPU time; on a CPU they are the time of CPU operators, and say so.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from cs336_systems.costs.attention import attention_stages
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.hardware import find_hardware
from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling.ranges import BACKWARD, SCORES, SOFTMAX, STEP, VALUES
from cs336_systems.profiling.recording import Workload
from cs336_systems.profiling.traces.kernels import CLASSES, MATMUL, short_name
from cs336_systems.profiling.traces.queries import class_times, kernel_table, limits, n_steps, range_table, times
from cs336_systems.profiling.traces.tables import Trace
from cs336_systems.report.tables import Table, digits
from cs336_systems.report.timeline import draw_timeline

_SETTINGS = ("attention", "compile", "checkpoint", "optimizer", "kernels", "keep")


@dataclass(frozen=True)
class Profile:
    """One workload, recorded: its trace, and median milliseconds by phase without ranges, with them, and recorded."""

    workload: Workload
    trace: Trace
    unprofiled_ms: dict[str, float]
    annotated_ms: dict[str, float]
    recorded_ms: dict[str, float]

    @property
    def phases(self) -> list[str]:
        """The phases of its mode, without the whole."""
        return [phase for phase in self.unprofiled_ms if phase != WHOLE]

    @property
    def clock(self) -> str:
        """The clock of the trace's operations, as a column says it."""
        return "GPU" if self.trace.has_gpu else "CPU operators"

    def passes(self) -> dict[str, list[pd.DataFrame]]:
        """The ranges of each pass that tables speak of: forward, forward + backward, the whole step."""
        ranges = {phase: self.trace.instances(phase, inside=STEP) for phase in self.phases}
        if self.workload.mode == "forward":
            return {"inference forward": [ranges["forward"]]}
        passes = {"forward": [ranges["forward"]], "forward + backward": [ranges["forward"], ranges["backward"]]}
        if "optimizer" in ranges:
            passes["full step"] = list(ranges.values())
        return passes


def write_page(profiles: list[Profile], name: str, where: str, profiler: str, folder: Path) -> Path:
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
        title = (
            f"One {'training step' if mode == 'step' else mode + ' pass'} of {profile.workload.shape_words} on {where}"
        )
        draw_timeline(profile.trace, profile.phases, title, folder / f"{name}-{mode}.png")
    _write_csv(pd.concat(kernels), ["mode", "passes"], folder / f"{name}-kernels.csv")
    _write_csv(pd.concat(ranges), ["mode"], folder / f"{name}-ranges.csv")
    page = folder / f"{name}.md"
    page.write_text(page_text(profiles, name, where, profiler), encoding="utf-8", errors="replace")
    return page


def _write_csv(frame: pd.DataFrame, first: list[str], path: Path) -> None:
    columns = [*first, *(column for column in frame.columns if column not in first)]
    frame[columns].to_csv(path, index=False, float_format="%.6g")


def page_text(profiles: list[Profile], name: str, where: str, profiler: str) -> str:
    """The page as Markdown; the modes' pictures are linked by their names beside it."""
    first = profiles[0]
    settings = ", ".join(f"{key} {getattr(first.workload, key)}" for key in _SETTINGS)
    parts = [
        f"# {first.workload.shape_words}: where the time goes",
        f"{where}, recorded with {profiler}; {settings}. Every kernel and range: `{name}-kernels.csv`, "
        f"`{name}-ranges.csv`.",
    ]
    if not first.trace.has_gpu:
        parts.append(
            "**Without a GPU** a trace holds no kernels: times are those of CPU operators, and limits are absent."
        )
    parts += [f"![{profile.workload.mode}]({name}-{profile.workload.mode}.png)" for profile in profiles]
    tables = [*map(phase_table, profiles), class_table(profiles)]
    tables += [kernels_table(profile, label) for profile in profiles for label in profile.passes()]
    tables += filter(None, map(stage_table, profiles))
    parts += [table.markdown() for table in tables]
    if first.trace.has_gpu:
        parts += [limits_table(profiles, where).markdown(), *map(verdict, profiles)]
    return "\n\n".join(parts) + "\n"


def phase_table(profile: Profile) -> Table:
    """Each phase by the timing harness and by the trace."""
    clocks = (profile.unprofiled_ms, profile.annotated_ms, profile.recorded_ms)
    lines = []
    for phase in [*profile.phases, WHOLE]:
        found = times(profile.trace, profile.trace.instances(phase, inside=STEP if phase != STEP else None))
        ms = (*(clock[phase] for clock in clocks), found.host_ms, found.projected_ms, found.unioned_ms, found.summed_ms)
        lines.append((phase, *map(digits, ms), f"{found.operations:.0f}"))
    columns = ["phase", "harness ms", "annotated ms", "recorded ms", "host range ms"]
    columns += [f"{profile.clock} {what} ms" for what in ("first to last", "busy", "summed")]
    plain, annotated, recorded = (clock[WHOLE] for clock in clocks)
    caption = (
        f"Phases of mode {profile.workload.mode}, per step, over {n_steps(profile.trace)} recorded steps. The first "
        "three columns are the timing harness's clock: without ranges, with them "
        f"({annotated / plain:.3f} times the step), and while recording "
        f"({recorded / plain:.3f} times); the rest is read from the trace."
    )
    return Table(caption, pd.DataFrame(lines, columns=[*columns, "operations"]))


def kernels_table(profile: Profile, label: str, top: int = 10) -> Table:
    """The kernels that take the most time in one pass, and what remains."""
    table = kernel_table(profile.trace, *profile.passes()[label])
    what = "kernels, copies and fills" if profile.trace.has_gpu else "CPU operators"
    rest = table.iloc[top:]
    shown = pd.DataFrame(
        {
            "kernel": table["name"].map(short_name),
            "class": table["kernel_class"],
            "per step": table["count"].map("{:g}".format),
            "ms per step": table["total_ms"].map(digits),
            "mean us": table["mean_us"].map(digits),
            "share %": table["share_percent"].map("{:.1f}".format),
        }
    ).head(top)
    if len(rest):
        sums = rest[["count", "total_ms", "share_percent"]].sum()
        counted = f"{sums['count']:g}", digits(sums["total_ms"]), "", f"{sums['share_percent']:.1f}"
        shown.loc[len(shown)] = [f"{len(rest)} more", "", *counted]
    return Table(f"{label.capitalize()}: {digits(table['total_ms'].sum())} ms of {what} per step, by name.", shown)


def class_table(profiles: list[Profile]) -> Table:
    """Share of each kernel class in every pass of every profile: how matmul's share changes with the pass."""
    found = []
    for profile in profiles:
        rows = {label: class_times(profile.trace, *ranges) for label, ranges in profile.passes().items()}
        for phase in profile.phases[1:]:
            rows[f"{phase} alone"] = class_times(profile.trace, profile.trace.instances(phase, inside=STEP))
        found += [(label, profile.clock, sums) for label, sums in rows.items()]
    present = [label for label in CLASSES if any(label in sums for _, _, sums in found)]
    lines = [
        {"pass": label, f"{clock} ms": digits(sum(sums.values()))}
        | {f"{name} %": f"{100 * sums.get(name, 0.0) / max(sum(sums.values()), 1e-9):.1f}" for name in present}
        for label, clock, sums in found
    ]
    return Table("Share of summed time by class of kernel.", pd.DataFrame(lines))


def stage_table(profile: Profile) -> Table | None:
    """Attention's stages, all layers: time, executed FLOPs, least bytes, and their ratios to softmax; None if fused."""
    workload, trace = profile.workload, profile.trace
    if SOFTMAX not in set(trace.ranges["name"]):
        return None
    precision = workload.precision.on(workload.device)
    lines = []
    for direction in ("forward", "backward") if workload.mode != "forward" else ("forward",):
        stages = attention_stages(*workload.work, precision, direction)
        works = {SCORES: stages.scores_matmul, SOFTMAX: stages.softmax, VALUES: stages.values_matmul}
        suffix = BACKWARD if direction == "backward" else ""
        phase = trace.instances(direction, inside=STEP)
        named = {stage: trace.ranges[trace.ranges["name"] == stage + suffix] for stage in works}
        spent = {stage: times(trace, trace.during(ranges, phase)) for stage, ranges in named.items()}
        one, softmax_ms = works[SOFTMAX], max(spent[SOFTMAX].summed_ms, 1e-9)
        for stage, work in works.items():
            ms = max(spent[stage].summed_ms, 1e-9)
            measured = (spent[stage].summed_ms, spent[stage].copies_ms, work.flops / 1e9, work.n_bytes / 2**20)
            derived = (work.flops / ms / 1e9, work.n_bytes / ms / 1e6)
            ratios = (ms / softmax_ms, work.flops / one.flops, work.n_bytes / one.n_bytes)
            lines.append((stage, direction, *map(digits, (*measured, *derived, *ratios))))
    columns = ["stage", "direction", f"{profile.clock} ms", "copies and casts ms", "GFLOP", "MiB", "TFLOP/s", "GB/s"]
    columns += ["time / softmax", "FLOPs / softmax", "bytes / softmax"]
    caption = (
        f"Attention's stages in mode {workload.mode}, all layers, per step: summed time, and the copies and casts in "
        "it; executed FLOPs and least bytes by arithmetic; the last three columns are ratios to softmax in the same "
        "direction."
    )
    return Table(caption, pd.DataFrame(lines, columns=columns))


def limits_table(profiles: list[Profile], where: str) -> Table:
    """The step's time split over what binds it, and the rate of its matmuls."""
    lines = []
    for profile in profiles:
        workload = profile.workload
        found = limits(profile.trace, profile.unprofiled_ms[WHOLE])
        phases = [profile.trace.instances(phase, inside=STEP) for phase in profile.phases]
        matmul_ms = class_times(profile.trace, *phases).get(MATMUL, 0.0)
        split = {"whole": found.step_ms, "compute": found.compute_ms, "memory": found.memory_ms}
        line = {"mode": workload.mode} | {f"{name} ms": digits(ms) for name, ms in split.items()}
        line |= {"GPU idle ms": digits(found.idle_ms), "GPU idle %": f"{found.idle_percent:.1f}"}
        line["late launches"] = f"{found.late_gaps:.0f}"
        line["idle while recording ms"] = digits(found.traced_step_ms - found.step_ms + found.idle_ms)
        if stage_table(profile) is not None and matmul_ms:
            flops = hardware_flops(*workload.work, workload.mode, checkpoint=workload.checkpoint)
            rate = flops / matmul_ms / 1e9
            line["matmul TFLOP/s"] = digits(rate)
            hardware = find_hardware(where)
            if peak := hardware and hardware.peak(workload.precision.matmul_dtype):
                line["% of peak"] = f"{100 * rate / (peak / 1e12):.1f}"
        lines.append(line)
    caption = (
        "What limits a step. The whole is the unprofiled time. Compute: matmuls and fused attention run; memory: only "
        "other kernels and copies run; idle: what is left, since recording slows launches but not kernels. Late "
        "launches are times per recorded step that the GPU had finished all it was given. Matmul TFLOP/s: executed "
        "FLOPs over the time of matmul kernels."
    )
    return Table(caption, pd.DataFrame(lines))


def verdict(profile: Profile) -> str:
    """Say what limits this mode, in one sentence with its numbers."""
    found = limits(profile.trace, profile.unprofiled_ms[WHOLE])
    reasons = {
        "compute": f"matmuls run for {found.compute_ms / found.step_ms:.0%} of the time",
        "memory": f"kernels that are not matmuls run for {found.memory_ms / found.step_ms:.0%} of the time",
        "communication": f"collectives run alone for {found.communication_ms / found.step_ms:.0%} of the time",
        "overhead": f"the GPU has nothing to do for {found.idle_percent:.0f} % of the time",
    }
    return f"Mode {profile.workload.mode} is limited by **{found.verdict}**: {reasons[found.verdict]}."
