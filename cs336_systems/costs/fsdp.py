"""Fully sharded data parallelism by arithmetic: bytes per rank of states, bytes per step of collectives.

On W ranks, with P bytes of parameters of two or more dimensions in the dtype that is communicated and G of their
gradients in theirs, a step of U units sends

    all-gather        forward, and backward but for the last unit, which is still whole      (2 - share of the last) P
    reduce-scatter    backward                                                                G
    all-reduce        gradients of what is not sharded, and a count per parameter             small

of which a ring moves (W-1)/W through every link (twice for the all-reduce): half as much again as the all-reduce of
data parallelism. States are 1/W of the whole, rows rounded up: a shard has ceil(rows / W) rows on the fullest rank.
Rajbhandari et al. 2020, sections 5.3 and 7.2. Sizes are in bytes; alignment of buffers (up to 256 bytes per parameter)
is left out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, prod

from cs336_systems.config import ModelConfig, Recipe

Shape = tuple[int, ...]

COUNT_BYTES = 4
"""Bytes of the number, one for each trainable parameter, that says how many ranks have its gradient."""

MAXIMA_BYTES = 4 * 4
"""Bytes of the largest magnitudes of a quantized block's four matrices: q | k | v, output, gate | up and down."""

MEETING_BYTES = 4
"""Bytes of the number that ranks reduce to wait for each other, where they copy each other's weights."""


def is_sharded(shape: Shape) -> bool:
    return len(shape) > 1


def shard_elements(shape: Shape, world_size: int) -> int:
    """Elements that the fullest rank holds of a parameter."""
    return ceil(shape[0] / world_size) * prod(shape[1:]) if is_sharded(shape) else prod(shape)


def model_units(config: ModelConfig) -> list[list[Shape]]:
    """Parameter shapes of the reference model, unit by unit in the order of forward: embedding, blocks, norm, head.

    A tied head is in no list; the embedding's unit then stays whole until backward has passed it.
    """
    d_model, d_kv, d_ff = config.d_model, config.d_kv, config.d_ff
    d_query = config.d_query
    attention = [(d_query, d_model), (d_kv, d_model), (d_kv, d_model), (d_model, d_query)]
    biases = [(d_query,), (d_kv,), (d_kv,)] if config.qkv_bias else []
    feed_forward = [(d_ff, d_model), (d_model, d_ff), (d_ff, d_model)]
    norms = [(config.d_head,), (config.d_head,)] if config.qk_norm else []
    block: list[Shape] = [(d_model,), *attention, *biases, *norms, (d_model,), *feed_forward]
    embedding: list[Shape] = [(config.vocab_size, d_model)]
    head = [] if config.tie_embeddings else [embedding]
    return [embedding, *[block] * config.n_layers, [(d_model,)], *head]


def quantized_units(recipe: Recipe, n_layers: int) -> range:
    """The numbers of the units whose weights travel in eight bits: blocks with one scale for each matrix."""
    travels = recipe.quantized and recipe.scaling == "tensor"
    return range(1 + recipe.skip_first, 1 + n_layers - recipe.skip_last) if travels else range(0)


def held_elements(units: Sequence[Sequence[Shape]], world_size: int) -> int:
    """Elements that the fullest rank holds of all parameters."""
    return sum(shard_elements(shape, world_size) for unit in units for shape in unit)


def padded_elements(unit: Sequence[Shape], world_size: int) -> int:
    """Elements of a unit's sharded parameters, padded to equal shards."""
    return sum(world_size * shard_elements(shape, world_size) for shape in unit if is_sharded(shape))


@dataclass(frozen=True)
class StepTraffic:
    """Collectives of one step: how many of each, bytes of their whole messages, and what a rank sends on a ring."""

    counts: dict[str, int]
    messages: dict[str, int]
    sent_per_rank: float


def step_traffic(
    units: Sequence[Sequence[Shape]],
    world_size: int,
    *,
    compute_bytes: int = 4,
    gradient_bytes: int = 4,
    quantized: Collection[int] = (),
    peer_copies: bool = False,
) -> StepTraffic:
    """Communication of a step after the first, in which every unit runs once and every parameter is trained. (The first
    gathers its last unit twice, as the order of the units is not known yet.)

    Args:
        compute_bytes: per element of a gathered weight.
        gradient_bytes: per element of a gradient that is reduced; replicated gradients travel in fp32.
        quantized: numbers of the units whose weights travel in eight bits, once a step after an agreement on the
            largest magnitudes of all their matrices together. The last unit is none of them.
        peer_copies: ranks copy weights from each other's memory, and send none. They meet before and after a forward
            and a backward, in all-reduces of one number.
    """
    gathers = [
        (size, 1 if number in quantized else compute_bytes)
        for number, unit in enumerate(units)
        if (size := padded_elements(unit, world_size))
    ]
    sizes = [size for size, _ in gathers]
    replicated = sum(prod(shape) for unit in units for shape in unit if not is_sharded(shape))
    n_parameters = sum(len(unit) for unit in units)
    gathered = 2 * sum(map(prod, gathers)) - (prod(gathers[-1]) if gathers else 0)
    meetings = 4 if peer_copies else 0
    messages = {
        "all-gather": 0 if peer_copies else gathered,
        "reduce-scatter": gradient_bytes * sum(sizes),
        "all-reduce": 4 * replicated
        + COUNT_BYTES * n_parameters
        + MAXIMA_BYTES * len(quantized)
        + MEETING_BYTES * meetings,
    }
    counts = {
        "all-gather": 0 if peer_copies else max(0, 2 * len(sizes) - 1),
        "reduce-scatter": len(sizes),
        "all-reduce": 1 + bool(quantized) + meetings,
    }
    share = (world_size - 1) / world_size
    sent = share * (messages["all-gather"] + messages["reduce-scatter"] + 2 * messages["all-reduce"])
    return StepTraffic(counts, messages, sent)
