"""Tables of one profiled step: phases against the clock, kernels, classes of kernels, stages of attention, modules.

``Profile`` is what a profiling run leaves of one workload: its trace and its times without and with profiler. On a GPU
the columns are GPU time; on a CPU they are the time of CPU operators, and say so.
"""

import re
from dataclasses import dataclass

import pandas as pd

from cs336_systems.costs.attention_stages import attention_stages
from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling.ranges import BACKWARD, SCORES, SOFTMAX, STEP, VALUES
from cs336_systems.profiling.recording import Workload
from cs336_systems.profiling.traces.kernels import CLASSES, short_name
from cs336_systems.profiling.traces.queries import class_times, kernel_table, n_steps, range_table, times
from cs336_systems.profiling.traces.tables import Trace
from cs336_systems.report.tables import Table, digits


@dataclass(frozen=True)
class Profile:
    """One workload, recorded: its trace, and median milliseconds by phase without ranges, with them, and recorded."""

    workload: Workload
    trace: Trace
    unprofiled_ms: dict[str, float]
    annotated_ms: dict[str, float]
    profiled_ms: dict[str, float]

    @property
    def phases(self) -> list[str]:
        """The phases of its mode, without the whole."""
        return [phase for phase in self.unprofiled_ms if phase != WHOLE]

    @property
    def clock(self) -> str:
        """What the trace's operations ran on, as a column says it."""
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


def phase_table(profile: Profile) -> Table:
    """Each phase by the timing harness and by the trace."""
    lines = []
    for phase in [*profile.phases, WHOLE]:
        instances = profile.trace.instances(phase, inside=STEP if phase != STEP else None)
        found = times(profile.trace, instances)
        lines.append(
            {
                "phase": phase,
                "harness ms": digits(profile.unprofiled_ms[phase]),
                "annotated ms": digits(profile.annotated_ms[phase]),
                "recorded ms": digits(profile.profiled_ms[phase]),
                "host range ms": digits(found.host_ms),
                f"{profile.clock} first to last ms": digits(found.projected_ms),
                f"{profile.clock} busy ms": digits(found.unioned_ms),
                f"{profile.clock} summed ms": digits(found.summed_ms),
                "operations": f"{found.operations:.0f}",
            }
        )
    caption = (
        f"Per step of mode {profile.workload.mode}, over {n_steps(profile.trace)} recorded steps. The first three are "
        "the timing harness's clock: without ranges, with them, and while recording; the rest is read from the trace."
    )
    return Table(caption, pd.DataFrame(lines))


