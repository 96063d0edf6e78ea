"""The bytes of messages, not on the wire, of a training step over the ranks of a mesh (``distributed/mesh.py``).

Bytes are those of ``harness/traffic.py``: of a gather or a reduce-scatter its output, of an all-reduce what it reduces,
of a send what is sent. With R tokens in a rank's micro-batch, D d_model, d_kv the width of its keys, t tensor ranks
and e bytes of an element, each block sends in a micro-batch

    tensor    forward   2 gathers of R D e and 2 reduce-scatters of R D e / t
              backward  the same, a gather for each norm that is not kept, a reduce-scatter if the residual is not
              in fp8    gathers with e = 1, and 4 times 4 bytes to agree on the largest magnitudes of what is gathered
    context   forward   keys and values, to each rank whose queries see them, at most 2 R d_kv e each
              backward  the same, and their gradients back

and embedding, head and loss about half a block's (Korthikanti et al. 2022, section 4.2.2; Liu et al. 2023). A part of a
pipeline sends R D e / t to the next one forward, and as much to the one before backward.
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
"""Each norm, and the product of it that backward recomputes if it is not kept."""
_N_AGREED, _MAXIMUM_BYTES = 4, 4
"""The largest magnitudes of both norms and of the gradients of both results of a block, in fp32."""


COPIED_FROM = 12 * 2**20
"""The fewest elements of a tensor rank's rows that a GPU copies; fewer go by collectives. A step of llama3-8b on H200s
took 392 ms by copies and 410 by collectives at 16 Mi elements (two ranks, 8,192 tokens), 433 and 254 ms at 8 Mi (four
ranks), where most likely the host was late (LOG.md)."""
COPIED_FROM_SINCE = "2026-11-28T13:37"
"""UTC time of the commit (5b04ffc2) since which few rows go by collectives."""


def copied_from(device: str) -> int:
    """``COPIED_FROM`` on a GPU, 0 on a CPU, where messages stand for copies of any size."""
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
    """Count what a tensor rank sends in a micro-batch of ``n_rows`` tokens, with as much kept as ``keep`` says.

    By copies, what blocks gather, scatter and add up goes from each rank to each other. Statistics of the loss travel
    in at least fp32.

    Args:
        recipe: of the blocks' matmuls; those that it quantizes gather in eight bits.
    """
    sent: Sent = Counter()
    if n_ranks == 1:
        return sent
    whole, own = n_rows * config.d_model * itemsize, n_rows // n_ranks * config.d_model * itemsize
    for block, level in enumerate(keep_of_blocks(keep, config.n_layers)):
        kept, quantized = kept_names(level), recipe.quantizes(block, config.n_layers)
        # The transpose that is kept of a quantized norm does not serve a product that forward has read it for.
        norms = [{norm} | ({product} if quantized else set()) for norm, product in _READERS.items()]
        again = "residual" not in kept  # which brings the norm after it along
        n_gathers = 4 + (not norms[0] <= set(kept)) + (again or not norms[1] <= set(kept))
        sent[GATHER] += n_gathers * (whole // itemsize if quantized else whole)
        sent[REDUCE] += _N_AGREED * _MAXIMUM_BYTES * quantized
        sent[SCATTER] += (4 + again) * own
        sent[REDUCE] += (2 * config.d_model + 2 * config.d_head * config.qk_norm) * itemsize
    sent[REDUCE] += config.d_model * itemsize
    if by == "copies":
        sent[SEND] = (n_ranks - 1) * (sent.pop(GATHER) // n_ranks + sent.pop(SCATTER) + sent.pop(REDUCE))
    sent[GATHER] += 2 * whole + n_ranks * n_rows * 2 * max(4, itemsize)  # embedding, head, and what the loss agrees on
    sent[SCATTER] += 2 * own
    return sent


def context_sent(
    config: ModelConfig, n_rows: int, keep: str, n_ranks: int, itemsize: int, *, rank: int, order: str
) -> Sent:
    """Count what context rank ``rank`` of ``n_ranks`` sends in a micro-batch of ``n_rows`` tokens of its own.

    Args:
        config: of what a tensor rank holds, where there are several.
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

    Results of all parts go on, outputs to the part after and gradients of inputs to the part before, but for those that
    the same stage takes. The ends of the model exchange the gradient of a tied embedding, if they are on two stages.
    A tensor rank counts what it has: ``config`` of its part, and its rows.
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
    """Count what FSDP sends on a stage in a step, but for a pipeline's first one, beside ``pipeline_sent``.

    Each pass of a part gathers that part's units, the first of them as the operation before begins. It frees all but
    the first unit of the next operation; a forward also keeps its own last one for a backward. Gradients are reduced
    once.

    Args:
        config: of what a tensor rank holds.
        blocks: those of each part of the model.
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
