"""The bytes of the messages of a training step over a mesh (``distributed/mesh.py``), counted by tensors.

Bytes are counted as in ``harness/traffic.py``, not on the wire: the output of an all-gather or reduce-scatter, the
tensor of an all-reduce or a send. With R tokens in a rank's micro-batch, D d_model, d_kv the width of its keys, t
tensor ranks and e bytes per element, each block sends in a micro-batch

    tensor    forward   2 gathers of R D e and 2 reduce-scatters of R D e / t
              backward  the same, a gather for each norm that is not kept, a reduce-scatter if the residual is not
              in fp8    gathers with e = 1, and 4 times 4 bytes to agree on the largest magnitudes of what is gathered
    context   forward   keys and values, to each rank whose queries see them, at most 2 R d_kv e each
              backward  the same, and their gradients back

Embedding, head and loss together send about half as much as a block (Korthikanti et al. 2022, section 4.2.2; Liu et al.
2023). A part of a pipeline sends R D e / t to the next part in forward, and as much to the preceding one in backward.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from cs336_systems.config import ModelConfig, Recipe
from cs336_systems.costs.fsdp import model_units, padded_elements, step_traffic
from cs336_systems.costs.kept import STORED, keep_of_blocks, kept_names
from cs336_systems.costs.parallelism.schedules import Operation, Schedule
from cs336_systems.costs.parallelism.stages import Stage

GATHER, SCATTER, REDUCE, SEND = "all-gather", "reduce-scatter", "all-reduce", "send"

Sent = Counter[str]
"""Bytes by kind of message."""

_READERS = {"normed1": "qkv", "normed2": "gate_up"}
"""Each norm, and the matmul of its output that backward recomputes if its result is not kept."""
_N_AGREED, _MAXIMUM_BYTES = 4, 4
"""Bytes of the fp32 absmax of both norms and of the gradients of a block's two outputs."""


COPIED_FROM = 12 * 2**20
"""The fewest elements of a tensor rank's rows that a GPU copies; fewer go by collectives. A step of llama3-8b on H200s
took 392 ms by copies and 410 by collectives at 16 Mi elements (two ranks, 8,192 tokens), 433 and 254 ms at 8 Mi (four
ranks), where most likely the host was late (LOG.md)."""
COPIED_FROM_SINCE = "2026-11-28T13:37"
"""UTC time of the commit (5b04ffc2) since which few rows go by collectives."""


def copied_from(device: str) -> int:
    """``COPIED_FROM`` on a GPU; 0 on a CPU, where messages replace copies of any size."""
    return 0 if device == "cpu" else COPIED_FROM


