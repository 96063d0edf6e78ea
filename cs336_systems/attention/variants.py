"""Attention variants as values: masks and score modifications for FlexAttention (Dong et al. 2024), and their oracle.

A ``Variant`` holds two small functions for ``torch.nn.attention.flex_attention``, which compiles them into its kernel:
``mask_mod`` says whether a query sees a key, ``score_mod`` changes a score. Both are elementwise in their indices, so
``dense_mask``, ``dense_scores`` and ``dense_attention`` evaluate them on all scores at once, without FlexAttention.

Variants combine: in ``a & b`` a query sees the keys that it sees in both, and a's score modification is applied, then
b's. So ``document(ids) & causal()`` packs sequences, and ``causal() & softcap(50.0)`` is Gemma 2.

Mods receive positions, aligned to the last key: query i has position i + n_keys - n_queries, so causal means the same
here as in the rest of this package.

FlexAttention's kernel visits blocks of 128 x 128 scores and skips fully masked ones; ``block_sparsity`` gives their
share. Building the block mask evaluates the mask on every score, and ``variant_attention`` does so on every call unless
one is passed: pass one in loops and in measurements.

Limits: on a CPU, FlexAttention has no backward to q, k and v (torch 2.11), and uncompiled it holds all scores in
memory. ``dense_attention`` gives every gradient on every device, and holds all scores, too.

    variant = sliding_window(256) & softcap(30.0)
    o = variant_attention(q, k, v, variant, block_mask=make_block_mask(variant, validate(q, k, v), q.device))
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from cs336_systems.attention.oracle import attend, scaled_scores
from cs336_systems.attention.shapes import AttentionShape, validate

BLOCK_SIZE = 128
"""Rows and columns of a block of scores: FlexAttention's default, which its kernels' tiles divide."""

RECOMPILE_LIMIT = 256
"""Variants and shapes that one process may compile. Dynamo stops at 8 by default; each variant is a compilation."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position), integer scalars -> bool."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query position, key position) -> score."""

_ONE_STAGE = {"num_stages": 1}
"""Fewer stages: a table that is read for every score is prefetched like keys and values, and three stages would need
240 KiB of shared memory, where an H200 has 227."""

T = TypeVar("T")


class Operand(NamedTuple):
    """A tensor that the mods read, such as document ids or a learned table, and the shape that it must have."""

    name: str
    tensor: Tensor
    wanted_shape: Callable[[AttentionShape], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Variant:
    """One attention variant; make one with the functions below, combine them with ``&``."""

    name: str
    mask_mod: MaskMod | None = None
    """None: every key is seen."""
    score_mod: ScoreMod | None = None
    """None: scores stay as they are."""
    operands: tuple[Operand, ...] = ()
    mask_per_batch: bool = False
    """Whether the mask differs within a batch; never between heads."""
    kernel_options: dict[str, Any] = field(default_factory=dict)
    """Options of FlexAttention's kernel for this variant."""

    def __and__(self, other: "Variant") -> "Variant":
        """The variant with the intersection of both masks; this one's score modification is applied first."""
        return Variant(
            name=f"{self.name} & {other.name}",
            mask_mod=_merge(self.mask_mod, other.mask_mod, and_masks),
            score_mod=_merge(self.score_mod, other.score_mod, _chain_mods),
            operands=self.operands + other.operands,
            mask_per_batch=self.mask_per_batch or other.mask_per_batch,
            kernel_options=self.kernel_options | other.kernel_options,
        )


def full() -> Variant:
    """Every query sees every key."""
    return Variant("full")


def causal() -> Variant:
    """A query sees the keys up to its own position."""
    return Variant("causal", mask_mod=lambda b, h, q, k: k <= q)


def sliding_window(window: int) -> Variant:
    """A query sees itself and the ``window`` - 1 keys before it (Beltagy et al. 2020; Mistral 7B).

    Raises:
        ValueError: a window below 1.
    """
    if window < 1:
        raise ValueError(f"a sliding window must hold at least the query itself: {window}")
    return Variant(f"window {window}", mask_mod=lambda b, h, q, k: (k <= q) & (q - k < window))


