"""Attention of a sequence that is longer than a chunk: the keys and values of a layer stay, chunk after chunk.

Forward visits chunks first to last. A chunk's keys and values, a product of their own (``blocks/saved.py``: ``APART``),
are written behind those of the chunks before, and its queries attend to all of them, the last query seeing the last
key. Backward visits chunks last to first: each adds what its queries give to the gradients of all keys and values up to
its own, and what has then been added up for its own is complete, as no earlier query sees them. A block calls this as
it calls any attention (``blocks/ops.py``), so what is not kept is computed again from the same keys by the same
function: the same bits.

    ops = attending(REFERENCE, context)                                   # forward, and recomputation
    ops = attending(REFERENCE, context, Sums(dcontext, part, is_last=...))

Sums over chunks are kept in at least fp32. One set of gradients beside them holds what one chunk gives.

Shape legend: S positions of a sequence up to a chunk's last, K key/value heads, E d_head; keys and values of a token
are neighbours: (S, 2, K, E).
"""

from dataclasses import dataclass, replace

from torch import Tensor

from cs336_systems.blocks.ops import BlockOps


@dataclass(frozen=True)
class Sums:
    """Gradients of keys and values, (S, 2, K, E) each."""

    total: Tensor
    """Over the chunks that have been; at least fp32."""
    part: Tensor
    """Memory for those of one chunk."""
    is_last: bool
    """Whether the chunk is its sequence's last, whose backward comes first: ``total`` is then overwritten."""


def attending(ops: BlockOps, context_S2KE: Tensor, sums: Sums | None = None) -> BlockOps:
    """``ops`` for a chunk of one sequence, whose own keys and values are the last ones of ``context``."""

    def forward(q_1HSE: Tensor, k_1KSE: Tensor, v_1KSE: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention_forward(q_1HSE, *_heads(context_S2KE))

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, into: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        assert sums is not None
        dq, *own = into
        ops.attention_backward(do, q, *_heads(context_S2KE), o, lse, (dq, *_heads(sums.part)))
        if sums.is_last:
            sums.total.copy_(sums.part)
        else:
            sums.total.add_(sums.part)
        for gradient, complete in zip(own, _heads(sums.total[-q.shape[2] :]), strict=True):
            gradient.copy_(complete)

    return replace(ops, attention_forward=forward, attention_backward=backward)


def _heads(keys_values_S2KE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as attention takes them: views (1, K, S, E)."""
    keys, values = keys_values_S2KE.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    return keys, values
