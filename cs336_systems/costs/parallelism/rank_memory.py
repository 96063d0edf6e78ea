"""The peak memory of one rank of a layout in closed form, for a search over thousands of layouts.

The step is in bf16 with hand-written blocks, whose matmuls may be in fp8. A single step's peak is better found by
running it on tensors without storage (``training/dry_run.py``); tests check that this form agrees with it, for pipeline
stages to within 3 %, else to within a few per cent. With P parameters of a stage on a tensor rank, n ranks over which
states are sharded, and k bytes of moments per parameter,

    weights         2 P; with ZeRO 3, 2 P / n and two gathered blocks
    moments         k P; from ZeRO 1 on, k P / n
    gradients       2 P; from ZeRO 2 on, 2 P / n and two blocks that are not yet scattered
    activations     layers x bytes that a block keeps / (context x tensor)
    working set     of a block's backward, of the loss in chunks of logits, or of the embedding's backward
    fp8             two more copies of each block's weights in one byte per element, one of them transposed; with ZeRO
                    3, one copy of the shard

Tensors on the host are left out, except the inputs of two blocks and the gradients in flight (``costs/offload.py``).

The peak is the largest of four moments: the loss; the backward of the last block, when all activations are kept; that
of the first block, when all gradients exist; and that of the embedding. On a pipeline stage they occur in each
operation of its list, with the micro-batches that it then holds (``held.py``): the blocks' activations from F to B, the
operands of weight gradients from B to W, the gradients of the head and its input from each loss to its B, the weight
gradients from the first W on, and one message in each direction. The CUDA context, NCCL's buffers and fragmentation are
left out.

    rank_peak(config, 8192, Layout(shards=8, zero=3)).n_bytes
"""

from functools import cache
from typing import NamedTuple

from cs336_systems.config import PRECISIONS, ModelConfig, Recipe
from cs336_systems.costs.kept import STORED, kept_sizes
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, WIDE, PeakMemory, default_chunk, rotary_bytes
from cs336_systems.costs.offload import IN_FLIGHT_BYTES, STATES, state_keys
from cs336_systems.costs.parallelism.held import Held, Task, fullest, holdings, shown
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.schedules import UNIT, make_schedule
from cs336_systems.costs.parallelism.seconds import BF16_MOMENTS, Moments
from cs336_systems.costs.parallelism.stages import Stage, blocks_of_parts, part_seconds, stages_of

_BF16 = PRECISIONS["bf16"]
_WIDTH = _BF16.parameter_bytes
_PREFETCHED = 2
"""Blocks whose weights are gathered, or whose gradients are not yet scattered, at the same time."""


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
        moments: bytes per parameter of each optimizer state, by name.
        recipe: quantization of the blocks' matmuls.
        offload: names of what is offloaded to the host, from ``costs/offload.py``.
        whole_gradients: whether ZeRO 3 keeps unsharded gradients until the last micro-batch, as this suite's FSDP does;
            pipeline stages do so at any level.

    Raises:
        ValueError: the model cannot be divided this way, the schedule does not exist for these numbers, or pipeline
            stages would offload more than the optimizer's states.
    """
    away = state_keys(offload)
    per_parameter = sum(n_bytes for name, n_bytes in moments if name not in away)
    how = _How(per_parameter, recipe, offload, whole_gradients)
    if layout.pipeline == 1:
        (stage,) = stages_of(config, length, 1)
        return _peak(_states(config, length, layout, stage, how), _moments(config, length, layout, stage, how))
    if offload - STATES.keys():
        raise ValueError(f"stages of a pipeline keep {' and '.join(sorted(offload))} on the device")
    few = shown(layout.schedule, layout.pipeline, layout.n_micro_batches)
    asked = layout.pipeline, layout.schedule, layout.chunks, few
    cases = _cases(config, length, *asked, layout.keep if layout.schedule == "zbv" else "")
    peaks = (
        _peak(_states(config, length, layout, stage, how), _staged_moments(config, length, layout, stage, each, how))
        for stage, each in cases
    )
    return max(peaks, key=lambda peak: peak.n_bytes)


class _How(NamedTuple):
    """Choices other than the layout that determine a rank's bytes."""

    per_parameter: int
    """Bytes per parameter of the optimizer states on the device."""
    recipe: Recipe
    offload: frozenset[str]
    whole_gradients: bool


