"""Timelines of pipelines, one lane per stage: its operations over time, and its idle time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cs336_systems.costs.parallelism.pipeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {"F": "forward", "BW": "backward", "B": "gradient of the input only", "W": "gradient of the weights"}
NAMES = {
    **{"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "ZB-H1 (zero bubble)"},
    **{"zbv": "ZBV (zero bubble, V-shaped)", "dualpipev": "DualPipeV"},
}
"""Schedules as their papers call them."""


def simulated(timelines: list[Timeline]) -> dict[str, Timeline]:
    """Return the timelines by titles with bubble and peak activations."""
    found = {}
    for each in timelines:
        alive = each.peak_activations
        kept = f"activations of {alive[0]:g} micro-batches on the first stage, {alive[-1]:g} on the last"
        found[f"{NAMES[each.plan.name]}: {100 * each.bubble_fraction:.1f} % bubble, {kept}"] = each
    return found


def pipelines_figure(
    timelines: Mapping[str, Timeline], unit: str = "forward passes of one micro-batch on one stage"
) -> "Figure":
    """Draw a panel for each timeline by title, with stages from top to bottom, all on one time axis.

    A box is an operation, labelled with its micro-batch; a stage's second chunk is paler. White is the bubble.
    """
    from matplotlib.patches import Patch

    from cs336_systems.report.figures import OKABE_ITO, panels

    blue, orange, sky, green = OKABE_ITO[0], OKABE_ITO[4], OKABE_ITO[5], OKABE_ITO[2]
    colours = {"F": sky, "BW": blue, "B": green, "W": orange}
    stages = max(timeline.plan.stages for timeline in timelines.values())
    figure, grid = panels(len(timelines), 1, 9.5, 0.75 + 0.24 * stages, sharex=True)
    for axes, (title, timeline) in zip(grid, timelines.items(), strict=True):
        for timed in (timed for stage in timeline.operations for timed in stage):
            colour = _paler(colours[timed.operation.kind], timed.operation.chunk, timeline.plan.chunks)
            box = [(timed.start, timed.end - timed.start)]
            axes.broken_barh(box, (timed.stage - 0.46, 0.92), facecolor=colour, edgecolor="white", lw=0.5)
            ink, number = "white" if sum(colour) < 1.5 else "black", str(timed.operation.microbatch + 1)
            place = (timed.start + timed.end) / 2, timed.stage
            axes.text(*place, number, ha="center", va="center_baseline", fontsize=6, color=ink)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(timeline.plan.stages - 0.5, -0.5)
        axes.set_yticks(range(timeline.plan.stages), [str(stage + 1) for stage in range(timeline.plan.stages)])
        axes.set_ylabel("stage")
        axes.grid(visible=False)
    grid[-1].set_xlim(0, max(timeline.span for timeline in timelines.values()))
    grid[-1].set_xlabel(f"time, in {unit}")
    handles = [Patch(color=colours[kind], label=label) for kind, label in _LABELS.items()]
    handles.append(Patch(color=_paler(blue, 1, 2), label="paler: second chunk"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _paler(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the colour mixed with white, by half for the last chunk."""
    white = 0.5 * chunk / max(chunks - 1, 1)
    from matplotlib.colors import to_rgb

    red, green, blue = (white + (1 - white) * channel for channel in to_rgb(colour))
    return red, green, blue
