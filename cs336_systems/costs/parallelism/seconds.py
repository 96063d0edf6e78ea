"""The seconds of a training step on one GPU, or over a mesh of ranks and the stages of a pipeline, before it runs.

    compute      products, attention and passes over memory at the rates of ``costs/rates.py``, divided evenly over
                 the ranks that share a batch; in context order ``ring`` the last rank's, who sees most keys; of a
                 pipeline its slowest stage's
    late         kernels are shorter than the host needs to launch them
    bubble       the stage stands still while the pipeline fills and drains (``bubbles.py``)
    optimizer    its passes over the weights that the rank updates, or the copies of states that lie on the host
    waiting      messages beside which nothing runs: rows of tensor ranks that go by collectives, gathered keys,
                 other keys where they take longer than attention, rows between stages of the first and last micro-batch
    slowed       gradients and weights: kernels run longer beside their collectives, by ``SLOWED`` of these' time, and
                 wait for what takes longer than both
    copies       of blocks' inputs and gradients that lie on the host: what takes longer than the kernels beside them

Messages inside a host take NVLink. A collective that leaves its host does so by the network card of each of its ranks
there, so that it has the lesser of the link's rate and of those cards' together, and waits for each host once. Between
neighbours (stages, and context ranks by ``zigzag`` or ``ring``) one card carries a message. The order of dimensions
(``layout.py``) decides which messages leave. Gradients that are sent once a step run beside one micro-batch, weights
and gradients of ZeRO 3 (of ZeRO 2 the gradients) beside each.

Left out: that smaller matrices reach lower rates, waits for messages that could be hidden, other
traffic on the network, and the slowest of many GPUs. Rates between hosts are not measured here: they are published line
rates by the share of NVLink that a ring reaches.

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
"""Seconds to start a message over NVLink (fitted as ``LINK_SHARE``)."""

HOST_ALPHA_S = 14e-6
"""Seconds for which a ring waits at each host, as NCCL estimates them (hwLatencies of a network, ring, protocol Simple:
NVIDIA/nccl, src/graph/tuning.cc)."""

SLOWED = 0.5
"""Seconds by which kernels run longer, a second of collectives beside them (fitted to llama3-8b at 8,192 tokens under
FSDP on two and four H200s, rows of mesh-tensor and mesh-four: 46 of 76 ms and 58 of 114)."""

BLOCK_HOST_S, BLOCK_HOST_FP8_S = 1.6e-3, 4.1e-3
"""Seconds of the host for a block's forward and backward, and for the same in fp8. From launch-bound steps: 38.5 ms in
24 blocks of 0.5B and, in fp8, 115 ms in 28 blocks of 7B beside other jobs (LOG.md). host_lead in rows of training-2
says 54 launches a block, in fp8 75, if the host can be 1,024 ahead."""

SHARDS_HOST_S, PART_HOST_S, COLLECTIVES_HOST_S, COPIES_HOST_S = 1.7e-3, 2.9e-3, 3.0e-3, 10.55e-3
"""Seconds of the host that a block takes more: under ZeRO 3, for each further part of the keys that a context rank
takes up, and where tensor ranks send rows by collectives or copy them; copies take as long under ZeRO 3. From
launch-bound steps of 32 blocks: 220 and 378 ms under ZeRO 3 on two and four context ranks, 168 and 181 by collectives
on two tensor ranks (rows of mesh-short and mesh-four), 392 to 433 by copies on two and four (mesh-tensor, mesh-four).
Another host took a fifth longer."""

Moments = tuple[tuple[str, int], ...]
"""Names of the states that the optimizer keeps, and bytes a parameter of each."""
BF16_MOMENTS: Moments = tuple(MOMENTS.items())

_ITEMSIZE = 2
_part = cache(ModelConfig.part)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the slowest rank, by part."""

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
        """Seconds by which communication makes the step longer."""
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
        network_bytes_per_s: what a GPU sends to other hosts, in one direction.
        moments: bytes a parameter that the optimizer keeps, by name.
        recipe: of blocks' matmuls.
        offload: names of what lies on the host, of ``costs/offload.py``.
        sustained: the engine's shares of the device's rates; None for this suite's on that device.
        launches: whether kernels may wait for this suite's host, which launches them one by one.
        copied_from: the fewest elements of a tensor rank's rows that are copied, if its layout asks for copies; fewer,
            and those to another host, go by collectives.
        simulated: whether the bubble is simulated; else it is the least that its schedule can have.

    Raises:
        ValueError: a rate of the device is not published, the model or its sequences cannot be divided so, or ``keep``
            is not of a hand-written backward.
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
"""Classes of kernels, and the shares of an engine for which they take no time."""


