"""Where the time of a recorded step goes, by phase and kind of work, against the least that each could take.

From rows alone: every moment of the recorded steps is in one of the parts (``profiling/communication.py``), and the
bounds follow from the cell (``costs/speed_of_light.py``), where its blocks are written out and its device is known.
What stands above the bounds is where time is to be had.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.speed_of_light import least_ms
from cs336_systems.experiments.fully_sharded import FULLY_SHARDED
from cs336_systems.hardware import find_hardware
from cs336_systems.profiling.communication import KINDS
from cs336_systems.report.figures import OKABE_ITO, dress
from cs336_systems.report.results import MISSING, Line
from cs336_systems.report.tables import Table

PHASES = ("forward", "backward", "optimizer")
_NOTE = "at the datasheet's peaks; recomputed are attention's scores alone"


def recorded_lines(rows: pd.DataFrame) -> list[Line]:
    """The cells whose steps were recorded."""
    return [line for line in FULLY_SHARDED.lines(rows) if f"{PHASES[0]}_{KINDS[0]}" in line.metrics]


def bounds(line: Line) -> Mapping[tuple[str, str], float]:
    """Least milliseconds by phase and kind; none where they are not known."""
    said = line.settings
    hardware, precision = find_hardware(str(said["gpu"])), PRECISIONS.get(str(said["dtype"]))
    if hardware is None or hardware.memory_bytes_per_s is None or precision is None or said["keep"] == "autograd":
        return {}
    context_length, config = int(said["context_length"]), resolve_size(str(said["size"]))
    work = config.at_context(context_length), int(said["batch_size"]), context_length
    return least_ms(*work, precision, hardware, n_shards=int(said["world_size"]))


def breakdown_table(line: Line) -> Table:
    """A row for each kind of work, and one for all: milliseconds of each phase and their bounds."""
    least = bounds(line)
    found = {(phase, kind): line.median(f"{phase}_{kind}") or 0.0 for phase in PHASES for kind in KINDS}
    frame: dict[str, list[str]] = {"kind": [*KINDS, "all"]}
    for phase in PHASES:
        measured = [found[phase, kind] for kind in KINDS]
        bound = [least.get((phase, kind)) for kind in KINDS]
        frame[f"{phase} ms"] = [_shown(ms) for ms in (*measured, sum(measured))]
        frame[f"{phase} least"] = [*map(_shown, bound), MISSING]
    step = [sum(found[phase, kind] for phase in PHASES) for kind in KINDS]
    above = [ms - sum(least.get((phase, kind), 0.0) for phase in PHASES) for ms, kind in zip(step, KINDS, strict=True)]
    frame["step ms"] = [_shown(ms) for ms in (*step, sum(step))]
    frame["above least"] = [_shown(ms) if least else MISSING for ms in (*above, sum(above))]
    said = line.settings
    where = (
        f"{said['size']}, {said['batch_size']} x {said['context_length']} tokens on each of {said['world_size']} ranks"
    )
    caption = f"A recorded step of {said['fsdp']}, {where}, {said['dtype']}, keep {said['keep']}"
    return Table(caption, pd.DataFrame(frame), {"above least": _NOTE})


def breakdown_tables(rows: pd.DataFrame) -> str:
    """The tables of all recorded cells, as Markdown."""
    return "\n\n".join(breakdown_table(line).markdown() for line in recorded_lines(rows))


def _shown(ms: float | None) -> str:
    return MISSING if ms is None else f"{ms:,.1f}"


def breakdown_figure(rows: pd.DataFrame) -> Figure | None:
    """A bar for each kind and phase of the last recorded cell that has bounds, which are the dark part of it."""
    line = next((line for line in reversed(recorded_lines(rows)) if bounds(line)), None)
    if line is None:
        return None
    least = bounds(line)
    parts = [
        (phase, kind, ms) for phase in PHASES for kind in KINDS if (ms := line.median(f"{phase}_{kind}") or 0.0) >= 1
    ]
    figure = Figure(figsize=(9, 0.8 + 0.36 * len(parts)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(parts))
    colours = [OKABE_ITO[PHASES.index(phase)] for phase, _, _ in parts]
    axes.barh(places, [ms for _, _, ms in parts], color=colours, alpha=0.45)
    axes.barh(places, [least.get((phase, kind), 0.0) for phase, kind, _ in parts], color=colours)
    for place, (_, _, ms) in zip(places, parts, strict=True):
        axes.annotate(f"{ms:,.0f}", (ms, place), xytext=(4, 0), textcoords="offset points", fontsize=8, va="center")
    axes.set_yticks(places, [f"{phase}: {kind}" for phase, kind, _ in parts], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.07)
    axes.set_xlabel("ms of a recorded step; every moment once, exposed time")
    dress(axes)
    shades = {f"least, {_NOTE}": "#555555", "measured": "#BBBBBB"}
    handles = [Patch(color=colour, label=label) for label, colour in shades.items()]
    axes.legend(handles=handles, fontsize=8, loc="lower right")
    said = line.settings
    figure.suptitle(
        f"{said['size']} on {said['world_size']} {said['gpu']}, {said['dtype']}, {said['fsdp']}, keep {said['keep']}",
        fontsize=10,
    )
    return figure
