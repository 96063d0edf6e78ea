"""The answers to ``questions.py``: tables, a figure where one is asked for, main figures as one JSON object."""

import functools
import json
import math
from typing import Any

import pandas as pd

from cs336_systems.costs.parallelism import ring as rings
from cs336_systems.costs.parallelism.accounting import XXL, smaller_batches, thresholds, torus_network
from cs336_systems.costs.parallelism.failures import Job, mean_time_between_failures
from cs336_systems.costs.parallelism.forms import DEVICES, FORMS, PASSES, find_device, largest_world, pass_cost
from cs336_systems.costs.parallelism.mesh import Network, best_whole_split, largest_mesh, optimal_split
from cs336_systems.costs.parallelism.pipeline import SCHEDULES, simulate
from cs336_systems.costs.parallelism.scaling import CASES, Case, Workload, case, communication_limit, fsdp_step
from cs336_systems.experiments.parallelism import questions
from cs336_systems.experiments.parallelism.figures import goodput_figure, scaling_figure
from cs336_systems.experiments.parallelism.pipeline_figure import pipelines_figure
from cs336_systems.report.command_line import complain
from cs336_systems.report.figures import save
from cs336_systems.report.show import show
from cs336_systems.report.tables import Table, digits

Answer = tuple[list[Table], dict[str, Any]]


def answer(question: Any) -> int:
    """Print the answer to one of ``QUESTIONS``; 2 for a value that makes no sense."""
    name = type(question).__name__.lower()
    try:
        tables, summary = found(question)
    except ValueError as error:
        return complain(f"parallelism {name}", error)
    for table in tables:
        show(table, "auto")
    figure = getattr(question, "figure", None)
    finite = {key: None if value == math.inf else value for key, value in summary.items()}
    print(json.dumps({"question": name, **finite} | ({"figure": str(figure)} if figure else {})))
    return 0


@functools.singledispatch
def found(question: Any) -> Answer:
    """Tables and main figures; raises ValueError for a value that makes no sense."""
    raise TypeError(f"not one of QUESTIONS: {question}")


def _table(caption: str, lines: list[dict[str, Any]]) -> Table:
    return Table(caption, pd.DataFrame(lines))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _tokens(count: float) -> str:
    return "never" if math.isinf(count) else f"{math.ceil(count):,}"


def _limits(found: Case) -> dict[str, str]:
    reached = {"batch limit": found.local_batch_limit, "communication limit": found.communication_limit}
    return {limit: "reached" if there else "-" for limit, there in reached.items()}


@found.register
def _ring(asked: questions.Ring) -> Answer:
    device = find_device(asked.device)
    runs = {
        "all-gather": rings.all_gather,
        "reduce-scatter": rings.reduce_scatter,
        "all-reduce": rings.all_reduce,
        "alternate all-reduce": rings.alternate_all_reduce,
    }
    lines, summary = [], dict[str, Any]()
    for name, play in runs.items():
        run = play(asked.world_size, asked.total_mib * 2**20)
        seconds = run.seconds(device.egress(asked.world_size))
        sent = max(run.bytes_per_link) / 2**20
        lines.append(
            {"subject": name, "steps": len(run.steps), "MiB sent per rank": f"{sent:,.1f}", "ms": _ms(seconds)}
        )
        summary[f"{name} ms"] = 1e3 * seconds
    caption = f"{asked.total_mib} MiB over {asked.world_size} ranks of {device.name}; bytes in one direction of a link"
    return [_table(caption, lines)], summary


@found.register
def _forms(asked: questions.Forms) -> Answer:
    device, layer = find_device(asked.device), asked.layer
    egress = device.egress(asked.world_size)
    lines, summary = [], dict[str, Any]()
    for form in FORMS:
        for which in PASSES:
            found = pass_cost(form, layer, asked.tokens, asked.world_size, which, large_rings=asked.large_rings)
            limit = largest_world(
                form, layer, asked.tokens, which, device.flops_per_s, egress, large_rings=asked.large_rings
            )
            lines.append(
                {
                    "subject": form,
                    "pass": which,
                    "TFLOP per device": digits(found.flops / 1e12),
                    "MiB sent per device": f"{found.sent_bytes / 2**20:,.1f}",
                    "compute ms": _ms(found.compute_s(device)),
                    "communication ms": _ms(found.communication_s(egress)),
                    "largest N": "any" if math.isinf(limit) else f"{limit:,.1f}",
                }
            )
            summary[f"{form} {which} largest N"] = limit
    return [_table(asked.caption(egress), lines)], summary


