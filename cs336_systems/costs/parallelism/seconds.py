"""Predicts the seconds of a training step on one GPU, or on a mesh of ranks and pipeline stages.

    compute      matmuls, attention and passes over memory at the rates of ``costs/rates.py``, divided evenly over the
                 ranks that share a batch; in context order ``ring`` for the last rank, which sees the most keys; in a
                 pipeline for its slowest stage
    late         the GPU waits for the host, which launches kernels more slowly than they run
    bubble       the stage is idle while the pipeline fills and drains (``bubbles.py``)
    optimizer    its passes over the weights that the rank updates, or copies of offloaded states if these take longer
    waiting      exposed messages: rows that tensor ranks send by collectives; gathered keys, and other keys as far as
                 they take longer than attention; rows between stages for the first and last micro-batch
    slowed       collectives of gradients and weights: kernels beside them take longer, by ``SLOWED`` of the
                 collectives' time, or wait for them if they take longer than kernels
    copies       of offloaded blocks' inputs and gradients, as far as they take longer than the kernels beside them

Messages inside a host use NVLink. A collective over several hosts uses the network card of each of its ranks: its rate
is the smaller of the link's and that of a host's cards together, and it pays one latency per host. Between neighbours
(stages, and context ranks in order ``zigzag`` or ``ring``) one card carries a message. The order of dimensions
(``layout.py``) decides which messages leave a host. Gradients that are sent once per step overlap one micro-batch; the
weights and gradients of ZeRO 3, and the gradients of ZeRO 2, overlap each micro-batch.

Not modelled: lower rates of smaller matrices, waits for messages that could be hidden, other traffic on the network,
and the slowest of many GPUs. Rates between hosts are not measured here: they are published line rates times the share
of NVLink's rate that a ring reaches.

    found = step_seconds(config, 8192, Layout(tensor=2), hardware_named("h200"))
    found.total, found.waiting
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from cs336_systems.config import ModelConfig, Recipe
from cs336_systems.costs.communication import Link
from cs336_systems.costs.fsdp import step_traffic
from cs336_systems.costs.kept import STORED, keep_of_blocks, kept_names
from cs336_systems.costs.offload import state_keys
from cs336_systems.costs.parallelism.bubbles import least_bubble, span_seconds
from cs336_systems.costs.parallelism.forms import GPUS_PER_HOST, NETWORK_BYTES_PER_S
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.schedules import places_of
from cs336_systems.costs.parallelism.stages import Stage, stages_of
from cs336_systems.costs.parallelism.step import COPIED_FROM, GATHER, SCATTER, SEND, Sent, context_sent, tensor_sent
from cs336_systems.costs.rates import LINK_SHARE, Rates, Sustained, ours_on
from cs336_systems.costs.streaming import LEVELS, MOMENTS, StreamedWork
from cs336_systems.hardware import Hardware

ALPHA_S = 25e-6
"""Latency of a message over NVLink in seconds (fitted like ``LINK_SHARE``)."""

HOST_ALPHA_S = 14e-6
"""Latency of a ring per host in seconds, by NCCL's estimate (hwLatencies of a network, ring, protocol Simple:
NVIDIA/nccl, src/graph/tuning.cc)."""

SLOWED = 0.5
"""Extra seconds of kernels per second of collectives beside them (fitted to llama3-8b at 8,192 tokens under FSDP on two
and four H200s, rows of mesh-tensor and mesh-four: 46 of 76 ms and 58 of 114 ms)."""

BLOCK_HOST_S, BLOCK_HOST_FP8_S = 1.6e-3, 4.1e-3
"""Host seconds to launch a block's forward and backward, in bf16 and in fp8. From launch-bound steps: 38.5 ms in
24 blocks of 0.5B and, in fp8, 115 ms in 28 blocks of 7B beside other jobs (LOG.md). host_lead in rows of training-2
says 54 launches a block, in fp8 75, if the host can be 1,024 ahead."""

SHARDS_HOST_S, PART_HOST_S, COLLECTIVES_HOST_S, COPIES_HOST_S = 1.7e-3, 2.9e-3, 3.0e-3, 10.55e-3
"""Additional host seconds per block: under ZeRO 3; for each further part of the keys that a context rank visits; if
tensor ranks send rows by collectives; and if they copy rows, which takes as long under ZeRO 3. From
launch-bound steps of 32 blocks: 220 and 378 ms under ZeRO 3 on two and four context ranks, 168 and 181 by collectives
on two tensor ranks (rows of mesh-short and mesh-four), 392 to 433 by copies on two and four (mesh-tensor, mesh-four).
Another host took a fifth longer."""

Moments = tuple[tuple[str, int], ...]
"""(Name, bytes per parameter) of each optimizer state."""
BF16_MOMENTS: Moments = tuple(MOMENTS.items())

_ITEMSIZE = 2
_part = cache(ModelConfig.part)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the slowest rank, by the parts of the module's docstring."""

    compute: float
    optimizer: float
    waiting: float
    slowed: float
    late: float = 0.0
    bubble: float = 0.0
    copies: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.optimizer + self.waiting + self.slowed + self.late + self.bubble + self.copies

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return self.waiting + self.slowed