class _Sizes(NamedTuple):
    """Bytes on one rank in one micro-batch."""

    stream: float
    """The rank's own rows, d_model wide."""
    kept: float
    """Activations that one block keeps."""
    put_off: float
    """Bytes that one block holds between B and W: both operands of the matmuls of its four weight gradients."""
    work: float
    """Working set of a block's backward, besides its activations and weight gradients."""
    loss: float
    embedding: float
    """Working set of the embedding's backward."""
    tables: float


@cache
def _sizes(
    config: ModelConfig, length: int, micro_batch: int, context: int, tensor: int, keep: str, recipe: Recipe
) -> _Sizes:
    parts, rows = context * tensor, micro_batch * length // context
    every = kept_sizes(config, micro_batch, length, _BF16, "all")
    kept = kept_sizes(config, micro_batch, length, _BF16, keep, recipe)
    stream, whole = every["x"] / parts, every["x"] / context
    # Tensor ranks gather the rows of both norms, and keep what they gathered.
    gathered_norms = sum(n_bytes for name, n_bytes in kept.items() if name.startswith("normed"))
    kept_here = sum(kept.values()) / parts + gathered_norms * (1 / context - 1 / parts)
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
    wide = 3 * config.d_ff + config.d_query + config.d_qkv  # tensor ranks divide these columns
    put_off = rows * (4 * config.d_model + wide / tensor) * (1 if recipe.quantized else _WIDTH)
    return _Sizes(stream, kept_here, put_off, work, loss, sums + stream, tables)


def _sizes_of(config: ModelConfig, length: int, layout: Layout, recipe: Recipe) -> _Sizes:
    return _sizes(config, length, layout.micro_batch, layout.context, layout.tensor, layout.keep, recipe)


def _states(config: ModelConfig, length: int, layout: Layout, stage: Stage, how: _How) -> dict[str, float]:
    """Bytes that are alive throughout the step, by part of memory."""
    part, n, zero = config.part(layout.tensor), layout.n_state_shards, layout.zero
    weights = _WIDTH * stage.n_parameters(part)
    parts = {
        "parameters": weights / (n if zero == 3 else 1),
        "optimizer state": how.per_parameter / _WIDTH * weights / (n if zero else 1),
        "tables and workspaces": _sizes_of(config, length, layout, how.recipe).tables,
    }
    if how.recipe.quantized:
        copies = stage.n_layers * part.n_block_parameters
        parts["parameters"] += copies / n if zero == 3 else 2 * copies
    return parts


_Bytes = tuple[float, float, float, float]
"""Bytes of gradients, activations, temporaries and gathered parameters."""
_NAMES = "gradients", "activations", "temporaries", "gathered parameters"


def _moments(config: ModelConfig, length: int, layout: Layout, stage: Stage, how: _How) -> dict[str, _Bytes]:
    """Bytes at each moment, for a rank without a pipeline."""
    part, n, zero = config.part(layout.tensor), layout.n_state_shards, layout.zero
    sizes = _sizes_of(config, length, layout, how.recipe)
    weights, block = _WIDTH * stage.n_parameters(part), _WIDTH * part.n_block_parameters
    words = _WIDTH * part.vocab_size * part.d_model
    whole = zero == 3 and how.whole_gradients and layout.n_micro_batches > 1
    gradients = weights / (n if zero >= 2 and not whole else 1)
    if "gradients" in how.offload:
        gradients = min(gradients, IN_FLIGHT_BYTES)
    kept = stage.n_layers * sizes.kept
    if "residual" in how.offload:
        kept -= max(0, stage.n_layers - _PREFETCHED) * sizes.stream
    earlier = gradients if layout.n_micro_batches > 1 else 0.0
    unscattered = _PREFETCHED * block if zero >= 2 else 0
    gathered = _gathered(part, layout, stage)
    ends = words if zero == 3 else 0
    last = words + block if zero >= 2 else 0
    return {
        "last block": (earlier + words + block, kept, sizes.work, gathered),
        "first block": (gradients + unscattered, sizes.kept, sizes.work, gathered),
        "loss": (earlier + words, kept + sizes.stream, sizes.loss, ends),
        "embedding": (gradients + last, 0.0, sizes.embedding, ends),
    }


