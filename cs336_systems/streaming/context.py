"""Attention of one chunk of a sequence that is longer than a chunk.

The keys and values of a layer are kept for the whole sequence, its *context*. Forward visits chunks first to last. A
chunk computes its keys and values by a matmul of their own (``APART`` in ``blocks/saved.py``) and writes them behind
those of earlier chunks; its queries attend to all of them, and its last query sees the last key. Backward visits chunks
last to first. Each adds its queries' share to the gradients of all keys and values up to its own. The sum for its own
is then complete, because no earlier query sees them.

``attending`` is called like any other attention of ``blocks/ops.py``. So recomputation reads the same keys with the
same function, and gets the same bits.

Shape legend: S positions of a sequence up to a chunk's last, K key/value heads, E d_head. Keys and values of a token
are neighbours: (S, 2, K, E).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from cs336_systems.blocks import BlockOps


@dataclass(frozen=True)
class Sums:
    """Gradients of keys and values, (S, 2, K, E) each."""

    total: Tensor
    """The sum over the chunks so far, in at least fp32."""
    part: Tensor
    """Memory for the gradients from one chunk's queries."""
    is_last: bool
    """Whether the chunk is its sequence's last. Its backward comes first, so it overwrites ``total``."""


def attending(
    ops: BlockOps, context_S2KE: Tensor, sums: Sums | None = None, norm_keys: Callable[[Tensor], Tensor] | None = None
) -> BlockOps:
    """``ops`` with attention for one chunk, whose keys and values are the last of ``context``.

    Args:
        sums: needed for backward.
        norm_keys: norm and rotation of keys, (S, 2 K E) -> (S, K E), if the context holds keys before their norm.
    """

    def keys_and_values() -> tuple[Tensor, Tensor]:
        keys, values = _heads(context_S2KE)
        if norm_keys is not None:
            keys = norm_keys(context_S2KE.flatten(1)).view(keys.shape[2], *keys.shape[1::2]).transpose(0, 1)[None]
        return keys, values

    def forward(q_1HSE: Tensor, k_1KSE: Tensor, v_1KSE: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention_forward(q_1HSE, *keys_and_values())

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, into: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        assert sums is not None
        dq, *own = into
        ops.attention_backward(do, q, *keys_and_values(), o, lse, (dq, *_heads(sums.part)))
        if sums.is_last:
            sums.total.copy_(sums.part)
        else:
            sums.total.add_(sums.part)
        for gradient, complete in zip(own, _heads(sums.total[-q.shape[2] :]), strict=True):
            gradient.copy_(complete)

    return replace(ops, attention_forward=forward, attention_backward=backward, rotates_back=False)


def _heads(keys_values_S2KE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the layout of attention: views (1, K, S, E)."""
    keys, values = keys_values_S2KE.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    return keys, values