def step_seconds(
    config: ModelConfig,
    length: int,
    layout: Layout,
    hardware: Hardware,
    *,
    network_bytes_per_s: float = NETWORK_BYTES_PER_S,
    moments: Moments = BF16_MOMENTS,
    recipe: Recipe = STORED,
    offload: frozenset[str] = frozenset(),
    sustained: Sustained | None = None,
    simulated: bool = True,
    launches: bool = True,
    copied_from: int = COPIED_FROM,
) -> StepSeconds:
    """Predict a step on sequences of ``length`` tokens.

    Args:
        network_bytes_per_s: the rate at which a GPU sends to other hosts.
        moments: bytes per parameter of each optimizer state, by name.
        recipe: quantization of the blocks' matmuls.
        offload: names of what is offloaded to the host, from ``costs/offload.py``.
        sustained: the share of each device rate that an engine reaches; None for this suite's shares on that device.
        launches: whether to model launch-bound steps of this suite, whose host launches kernels one by one.
        copied_from: if the layout has tensor ranks copy rows, the fewest elements for which they do so; fewer, and rows
            to another host, go by collectives.
        simulated: whether the bubble is simulated; else it is the least that its schedule can have.

    Raises:
        ValueError: a rate of the device is not published, the model or its sequences cannot be divided this way, or
            ``keep`` is no level of hand-written blocks.
    """
    m, parts, rates = layout.n_micro_batches, layout.context * layout.tensor, Rates.of(hardware, sustained=sustained)
    if recipe.quantized and not rates.quantized:
        raise ValueError(f"{hardware.name} has no products in fp8")
    work = _work(config, length, layout.micro_batch, layout.keep, moments, rates, recipe)
    part = _part(config, layout.tensor)
    stages = stages_of(config, length, layout.pipeline, layout.schedule, layout.chunks)
    slowest, fullest = max(stages, key=work.cost), max(stages, key=lambda stage: stage.n_parameters(config))
    whole = Stage(config.n_layers, True, True)
    own = work.cost(slowest) / work.cost(whole) / parts
    c = layout.context
    uneven = (2 * c - 1) / c - 1 if layout.context_order == "ring" else 0.0
    compute = own * (work.compute + uneven * work.attention)
    pcie = rates.link_out_both
    network = _Network(hardware.link_bytes_per_s or pcie, hardware.nvlink_joins, pcie, network_bytes_per_s)
    rows = layout.micro_batch * length // c
    many = rows // layout.tensor * config.d_model >= copied_from
    by = layout.tensor_by if many and layout.tensor <= GPUS_PER_HOST else "collectives"
    rows_sent = _tensor_seconds(part, slowest.n_layers, rows, layout.keep, layout.tensor, by, recipe, network)
    beside = min(rows_sent.copies, own * (work.compute - work.attention))
    waits = rows_sent.collectives + rows_sent.copies - beside
    waits += _context_waits(part, slowest, rows, layout, network, own * work.attention)
    slowed = _slowed(part, fullest, layout, network, compute - beside)
    updates = work.updates * fullest.n_parameters(config) / config.n_parameters
    host = _host_seconds(layout, by, recipe)
    adds = work.adds * fullest.n_parameters(config) / config.n_parameters / layout.tensor
    late = max(0.0, m * (slowest.n_layers * host - compute - waits) - (m - 1) * adds - slowed) if launches else 0.0
    idle = 0.0
    if layout.pipeline > 1:
        added = (m - 1) / m * adds
        each = compute + added + waits + late / m
        durations = {"F": own * work.forward + (waits + late / m) / 2, "W": own * work.weights + added}
        durations["B"] = each - durations["F"] - durations["W"]
        if simulated:
            idle = span_seconds(layout.schedule, layout.pipeline, m, layout.chunks, durations) - m * each
        else:
            idle = least_bubble(layout.schedule, layout.pipeline, layout.chunks, durations)
    optimizer = updates / (layout.tensor * layout.n_state_shards)
    away, copied = _offloaded(part, fullest, slowest, rows, layout, moments, offload, rates)
    copies = max(0.0, copied - compute - waits - late / m)
    waiting = m * waits + _stage_waits(config, rows, layout, network)
    return StepSeconds(m * compute + (m - 1) * adds, max(optimizer, away), waiting, slowed, late, idle, m * copies)


