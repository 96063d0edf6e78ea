"""Attention of a sequence that is longer than a chunk: the keys and values of a layer stay, chunk after chunk.

Forward visits chunks first to last. A chunk's keys and values are written behind those of the chunks before, and its
queries attend to all of them, the last query seeing the last key. Backward visits chunks last to first: each adds
what its queries give to the gradients of all keys and values up to its own, and what has then been added up for its
own is complete, as no earlier query sees them. A block calls this as it calls any attention (``blocks/ops.py``), so
what is not kept is computed again from the same keys by the same function: the same bits.

    context = Context(keys_values, gradients, attention)
    ops = context.ops(REFERENCE, chunk)

Sums over chunks are kept in at least fp32. One set of gradients beside them holds what one chunk gives.
"""

from dataclasses import replace

from torch import Tensor

from cs336_systems.blocks.ops import BlockOps


class Context:
    """Keys and values of one layer at a time, for one sequence; and what has been added up of their gradients.

    Args:
        keys, values: (1, K, S, E), for all S positions, of any strides that attention takes.
        dkeys, dvalues: the same in at least fp32.
        parts: two more like keys and values.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        dkeys: Tensor | None,
        dvalues: Tensor | None,
        parts: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.keys, self.values, self.dkeys, self.dvalues, self.parts = keys, values, dkeys, dvalues, parts

    def ops(self, ops: BlockOps, start: int) -> BlockOps:
        """``ops`` for the chunk whose first token is the sequence's ``start``-th."""

        def forward(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
            end = start + q_BHSE.shape[2]
            self.keep(k_BKSE, v_BKSE, start)
            return ops.attention_forward(q_BHSE, self.keys[:, :, :end], self.values[:, :, :end])

        def backward(
            do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, into: tuple[Tensor, Tensor, Tensor]
        ) -> None:
            assert self.dkeys is not None and self.dvalues is not None and self.parts is not None
            end = start + q.shape[2]
            dq, dk, dv = into
            seen = slice(None), slice(None), slice(end)
            part_k, part_v = (part[seen] for part in self.parts)
            keys, values = self.keys[seen], self.values[seen]
            ops.attention_backward(do, q, keys, values, o, lse, (dq, part_k, part_v))
            own = slice(None), slice(None), slice(start, end)
            for total, part, gradient in ((self.dkeys, part_k, dk), (self.dvalues, part_v, dv)):
                total[seen].add_(part)
                gradient.copy_(total[own])

        return replace(ops, attention_forward=forward, attention_backward=backward)

    def keep(self, k_BKSE: Tensor, v_BKSE: Tensor, start: int) -> None:
        """Write a chunk's keys and values where they belong."""
        end = start + k_BKSE.shape[2]
        self.keys[:, :, start:end].copy_(k_BKSE)
        self.values[:, :, start:end].copy_(v_BKSE)

    def clear_gradients(self) -> None:
        """Before the last chunk's backward."""
        for total in (self.dkeys, self.dvalues):
            if total is not None:
                total.zero_()