def tensor_sent(
    config: ModelConfig,
    n_rows: int,
    keep: str,
    n_ranks: int,
    itemsize: int,
    *,
    by: str = "collectives",
    recipe: Recipe = STORED,
) -> Sent:
    """Count what a tensor rank sends in a micro-batch of ``n_rows`` tokens, if blocks keep the level ``keep``.

    By copies, each rank sends to every other one what blocks would gather, scatter or add up by collectives. Statistics
    of the loss are sent in at least fp32.

    Args:
        recipe: of the blocks' matmuls; quantized ones gather one byte per element.
    """
    sent: Sent = Counter()
    if n_ranks == 1:
        return sent
    whole, own = n_rows * config.d_model * itemsize, n_rows // n_ranks * config.d_model * itemsize
    for block, level in enumerate(keep_of_blocks(keep, config.n_layers)):
        kept, quantized = kept_names(level), recipe.quantizes(block, config.n_layers)
        # A quantized norm is kept transposed, which is no operand for recomputing forward's matmul.
        norms = [{norm} | ({product} if quantized else set()) for norm, product in _READERS.items()]
        again = "residual" not in kept  # recomputing it includes the norm after it
        n_gathers = 4 + (not norms[0] <= set(kept)) + (again or not norms[1] <= set(kept))
        sent[GATHER] += n_gathers * (whole // itemsize if quantized else whole)
        sent[REDUCE] += _N_AGREED * _MAXIMUM_BYTES * quantized
        sent[SCATTER] += (4 + again) * own
        sent[REDUCE] += (2 * config.d_model + 2 * config.d_head * config.qk_norm) * itemsize
    sent[REDUCE] += config.d_model * itemsize
    if by == "copies":
        sent[SEND] = (n_ranks - 1) * (sent.pop(GATHER) // n_ranks + sent.pop(SCATTER) + sent.pop(REDUCE))
    sent[GATHER] += 2 * whole + n_ranks * n_rows * 2 * max(4, itemsize)  # embedding, head, and the loss's statistics
    sent[SCATTER] += 2 * own
    return sent


def context_sent(
    config: ModelConfig, n_rows: int, keep: str, n_ranks: int, itemsize: int, *, rank: int, order: str
) -> Sent:
    """Count what context rank ``rank`` of ``n_ranks`` sends in a micro-batch of ``n_rows`` tokens of its own.

    Args:
        config: a tensor rank's part of the model, if there are several.
    """
    sent: Sent = Counter()
    if n_ranks == 1:
        return sent
    own, later = 2 * n_rows * config.d_kv * itemsize, n_ranks - 1 - rank
    there, back = {"ring": (later, rank), "zigzag": (later / 2 + rank, rank / 2 + later)}.get(order, (0, 0))
    for level in keep_of_blocks(keep, config.n_layers):
        n_passes = 2 if "attended" in kept_names(level) else 3  # forward, backward, and forward once more
        if order == "gathered":
            sent[GATHER] += n_passes * n_ranks * own
            sent[SCATTER] += own
        else:
            sent[SEND] += int((n_passes * there + back) * own)
    return sent


def pipeline_sent(config: ModelConfig, n_rows: int, plan: Schedule, stage: int, itemsize: int) -> Sent:
    """Count what a stage sends in a step of the schedule's micro-batches, each of ``n_rows`` tokens.

    Each part sends its output to the next part and its input's gradient to the preceding one, unless the same stage has
    that part. The first and last part exchange the gradient of a tied embedding if they are on two stages. For a tensor
    rank, ``config`` is its part of the model and ``n_rows`` counts its rows.
    """
    stages = [of for of, _ in plan.places]
    crossed = sum((here == stage) + (there == stage) for here, there in pairwise(stages) if here != there)
    sent = plan.microbatches * crossed * n_rows * config.d_model
    if config.tie_embeddings and stages[0] != stages[-1] and stage in (stages[0], stages[-1]):
        sent += config.vocab_size * config.d_model
    return Counter({SEND: sent * itemsize})


def sharded_sent(
    config: ModelConfig, plan: Schedule, blocks: Sequence[slice], stage: int, itemsize: int, n_shards: int
) -> Sent:
    """Count what FSDP sends on a stage in every step after the first, in addition to ``pipeline_sent``.

    Each pass of a part gathers that part's units; the first unit is gathered when the preceding operation begins. The
    pass frees all units except the first unit of the next operation; a forward also keeps its last unit for a backward.
    Gradients are reduced once.

    Args:
        config: a tensor rank's part of the model.
        blocks: the blocks of each part of the model.
    """
    words, block, *_ = (padded_elements(unit, n_shards) for unit in model_units(config))
    units: list[list[int | str]] = [list(range(own.start, own.stop)) for own in blocks]
    units[0].insert(0, "embedding")
    units[-1].append("embedding" if config.tie_embeddings else "head")
    gathered: list[int | str] = []
    there, order = set[int | str](), plan.orders[stage]

    def first_of(operation: Operation | None) -> set[int | str]:
        if operation is None or operation.kind == "W":
            return set()
        own = units[plan.part(stage, operation.chunk)]
        return {own[0 if operation.kind == "F" else -1]}

    for operation, following in zip(order, (*order[1:], None), strict=True):
        ahead, forward = first_of(following), operation.kind == "F"
        if forward:
            there &= first_of(operation) | ahead
        own = [] if operation.kind == "W" else units[plan.part(stage, operation.chunk)]
        gathered += (set(own) | ahead) - there
        there = there | ahead if operation.kind == "W" else ahead | ({own[-1]} if forward else set())
    n_gathered = sum(words if isinstance(unit, str) else block for unit in gathered)
    n_blocks = sum(own.stop - own.start for (of, _), own in zip(plan.places, blocks, strict=True) if of == stage)
    held = Stage(n_blocks, *(plan.places[part][0] == stage for part in (0, -1))).units(config)
    messages = step_traffic(held, n_shards, compute_bytes=itemsize, gradient_bytes=itemsize).messages
    return Counter(
        {GATHER: n_gathered * itemsize, SCATTER: messages["reduce-scatter"] // n_shards, REDUCE: messages["all-reduce"]}
    )
