"""When does communication outlast computation? Questions about training on many devices, answered by arithmetic.

Each class is a question of ``scripts/parallelism.py``: its fields are the options, and ``answer`` returns tables and
main figures. Importing this module imports no torch, pandas or matplotlib.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cs336_systems.costs.parallelism import failures, forms, mesh, pipeline, ring, scaling
from cs336_systems.report.command_line import complain

if TYPE_CHECKING:
    from cs336_systems.report.tables import Table

Answer = tuple[list["Table"], dict[str, Any]]
"""Tables, and main figures by name."""


class Question(Protocol):
    """A frozen dataclass of options."""

    def answer(self) -> Answer:
        """Tables and main figures; raises ValueError for a value that makes no sense."""
        ...


def run(question: Question) -> int:
    """Print the answer, last of all one JSON object; 2 for a value that makes no sense."""
    from cs336_systems.report.show import show

    name = type(question).__name__.lower()
    try:
        tables, summary = question.answer()
    except ValueError as error:
        return complain(f"parallelism {name}", error)
    for table in tables:
        show(table, "auto")
    figure = getattr(question, "figure", None)
    finite = {key: None if value == math.inf else value for key, value in summary.items()}
    print(json.dumps({"question": name, **finite} | ({"figure": str(figure)} if figure else {})))
    return 0


def _table(caption: str, lines: list[dict[str, Any]]) -> "Table":
    import pandas as pd

    from cs336_systems.report.tables import Table

    return Table(caption, pd.DataFrame(lines))


def _digits(value: float) -> str:
    from cs336_systems.report.tables import digits

    return digits(value)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _tokens(count: float) -> str:
    return "never" if math.isinf(count) else f"{math.ceil(count):,}"


def _limits(found: scaling.Case) -> dict[str, str]:
    reached = {"batch limit": found.local_batch_limit, "communication limit": found.communication_limit}
    return {limit: "reached" if there else "-" for limit, there in reached.items()}


@dataclass(frozen=True)
class Ring:
    """Ring collectives played step by step, and the alternate all-reduce that passes whole tensors."""

    world_size: int = 8
    total_mib: int = 1024
    """Size of the whole tensor, MiB."""
    device: str = "h100"
    """Device whose link the seconds are for."""

    def answer(self) -> Answer:
        device = forms.find_device(self.device)
        runs = {
            "all-gather": ring.all_gather,
            "reduce-scatter": ring.reduce_scatter,
            "all-reduce": ring.all_reduce,
            "alternate all-reduce": ring.alternate_all_reduce,
        }
        lines, summary = [], dict[str, Any]()
        for name, play in runs.items():
            run = play(self.world_size, self.total_mib * 2**20)
            seconds = run.seconds(device.egress(self.world_size))
            sent = max(run.bytes_per_link) / 2**20
            lines.append(
                {"subject": name, "steps": len(run.steps), "MiB sent per rank": f"{sent:,.1f}", "ms": _ms(seconds)}
            )
            summary[f"{name} ms"] = 1e3 * seconds
        caption = (
            f"{self.total_mib} MiB over {self.world_size} ranks of {device.name}; bytes in one direction of a link"
        )
        return [_table(caption, lines)], summary


@dataclass(frozen=True)
class OneLayer:
    """One feed-forward layer and what it runs on."""

    device: str = "h100"
    world_size: int = 8
    tokens: int = 32_768
    """Tokens of the global batch."""
    d_model: int = 8192
    d_ff: int = 28_672
    n_matrices: int = 3
    """3 for SwiGLU, 2 for the layer of the scaling book."""
    large_rings: bool = False
    """Take (n-1)/n for 1, as the scaling book does."""

    @property
    def layer(self) -> forms.FeedForward:
        return forms.FeedForward(self.d_model, self.d_ff, self.n_matrices)

    def caption(self, egress: float) -> str:
        return (
            f"One layer {self.d_model} x {self.d_ff} of {self.n_matrices} matrices, {self.tokens:,} tokens on "
            f"{self.world_size} x {self.device}, W = {egress / 1e9:g} GB/s egress per device"
        )


@dataclass(frozen=True)
class Forms(OneLayer):
    """Data parallel, FSDP and tensor parallel: FLOPs, bytes, seconds and the largest number of devices."""

    def answer(self) -> Answer:
        device, layer = forms.find_device(self.device), self.layer
        egress = device.egress(self.world_size)
        lines, summary = [], dict[str, Any]()
        for form in forms.FORMS:
            for which in forms.PASSES:
                found = forms.pass_cost(form, layer, self.tokens, self.world_size, which, large_rings=self.large_rings)
                limit = forms.largest_world(
                    form, layer, self.tokens, which, device.flops_per_s, egress, large_rings=self.large_rings
                )
                lines.append(
                    {
                        "subject": form,
                        "pass": which,
                        "TFLOP per device": _digits(found.flops / 1e12),
                        "MiB sent per device": f"{found.sent_bytes / 2**20:,.1f}",
                        "compute ms": _ms(found.compute_s(device)),
                        "communication ms": _ms(found.communication_s(egress)),
                        "largest N": "any" if math.isinf(limit) else f"{limit:,.1f}",
                    }
                )
                summary[f"{form} {which} largest N"] = limit
        return [_table(self.caption(egress), lines)], summary


@dataclass(frozen=True)
class Mesh(OneLayer):
    """FSDP and tensor parallelism together: the best split, by closed form and by trying all, and the largest mesh."""

    world_size: int = 256
    tokens: int = 2**20

    def answer(self) -> Answer:
        device, layer = forms.find_device(self.device), self.layer
        egress = device.egress(self.world_size)
        lines, summary = [], dict[str, Any]()
        for overlapping in (True, False):
            network = mesh.Network(device.flops_per_s, egress, egress, overlapping, self.large_rings)
            best = mesh.optimal_split(layer, self.tokens, self.world_size, network)
            whole = mesh.best_whole_split(layer, self.tokens, self.world_size, network)
            x, y = mesh.largest_mesh(layer, self.tokens, network)
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
        return [_table("Forward. " + self.caption(egress) + ", along both axes", lines)], summary


@dataclass(frozen=True)
class Accounting:
    """The 4D question about XXL: memory, the FSDP degree that fits, and the batch that keeps 16 x 4 devices busy."""

    fsdp: int = 16
    tp: int = 4
    fsdp_axes: int = 2
    """M_x, the axes of the torus that carry FSDP."""
    tp_axes: int = 1
    """M_y, the axes of the torus that carry tensor parallelism."""
    tokens: int = 0
    """Tokens per device whose activations count for the FSDP degree."""

    def answer(self) -> Answer:
        tpu, states = forms.find_device("tpu-v5p"), mesh.XXL.state_bytes
        degree = mesh.XXL.least_devices(tpu.memory_bytes, self.tokens)
        h100, h100_gib = math.ceil(states / 80e9), math.ceil(states / (80 * 2**30))
        fitting = f"{degree} ({mesh.XXL.device_bytes(degree, self.tokens) / 1e9:.1f} GB each)"
        memory = {
            "parameters": f"{mesh.XXL.n_parameters / 1e9:.1f} billion",
            "FP32 weights, gradients, two moments": f"{states / 1e9:,.0f} GB ({states / 2**30:,.0f} GiB)",
            "BF16 activations": f"{mesh.XXL.activation_bytes_per_token / 1e6:.2f} MB per token",
            "H100 of 80 GB (of 80 GiB)": f"{h100} ({h100_gib})",
            f"FSDP degree that fits 95 GB, {self.tokens} tokens per device": fitting,
        }
        about = [{"subject": subject, "value": value} for subject, value in memory.items()]
        n, lines = self.fsdp * self.tp, []
        summary: dict[str, Any] = {"states GB": states / 1e9, "h100": h100, "fsdp": degree}
        for large_rings in (True, False):
            found = []
            for overlapping in (False, True):
                axes = {"overlapping": overlapping, "large_rings": large_rings}
                network = mesh.torus_network(tpu, self.fsdp_axes, self.tp_axes, **axes)
                found.append(mesh.thresholds(mesh.XXL.layer, n, network))
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
                if (one.fsdp, one.tp) == (self.fsdp, self.tp):
                    rings_of = "n" if large_rings else "n-1"
                    summary[f"tokens per device, sum, rings of {rings_of}"] = one.tokens_per_device
                    summary[f"tokens per device, max, rings of {rings_of}"] = other.tokens_per_device
        where = f"{n} x {tpu.name}, M_x = {self.fsdp_axes}, M_y = {self.tp_axes}"
        caption = f"Tokens from which forward is bound by compute, {where}"
        book = mesh.torus_network(tpu, self.fsdp_axes, self.tp_axes, overlapping=False, large_rings=True)
        smaller = [
            {"how": how, "tokens per device": _tokens(least)}
            for how, least in mesh.smaller_batches(mesh.XXL.layer, self.fsdp, self.tp, book)
        ]
        title = "XXL: d_model 16384, d_ff 53248, 126 blocks"
        return [_table(title, about), _table(caption, lines), _table("How to reduce the batch", smaller)], summary


@dataclass(frozen=True)
class Pipeline:
    """Bubble and activations of four pipeline schedules, simulated operation by operation."""

    stages: int = 4
    microbatches: int = 8
    chunks: int = 2
    """Chunks per stage of the interleaved schedule."""
    figure: Path | None = None
    """PNG to draw."""

    def answer(self) -> Answer:
        timelines = [
            pipeline.simulate(name, self.stages, self.microbatches, chunks=self.chunks if name == "interleaved" else 1)
            for name in pipeline.SCHEDULES
        ]
        if self.figure:
            from cs336_systems.experiments.parallelism_figures import pipelines_figure
            from cs336_systems.report.figures import save

            save(pipelines_figure(timelines), self.figure)
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
        caption = (
            f"{self.stages} stages, {self.microbatches} microbatches; forward and both gradients take one unit each"
        )
        return [_table(caption, lines)], {f"{t.schedule} bubble": t.bubble_fraction for t in timelines}


@dataclass(frozen=True)
class Scaling:
    """Where FSDP of a 70B model stops scaling, and the remedy for each of the four ways in which it can."""

    device: str = "h100"
    parameters: int = scaling.LLAMA3_70B.n_parameters
    batch: int = 2**22
    """Tokens of the global batch."""
    context_length: int = 8192
    most_devices: int = 8192
    figure: Path | None = None
    """PNG to draw."""

    def answer(self) -> Answer:
        device, workload = (
            forms.find_device(self.device),
            scaling.Workload(self.parameters, self.batch, self.context_length),
        )
        if self.most_devices <= device.domain_size:
            raise ValueError(
                f"--most-devices must be above one domain of {device.domain_size}, got {self.most_devices}"
            )
        if self.figure:
            from cs336_systems.experiments.parallelism_figures import scaling_figure
            from cs336_systems.report.figures import save

            save(scaling_figure(workload, device, self.most_devices), self.figure)
        counts = [8 * 2**power for power in range(32) if 8 * 2**power <= self.most_devices]
        lines = []
        for n in counts:
            step, found = scaling.fsdp_step(workload, n, device), scaling.case(workload, n, device)
            lines.append(
                {
                    "devices": f"{n:,}",
                    "compute s": _digits(step.compute_s),
                    "communication s": _digits(step.communication_s),
                    "tokens each": f"{step.tokens_per_device:,.0f}",
                    "sequences each": f"{step.sequences_per_device:g}",
                    **_limits(found),
                }
            )
        remedies = [{**_limits(c), "how": c.what, "explanation": c.remedy} for c in scaling.CASES]
        limit = scaling.communication_limit(workload, device)
        summary = {"communication limit": limit, "local batch limit": workload.n_sequences}
        caption = f"FSDP of {self.parameters / 1e9:.1f} billion parameters, {self.batch:,} tokens, {device.name} peaks"
        return [_table(caption, lines), _table("The four cases", remedies)], summary


@dataclass(frozen=True)
class Failures:
    """Time between failures against nodes, and the checkpoint interval that wastes least."""

    nodes: tuple[int, ...] = (8, 64, 512, 2048)
    per_1000_node_days: float = failures.FAILURES_PER_1000_NODE_DAYS
    save: float = 60.0
    """Seconds that training stops for a checkpoint."""
    restart: float = 300.0
    """Seconds from a failure until training runs again."""
    figure: Path | None = None
    """PNG to draw."""

    def answer(self) -> Answer:
        between = {n: failures.mean_time_between_failures(n, self.per_1000_node_days) for n in self.nodes}
        jobs = [(n, failures.Job(mtbf, self.save, self.restart)) for n, mtbf in between.items()]
        if not jobs:
            raise ValueError("--nodes names no number of nodes")
        if self.figure:
            from cs336_systems.experiments.parallelism_figures import goodput_figure
            from cs336_systems.report.figures import save

            labelled = [(f"{n:,} nodes, M = {job.mtbf_s / 3600:.3g} h", job) for n, job in jobs]
            save(goodput_figure(labelled), self.figure)
        lines = [
            {
                "nodes": f"{n:,}",
                "hours between failures": _digits(job.mtbf_s / 3600),
                "Young min": _digits(job.young_s / 60),
                "Daly min": _digits(job.daly_s / 60),
                "exact min": _digits(job.optimal_s / 60),
                "goodput % there": f"{100 * job.goodput(job.optimal_s):.2f}",
                "at Young": f"{100 * job.goodput(job.young_s):.2f}",
                "saving hourly": f"{100 * job.goodput(3600):.2f}",
            }
            for n, job in jobs
        ]
        rate = f"{self.per_1000_node_days:g} failures per 1000 node-days"
        caption = f"{rate}, {self.save:g} s to save, {self.restart:g} s to restart"
        return [_table(caption, lines)], {f"{n} nodes: optimum s": job.optimal_s for n, job in jobs}


@dataclass(frozen=True)
class Devices:
    """The presets, with their sources."""

    def answer(self) -> Answer:
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
            for device in forms.DEVICES.values()
        ]
        return [_table("W is a device's egress; on the TPU both directions of one torus axis", lines)], {
            "devices": list(forms.DEVICES)
        }


QUESTIONS = (Ring, Forms, Mesh, Accounting, Pipeline, Scaling, Failures, Devices)
