"""The traces of one workload, digested: two CSVs, a picture per mode, and three tables.

    write_digest(profiles, "small-...", where="NVIDIA H200", folder)

``profiles`` are one workload in its modes. Every kernel and range (each module is one) is in the CSVs; the tables hold
phases against the clock, classes of kernels, and what limits the step. On a GPU times are GPU time; on a CPU they are
the time of CPU operators, and say so.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from cs336_systems.harness.clock import WHOLE
from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.recording import Workload
from cs336_systems.profiling.traces.kernels import CLASSES
from cs336_systems.profiling.traces.queries import class_times, kernel_table, limits, n_steps, range_table, times
from cs336_systems.profiling.traces.tables import Trace
from cs336_systems.report.tables import Table, digits
from cs336_systems.report.timeline import draw_timeline


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


def write_digest(profiles: list[Profile], name: str, where: str, folder: Path) -> None:
    """Write ``<name>-kernels.csv``, ``<name>-ranges.csv`` and ``<name>-<mode>.png``.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels, ranges = [], []
    for profile in profiles:
        mode = profile.workload.mode
        for label, instances in profile.passes().items():
            kernels.append(kernel_table(profile.trace, *instances))
            kernels[-1].insert(0, "passes", label)
            kernels[-1].insert(0, "mode", mode)
        ranges.append(range_table(profile.trace))
        ranges[-1].insert(0, "mode", mode)
        title = f"Mode {mode} of {profile.workload.shape_words} on {where}"
        draw_timeline(profile.trace, profile.phases, title, folder / f"{name}-{mode}.png")
    pd.concat(kernels).to_csv(folder / f"{name}-kernels.csv", index=False, float_format="%.6g")
    pd.concat(ranges).to_csv(folder / f"{name}-ranges.csv", index=False, float_format="%.6g")


def phase_table(profile: Profile) -> Table:
    """Each phase by the timing harness and by the trace."""
    clocks = (profile.unprofiled_ms, profile.annotated_ms, profile.recorded_ms)
    lines = []
    for phase in [*profile.phases, WHOLE]:
        found = times(profile.trace, profile.trace.instances(phase, inside=STEP if phase != STEP else None))
        ms = (*(clock[phase] for clock in clocks), found.host_ms, found.unioned_ms)
        lines.append((phase, *map(digits, ms), f"{found.operations:.0f}"))
    columns = ["phase", "harness ms", "annotated ms", "recorded ms", "host range ms", f"{profile.clock} busy ms"]
    caption = (
        f"Phases of mode {profile.workload.mode}, per step, over {n_steps(profile.trace)} recorded steps. The first "
        "three columns are the timing harness's clock: without ranges, with them, and while recording; the rest is "
        "read from the trace."
    )
    return Table.of(caption, [*columns, "operations"], lines)


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


def limits_table(profiles: list[Profile]) -> Table:
    """The step's time split over what binds it; of traces of a GPU."""
    lines = []
    for profile in profiles:
        found = limits(profile.trace, profile.unprofiled_ms[WHOLE])
        split = {"whole": found.step_ms, "compute": found.compute_ms, "memory": found.memory_ms, "idle": found.idle_ms}
        line = {"mode": profile.workload.mode} | {f"{name} ms": digits(ms) for name, ms in split.items()}
        lines.append(line | {"limited by": found.verdict})
    caption = (
        "What limits a step. The whole is the unprofiled time. Compute: matmuls and fused attention run; memory: only "
        "other kernels and copies run; idle (overhead): what is left, as recording slows launches but not kernels."
    )
    return Table(caption, pd.DataFrame(lines))