@found.register
def _mesh(asked: questions.Mesh) -> Answer:
    device, layer = find_device(asked.device), asked.layer
    egress = device.egress(asked.world_size)
    lines, summary = [], dict[str, Any]()
    for overlapping in (True, False):
        network = Network(device.flops_per_s, egress, egress, overlapping, asked.large_rings)
        best = optimal_split(layer, asked.tokens, asked.world_size, network)
        whole = best_whole_split(layer, asked.tokens, asked.world_size, network)
        x, y = largest_mesh(layer, asked.tokens, network)
        axes = "overlapping" if overlapping else "sharing"
        lines.append(
            {
                "how": "axes overlap: max" if overlapping else "axes share the network: sum",
                "best X x Y": f"{best.fsdp:.1f} x {best.tp:.1f}",
                "of whole numbers": f"{whole.fsdp:g} x {whole.tp:g}",
                "compute ms": _ms(whole.compute_s),
                "FSDP ms": _ms(whole.fsdp_s),
                "TP ms": _ms(whole.tp_s),
                "communication ms": _ms(whole.communication_s),
                "largest mesh": f"{x:.1f} x {y:.1f} = {x * y:,.0f}",
            }
        )
        summary |= {f"{axes} best fsdp": best.fsdp, f"{axes} whole fsdp": whole.fsdp, f"{axes} largest N": x * y}
    return [_table("Forward. " + asked.caption(egress) + ", along both axes", lines)], summary


@found.register
def _accounting(asked: questions.Accounting) -> Answer:
    tpu, states = find_device("tpu-v5p"), XXL.state_bytes
    degree = XXL.least_devices(tpu.memory_bytes, asked.tokens)
    h100, h100_gib = math.ceil(states / 80e9), math.ceil(states / (80 * 2**30))
    fitting = f"{degree} ({XXL.device_bytes(degree, asked.tokens) / 1e9:.1f} GB each)"
    memory = {
        "parameters": f"{XXL.n_parameters / 1e9:.1f} billion",
        "FP32 weights, gradients, two moments": f"{states / 1e9:,.0f} GB ({states / 2**30:,.0f} GiB)",
        "BF16 activations": f"{XXL.activation_bytes_per_token / 1e6:.2f} MB per token",
        "H100 of 80 GB (of 80 GiB)": f"{h100} ({h100_gib})",
        f"FSDP degree that fits 95 GB, {asked.tokens} tokens per device": fitting,
    }
    about = [{"subject": subject, "value": value} for subject, value in memory.items()]
    n, lines = asked.fsdp * asked.tp, []
    summary: dict[str, Any] = {"states GB": states / 1e9, "h100": h100, "fsdp": degree}
    for large_rings in (True, False):
        found = []
        for overlapping in (False, True):
            axes = {"overlapping": overlapping, "large_rings": large_rings}
            network = torus_network(tpu, asked.fsdp_axes, asked.tp_axes, **axes)
            found.append(thresholds(XXL.layer, n, network))
        for one, other in zip(*found, strict=True):
            lines.append(
                {
                    "how": "rings of n (the book)" if large_rings else "rings of n - 1",
                    "X x Y": f"{one.fsdp} x {one.tp}",
                    "tokens per device, sum": _tokens(one.tokens_per_device),
                    "in all, sum": _tokens(one.tokens),
                    "tokens per device, max": _tokens(other.tokens_per_device),
                    "in all, max": _tokens(other.tokens),
                }
            )
            if (one.fsdp, one.tp) == (asked.fsdp, asked.tp):
                rings_of = "n" if large_rings else "n-1"
                summary[f"tokens per device, sum, rings of {rings_of}"] = one.tokens_per_device
                summary[f"tokens per device, max, rings of {rings_of}"] = other.tokens_per_device
    mesh = f"{n} x {tpu.name}, M_x = {asked.fsdp_axes}, M_y = {asked.tp_axes}"
    caption = f"Tokens from which forward is bound by compute, {mesh}"
    book = torus_network(tpu, asked.fsdp_axes, asked.tp_axes, overlapping=False, large_rings=True)
    smaller = [
        {"how": how, "tokens per device": _tokens(least)}
        for how, least in smaller_batches(XXL.layer, asked.fsdp, asked.tp, book)
    ]
    title = "XXL: d_model 16384, d_ff 53248, 126 blocks"
    return [_table(title, about), _table(caption, lines), _table("How to reduce the batch", smaller)], summary