def kernels_table(profile: Profile, label: str, top: int = 10) -> Table:
    """The kernels that take the most time in one pass, and what remains."""
    table = kernel_table(profile.trace, *profile.passes()[label])
    what = "kernels, copies and fills" if profile.trace.has_gpu else "CPU operators"
    lines = [
        {
            "kernel": short_name(row["name"]),
            "class": row["kernel_class"],
            "per step": f"{row['count']:g}",
            "ms per step": digits(row["total_ms"]),
            "mean us": digits(row["mean_us"]),
            "share %": f"{row['share_percent']:.1f}",
        }
        for _, row in table.head(top).iterrows()
    ]
    if len(rest := table.iloc[top:]):
        lines.append(
            {
                "kernel": f"{len(rest)} more",
                "class": "",
                "per step": f"{rest['count'].sum():g}",
                "ms per step": digits(rest["total_ms"].sum()),
                "mean us": "",
                "share %": f"{rest['share_percent'].sum():.1f}",
            }
        )
    caption = f"{label.capitalize()}: {digits(table['total_ms'].sum())} ms of {what} per step, by name."
    return Table(caption, pd.DataFrame(lines))


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
    workload = profile.workload
    if SOFTMAX not in set(profile.trace.ranges["name"]):
        return None
    precision = workload.precision.on(workload.device)
    lines = []
    for direction in ("forward", "backward") if workload.mode != "forward" else ("forward",):
        stages = attention_stages(*workload.work, precision, direction)
        works = {SCORES: stages.scores_matmul, SOFTMAX: stages.softmax, VALUES: stages.values_matmul}
        suffix = BACKWARD if direction == "backward" else ""
        phase, ranges = profile.trace.instances(direction, inside=STEP), profile.trace.ranges
        spent = {
            stage: times(profile.trace, profile.trace.during(ranges[ranges["name"] == stage + suffix], phase))
            for stage in works
        }
        for stage, work in works.items():
            ms = max(spent[stage].summed_ms, 1e-9)
            lines.append(
                {
                    "stage": stage,
                    "direction": direction,
                    f"{profile.clock} ms": digits(spent[stage].summed_ms),
                    "copies and casts ms": digits(spent[stage].copies_ms),
                    "GFLOP": digits(work.flops / 1e9),
                    "MiB": digits(work.n_bytes / 2**20),
                    "TFLOP/s": digits(work.flops / ms / 1e9),
                    "GB/s": digits(work.n_bytes / ms / 1e6),
                    "time / softmax": digits(ms / max(spent[SOFTMAX].summed_ms, 1e-9)),
                    "FLOPs / softmax": digits(work.flops / works[SOFTMAX].flops),
                    "bytes / softmax": digits(work.n_bytes / works[SOFTMAX].n_bytes),
                }
            )
    caption = (
        "Attention's stages, all layers, per step: summed time, and the copies and casts in it; executed FLOPs and "
        "least bytes by arithmetic (`costs/attention_stages.py`); the last three columns are ratios to softmax in the "
        "same direction."
    )
    return Table(caption, pd.DataFrame(lines))


def module_table(profile: Profile) -> Table:
    """Time of each kind of module, layers added up, forward and backward."""
    table = range_table(profile.trace)
    table = table[~table["range"].isin([STEP, *profile.phases])]
    table = table[~table["range"].str.contains("#")]  # torch.profiler's own ranges around the optimizer
    kind = table["range"].str.removesuffix(BACKWARD).map(lambda name: re.sub(r"\.\d+(?=\.|$)", ".*", name))
    backward = table["range"].str.endswith(BACKWARD)
    lines = []
    for name in dict.fromkeys(kind):
        rows, held = table[kind == name], backward[kind == name]
        line = {"module": name, "calls": f"{rows[~held]['calls'].sum():g}"}
        for direction, part in (("forward", rows[~held]), ("backward", rows[held])):
            line[f"{direction} {profile.clock} ms"] = digits(part["summed_ms"].sum()) if len(part) else "–"
            line[f"{direction} operations"] = f"{part['operations'].sum():.0f}" if len(part) else "–"
        lines.append(line)
    caption = "Modules, layers added up; a module holds those inside it."
    if profile.workload.checkpoint != "none":
        caption += " What checkpointing runs again during backward counts as forward."
    return Table(caption, pd.DataFrame(lines))


def overhead_table(profiles: list[Profile]) -> Table:
    """What annotation and recording add to the unprofiled step."""
    lines = []
    for profile in profiles:
        plain = profile.unprofiled_ms[WHOLE]
        line = {"mode": profile.workload.mode, "unprofiled ms": digits(plain)}
        for how, ms in (("annotated", profile.annotated_ms[WHOLE]), ("recorded", profile.profiled_ms[WHOLE])):
            line |= {f"{how} ms": digits(ms), f"{how} / unprofiled": f"{ms / plain:.3f}"}
        lines.append(line)
    return Table("Median time of the whole pass by the timing harness.", pd.DataFrame(lines))


def rounded(frame: pd.DataFrame, n_digits: int) -> pd.DataFrame:
    """A frame of queries as text, its numbers with so many significant digits."""
    return frame.map(lambda cell: f"{cell:.{n_digits}g}" if isinstance(cell, float) else str(cell))
