"""Two figures of the parallelism calculators: where FSDP stops scaling, and how often to save a checkpoint, as PNG.

Nothing in them is measured; both say so by what is on their axes: times at datasheet peaks, goodput of a formula.
Colours are Okabe and Ito's; each line also has its own dash, so that the figures read in grey.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from cs336_systems.costs.parallelism.failures import Job
from cs336_systems.costs.parallelism.forms import Device
from cs336_systems.costs.parallelism.scaling import Workload, communication_limit, fsdp_step
from cs336_systems.report.figures import OKABE_ITO, PLAIN, dress

_COMPUTE, _COMMUNICATION, _LIMIT = OKABE_ITO[0], OKABE_ITO[1], OKABE_ITO[2]


def scaling_figure(workload: Workload, device: Device, most_devices: int) -> Figure:
    """Compute and communication seconds of a step of FSDP against devices, with both limits marked."""
    counts = [device.domain_size]
    while counts[-1] < most_devices:
        counts.append(min(most_devices, max(counts[-1] + 1, round(counts[-1] * 1.1))))
    steps = [fsdp_step(workload, n, device) for n in counts]
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(counts, [s.compute_s for s in steps], color=_COMPUTE, lw=2, label="compute: 6 P B / (N C)")
    axes.plot(
        counts, [s.communication_s for s in steps], color=_COMMUNICATION, lw=2, ls="--", label="communication: 6 P / W"
    )
    axes.plot(counts, [s.seconds for s in steps], color="black", lw=5, alpha=0.15, label="step, if they overlap fully")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    crossing, sequences = communication_limit(workload, device), workload.n_sequences
    if crossing <= most_devices:
        at = fsdp_step(workload, crossing, device).compute_s
        axes.plot([crossing], [at], "o", color="black", ms=6)
        _mark(
            axes, crossing, f"communication\nlimit: {crossing:,}\n({workload.batch_tokens / crossing:,.0f} tokens each)"
        )
    if counts[0] < sequences <= most_devices:
        _mark(axes, sequences, f"local batch limit: {sequences:,}\n(one sequence each)", low=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(f"devices ({device.name}), fixed batch of {workload.batch_tokens:,} tokens")
    axes.set_ylabel("seconds per step at datasheet peaks")
    axes.set_title(
        f"FSDP, {workload.n_parameters / 1e9:.1f} billion parameters, sequences of {workload.sequence_length:,}"
    )
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    dress(axes)
    return figure


def goodput_figure(jobs: Sequence[tuple[str, Job]]) -> Figure:
    """Goodput against checkpoint interval, a line per job; dots at the exact optimum, crosses at Young's."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    dashes = ("-", "--", "-.", ":")
    for i, (label, job) in enumerate(jobs):
        intervals = [30 * 1.05**power for power in range(150)]
        colour = OKABE_ITO[i % len(OKABE_ITO)]
        goodput = [100 * job.goodput(interval) for interval in intervals]
        axes.plot([t / 60 for t in intervals], goodput, color=colour, ls=dashes[i % 4], lw=2, label=label)
        axes.plot([job.optimal_s / 60], [100 * job.goodput(job.optimal_s)], "o", color=colour, ms=7)
        axes.plot([job.young_s / 60], [100 * job.goodput(job.young_s)], "x", color="black", ms=7, zorder=3)
    axes.plot([], [], "o", color="grey", label="exact optimum")
    axes.plot([], [], "x", color="black", label="Young: sqrt(2 save M)")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("checkpoint interval, minutes of work")
    axes.set_ylabel("goodput, % of time that becomes work kept")
    first = jobs[0][1]
    axes.set_title(f"{first.save_s:g} s to save, {first.restart_s:g} s to restart")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    dress(axes)
    return figure


def _mark(axes: Axes, at: int, label: str, low: bool = False) -> None:
    axes.axvline(at, color=_LIMIT, ls=":", lw=1.5)
    axes.annotate(label, (at, 0.03 if low else 0.5), (5 if not low else -5, 0), axes.get_xaxis_transform(),
                  "offset points", fontsize=9, ha="right" if low else "left", color="#333333")  # fmt: skip