CLASSES: dict[str, dict[str, float]] = {
    "products": {"products": inf, "quantized": inf},
    "attention": {"attention_forward": inf, "attention_backward": inf},
    "passes over memory": {"memory": inf},
}
"""Classes of kernels, with the shares of ``Sustained`` that, when infinite, make them take no time."""


def by_class(config: ModelConfig, length: int, layout: Layout, hardware: Hardware, **how: Any) -> dict[str, float]:
    """Seconds of a step by class of kernel, optimizer, links and idle time; they sum up to its total."""
    sustained = how.pop("sustained", None) or ours_on(hardware)
    step = step_seconds(config, length, layout, hardware, sustained=sustained, **how)
    found = {}
    for name, free in CLASSES.items():
        without = step_seconds(config, length, layout, hardware, sustained=replace(sustained, **free), **how)
        found[name] = step.compute - without.compute
    links = step.waiting + step.slowed + step.copies
    return found | {"optimizer": step.optimizer, "links": links, "standing still": step.late + step.bubble}


def _host_seconds(layout: Layout, by: str, recipe: Recipe) -> float:
    """Seconds that the host needs to launch a block's forward and backward.

    Args:
        by: how tensor ranks send rows, ``collectives`` or ``copies``.
    """
    seconds = BLOCK_HOST_FP8_S if recipe.quantized else BLOCK_HOST_S
    if layout.context_order != "gathered":
        seconds += PART_HOST_S * (layout.context - 1)
    if layout.tensor > 1 and by == "copies":
        return seconds + COPIES_HOST_S
    if layout.tensor > 1:
        seconds += COLLECTIVES_HOST_S
    if layout.zero == 3 and layout.n_state_shards > 1:
        seconds += SHARDS_HOST_S
    return seconds


def _offloaded(
    part: ModelConfig,
    fullest: Stage,
    slowest: Stage,
    rows: int,
    layout: Layout,
    moments: Moments,
    offload: frozenset[str],
    rates: Rates,
) -> tuple[float, float]:
    """Seconds of copies of offloaded tensors: (at the end of a step, beside each micro-batch's kernels).

    The model ignores that GPUs of one host slow each other's copies if they saturate its memory.
    """
    parameters = fullest.n_parameters(part)
    keys = state_keys(offload)
    states = sum(n_bytes for name, n_bytes in moments if name in keys) * parameters / layout.n_state_shards
    gradients = _ITEMSIZE * parameters if "gradients" in offload else 0
    rows //= layout.tensor
    inputs = slowest.n_layers * rows * part.d_model * _ITEMSIZE if "residual" in offload else 0
    beside = rates.link_seconds(0, inputs) + rates.link_seconds(inputs + gradients, gradients)
    return rates.link_seconds(states + gradients, states), beside


