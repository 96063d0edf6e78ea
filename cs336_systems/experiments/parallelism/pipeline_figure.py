"""Pipeline schedules as pictures: one panel for each, stages from top to bottom, time to the right, as PNG.

A box is one operation on one microbatch, whose number stands in it where there is room. Colours are Okabe and Ito's and
differ in lightness too, so that the panels read in grey; a second chunk of an interleaved schedule is drawn paler.
White is the bubble, whose share stands in the title beside the activations that the first and the last stage keep
alive.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from cs336_systems.costs.parallelism.pipeline import Timeline
from cs336_systems.report.figures import OKABE_ITO

_COLOURS = {"F": OKABE_ITO[5], "B": OKABE_ITO[0], "BW": OKABE_ITO[0], "W": OKABE_ITO[4]}
_LABELS = {"F": "forward", "B": "backward (in ZB-H1: gradient of the input only)", "W": "gradient of the weights"}
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "zero bubble, ZB-H1"}
_MOST_NUMBERED = 400
"""Boxes of a panel beyond which no number could be read."""


def pipelines_figure(timelines: Sequence[Timeline]) -> Figure:
    """One panel below the other, on a common time axis in units of one microbatch's forward on one stage."""
    stages = max(timeline.stages for timeline in timelines)
    figure = Figure(figsize=(11, len(timelines) * (0.75 + 0.24 * stages) + 0.8), layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline in zip(grid, timelines, strict=True):
        _draw(axes, timeline)
    grid[-1].set_xlim(0, max(timeline.span / timeline.durations.forward for timeline in timelines))
    grid[-1].set_xlabel("time, in forward passes of one microbatch on one stage")
    kinds = {timed.operation.kind for timeline in timelines for stage in timeline.operations for timed in stage}
    handles = [
        Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in ("F", "B", "W") if {kind, kind + "W"} & kinds
    ]
    if any(timeline.chunks > 1 for timeline in timelines):
        handles.append(
            Patch(color=_paler(OKABE_ITO[0], 1, 2), label="paler: a later chunk of layers on the same stage")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, timeline: Timeline) -> None:
    unit = timeline.durations.forward
    numbered = sum(len(stage) for stage in timeline.operations) <= _MOST_NUMBERED
    for stage in timeline.operations:
        for timed in stage:
            operation, start, width = timed.operation, timed.start / unit, (timed.end - timed.start) / unit
            colour = _paler(_COLOURS[operation.kind], operation.chunk, timeline.chunks)
            axes.add_patch(
                Rectangle((start, timed.stage - 0.46), width, 0.92, facecolor=colour, edgecolor="white", lw=0.5)
            )
            if numbered:
                dark = sum(to_rgb(colour)) < 1.5
                axes.text(
                    start + width / 2,
                    timed.stage,
                    str(operation.microbatch + 1),
                    ha="center",
                    va="center_baseline",
                    fontsize=6,
                    color="white" if dark else "black",
                )
    alive = timeline.peak_activations
    axes.set_title(
        f"{_NAMES[timeline.schedule]}: {100 * timeline.bubble_fraction:.1f} % bubble, activations of "
        f"{alive[0]:g} microbatches on the first stage, {alive[-1]:g} on the last",
        loc="left",
        fontsize=10,
    )
    axes.set_ylim(timeline.stages - 0.5, -0.5)
    axes.set_yticks(range(timeline.stages), [str(stage + 1) for stage in range(timeline.stages)])
    axes.set_ylabel("stage")
    axes.spines[["top", "right"]].set_visible(False)


def _paler(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Mixed with white, up to a half for the last chunk."""
    white = 0.5 * chunk / max(chunks - 1, 1)
    red, green, blue = (white + (1 - white) * channel for channel in to_rgb(colour))
    return red, green, blue
