"""Activation-checkpointing policies as plans of what backward recomputes, which training executes and costs count.

A plan says, for the blocks of a model in order, what each keeps for backward. An ``int`` is a block that keeps its
activations. A tuple is a segment that keeps only its input; backward recomputes the segment before its own backward,
and the tuple is the plan of what is kept then. For four blocks:

    none             0, 1, 2, 3
    every-3          (0, 1, 2), (3,)
    full             (0,), (1,), (2,), (3,)         every block by itself: every-1
    first-2          (0,), (1,), 2, 3               the first ones, as the last ones' activations are used at once
    recursive        ((0,), 1), (2,), 3             halves of halves: at most log2(n) inputs and one block at a time
    keep-matmuls     as full; each block also keeps the results of its matrix products
    keep-attention   as full; each block also keeps the result of its attention
    keep-matmuls-1   as keep-attention, but for the last block, which keeps the results of all its matrix products

Segments, and segments inside segments, are Chen et al. 2016 ("Training deep nets with sublinear memory cost", sections
4.2 and 4.4). ``recursive`` is the bisection that Griewank & Walther 2000 ("revolve") refine: it never drops the right
half of a half, because backward needs it next, so that each level costs half a forward.

Long segments do not save memory. If activations determine the peak, it occurs when backward reaches the first segment:
the activations of its k blocks and the gradients of all later blocks are alive, and one of the n / k inputs is left. So
each further block in a segment adds its activations minus its gradients, no term in n / k offsets that, and
``recursive`` needs as much as ``full``. ``first-m`` goes from none to full in steps, ``keep-matmuls-k`` from
keep-matmuls to keep-attention.

A fused attention is one operator and counts as a matrix product that returns its result. With the reference attention,
``keep-matmuls`` also keeps the scores, and ``keep-attention`` keeps the product with the values: backward needs the
probabilities, too, so scores and softmax are recomputed, and only that one matmul is saved.
"""

import re
from typing import TypeAlias

from cs336_systems.config import did_you_mean

Segments: TypeAlias = "tuple[int | Segments, ...]"
"""A plan for blocks in order: an ``int`` keeps its activations, a tuple only its input."""

KEEP_MATMULS = "keep-matmuls"
KEEP_ATTENTION = "keep-attention"

_NAMED = ("none", "full", "recursive", KEEP_MATMULS, KEEP_ATTENTION)
_COUNTED = re.compile(rf"(every|first|{KEEP_MATMULS})-([1-9]\d{{0,8}})")


def canonical_policy(policy: str) -> str:
    """The one name of a policy: every-1 is full.

    Raises:
        ValueError: there is no such policy; the message lists what is allowed.
    """
    if policy not in _NAMED and not _COUNTED.fullmatch(policy):
        hint = did_you_mean(policy, _NAMED, show=repr)
        raise ValueError(
            f"unknown checkpoint policy {policy!r}: {hint}known are {', '.join(_NAMED)}, "
            f"every-K (segments of K blocks), first-M (the first M blocks) and {KEEP_MATMULS}-K (the last K blocks "
            f"keep results of matmuls, the others of attention) with positive K and M"
        )
    return "full" if policy == "every-1" else policy


def is_selective(policy: str) -> bool:
    """Whether blocks keep the results of some operations besides their inputs.

    Raises:
        ValueError: there is no such policy.
    """
    return canonical_policy(policy).startswith("keep-")


def selective_policies(policy: str, n_layers: int) -> tuple[str, ...]:
    """``keep-matmuls`` or ``keep-attention`` for each of ``n_layers`` blocks of a selective policy.

    Raises:
        ValueError: the policy is not selective.
    """
    if not is_selective(policy):
        raise ValueError(f"checkpoint policy {policy!r} keeps inputs alone")
    counted = _COUNTED.fullmatch(policy)
    if not counted:
        return (policy,) * n_layers
    n_matmuls = min(int(counted[2]), n_layers)
    return (KEEP_ATTENTION,) * (n_layers - n_matmuls) + (KEEP_MATMULS,) * n_matmuls


def make_plan(policy: str, n_layers: int) -> Segments:
    """The plan of a policy for ``n_layers`` blocks; a last segment may be shorter, and all blocks may be one.

    Raises:
        ValueError: there is no such policy.
    """
    policy = canonical_policy(policy)
    if policy == "none":
        return tuple(range(n_layers))
    if policy == "recursive":
        return _halved(0, n_layers)
    counted = _COUNTED.fullmatch(policy)
    if counted and counted[1] == "first":
        return tuple((i,) if i < int(counted[2]) else i for i in range(n_layers))
    length = int(counted[2]) if counted and counted[1] == "every" else 1
    return tuple(tuple(range(start, min(start + length, n_layers))) for start in range(0, n_layers, length))


def _halved(start: int, stop: int) -> Segments:
    if stop - start == 1:
        return (start,)
    middle = (start + stop) // 2
    return (_halved(start, middle), *_halved(middle, stop))


def recomputed_blocks(plan: Segments) -> tuple[int, int]:
    """(blocks, segments) that backward recomputes, each counted as often as it is.

    Eager recomputation stops at the last tensor that backward needs, which is the input of the segment's last matrix,
    so one product per segment is not recomputed.
    """
    blocks = segments = 0
    for part in plan:
        if not isinstance(part, int):
            inner_blocks, inner_segments = recomputed_blocks(part)
            blocks += _length(part) + inner_blocks
            segments += 1 + inner_segments
    return blocks, segments


def _length(plan: Segments) -> int:
    return sum(1 if isinstance(part, int) else _length(part) for part in plan)