@dataclass(frozen=True)
class _Network:
    """The rates of messages between GPUs, in bytes/s each way."""

    nvlink_bytes_per_s: float
    """NVLink's rate, or PCIe's if there is no NVLink."""
    joined: int
    """How many GPUs of a host NVLink connects."""
    pcie_bytes_per_s: float
    """Through the host, to its other GPUs."""
    card_bytes_per_s: float
    """Through a GPU's network card, to other hosts."""

    def inside(self, n_gpus: int) -> float:
        """The rate between neighbours among ``n_gpus`` GPUs of a host."""
        return self.nvlink_bytes_per_s if n_gpus <= self.joined else self.pcie_bytes_per_s

    def ring(self, n_ranks: int, stride: int) -> tuple[Link, int]:
        """The link of collectives over ranks that are ``stride`` apart, and the number of hosts in their ring."""
        if n_ranks * stride <= GPUS_PER_HOST:
            return Link(ALPHA_S, 1 / (LINK_SHARE * self.inside(n_ranks * stride))), 1
        here = min(n_ranks, max(1, GPUS_PER_HOST // stride))
        rate = min(self.inside(GPUS_PER_HOST), here * self.card_bytes_per_s)
        return Link(ALPHA_S, 1 / (LINK_SHARE * rate)), -(-n_ranks // here)

    def neighbours(self, n_ranks: int, stride: int) -> Link:
        """The slowest link between consecutive ranks of these; between hosts, one card carries a message."""
        if n_ranks * stride <= GPUS_PER_HOST:
            return self.ring(n_ranks, stride)[0]
        return Link(HOST_ALPHA_S, 1 / (LINK_SHARE * min(self.inside(GPUS_PER_HOST), self.card_bytes_per_s)))


class _Work(NamedTuple):
    """The seconds of the whole model on one micro-batch on one GPU."""

    compute: float
    """Forward and backward."""
    attention: float
    forward: float
    weights: float
    """The matmuls of weight gradients."""
    block: float
    """A block's forward and backward."""
    embedding: float
    head: float
    updates: float
    """The optimizer's passes over all weights."""
    adds: float
    """How much longer matmuls take that accumulate into gradients than those that overwrite them."""

    def cost(self, stage: Stage) -> float:
        """Seconds of a stage's forward and backward."""
        return self.block * stage.n_layers + self.embedding * stage.embedding + self.head * stage.head


@cache
def _work(
    config: ModelConfig, length: int, micro_batch: int, keep: str, moments: Moments, rates: Rates, recipe: Recipe
) -> _Work:
    stored = StreamedWork(config.at_context(length), length, micro_batch * length, moments=moments)
    added = stored.gradient_bytes("head") + config.n_layers * stored.gradient_bytes("backward")
    adds, rates = rates.added * added / rates.memory, replace(rates, added=0.0)
    kinds = ("head", "embed", "embed backward", "optimizer")
    seconds = {kind: stored.seconds(kind, 0, LEVELS[0], rates) for kind in kinds}
    embedding, head = seconds["embed"] + seconds["embed backward"], seconds["head"]
    blocks = attention = forward = weights = 0.0
    of_products = stored.hardware_flops("forward", 0, LEVELS[0]) - stored.attention_flops(0)
    of_attention = rates.attention(config.d_head, length)
    n_layers = config.n_layers
    of_blocks = Counter((kept, recipe.quantizes(i, n_layers)) for i, kept in enumerate(keep_of_blocks(keep, n_layers)))
    for (kept, quantized), n in of_blocks.items():
        work = replace(stored, recipe=recipe) if quantized else stored
        parts = {kind: n * work.seconds(kind, 0, kept, rates) for kind in ("forward", "recompute", "backward")}
        blocks += sum(parts.values())
        forward += parts["forward"]
        again = 1 + ("attended" not in kept_names(kept))
        attention += n * stored.attention_flops(0) * (again / of_attention[0] + 2.5 / of_attention[1])
        weights += n * of_products / (rates.quantized if quantized else rates.products)
    updates = config.n_layers * seconds["optimizer"] + stored.seconds("fixed optimizer", 0, LEVELS[0], rates)
    compute, block = embedding + head + blocks, blocks / config.n_layers
    forward += seconds["embed"] + head / 3
    weights += head / 3
    return _Work(compute, attention, forward, weights, block, embedding, head, updates, adds)


class _RowSeconds(NamedTuple):
    """Seconds of the messages with tensor ranks' rows in a micro-batch."""

    collectives: float = 0.0
    """Exposed."""
    copies: float = 0.0
    """These overlap all kernels except attention; they are exposed as far as they take longer."""


@cache
def _tensor_seconds(
    part: ModelConfig, n_layers: int, rows: int, keep: str, n_ranks: int, by: str, recipe: Recipe, network: _Network
) -> _RowSeconds:
    if n_ranks == 1:
        return _RowSeconds()
    link, _ = network.ring(n_ranks, 1)
    layers = replace(part, n_layers=max(1, n_layers))
    sent = tensor_sent(layers, rows, keep, n_ranks, _ITEMSIZE, by=by, recipe=recipe)
    whole = rows * part.d_model * _ITEMSIZE
    count = sent[GATHER] // whole + sent[SCATTER] * n_ranks // whole
    collectives = link.alpha_s * (n_ranks - 1) * count + _ring_bytes(sent, n_ranks) / link.bytes_per_s
    return _RowSeconds(collectives, sent[SEND] / link.bytes_per_s)


def _context_waits(
    part: ModelConfig, stage: Stage, rows: int, layout: Layout, network: _Network, attention: float
) -> float:
    """Exposed seconds of sending keys, values and their gradients in a micro-batch."""
    n_ranks = layout.context
    if n_ranks == 1:
        return 0.0
    link, hosts = network.ring(n_ranks, layout.stride("context"))
    sent = _context_sent(part, stage.n_layers, rows, layout.keep, n_ranks, layout.context_order)
    between = network.neighbours(n_ranks, layout.stride("context"))
    beside = max(0.0, sent[SEND] / between.bytes_per_s - attention)
    latency = 3 * stage.n_layers * HOST_ALPHA_S * (hosts - 1) if sent[GATHER] else 0.0
    return _ring_bytes(sent, n_ranks) / link.bytes_per_s + beside + latency


@cache
def _context_sent(part: ModelConfig, n_layers: int, rows: int, keep: str, n_ranks: int, order: str) -> Sent:
    layers = replace(part, n_layers=max(1, n_layers))
    return context_sent(layers, rows, keep, n_ranks, _ITEMSIZE, rank=0, order=order)


@cache
def _sharded_bytes(part: ModelConfig, stage: Stage, n_shards: int) -> float:
    """Bytes that a rank sends to gather weights and scatter gradients of one micro-batch under ZeRO 3, by rings."""
    traffic = step_traffic(stage.units(part), n_shards, compute_bytes=_ITEMSIZE, gradient_bytes=_ITEMSIZE)
    return traffic.sent_per_rank


def _ring_bytes(sent: Sent, n_ranks: int) -> float:
    """Bytes that a rank sends on a ring for all-gathers and reduce-scatters; ``sent`` counts their outputs."""
    return (n_ranks - 1) * (sent[GATHER] / n_ranks + sent[SCATTER])


def _stage_waits(config: ModelConfig, rows: int, layout: Layout, network: _Network) -> float:
    """Seconds to send one micro-batch's rows through all stages, and its gradients back."""
    if layout.pipeline == 1:
        return 0.0
    link = network.neighbours(layout.pipeline, layout.stride("pipeline"))
    n_bytes = rows * config.d_model * _ITEMSIZE / layout.tensor
    places = places_of(layout.schedule, layout.pipeline, layout.chunks)
    crossed = sum(here != there for (here, _), (there, _) in pairwise(places))
    return 2 * crossed * (link.alpha_s + n_bytes / link.bytes_per_s)


def _slowed(part: ModelConfig, stage: Stage, layout: Layout, network: _Network, beside: float) -> float:
    """Seconds that collectives of weights and gradients add to a step.

    Args:
        beside: seconds of a micro-batch's kernels that no other messages overlap, and that can hide these.
    """
    n_shards, n_copies = layout.n_state_shards, layout.n_copies
    gradients, n_units = stage.n_parameters(part) * _ITEMSIZE, stage.n_layers + stage.embedding + stage.head
    each = once = 0.0
    if n_copies > 1:
        link, hosts = network.ring(n_copies, layout.stride("context" if n_shards == 1 else "replica"))
        once = 2 * (n_copies - 1) / n_copies * gradients / n_shards / link.bytes_per_s
        once += 2 * n_units * HOST_ALPHA_S * (hosts - 1)
    if n_shards > 1:
        link, hosts = network.ring(n_shards, layout.stride("context"))
        latency = n_units * HOST_ALPHA_S * (hosts - 1)
        half = (n_shards - 1) / n_shards * gradients / link.bytes_per_s + latency
        if layout.zero == 3:
            each = _sharded_bytes(part, stage, n_shards) / link.bytes_per_s + 3 * latency
            if layout.pipeline > 1:  # gradients are reduced once, after all micro-batches
                each, once = max(0.0, each - half), once + half
        else:
            each, once = (half, once + half) if layout.zero == 2 else (0.0, once + 2 * half)
    last = max(SLOWED * (each + once), each + once - beside)
    return last + (layout.n_micro_batches - 1) * max(SLOWED * each, each - beside)