def document(ids: Tensor) -> Variant:
    """A query sees the keys of its own document, for packed sequences; ids (batch, n_keys), any integers."""
    return Variant(
        "document",
        mask_mod=lambda b, h, q, k: (q >= 0) & (ids[b, q.clamp(min=0)] == ids[b, k]),
        operands=(Operand("document ids", ids, lambda shape: (shape.batch, shape.n_keys)),),
        mask_per_batch=True,
    )


def prefix_lm(lengths: Tensor) -> Variant:
    """Every query sees the first ``lengths[batch]`` keys; later keys are causal (Raffel et al. 2020, fig. 4)."""
    return Variant(
        "prefix-LM",
        mask_mod=lambda b, h, q, k: (k <= q) | (k < lengths[b]),
        operands=(Operand("prefix lengths", lengths, lambda shape: (shape.batch,)),),
        mask_per_batch=True,
    )


def alibi_slopes(heads: int) -> Tensor:
    """(heads,) slopes of Press et al. 2022, section 3: 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two.

    For other n, as in the authors' code: the slopes of the next lower power of two, then every second one of twice it.
    """
    lower = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * i / lower) for i in range(1, lower + 1)]
    between = [2 ** (-4 * i / lower) for i in range(1, 2 * lower + 1, 2)]
    return torch.tensor(slopes + between[: heads - lower])


def alibi(slopes: Tensor) -> Variant:
    """Score - slope[head] |query - key| (Press et al. 2022); slopes (heads,). No mask: combine with ``causal()``."""
    return Variant(
        "ALiBi",
        score_mod=lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(),
        operands=(Operand("ALiBi slopes", slopes, lambda shape: (shape.heads,)),),
    )


def relative_bias(table: Tensor) -> Variant:
    """Score + table[head, clip(key - query) + max_distance], clipped to +-max_distance (Shaw et al. 2018, T5 per head).

    ``table`` is (heads, 2 max_distance + 1), learned: it receives a gradient.

    Raises:
        ValueError: the table has an even number of columns, and so no middle one.
    """
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise ValueError(f"a table of relative biases must be (heads, 2 max_distance + 1): {tuple(table.shape)}")
    max_distance = table.shape[1] // 2
    return Variant(
        f"relative bias {max_distance}",
        score_mod=lambda score, b, h, q, k: score + table[h, (k - q).clamp(-max_distance, max_distance) + max_distance],
        operands=(Operand("the relative biases", table, lambda shape: (shape.heads, 2 * max_distance + 1)),),
        kernel_options=_ONE_STAGE,
    )


def softcap(cap: float) -> Variant:
    """cap tanh(score / cap), which keeps scores within +-cap (Gemma 2, Riviere et al. 2024, section 2).

    Raises:
        ValueError: a cap that is not finite and positive.
    """
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"a soft cap must be finite and positive: {cap}")
    return Variant(f"softcap {cap:g}", score_mod=lambda score, b, h, q, k: cap * torch.tanh(score / cap))


def make_block_mask(variant: Variant, shape: AttentionShape, device: torch.device | str) -> BlockMask | None:
    """The variant's mask as the blocks that FlexAttention visits; None if every key is seen.

    Evaluates the mask on all n_queries n_keys scores, once for all heads, so call it outside of loops.
    """
    _check(variant, shape, torch.device(device))
    mod, offset = variant.mask_mod, shape.offset
    if mod is None:
        return None
    mask_mod = (lambda b, h, q, k: mod(b, h, q + offset, k)) if offset else mod  # FlexAttention passes query indices
    batch = shape.batch if variant.mask_per_batch else None
    return create_block_mask(mask_mod, batch, None, shape.n_queries, shape.n_keys, device, BLOCK_SIZE)


def block_sparsity(variant: Variant, shape: AttentionShape) -> float:
    """Percent of the ceil(n_queries / block) ceil(n_keys / block) blocks per head that FlexAttention skips.

    ``BlockMask.sparsity`` divides by the unpadded matrix instead, and is negative if blocks extend beyond it.
    """
    device = variant.operands[0].tensor.device if variant.operands else "cpu"
    mask = make_block_mask(variant, shape, device)
    if mask is None:
        return 0.0
    assert mask.full_kv_num_blocks is not None  # create_block_mask lists full blocks separately from partial ones
    visited_per_row = (mask.kv_num_blocks + mask.full_kv_num_blocks).double()
    return 100.0 * (1.0 - visited_per_row.mean().item() / math.ceil(shape.n_keys / BLOCK_SIZE))


