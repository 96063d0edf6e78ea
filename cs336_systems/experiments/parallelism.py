"""When does communication outlast computation? Questions about training on many devices, answered by arithmetic.

Each class is a question of ``scripts/parallelism.py``: its fields are the options, and ``answer`` returns tables and
main figures, and raises ValueError for a value that makes no sense. Importing this module imports no torch or pandas.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from cs336_systems.costs.communication import RingCost, cost
from cs336_systems.costs.parallelism import failures, forms, mesh, pipeline, scaling
from cs336_systems.ranks import SCHEDULES
from cs336_systems.report.command_line import complain
from cs336_systems.report.tables import Table, digits, show

Answer = tuple[list[Table], dict[str, Any]]
"""Tables, and main figures by name."""

MOST_SIMULATED = 2**17
"""Stages x micro-batches x chunks that ``pipeline`` takes: half a minute for all schedules."""


def run(question: Any) -> int:
    """Print the answer and last of all one JSON object; returns the code."""
    name = type(question).__name__.lower()
    try:
        tables, summary = question.answer()
    except ValueError as error:
        return complain(f"parallelism {name}", error)
    for table in tables:
        show(table, "auto")
    finite = {key: None if value == math.inf else value for key, value in summary.items()}
    print(json.dumps({"question": name, **finite}))
    return 0


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _tokens(count: float) -> str:
    return "never" if math.isinf(count) else f"{math.ceil(count):,}"


@dataclass(frozen=True)
class Ring:
    """Collectives on a ring, and an all-reduce that passes whole tensors instead of pieces.

    In each of the n - 1 steps of the handout's alternative every rank passes on the whole tensor that arrived before,
    and adds it to its own sum: n/2 times the bytes of the ring of pieces, hence worse from three ranks on. It needs two
    buffers more, and each rank adds in an order of its own: replicas differ in their last bits.
    """

    world_size: int = 8
    total_mib: int = 1024
    """Size of the whole tensor, MiB."""
    device: str = "h100"
    """Device whose link speed is used."""

    def answer(self) -> Answer:
        device, n, total = forms.find_device(self.device), self.world_size, self.total_mib * 2**20
        names = ("all-gather", "reduce-scatter", "all-reduce")
        costs = {name: cost(name.replace("-", "_"), n, total) for name in names}
        costs["alternate all-reduce"] = RingCost(n - 1, float((n - 1) * total))
        ms = {name: 1e3 * each.wire_bytes / device.egress(n) for name, each in costs.items()}
        lines = [
            (name, each.steps, f"{each.wire_bytes / 2**20:,.1f}", f"{ms[name]:.3f}") for name, each in costs.items()
        ]
        caption = f"{self.total_mib} MiB over {n} ranks of {device.name}; bytes in one direction of a link"
        columns = ("subject", "steps", "MiB sent per rank", "ms")
        return [Table.of(caption, columns, lines)], {f"{name} ms": each for name, each in ms.items()}


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
    """3 for SwiGLU, 2 for the layer in "How to Scale Your Model" (the scaling book)."""

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
                found = forms.pass_cost(form, layer, self.tokens, self.world_size, which)
                limit = forms.largest_world(form, layer, self.tokens, which, device.flops_per_s, egress)
                summary[f"{form} {which} largest N"] = limit
                times = _ms(found.compute_s(device)), _ms(found.communication_s(egress))
                largest = "any" if math.isinf(limit) else f"{limit:,.1f}"
                work = digits(found.flops / 1e12), f"{found.sent_bytes / 2**20:,.1f}"
                lines.append((form, which, *work, *times, largest))
        columns = ("subject", "pass", "TFLOP per device", "MiB sent per device", "compute ms", "communication ms")
        return [Table.of(self.caption(egress), (*columns, "largest N"), lines)], summary


@dataclass(frozen=True)
class Mesh(OneLayer):
    """FSDP and tensor parallelism together: the best split, by closed form and by trying all, and the largest mesh."""

    world_size: int = 256
    tokens: int = 2**20

    def answer(self) -> Answer:
        device, layer = forms.find_device(self.device), self.layer
        egress = device.egress(self.world_size)
        lines, summary = [], dict[str, Any]()
        for axes, how in {"overlapping": "axes overlap: max", "sharing": "axes share the network: sum"}.items():
            network = mesh.Network(device.flops_per_s, egress, egress, axes == "overlapping")
            best = mesh.optimal_split(layer, self.tokens, self.world_size, network)
            whole = mesh.best_whole_split(layer, self.tokens, self.world_size, network)
            x, y = mesh.largest_mesh(layer, self.tokens, network)
            splits = f"{best.fsdp:.1f} x {best.tp:.1f}", f"{whole.fsdp:g} x {whole.tp:g}"
            times = map(_ms, (whole.compute_s, whole.fsdp_s, whole.tp_s, whole.communication_s))
            lines.append((how, *splits, *times, f"{x:.1f} x {y:.1f} = {x * y:,.0f}"))
            summary |= {f"{axes} best fsdp": best.fsdp, f"{axes} whole fsdp": whole.fsdp, f"{axes} largest N": x * y}
        columns = ("how", "best X x Y", "of whole numbers", "compute ms", "FSDP ms", "TP ms", "communication ms")
        caption = f"Forward. {self.caption(egress)}, along both axes"
        return [Table.of(caption, (*columns, "largest mesh"), lines)], summary


_FSDP_AXES = 2
"""M_x, the axes of the torus that carry FSDP; tensor parallelism has one, as the question says."""


@dataclass(frozen=True)
class Accounting:
    """The 4D question about XXL: memory, the FSDP degree that fits, and the batch that keeps 16 x 4 devices busy."""

    fsdp: int = 16
    tp: int = 4
    tokens: int = 0
    """Tokens per device whose activations count for the FSDP degree."""

    def answer(self) -> Answer:
        tpu, xxl, n = forms.find_device("tpu-v5p"), mesh.XXL, self.fsdp * self.tp
        states, degree = xxl.state_bytes, xxl.least_devices(tpu.memory_bytes, self.tokens)
        h100, as_shown = math.ceil(states / 80e9), math.ceil(states / mesh.H100_BYTES)
        fitting = f"{degree} ({xxl.device_bytes(degree, self.tokens) / 1e9:.1f} GB each)"
        memory = {
            "parameters": f"{xxl.n_parameters / 1e9:.1f} billion",
            "FP32 weights, gradients, two moments": f"{states / 1e9:,.0f} GB ({states / 2**30:,.0f} GiB)",
            "BF16 activations": f"{xxl.activation_bytes_per_token / 1e6:.2f} MB per token",
            "H100 of 80 GB (of 79.6 GiB, as nvidia-smi shows one)": f"{h100} ({as_shown})",
            f"FSDP degree that fits 95 GB, {self.tokens} tokens per device": fitting,
        }
        lines, summary = [], {"states GB": states / 1e9, "h100": h100, "fsdp": degree}
        for rings_of, rings in {"n": "rings of n (the book)", "n-1": "rings of n - 1"}.items():
            shared, own = (self._network(overlapping, rings_of == "n") for overlapping in (False, True))
            by_sum, by_max = (mesh.thresholds(xxl.layer, n, network) for network in (shared, own))
            for (x, y), tokens in by_sum.items():
                each = (tokens / n, tokens, by_max[x, y] / n, by_max[x, y])
                lines.append((rings, f"{x} x {y}", *map(_tokens, each)))
                if (x, y) == (self.fsdp, self.tp):
                    summary[f"tokens per device, sum, rings of {rings_of}"] = each[0]
                    summary[f"tokens per device, max, rings of {rings_of}"] = each[2]
        where = f"{n} x {tpu.name}, M_x = {_FSDP_AXES}, M_y = 1"
        columns = ("tokens per device, sum", "in all, sum", "tokens per device, max", "in all, max")
        smaller = mesh.smaller_batches(xxl.layer, self.fsdp, self.tp, self._network(False, True))
        reduced = [(how, _tokens(tokens)) for how, tokens in smaller]
        tables = [
            Table.of("XXL: d_model 16384, d_ff 53248, 126 blocks", ("subject", "value"), list(memory.items())),
            Table.of(f"Tokens from which forward is bound by compute, {where}", ("how", "X x Y", *columns), lines),
            Table.of("How to reduce the batch", ("how", "tokens per device"), reduced),
        ]
        return tables, summary

    def _network(self, overlapping: bool, large_rings: bool) -> mesh.Network:
        tpu = forms.find_device("tpu-v5p")
        egress = tpu.egress_bytes_per_s
        return mesh.Network(tpu.flops_per_s, _FSDP_AXES * egress, egress, overlapping, large_rings)


@dataclass(frozen=True)
class Pipeline:
    """Bubble and activations of pipeline schedules, simulated operation by operation.

    Those that the number of micro-batches does not suit are left out.
    """

    stages: int = 4
    microbatches: int = 8
    chunks: int = 2
    """Chunks per stage of the interleaved schedule."""

    def answer(self) -> Answer:
        if (n := self.stages * self.microbatches * self.chunks) > MOST_SIMULATED:
            asked = f"--stages {self.stages} --microbatches {self.microbatches} --chunks {self.chunks}"
            raise ValueError(f"{asked}: their product is at most {MOST_SIMULATED:,} in a simulation, got {n:,}")
        caption = f"{self.stages} stages, {self.microbatches} micro-batches; F, B and W take one unit each"
        lines, summary, unsuited = [], {}, []
        for name in SCHEDULES:
            try:
                found = pipeline.simulate(name, self.stages, self.microbatches, chunks=self.chunks)
            except ValueError as error:
                unsuited.append(str(error))
                continue
            alive = [f"{found.peak_activations[stage]:g}" for stage in (0, -1)]
            lines.append((name, f"{found.bubble:g}", f"{100 * found.bubble_fraction:.1f}", *alive))
            summary[f"{name} bubble"] = found.bubble_fraction
        if not lines:
            raise ValueError(unsuited[0])
        caption = "; ".join((caption, *unsuited))
        columns = ("subject", "bubble, forwards", "bubble % of step", "activations, first stage")
        return [Table.of(caption, (*columns, "activations, last stage"), lines)], summary


@dataclass(frozen=True)
class Scaling:
    """Where FSDP of a 70B model stops scaling, and the remedy for each of the four ways in which it can."""

    device: str = "h100"
    parameters: int = scaling.LLAMA3_70B.n_parameters
    batch: int = 2**22
    """Tokens of the global batch."""
    context_length: int = 8192
    most_devices: int = 8192

    def answer(self) -> Answer:
        workload = scaling.ModelAndBatch(self.parameters, self.batch, self.context_length)
        device = forms.find_device(self.device)
        if self.most_devices <= device.domain_size:
            least = f"--most-devices must be above one domain of {device.domain_size}"
            raise ValueError(f"{least}, got {self.most_devices}")
        reached, lines = {False: "-", True: "reached"}, []
        for n in [8 * 2**power for power in range(32) if 8 * 2**power <= self.most_devices]:
            step = scaling.fsdp_step(workload, n, device)
            each = f"{step.tokens_per_device:,.0f}", f"{step.sequences_per_device:g}"
            times = map(digits, (step.compute_s, step.communication_s))
            lines.append((f"{n:,}", *times, *each, *(reached[limit] for limit in step.limits)))
        limits = ("batch limit", "communication limit")
        columns = ("devices", "compute s", "communication s", "tokens each", "sequences each", *limits)
        remedies = [(*(reached[limit] for limit in at), *words) for at, words in scaling.REMEDIES.items()]
        caption = f"FSDP of {self.parameters / 1e9:.1f} billion parameters, {self.batch:,} tokens, {device.name} peaks"
        tables = [
            Table.of(caption, columns, lines),
            Table.of("The four cases", (*limits, "how", "explanation"), remedies),
        ]
        limit = scaling.communication_limit(workload, device)
        return tables, {"communication limit": limit, "local batch limit": workload.n_sequences}


@dataclass(frozen=True)
class Failures:
    """Time between failures against nodes, and the checkpoint interval that wastes least."""

    nodes: tuple[int, ...] = (8, 64, 512, 2048)
    per_1000_node_days: float = failures.FAILURES_PER_1000_NODE_DAYS
    save: float = 60.0
    """Seconds that training stops for a checkpoint."""
    restart: float = 300.0
    """Seconds from a failure until training runs again."""

    def answer(self) -> Answer:
        if not self.nodes:
            raise ValueError("--nodes names no number of nodes")
        lines, summary = [], {}
        for n in self.nodes:
            between = failures.mean_time_between_failures(n, self.per_1000_node_days)
            job = failures.Job(between, self.save, self.restart)
            minutes = [digits(s / 60) for s in (job.young_s, job.daly_s, job.optimal_s)]
            goodput = [f"{100 * job.goodput(interval):.2f}" for interval in (job.optimal_s, job.young_s, 3600)]
            lines.append((f"{n:,}", digits(between / 3600), *minutes, *goodput))
            summary[f"{n} nodes: optimum s"] = job.optimal_s
        columns = ("nodes", "hours between failures", "Young min", "Daly min", "exact min", "goodput % there")
        rate = f"{self.per_1000_node_days:g} failures per 1000 node-days"
        caption = f"{rate}, {self.save:g} s to save, {self.restart:g} s to restart"
        return [Table.of(caption, (*columns, "at Young", "saving hourly"), lines)], summary


QUESTIONS = (Ring, Forms, Mesh, Accounting, Pipeline, Scaling, Failures)
