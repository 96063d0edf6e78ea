"""Figures of the parallelism calculators: where FSDP stops scaling, how often to save, what pipeline schedules idle.

Nothing in them is measured, and their axes say so: times at datasheet peaks, goodput of a formula, a simulation in
units of one forward pass. Lines also differ in their dash and boxes in their lightness, to be told apart in grey.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from cs336_systems.costs.parallelism.failures import Job
from cs336_systems.costs.parallelism.forms import Device
from cs336_systems.costs.parallelism.pipeline import Timeline
from cs336_systems.costs.parallelism.scaling import ModelAndBatch, communication_limit, fsdp_step
from cs336_systems.report.figures import OKABE_ITO, PLAIN, dress

_COLOURS = {"F": OKABE_ITO[5], "B": OKABE_ITO[0], "BW": OKABE_ITO[0], "W": OKABE_ITO[4]}
_LABELS = {"F": "forward", "B": "backward (in ZB-H1: gradient of the input only)", "W": "gradient of the weights"}
_NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "zero bubble, ZB-H1"}
_MOST_NUMBERED = 400
"""The most boxes of a panel whose numbers can still be read."""


def scaling_figure(workload: ModelAndBatch, device: Device, most_devices: int) -> Figure:
    """Compute and communication seconds of a step of FSDP against devices, with both limits marked."""
    counts = [device.domain_size]
    while counts[-1] < most_devices:
        counts.append(min(most_devices, max(counts[-1] + 1, round(counts[-1] * 1.1))))
    steps = [fsdp_step(workload, n, device) for n in counts]
    axes = _axes(f"devices ({device.name}), fixed batch of {workload.batch_tokens:,} tokens")
    axes.plot(counts, [s.compute_s for s in steps], color=OKABE_ITO[0], lw=2, label="compute: 6 P B / (N C)")
    sent = [s.communication_s for s in steps]
    axes.plot(counts, sent, color=OKABE_ITO[1], lw=2, ls="--", label="communication: 6 P / W")
    axes.plot(counts, [s.seconds for s in steps], color="black", lw=5, alpha=0.15, label="step, if they overlap fully")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    crossing, sequences = communication_limit(workload, device), workload.n_sequences
    if crossing <= most_devices:
        axes.plot([crossing], [fsdp_step(workload, crossing, device).compute_s], "o", color="black", ms=6)
        each = f"({workload.batch_tokens / crossing:,.0f} tokens each)"
        _mark(axes, crossing, f"communication\nlimit: {crossing:,}\n{each}", 0.5, "left")
    if counts[0] < sequences <= most_devices:
        _mark(axes, sequences, f"local batch limit: {sequences:,}\n(one sequence each)", 0.03, "right")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_ylabel("seconds per step at datasheet peaks")
    axes.set_title(
        f"FSDP, {workload.n_parameters / 1e9:.1f} billion parameters, sequences of {workload.sequence_length:,}"
    )
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return _figure(axes)


def goodput_figure(jobs: Sequence[tuple[str, Job]]) -> Figure:
    """Goodput against checkpoint interval, a line per job; dots at the exact optimum, crosses at Young's."""
    axes = _axes("checkpoint interval, minutes of work")
    intervals = [30 * 1.05**power for power in range(150)]
    for i, (label, job) in enumerate(jobs):
        colour, dashes = OKABE_ITO[i % len(OKABE_ITO)], ("-", "--", "-.", ":")[i % 4]
        goodput = [100 * job.goodput(interval) for interval in intervals]
        axes.plot([t / 60 for t in intervals], goodput, color=colour, ls=dashes, lw=2, label=label)
        axes.plot([job.optimal_s / 60], [100 * job.goodput(job.optimal_s)], "o", color=colour, ms=7)
        axes.plot([job.young_s / 60], [100 * job.goodput(job.young_s)], "x", color="black", ms=7, zorder=3)
    axes.plot([], [], "o", color="grey", label="exact optimum")
    axes.plot([], [], "x", color="black", label="Young: sqrt(2 save M)")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_ylabel("goodput, % of time that becomes work kept")
    axes.set_title(f"{jobs[0][1].save_s:g} s to save, {jobs[0][1].restart_s:g} s to restart")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return _figure(axes)


def _axes(x_label: str) -> Axes:
    axes = Figure(figsize=(7.5, 4.6), layout="constrained").subplots()
    axes.set_xlabel(x_label)
    dress(axes)
    return axes


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def _mark(axes: Axes, at: int, label: str, height: float, side: str) -> None:
    """A dotted line with its label, at a share of the axes' height, to the left or right of it."""
    axes.axvline(at, color=OKABE_ITO[2], ls=":", lw=1.5)
    offset = (5 if side == "left" else -5, 0)
    above = axes.get_xaxis_transform()
    axes.annotate(label, (at, height), offset, above, "offset points", fontsize=9, ha=side, color="#333333")


def pipelines_figure(timelines: Sequence[Timeline]) -> Figure:
    """A panel for each schedule, stages from top to bottom, time in units of one microbatch's forward on one stage.

    A box is one operation on one microbatch, whose number stands in it where there is room; a later chunk of an
    interleaved schedule is paler. White is the bubble, whose share stands in the title beside the activations that the
    first and the last stage keep alive.
    """
    stages = max(timeline.stages for timeline in timelines)
    figure = Figure(figsize=(11, len(timelines) * (0.75 + 0.24 * stages) + 0.8), layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline in zip(grid, timelines, strict=True):
        _draw(axes, timeline)
    grid[-1].set_xlim(0, max(timeline.span / timeline.durations.forward for timeline in timelines))
    grid[-1].set_xlabel("time, in forward passes of one microbatch on one stage")
    kinds = {timed.operation.kind for timeline in timelines for stage in timeline.operations for timed in stage}
    labels = {_COLOURS[kind]: label for kind, label in _LABELS.items() if {kind, kind + "W"} & kinds}
    handles = [Patch(color=colour, label=label) for colour, label in labels.items()]
    if any(timeline.chunks > 1 for timeline in timelines):
        later = _paler(OKABE_ITO[0], 1, 2)
        handles.append(Patch(color=later, label="paler: a later chunk of layers on the same stage"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, timeline: Timeline) -> None:
    unit, boxes = timeline.durations.forward, [timed for stage in timeline.operations for timed in stage]
    for timed in boxes:
        operation, start, width = timed.operation, timed.start / unit, (timed.end - timed.start) / unit
        colour = _paler(_COLOURS[operation.kind], operation.chunk, timeline.chunks)
        axes.broken_barh([(start, width)], (timed.stage - 0.46, 0.92), facecolor=colour, edgecolor="white", lw=0.5)
        if len(boxes) <= _MOST_NUMBERED:
            place, number = (start + width / 2, timed.stage), str(operation.microbatch + 1)
            ink = "white" if sum(to_rgb(colour)) < 1.5 else "black"
            axes.text(*place, number, ha="center", va="center_baseline", fontsize=6, color=ink)
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
    """The colour mixed with white, up to a half for the last chunk."""
    white = 0.5 * chunk / max(chunks - 1, 1)
    red, green, blue = (white + (1 - white) * channel for channel in to_rgb(colour))
    return red, green, blue