def variant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    *,
    scale: float | None = None,
    block_mask: BlockMask | None = None,
) -> Tensor:
    """FlexAttention of one variant; 4-D shapes as in ``shapes.validate``, o like q. A query that sees no key gives 0.

    It is compiled, except on a CPU, where compiling takes half a minute.

    Args:
        block_mask: from ``make_block_mask`` for this variant and these lengths; built here if None.

    Raises:
        ValueError: as ``shapes.validate``; the variant's tensors do not match the shape or the device; or a gradient is
            required that FlexAttention does not support on a CPU.
    """
    shape = validate(q, k, v, scale=scale)
    _check(variant, shape, q.device)
    compiled = q.device.type != "cpu"
    if not compiled and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise ValueError(
            f"FlexAttention has no backward on a CPU for {variant.name!r}: "
            "call it under torch.no_grad(), on another device, or use dense_attention"
        )
    if block_mask is None:
        block_mask = make_block_mask(variant, shape, q.device)
    mod, offset = variant.score_mod, shape.offset
    score_mod = (lambda score, b, h, q, k: mod(score, b, h, q + offset, k)) if mod and offset else mod
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        options = variant.kernel_options or None
        return _flex(compiled)(q, k, v, score_mod, block_mask, scale, enable_gqa=True, kernel_options=options)


def dense_mask(variant: Variant, shape: AttentionShape, device: torch.device | str = "cpu") -> Tensor:
    """(batch, heads, n_queries, n_keys), True where a query sees a key, from the variant's ``mask_mod``."""
    device = torch.device(device)
    _check(variant, shape, device)
    if variant.mask_mod is None:
        return torch.ones(shape.scores, dtype=torch.bool, device=device)
    return variant.mask_mod(*_positions(shape.scores, device)).expand(shape.scores)


def dense_scores(variant: Variant, scores: Tensor) -> Tensor:
    """Scaled scores (batch, heads, n_queries, n_keys) after the variant's score modification, without its mask."""
    return scores if variant.score_mod is None else variant.score_mod(scores, *_positions(scores.shape, scores.device))


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The oracle of a variant: (o, lse) as from ``oracle_attention``, with all scores in memory and all gradients."""
    shape = validate(q, k, v, scale=scale)
    scores = dense_scores(variant, scaled_scores(q, k, shape, scale))
    return attend(scores, dense_mask(variant, shape, q.device), v, shape)


@functools.cache
def _flex(compiled: bool) -> Any:
    """FlexAttention; compiled with fullgraph, so that code that cannot be compiled raises instead of running unfused.

    Shapes are static: with dynamic shapes, mods that capture a number (softcap, relative bias) fail to compile in torch
    2.11 once a second value of the number has made it symbolic, too.
    """
    return torch.compile(flex_attention, fullgraph=True, dynamic=False) if compiled else flex_attention


def _check(variant: Variant, shape: AttentionShape, device: torch.device) -> None:
    if not shape.four_d:
        raise ValueError(f"{variant.name!r} takes (batch, heads, sequence, d_head), got inputs without heads")
    for operand in variant.operands:
        found, wanted, where = tuple(operand.tensor.shape), operand.wanted_shape(shape), operand.tensor.device
        if found != wanted:
            raise ValueError(f"{operand.name} must have shape {wanted} for this attention: {found}")
        if where.type != device.type or device.index not in (None, where.index):
            raise ValueError(f"the tensors of {variant.name!r} are on {where}, not on {device}")


def _merge(first: T | None, second: T | None, join: Callable[[T, T], T]) -> T | None:
    """``join`` of both, or the one that is not None."""
    if first is None or second is None:
        return second if first is None else first
    return join(first, second)


def _chain_mods(first: ScoreMod, second: ScoreMod) -> ScoreMod:
    return lambda score, b, h, q, k: second(first(score, b, h, q, k), b, h, q, k)


def _positions(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Batch, head, query position and key position, broadcastable, as mods receive them for scores of these sizes."""
    ranges = [
        torch.arange(size, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    ]
    ranges[2] += sizes[3] - sizes[2]
    return ranges