def by_class(config: ModelConfig, length: int, layout: Layout, hardware: Hardware, **how: Any) -> dict[str, float]:
    """Seconds of a step by class of kernel, the optimizer, and what links add; they sum up to its total."""
    sustained = how.pop("sustained", None) or ours_on(hardware)
    step = step_seconds(config, length, layout, hardware, sustained=sustained, **how)
    found = {}
    for name, free in CLASSES.items():
        without = step_seconds(config, length, layout, hardware, sustained=replace(sustained, **free), **how)
        found[name] = step.compute - without.compute
    links = step.waiting + step.slowed + step.copies
    return found | {"optimizer": step.optimizer, "links": links, "standing still": step.late + step.bubble}


def _host_seconds(layout: Layout, by: str, recipe: Recipe) -> float:
    """Seconds for which the host launches a block's forward and backward.

    Args:
        by: how tensor ranks' rows go, ``collectives`` or ``copies``.
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
    """Seconds of copies of what lies on the host: at the end of a step, and beside each micro-batch's kernels.

    GPUs of one host do not slow each other's copies here, which they do where its memory is busy.
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
    """That of PCIe, if there is none."""
    joined: int
    """GPUs of a host that NVLink joins."""
    pcie_bytes_per_s: float
    """Through the host, to its other GPUs."""
    card_bytes_per_s: float
    """Through a GPU's network card, to other hosts."""

    def inside(self, n_gpus: int) -> float:
        """The rate between neighbours among so many GPUs of a host."""
        return self.nvlink_bytes_per_s if n_gpus <= self.joined else self.pcie_bytes_per_s

    def ring(self, n_ranks: int, stride: int) -> tuple[Link, int]:
        """The link of collectives of ranks that are so far apart, and the hosts that their rings pass."""
        if n_ranks * stride <= GPUS_PER_HOST:
            return Link(ALPHA_S, 1 / (LINK_SHARE * self.inside(n_ranks * stride))), 1
        here = min(n_ranks, max(1, GPUS_PER_HOST // stride))
        rate = min(self.inside(GPUS_PER_HOST), here * self.card_bytes_per_s)
        return Link(ALPHA_S, 1 / (LINK_SHARE * rate)), -(-n_ranks // here)

    def neighbours(self, n_ranks: int, stride: int) -> Link:
        """The slowest link of messages from one of these ranks to the next, which one card carries between hosts."""
        if n_ranks * stride <= GPUS_PER_HOST:
            return self.ring(n_ranks, stride)[0]
        return Link(HOST_ALPHA_S, 1 / (LINK_SHARE * min(self.inside(GPUS_PER_HOST), self.card_bytes_per_s)))


class _Work(NamedTuple):
    """The seconds of a whole model on one micro-batch, on one GPU."""

    compute: float
    """The whole of a forward and a backward."""
    attention: float
    forward: float
    weights: float
    """The products that give gradients of weights."""
    block: float
    """A block's forward and backward."""
    embedding: float
    head: float
    updates: float
    """The optimizer's passes over all weights."""
    adds: float
    """How much longer products take that add to gradients than those that write them."""

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
    """Seconds in which the rows of tensor ranks travel in a micro-batch."""

    collectives: float = 0.0
    """Beside which nothing runs."""
    copies: float = 0.0
    """Which run beside all kernels but attention, and are waited for as far as they take longer."""


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
    """Seconds in which keys and values, and their gradients, travel in a micro-batch, beside which nothing runs."""
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
    """Bytes that a rank sends on a ring to gather weights and scatter gradients of one micro-batch under ZeRO 3."""
    traffic = step_traffic(stage.units(part), n_shards, compute_bytes=_ITEMSIZE, gradient_bytes=_ITEMSIZE)
    return traffic.sent_per_rank


def _ring_bytes(sent: Sent, n_ranks: int) -> float:
    """Bytes that a rank sends on a ring for gathers and reduce-scatters, both counted by their outputs."""
    return (n_ranks - 1) * (sent[GATHER] / n_ranks + sent[SCATTER])


def _stage_waits(config: ModelConfig, rows: int, layout: Layout, network: _Network) -> float:
    """Seconds in which the first micro-batch's rows reach the model's last part, and its gradients come back."""
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
        beside: seconds of kernels in a micro-batch, under which they can hide as no other messages do.
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
            if layout.pipeline > 1:  # whose gradients are reduced when all micro-batches are done
                each, once = max(0.0, each - half), once + half
        else:
            each, once = (half, once + half) if layout.zero == 2 else (0.0, once + 2 * half)
    last = max(SLOWED * (each + once), each + once - beside)
    return last + (layout.n_micro_batches - 1) * max(SLOWED * each, each - beside)
