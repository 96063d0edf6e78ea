"""The seconds of a bf16 training step over a mesh of replica, shard, context and tensor ranks, before it runs.

    compute      products, attention and passes over memory at the rates of ``costs/streaming.py``, divided evenly over
                 the ranks that share a batch; in context order ``ring`` the last rank's, who sees most keys
    optimizer    its passes over the weights that the rank updates
    waiting      messages beside which nothing runs: rows of tensor ranks that travel by collectives, gathered keys
    slowed       kernels that run longer beside collectives of gradients and weights: ``SLOWED`` of these' time

Left out: that smaller matrices reach lower rates, launches of kernels, and waits for messages that could be hidden.

    found = step_seconds(config, 8192, 1, "products", find_hardware(name), tensor=2)
    found.total, found.waiting
"""

from dataclasses import dataclass

from cs336_systems.config import ModelConfig
from cs336_systems.costs.communication import Link
from cs336_systems.costs.fsdp import model_units, step_traffic
from cs336_systems.costs.kept import keep_of_blocks
from cs336_systems.costs.parallelism.step import GATHER, SCATTER, Sent, context_sent, tensor_sent
from cs336_systems.costs.streaming import LEVELS, Rates, StreamedWork
from cs336_systems.hardware import Hardware

ALPHA_S, LINK_SHARE = 25e-6, 0.7
"""Seconds to start a message over NVLink, and the share of a GPU's links that a ring reaches (fitted to collectives of
1 MB to 1 GB between two H200s: writeup.md)."""

SLOWED = 0.5
"""Seconds by which kernels run longer, a second of collectives beside them (fitted to llama3-8b at 8,192 tokens under
FSDP on two and four H200s, rows of mesh-tensor and mesh-four: 46 of 76 ms and 58 of 114)."""

_ITEMSIZE = 2


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the slowest rank, by part."""

    compute: float
    optimizer: float
    waiting: float
    slowed: float

    @property
    def total(self) -> float:
        return self.compute + self.optimizer + self.waiting + self.slowed


def step_seconds(
    config: ModelConfig,
    length: int,
    n_sequences: int,
    keep: str,
    hardware: Hardware,
    *,
    data: int = 1,
    sharded: bool = False,
    replicas: int = 1,
    context: int = 1,
    order: str = "zigzag",
    tensor: int = 1,
    by: str = "collectives",
) -> StepSeconds:
    """Predict a step on sequences of ``length`` tokens, ``n_sequences`` for each group of ranks that share a batch.

    Args:
        keep: what blocks with a hand-written backward keep; parts that are left out (``-norm``) count as kept.
        data: groups of ranks that share a batch.
        sharded: whether ranks along data and context hold weights in shards (FSDP), or average gradients (DDP).
        replicas: copies of the shards among those ranks.
        by: collectives, or copies, which products hide.

    Raises:
        ValueError: a peak of the device is not published, the replicas are impossible, or ``keep`` is not of a
            hand-written backward.
    """
    if replicas < 1 or (data * context) % replicas or (replicas > 1 and not sharded):
        raise ValueError(f"{data} x {context} ranks cannot be {replicas} replicas of shards, sharded {sharded}")
    if hardware.link_bytes_per_s is None and data * context * tensor > 1:
        raise ValueError(f"no link between GPUs is published for {hardware.name}")
    link = Link(ALPHA_S, 1 / (LINK_SHARE * (hardware.link_bytes_per_s or 1)))
    rates, work = Rates.of(hardware), StreamedWork(config.at_context(length), length, length)
    compute = sum(work.seconds(kind, 0, LEVELS[0], rates) for kind in ("head", "embed", "embed backward"))
    attention = 0.0
    for kept in keep_of_blocks(keep, config.n_layers):
        level = kept.split("-")[0]
        level = "products" if level == "all" else level
        compute += sum(work.seconds(kind, 0, level, rates) for kind in ("forward", "recompute", "backward"))
        again = 1 + (level == "input")
        attention += work.attention_flops(0) * (again / rates.attention_forward + 2.5 / rates.attention_backward)
    uneven = (2 * context - 1) / context**2 - 1 / context if order == "ring" else 0.0
    own = n_sequences * (compute / (context * tensor) + uneven * attention / tensor)
    updates = config.n_layers * work.seconds("optimizer", 0, LEVELS[0], rates)
    updates += work.seconds("fixed optimizer", 0, LEVELS[0], rates)
    alike = data * context
    optimizer = updates / (tensor * (alike // replicas if sharded else 1))
    part, rows = config.part(tensor), n_sequences * length // context
    return StepSeconds(
        own,
        optimizer,
        _tensor_waits(part, rows, keep, tensor, by, link) + _context_waits(part, rows, keep, context, order, link),
        SLOWED * _data_bytes(part, alike, replicas, sharded) / link.bytes_per_s,
    )


def _tensor_waits(part: ModelConfig, rows: int, keep: str, n_ranks: int, by: str, link: Link) -> float:
    """Seconds of what tensor ranks send by collectives."""
    if n_ranks == 1:
        return 0.0
    sent = tensor_sent(part, rows, keep, n_ranks, _ITEMSIZE, by=by)
    whole = rows * part.d_model * _ITEMSIZE
    count = sent[GATHER] // whole + sent[SCATTER] * n_ranks // whole
    return link.alpha_s * (n_ranks - 1) * count + _ring_bytes(sent, n_ranks) / link.bytes_per_s


def _context_waits(part: ModelConfig, rows: int, keep: str, n_ranks: int, order: str, link: Link) -> float:
    """Seconds in which keys and values, and their gradients, are gathered and scattered."""
    sent = context_sent(part, rows, keep, n_ranks, _ITEMSIZE, rank=0, order=order)
    return _ring_bytes(sent, n_ranks) / link.bytes_per_s


def _ring_bytes(sent: Sent, n_ranks: int) -> float:
    """Bytes that a rank sends on a ring for gathers and reduce-scatters, both counted by their outputs."""
    return (n_ranks - 1) * (sent[GATHER] / n_ranks + sent[SCATTER])


def _data_bytes(part: ModelConfig, alike: int, replicas: int, sharded: bool) -> float:
    """Bytes that a rank sends on a ring for the weights that it holds like others, and for their gradients."""
    gradients = part.n_parameters * _ITEMSIZE
    if not sharded:
        return 2 * (alike - 1) / alike * gradients
    n_shards = alike // replicas
    found = 2 * (replicas - 1) / replicas * gradients / n_shards
    if n_shards > 1:
        units = model_units(part)
        found += step_traffic(units, n_shards, compute_bytes=_ITEMSIZE, gradient_bytes=_ITEMSIZE).sent_per_rank
    return found