def _gathered(part: ModelConfig, layout: Layout, stage: Stage) -> int:
    """Bytes of the weights that ZeRO 3 holds gathered while blocks run."""
    words = _WIDTH * part.vocab_size * part.d_model
    tied = words if part.tie_embeddings and stage.embedding else 0  # gathered from the first use to the last
    return _PREFETCHED * _WIDTH * part.n_block_parameters + tied if layout.zero == 3 else 0


@cache
def _cases(
    config: ModelConfig, length: int, n_stages: int, schedule: str, chunks: int, n_micro_batches: int, keep: str
) -> list[tuple[Stage, dict[Task, list[Held]]]]:
    """Each kind of stage, and the fullest cases of what such stages hold.

    Args:
        n_micro_batches: the result of ``shown``.
        keep: the blocks' level, which affects durations and therefore the lists of ``zbv``; "" for other schedules.
    """
    config = config.at_context(length)
    counts = blocks_of_parts(schedule, n_stages, chunks, config)
    durations = part_seconds(config, counts, keep) if keep else UNIT
    plan = make_schedule(schedule, n_stages, n_micro_batches, chunks, durations)
    found: dict[tuple[Stage, tuple[int, ...]], dict[Task, set[Held]]] = {}
    stages = stages_of(config, length, n_stages, schedule, chunks)
    for stage, (blocks, cases) in zip(stages, holdings(plan, counts), strict=True):
        merged = found.setdefault((stage, blocks), {})
        for task, held in cases.items():
            merged.setdefault(task, set()).update(held)
    return [(stage, {task: fullest(held) for task, held in cases.items()}) for (stage, _), cases in found.items()]


def _staged_moments(
    config: ModelConfig, length: int, layout: Layout, stage: Stage, cases: dict[Task, list[Held]], how: _How
) -> dict[str, _Bytes]:
    """The most bytes at each kind of moment on a stage, over these cases."""
    part, sizes = config.part(layout.tensor), _sizes_of(config, length, layout, how.recipe)
    block, words = _WIDTH * part.n_block_parameters, _WIDTH * part.vocab_size * part.d_model
    gathered, ends_gathered = _gathered(part, layout, stage), words if layout.zero == 3 else 0
    found: dict[str, _Bytes] = {}

    def at(moment: str, gradients: float, activations: float, temporaries: float, gathered: float = 0.0) -> None:
        n_bytes = gradients, activations, temporaries, gathered
        found[moment] = max(found.get(moment, n_bytes), n_bytes, key=sum)

    for (kind, first, last, n, is_new), held in ((task, each) for task, every in cases.items() for each in every):
        ends = stage.embedding and held.first, stage.head and held.last
        gradients = held.gradients * block + words * (any(ends) if part.tie_embeddings else sum(ends))
        kept = held.whole * sizes.kept + held.late * sizes.put_off
        kept += 2 * sizes.stream  # one message in each direction
        if stage.head:  # gradients of each loss's input and of the head, which are computed before B
            kept += held.losses * (words + sizes.stream)
        new = is_new * n * block
        if kind == "W":
            at("weights", gradients + new, kept, 0.0)
            continue
        if kind == "F":
            kept += n * sizes.kept
            at("last block", gradients, kept, sizes.work, gathered)
            if stage.head and last:
                at("loss", gradients + words, kept + sizes.stream, sizes.loss, ends_gathered)
            continue
        if stage.head and last:
            kept, gradients = kept - words, gradients + (0 if held.last else words)
        new, later = (0, sizes.put_off) if kind == "B" else (new, 0.0)
        freed = sizes.kept - later  # when a block's backward ends
        at("last block", gradients + min(new, block), kept, sizes.work, gathered)
        at("first block", gradients + new, kept - max(0, n - 1) * freed, sizes.work, gathered)
        if stage.embedding and first:
            at("embedding", gradients + new + words, kept - n * freed, sizes.embedding, ends_gathered)
    return found


def _peak(states: dict[str, float], at: dict[str, _Bytes]) -> PeakMemory:
    whole, moments = sum(states.values()), {name: sum(each) for name, each in at.items()}
    largest = max(moments, key=moments.__getitem__)
    parts = states | dict(zip(_NAMES, at[largest], strict=True))
    whole_moments = {name: int(whole + each) for name, each in moments.items()}
    return PeakMemory(whole_moments[largest], whole_moments, {name: int(each) for name, each in parts.items()})
