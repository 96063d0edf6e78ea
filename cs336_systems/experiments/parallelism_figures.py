"""Figures of the parallelism calculators: where FSDP stops scaling, how often to save, what pipeline schedules idle.

Nothing in them is measured, and their axes say so: times at datasheet peaks, goodput of a formula, a simulation in
units of one forward pass. Lines also differ in their dash and boxes in their lightness, to be told apart in grey.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.costs.parallelism.failures import Job
from cs336_systems.costs.parallelism.forms import Device
from cs336_systems.costs.parallelism.pipeline import Timeline
from cs336_systems.costs.parallelism.scaling import ModelAndBatch, communication_limit, fsdp_step
from cs336_systems.report.figures import OKABE_ITO, PLAIN, WITH_COMMAS, panels

_COLOURS = {"F": OKABE_ITO[5], "B": OKABE_ITO[0], "BW": OKABE_ITO[0], "W": OKABE_ITO[4]}
_LABELS = {"F": "forward", "B": "backward (in ZB-H1: gradient of the input only)", "W": "gradient of the weights"}
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "zero bubble, ZB-H1"}


def scaling_figure(workload: ModelAndBatch, device: Device, most_devices: int) -> Figure:
    """Compute and communication seconds of a step of FSDP against devices, with both limits marked."""
    counts = [device.domain_size]
    while counts[-1] < most_devices:
        counts.append(min(most_devices, max(counts[-1] + 1, round(counts[-1] * 1.1))))
    steps = [fsdp_step(workload, n, device) for n in counts]
    figure, (axes,) = panels(1, 1, 6.0, 4.0)
    axes.plot(counts, [s.compute_s for s in steps], color=OKABE_ITO[0], lw=2, label="compute: 6 P B / (N C)")
    sent = [s.communication_s for s in steps]
    axes.plot(counts, sent, color=OKABE_ITO[1], lw=2, ls="--", label="communication: 6 P / W")
    axes.plot(counts, [s.seconds for s in steps], color="black", lw=5, alpha=0.15, label="step, if they overlap fully")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    crossing, sequences = communication_limit(workload, device), workload.n_sequences
    each = f"({workload.batch_tokens / crossing:,.0f} tokens each)"
    _mark(axes, crossing, f"communication\nlimit: {crossing:,}\n{each}", 0.5, "left")
    _mark(axes, sequences, f"local batch limit: {sequences:,}\n(one sequence each)", 0.03, "right")
    axes.xaxis.set_major_formatter(WITH_COMMAS)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(f"devices ({device.name}), fixed batch of {workload.batch_tokens:,} tokens")
    axes.set_ylabel("seconds per step at datasheet peaks")
    billions = workload.n_parameters / 1e9
    axes.set_title(f"FSDP, {billions:.1f} billion parameters, sequences of {workload.sequence_length:,}")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def _mark(axes: Axes, at: int, label: str, height: float, side: str) -> None:
    """A dotted line with its label, at a share of the axes' height, to the left or right of it."""
    axes.axvline(at, color=OKABE_ITO[2], ls=":", lw=1.5)
    offset, above = (5 if side == "left" else -5, 0), axes.get_xaxis_transform()
    axes.annotate(label, (at, height), offset, above, "offset points", fontsize=9, ha=side, color="#333333")


def goodput_figure(jobs: Sequence[tuple[str, Job]]) -> Figure:
    """Goodput against checkpoint interval, a line per job; dots at the exact optimum, crosses at Young's."""
    figure, (axes,) = panels(1, 1, 6.0, 4.0)
    intervals = [30 * 1.05**power for power in range(150)]
    for i, (label, job) in enumerate(jobs):
        goodput, dashes = [100 * job.goodput(interval) for interval in intervals], ("-", "--", "-.", ":")[i % 4]
        axes.plot([t / 60 for t in intervals], goodput, color=OKABE_ITO[i], ls=dashes, lw=2, label=label)
        axes.plot([job.optimal_s / 60], [100 * job.goodput(job.optimal_s)], "o", color=OKABE_ITO[i], ms=7)
        axes.plot([job.young_s / 60], [100 * job.goodput(job.young_s)], "x", color="black", ms=7, zorder=3)
    axes.plot([], [], "o", color="grey", label="exact optimum")
    axes.plot([], [], "x", color="black", label="Young: sqrt(2 save M)")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("checkpoint interval, minutes of work")
    axes.set_ylabel("goodput, % of time that becomes work kept")
    axes.set_title(f"{jobs[0][1].save_s:g} s to save, {jobs[0][1].restart_s:g} s to restart")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def pipelines_figure(timelines: Sequence[Timeline]) -> Figure:
    """A panel for each schedule, stages from top to bottom, time in units of one microbatch's forward on one stage.

    A box is one operation on one microbatch, whose number stands in it; a later chunk of an interleaved schedule is
    paler. White is the bubble, whose share stands in the title beside the activations that the first and the last stage
    keep alive.
    """
    stages = max(timeline.stages for timeline in timelines)
    figure, grid = panels(len(timelines), 1, 9.5, 0.75 + 0.24 * stages, sharex=True)
    for axes, timeline in zip(grid, timelines, strict=True):
        for timed in (timed for stage in timeline.operations for timed in stage):
            colour = _paler(_COLOURS[timed.operation.kind], timed.operation.chunk, timeline.chunks)
            box = [(timed.start, timed.end - timed.start)]
            axes.broken_barh(box, (timed.stage - 0.46, 0.92), facecolor=colour, edgecolor="white", lw=0.5)
            ink, number = "white" if sum(colour) < 1.5 else "black", str(timed.operation.microbatch + 1)
            place = (timed.start + timed.end) / 2, timed.stage
            axes.text(*place, number, ha="center", va="center_baseline", fontsize=6, color=ink)
        alive = timeline.peak_activations
        bubble = f"{_NAMES[timeline.schedule]}: {100 * timeline.bubble_fraction:.1f} % bubble"
        kept = f"activations of {alive[0]:g} microbatches on the first stage, {alive[-1]:g} on the last"
        axes.set_title(f"{bubble}, {kept}", loc="left", fontsize=10)
        axes.set_ylim(timeline.stages - 0.5, -0.5)
        axes.set_yticks(range(timeline.stages), [str(stage + 1) for stage in range(timeline.stages)])
        axes.set_ylabel("stage")
        axes.grid(visible=False)
    grid[-1].set_xlim(0, max(timeline.span for timeline in timelines))
    grid[-1].set_xlabel("time, in forward passes of one microbatch on one stage")
    handles = [Patch(color=_COLOURS[kind], label=label) for kind, label in _LABELS.items()]
    later = _paler(OKABE_ITO[0], 1, 2)
    handles.append(Patch(color=later, label="paler: a later chunk of layers on the same stage"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _paler(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour mixed with white, up to a half for the last chunk."""
    white = 0.5 * chunk / max(chunks - 1, 1)
    red, green, blue = (white + (1 - white) * channel for channel in to_rgb(colour))
    return red, green, blue
