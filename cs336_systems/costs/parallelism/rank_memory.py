"""The peak memory of one rank of a layout as a closed form, for a search over thousands of them.

The step is a bf16 one with hand-written blocks, whose products may be in fp8. The rule for one step is to run it on
tensors without storage (``training/dry_run.py``); this form follows what that finds, to within a few percent (tests
hold it to that). Pipeline stages keep the activations of several micro-batches. With P
parameters of a stage on a tensor rank, n ranks that divide states, k bytes of moments a parameter, and what a block
keeps,

    weights         2 P, of ZeRO 3 2 P / n and two blocks gathered
    moments         k P, from ZeRO 1 on k P / n
    gradients       2 P, from ZeRO 2 on 2 P / n and two blocks before they are scattered
    activations     micro-batches alive (``bubbles.alive``) x layers x kept bytes / (context x tensor)
                    between B and W what both read for the products that are put off
    working set     of a block's backward, of the loss in chunks of logits, or of the embedding's backward
    fp8             each block's weights twice more, a byte a number (transposed, too); of ZeRO 3 once, of its shard

What lies on the host is left out, but for two blocks' inputs and the gradients in flight (``costs/offload.py``).

The largest of three moments counts: the loss, the backward of the last block, when all is kept, and that of the first,
when all gradients are there. The CUDA context, NCCL's buffers and fragmentation are left out.

    rank_peak(config, 8192, Layout(shards=8, zero=3)).n_bytes
"""

from functools import cache
from typing import NamedTuple

from cs336_systems.config import PRECISIONS, ModelConfig, Recipe
from cs336_systems.costs.kept import STORED, kept_sizes
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, WIDE, PeakMemory, default_chunk, rotary_bytes
from cs336_systems.costs.offload import IN_FLIGHT_BYTES, state_keys
from cs336_systems.costs.parallelism.bubbles import alive
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.schedules import SPLIT
from cs336_systems.costs.parallelism.seconds import BF16_MOMENTS, Moments
from cs336_systems.costs.parallelism.stages import Stage, stages_of

_BF16 = PRECISIONS["bf16"]
_WIDTH = _BF16.parameter_bytes
_PREFETCHED = 2
"""Blocks whose weights are gathered, or whose gradients are not yet scattered, at once."""


def rank_peak(
    config: ModelConfig,
    length: int,
    layout: Layout,
    *,
    moments: Moments = BF16_MOMENTS,
    recipe: Recipe = STORED,
    offload: frozenset[str] = frozenset(),
    whole_gradients: bool = False,
) -> PeakMemory:
    """Predict the peak of the fullest rank in a step on sequences of ``length`` tokens.

    Args:
        moments: bytes a parameter that the optimizer keeps, by name.
        recipe: of blocks' matmuls.
        offload: names of what lies on the host, of ``costs/offload.py``.
        whole_gradients: whether ZeRO 3 keeps whole gradients until the last micro-batch, as this suite's FSDP does.

    Raises:
        ValueError: the model cannot be divided so, or the schedule does not run so.
    """
    away = state_keys(offload)
    per_parameter = sum(n_bytes for name, n_bytes in moments if name not in away)
    how = _How(per_parameter, recipe, offload, whole_gradients)
    kept: tuple[float, ...] = (1.0,)
    if layout.pipeline > 1:
        sizes = _sizes_of(config, length, layout, recipe)
        asked = layout.schedule, layout.pipeline, layout.n_micro_batches, layout.chunks
        kept = alive(*asked, round(sizes.put_off / sizes.kept, 2) if layout.schedule in SPLIT else 1.0)
    stages = stages_of(config, length, layout.pipeline, layout.schedule, layout.chunks)
    most: dict[Stage, float] = {}
    for stage, n_alive in zip(stages, kept, strict=True):
        most[stage] = max(most.get(stage, 0.0), n_alive)
    peaks = (_stage_peak(config, length, layout, *each, how) for each in most.items())
    return max(peaks, key=lambda peak: peak.n_bytes)


class _How(NamedTuple):
    """What else decides a rank's bytes."""

    per_parameter: int
    """Bytes of the optimizer's states on the device."""
    recipe: Recipe
    offload: frozenset[str]
    whole_gradients: bool


class _Sizes(NamedTuple):
    """Bytes on one rank in one micro-batch."""

    stream: float
    """Of the rank's own rows, d_model wide."""
    kept: float
    """By one block."""
    put_off: float
    """What one block holds between B and W: both operands of four products that give gradients of weights."""
    work: float
    """In a block's backward, beside what it keeps and the gradients of its weights."""
    loss: float
    embedding: float
    """In the embedding's backward."""
    tables: float