@found.register
def _pipeline(asked: questions.Pipeline) -> Answer:
    timelines = [
        simulate(name, asked.stages, asked.microbatches, chunks=asked.chunks if name == "interleaved" else 1)
        for name in SCHEDULES
    ]
    if asked.figure:
        save(pipelines_figure(timelines), asked.figure)
    lines = [
        {
            "subject": timeline.schedule,
            "bubble, forwards": f"{timeline.bubble:g}",
            "bubble % of step": f"{100 * timeline.bubble_fraction:.1f}",
            "activations, first stage": f"{timeline.peak_activations[0]:g}",
            "activations, last stage": f"{timeline.peak_activations[-1]:g}",
        }
        for timeline in timelines
    ]
    caption = f"{asked.stages} stages, {asked.microbatches} microbatches; forward and both gradients take one unit each"
    return [_table(caption, lines)], {f"{t.schedule} bubble": t.bubble_fraction for t in timelines}


@found.register
def _scaling(asked: questions.Scaling) -> Answer:
    device, workload = find_device(asked.device), Workload(asked.parameters, asked.batch, asked.context_length)
    if asked.most_devices <= device.domain_size:
        raise ValueError(f"--most-devices must be above one domain of {device.domain_size}, got {asked.most_devices}")
    if asked.figure:
        save(scaling_figure(workload, device, asked.most_devices), asked.figure)
    counts = [8 * 2**power for power in range(32) if 8 * 2**power <= asked.most_devices]
    lines = []
    for n in counts:
        step, found = fsdp_step(workload, n, device), case(workload, n, device)
        lines.append(
            {
                "devices": f"{n:,}",
                "compute s": digits(step.compute_s),
                "communication s": digits(step.communication_s),
                "tokens each": f"{step.tokens_per_device:,.0f}",
                "sequences each": f"{step.sequences_per_device:g}",
                **_limits(found),
            }
        )
    remedies = [{**_limits(c), "how": c.what, "explanation": c.remedy} for c in CASES]
    limit = communication_limit(workload, device)
    summary = {"communication limit": limit, "local batch limit": workload.n_sequences}
    caption = f"FSDP of {asked.parameters / 1e9:.1f} billion parameters, {asked.batch:,} tokens, {device.name} peaks"
    return [_table(caption, lines), _table("The four cases", remedies)], summary


@found.register
def _failures(asked: questions.Failures) -> Answer:
    between = {n: mean_time_between_failures(n, asked.per_1000_node_days) for n in asked.nodes}
    jobs = [(n, Job(mtbf, asked.save, asked.restart)) for n, mtbf in between.items()]
    if not jobs:
        raise ValueError("--nodes names no number of nodes")
    if asked.figure:
        labelled = [(f"{n:,} nodes, M = {job.mtbf_s / 3600:.3g} h", job) for n, job in jobs]
        save(goodput_figure(labelled), asked.figure)
    lines = [
        {
            "nodes": f"{n:,}",
            "hours between failures": digits(job.mtbf_s / 3600),
            "Young min": digits(job.young_s / 60),
            "Daly min": digits(job.daly_s / 60),
            "exact min": digits(job.optimal_s / 60),
            "goodput % there": f"{100 * job.goodput(job.optimal_s):.2f}",
            "at Young": f"{100 * job.goodput(job.young_s):.2f}",
            "saving hourly": f"{100 * job.goodput(3600):.2f}",
        }
        for n, job in jobs
    ]
    rate = f"{asked.per_1000_node_days:g} failures per 1000 node-days"
    caption = f"{rate}, {asked.save:g} s to save, {asked.restart:g} s to restart"
    return [_table(caption, lines)], {f"{n} nodes: optimum s": job.optimal_s for n, job in jobs}


@found.register
def _devices(asked: questions.Devices) -> Answer:
    lines = [
        {
            "subject": device.name,
            "bf16 TFLOP/s": f"{device.flops_per_s / 1e12:g}",
            "GB": f"{device.memory_bytes / 1e9:.0f}",
            "W inside, GB/s": f"{device.egress_bytes_per_s / 1e9:g}",
            "domain": device.domain_size,
            "W beyond, GB/s": f"{device.egress(device.domain_size + 1) / 1e9:g}",
            "C/W inside, tokens": f"{device.flops_per_s / device.egress(1):,.0f}",
            "beyond": f"{device.flops_per_s / device.egress(device.domain_size + 1):,.0f}",
            "source": device.source,
        }
        for device in DEVICES.values()
    ]
    return [_table("W is a device's egress; on the TPU both directions of one torus axis", lines)], {
        "devices": list(DEVICES)
    }