@cache
def _sizes(
    config: ModelConfig, length: int, micro_batch: int, context: int, tensor: int, keep: str, recipe: Recipe
) -> _Sizes:
    parts, rows = context * tensor, micro_batch * length // context
    every = kept_sizes(config, micro_batch, length, _BF16, "all")
    kept = kept_sizes(config, micro_batch, length, _BF16, keep, recipe)
    stream, whole = every["x"] / parts, every["x"] / context
    again = [name for name in every if name not in kept]
    if "attended" in kept and "gate_up" not in kept:  # the feed-forward's backward comes before that of attention
        again = ["residual", "normed2", "gate_up", "product"]
    elif "gate_up" in kept:
        again = ["product"]
    gathered = (2 if "gate_up" in kept else 3) * (1 - 1 / tensor) * whole
    work = sum(every[name] for name in again) / parts + stream + gathered
    words = config.vocab_size // tensor
    chunk = min(rows, default_chunk(rows, words, _WIDTH))
    loss = chunk * (words + (2 * config.d_model if tensor > 1 else 0)) * _WIDTH + 2 * stream
    sums = WIDE * (rows // 10 + min(rows, words)) * config.d_model
    tables = rotary_bytes(config.at_context(length)) + 2 * CUBLAS_WORKSPACE_BYTES + 2 * rows * 8
    wide = 3 * config.d_ff + config.d_query + config.d_qkv  # these are columns of tensor ranks
    put_off = rows * (4 * config.d_model + wide / tensor) * (1 if recipe.quantized else _WIDTH)
    return _Sizes(stream, sum(kept.values()) / parts, put_off, work, loss, sums + stream, tables)


def _sizes_of(config: ModelConfig, length: int, layout: Layout, recipe: Recipe) -> _Sizes:
    return _sizes(config, length, layout.micro_batch, layout.context, layout.tensor, layout.keep, recipe)


def _stage_peak(
    config: ModelConfig, length: int, layout: Layout, stage: Stage, n_alive: float, how: _How
) -> PeakMemory:
    """The peak of a rank of one stage that keeps so many micro-batches at once."""
    part, n, zero = config.part(layout.tensor), layout.n_state_shards, layout.zero
    sizes = _sizes_of(config, length, layout, how.recipe)
    weights, block = _WIDTH * stage.n_parameters(part), _WIDTH * part.n_block_parameters
    words = _WIDTH * part.vocab_size * part.d_model
    parts = {
        "parameters": weights / (n if zero == 3 else 1),
        "optimizer state": how.per_parameter / _WIDTH * weights / (n if zero else 1),
        "tables and workspaces": sizes.tables,
    }
    if how.recipe.quantized:
        copies = stage.n_layers * block / _WIDTH
        parts["parameters"] += copies / n if zero == 3 else 2 * copies
    whole = zero == 3 and how.whole_gradients and layout.n_micro_batches > 1
    gradients = weights / (n if zero >= 2 and not whole else 1)
    if "gradients" in how.offload:
        gradients = min(gradients, IN_FLIGHT_BYTES)
    kept = n_alive * stage.n_layers * sizes.kept
    if "residual" in how.offload:
        kept -= n_alive * max(0, stage.n_layers - _PREFETCHED) * sizes.stream
    left = kept * (1 - 1 / n_alive) + sizes.kept  # in the first block's backward of the oldest micro-batch
    earlier = gradients if layout.n_micro_batches > 1 else 0.0
    unscattered = _PREFETCHED * block if zero >= 2 else 0
    tied = words if part.tie_embeddings and stage.embedding else 0  # gathered from the first use to the last
    gathered = _PREFETCHED * block + tied if zero == 3 else 0
    at = {
        "last block": (earlier + stage.head * words + block, kept, sizes.work, gathered),
        "first block": (gradients + unscattered, left, sizes.work, gathered),
    }
    if stage.head:
        at["loss"] = earlier + words, kept + sizes.stream, sizes.loss, words if zero == 3 else 0
    if stage.embedding:
        last = words + block if zero >= 2 else 0
        at["embedding"] = gradients + last, left - sizes.kept, sizes.embedding, words if zero == 3 else 0
    names = "gradients", "activations", "temporaries", "gathered parameters"
    states, moments = sum(parts.values()), {name: sum(each) for name, each in at.items()}
    largest = max(moments, key=moments.__getitem__)
    parts |= dict(zip(names, at[largest], strict=True))
    whole_moments = {name: int(states + each) for name, each in moments.items()}
    return PeakMemory(largest, whole_moments[largest], whole_moments, {name: int(each) for name, each in parts.items()})
