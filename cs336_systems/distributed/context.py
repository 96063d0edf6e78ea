"""Context parallelism: attention over sequences whose tokens are divided among ranks.

    ring       rank r of n has the r-th of n parts; later ranks see more keys, so they work longer
    zigzag     rank r has the parts r and 2n - 1 - r of 2n, so all ranks do equal work
    gathered   parts as in zigzag; keys and values are all-gathered first, their gradients are reduce-scattered

In ``ring`` and ``zigzag`` (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; the order after Zhu's
ring-flash-attention) a rank attends to its own keys while those of another rank arrive, and merges the partial outputs
by log-sum-exp. Keys do not go round a ring: each rank sends its own directly to the ranks whose queries see them.
Backward sends keys and values again, and returns their gradients. Key/value heads are sent once, however many query
heads share them.

    write_out(model, context_ops(ops, mesh.group("context"), "zigzag"), "products")
    ids, targets = local_tokens(torch.stack((ids, targets)), mesh, "zigzag")
    rotate_local(model, mesh.group("context"), "zigzag")          # angles of these tokens' positions

Up to rounding, a rank's output equals the whole sequence's output at its tokens: partial outputs have the inputs' dtype
and are merged in fp32. Gradients are also added in fp32, except that ``gathered`` reduces those of different ranks in
the inputs' dtype.

In every order packed documents are masked from each other. At most one document spans both the keys that a rank has
sent and later queries: its queries see the last of these keys, all other queries see none. So attention between two
ranks is plain attention over that document, if it exists. ``ring`` and ``zigzag`` read on the host where documents
begin, once per batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cs336_systems.blocks import BlockOps
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.model import TransformerLM
from cs336_systems.ranks import context_parts


def positions(length: int, rank: int, n_ranks: int, order: str) -> Tensor:
    """The positions in a sequence of the tokens that a rank holds, ascending: int64 (length / n_ranks,), on the CPU.

    Raises:
        ValueError: the ranks cannot divide the length evenly.
    """
    return _local(torch.arange(length, device="cpu"), 0, rank, n_ranks, order)


def local_tokens(tokens: Tensor, mesh: Mesh | None, order: str, dim: int = -1) -> Tensor:
    """This context rank's S / n tokens of whole sequences of S tokens along a dimension."""
    return tokens if mesh is None else _local(tokens, dim, mesh.place("context"), mesh.size("context"), order)


def _local(whole: Tensor, dim: int, rank: int, n_ranks: int, order: str) -> Tensor:
    """A rank's part of a tensor that has all positions along a dimension; raises as ``positions``."""
    if n_ranks == 1:
        return whole
    parts = whole.chunk(context_parts(whole.shape[dim], n_ranks, order), dim)
    return parts[rank] if order == "ring" else torch.cat((parts[rank], parts[-1 - rank]), dim)


class LocalRotary(nn.Module):
    """A ``RotaryEmbedding`` that returns the angles of this rank's positions instead of the first ones."""

    def __init__(self, whole: nn.Module, group: dist.ProcessGroup, order: str) -> None:
        super().__init__()
        self.whole, self.place = whole, (dist.get_rank(group), dist.get_world_size(group), order)

    def reset_parameters(self) -> None:
        self.whole.reset_parameters()  # type: ignore[operator]

    def forward(self, n_positions: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of this rank's positions in a sequence of n ``n_positions`` tokens; raises as ``positions``."""
        cos, sin = (_local(each, 0, *self.place) for each in self.whole(n_positions * self.place[1]))
        return cos, sin


def rotate_local(model: TransformerLM, group: dist.ProcessGroup, order: str) -> None:
    """Make a model rotate queries and keys by the positions of this rank's tokens."""
    model.rotary = LocalRotary(model.rotary, group, order)  # type: ignore[assignment]


def context_ops(ops: BlockOps, group: dist.ProcessGroup, order: str) -> BlockOps:
    """Block operations whose attention is over the tokens of all ranks of a group."""
    attention = (Gathered if order == "gathered" else Exchanged)(ops, group, order)
    return replace(ops, attention_forward=attention.forward, attention_backward=attention.backward, rotates_back=False)


class Meeting(NamedTuple):
    """Queries of one rank that come after these keys of another."""

    queries: slice
    keys: slice


def meeting(rank: int, other: int, length: int, order: str) -> Meeting | None:
    """Which queries of ``rank`` see which keys of another, each of ``length`` tokens; None if all keys come later."""
    everything, half = slice(0, length), length // 2
    if order == "ring":
        return Meeting(everything, everything) if other < rank else None
    if other < rank:  # its first part lies before both of ours, its second part after both
        return Meeting(everything, slice(0, half))
    return Meeting(slice(half, length), everything)  # both of its parts lie between ours


class Seen(NamedTuple):
    """Rows of a batch, their queries that see keys from another rank, and those keys."""

    rows: slice
    queries: slice
    keys: slice


def seen_in_documents(starts_BS: Tensor, met: Meeting, keys: Tensor) -> list[Seen]:
    """Find, row by row, which sent keys lie in the documents of which queries.

    Args:
        starts_BS: the first position of the document of each of a rank's tokens.
        keys: positions of the keys that another rank has sent, ascending.
    """
    first_seen = torch.searchsorted(keys, starts_BS)[:, met.queries]
    n_seeing, before = (first_seen < len(keys)).sum(1).tolist(), met.queries.start
    firsts = first_seen[:, 0].tolist()
    return [
        Seen(slice(row, row + 1), slice(before, before + n), slice(first, len(keys)))
        for row, (n, first) in enumerate(zip(n_seeing, firsts, strict=True))
        if n
    ]


Received = Callable[[], Tensor | None]
"""Waits, and returns what has arrived."""


class Exchanged:
    """Causal attention of one rank's tokens over whole sequences; ranks send each other keys and values."""

    def __init__(self, ops: BlockOps, group: dist.ProcessGroup, order: str) -> None:
        self._ops, self._group, self._order = ops, group, order
        self._rank, self._n_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Results of ``_in_documents`` by ``starts``, which all blocks share."""

    def forward(
        self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o, lse (B, H, S)), as ``attention_forward`` of ``blocks/ops.py``; starts are places in whole sequences."""
        own = torch.stack((k_BKSE, v_BKSE))
        documents, seen_by_step = self._seen(q_BHSE.shape[2], starts)
        arriving = self._send_keys(own, 1)
        o, lse = self._ops.attention_forward(q_BHSE, k_BKSE, v_BKSE, **documents)
        o = self._added_up(o, lse.dtype)
        for step, seen in enumerate(seen_by_step, 1):
            keys_values, arriving = arriving(), self._send_keys(own, step + 1)
            if keys_values is not None:
                for rows, queries, keys in seen:
                    given = q_BHSE[rows, :, queries], *keys_values[:, rows, :, keys]
                    part = self._ops.attention_forward(*given, causal=False)
                    self._ops.attention_merge_(o[rows, :, queries], lse[rows, :, queries], *part)
        return o.to(q_BHSE.dtype), lse

    def backward(
        self,
        do_BHSE: Tensor,
        q_BHSE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        o_BHSE: Tensor,
        lse_BHS: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
        starts: Tensor | None = None,
    ) -> None:
        """Write (dq, dk, dv) of this rank's tokens, as ``attention_backward`` of ``blocks/ops.py``."""
        own = torch.stack((k_BKSE, v_BKSE))
        documents, seen_by_step = self._seen(q_BHSE.shape[2], starts)
        arriving = self._send_keys(own, 1)
        self._ops.attention_backward(do_BHSE, q_BHSE, k_BKSE, v_BKSE, o_BHSE, lse_BHS, gradients, **documents)
        dq, *dkv = (self._added_up(gradient, lse_BHS.dtype) for gradient in gradients)
        returning: tuple[slice | None, Received] = None, lambda: None
        for step, seen in enumerate(seen_by_step, 1):
            keys_values, arriving = arriving(), self._send_keys(own, step + 1)
            found = None
            if keys_values is not None:
                found = torch.empty_like(keys_values) if starts is None else torch.zeros_like(keys_values)
                for rows, queries, keys in seen:
                    do, q, o, lse = (each[rows, :, queries] for each in (do_BHSE, q_BHSE, o_BHSE, lse_BHS))
                    part_dq = torch.empty_like(q)
                    given = do, q, *keys_values[:, rows, :, keys], o, lse.contiguous()
                    self._ops.attention_backward(*given, (part_dq, *found[:, rows, :, keys]), causal=False)
                    dq[rows, :, queries] += part_dq
            self._add(dkv, returning)
            returning = self._return_gradients(found, own, step)
        self._add(dkv, returning)
        for gradient, total in zip(gradients, (dq, *dkv), strict=True):
            if total is not gradient:
                gradient.copy_(total)

    def _seen(self, length: int, starts: Tensor | None) -> tuple[dict[str, Tensor], list[list[Seen]]]:
        """The ``starts`` of attention to this rank's own keys, and which of each other rank's keys are seen."""
        if starts is not None:
            if starts not in self._packed:
                self._packed[starts] = self._in_documents(starts)
            found: tuple[dict[str, Tensor], list[list[Seen]]] = self._packed[starts]
            return found
        all_met = (meeting(self._rank, other, length, self._order) for other in self._sources())
        everything = slice(None)
        return {}, [[Seen(everything, met.queries, everything)] if met else [] for met in all_met]

    def _in_documents(self, starts: Tensor) -> tuple[dict[str, Tensor], list[list[Seen]]]:
        starts_BS, length, seen = starts.cpu(), starts.shape[1], []
        of_ranks = [
            positions(length * self._n_ranks, r, self._n_ranks, self._order).int() for r in range(self._n_ranks)
        ]
        for other in self._sources():
            met = meeting(self._rank, other, length, self._order)
            seen.append(seen_in_documents(starts_BS, met, of_ranks[other][met.keys]) if met else [])
        among_own = torch.searchsorted(of_ranks[self._rank], starts_BS, out_int32=True)
        return {"starts": among_own.to(starts.device)}, seen

    def _sources(self) -> list[int]:
        """The other ranks in the order in which their keys arrive."""
        return [(self._rank - step) % self._n_ranks for step in range(1, self._n_ranks)]

    def _added_up(self, x: Tensor, wide: torch.dtype) -> Tensor:
        """The tensor to which other ranks' parts are added: x in fp32, or x itself if only one part is added."""
        return x if self._n_ranks == 2 else x.to(wide)

    @staticmethod
    def _add(dkv: list[Tensor], returning: tuple[slice | None, Received]) -> None:
        keys, received = returning
        parts = received()
        if parts is not None:
            for total, part in zip(dkv, parts, strict=True):
                total[:, :, keys] += part

    def _send_keys(self, own: Tensor, step: int) -> Received:
        """Send needed keys and values to the rank ``step`` after this one; receive from the rank ``step`` before."""
        if step >= self._n_ranks:
            return lambda: None
        to, source, length = (self._rank + step) % self._n_ranks, (self._rank - step) % self._n_ranks, own.shape[3]
        needed, wanted = meeting(to, self._rank, length, self._order), meeting(self._rank, source, length, self._order)
        sent = own[:, :, :, needed.keys].contiguous() if needed else None
        received = own.new_empty(own[:, :, :, wanted.keys].shape) if wanted else None
        return self._swap(sent, to, received, source)

    def _return_gradients(self, found: Tensor | None, own: Tensor, step: int) -> tuple[slice | None, Received]:
        """Send gradients to the rank ``step`` before this one; returns (keys whose gradients arrive, the wait)."""
        to, source = (self._rank - step) % self._n_ranks, (self._rank + step) % self._n_ranks
        coming = meeting(source, self._rank, own.shape[3], self._order)
        received = own.new_empty(own[:, :, :, coming.keys].shape) if coming else None
        return coming.keys if coming else None, self._swap(found, to, received, source)

    def _swap(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Received:
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=to))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=source))
        imagined = any(operation.tensor.is_meta for operation in operations)  # in a dry run
        works = dist.batch_isend_irecv(operations) if operations and not imagined else []

        def wait() -> Tensor | None:
            nonlocal sent
            for work in works:
                work.wait()
            sent = None  # kept alive until it is sent
            return received

        return wait


class Gathered:
    """Causal attention of one rank's tokens over whole sequences; keys and values are gathered first."""

    def __init__(self, ops: BlockOps, group: dist.ProcessGroup, order: str) -> None:
        self._ops, self._group = ops, group
        self._rank, self._n_ranks = dist.get_rank(group), dist.get_world_size(group)

    def _gather(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values of whole sequences, (2, B, K, n S, E)."""
        own = torch.stack((k, v)).movedim(3, 0).contiguous()  # (S, 2, B, K, E)
        of_all = own.new_empty(self._n_ranks * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(of_all, own, group=self._group)
        halves = of_all.view(self._n_ranks, 2, -1, *own.shape[1:])
        return torch.cat((halves[:, 0], halves[:, 1].flip(0))).flatten(0, 1).movedim(0, 3)

    def _parts(self, length: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Both parts of this rank's queries, and the keys that they see."""
        half = length // 2
        first, second = (self._rank + 1) * half, (2 * self._n_ranks - self._rank) * half
        return (slice(0, half), slice(0, first)), (slice(half, length), slice(0, second))

    def forward(
        self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(o, lse (B, H, S)), as ``attention_forward`` of ``blocks/ops.py``; starts are places in whole sequences."""
        keys_values, found = self._gather(k_BKSE, v_BKSE), []
        for queries, keys in self._parts(q_BHSE.shape[2]):
            given = q_BHSE[:, :, queries], *keys_values[:, :, :, keys]
            found.append(self._ops.attention_forward(*given, **_documents(starts, queries)))
        o, lse = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
        return o, lse

    def backward(
        self,
        do_BHSE: Tensor,
        q_BHSE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        o_BHSE: Tensor,
        lse_BHS: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor],
        starts: Tensor | None = None,
    ) -> None:
        """Write (dq, dk, dv) of this rank's tokens, as ``attention_backward`` of ``blocks/ops.py``."""
        keys_values = self._gather(k_BKSE, v_BKSE)
        total = torch.zeros_like(keys_values, dtype=lse_BHS.dtype)
        for queries, keys in self._parts(q_BHSE.shape[2]):
            do, q, o, lse = (each[:, :, queries] for each in (do_BHSE, q_BHSE, o_BHSE, lse_BHS))
            part = torch.empty_like(keys_values[:, :, :, keys])
            into = gradients[0][:, :, queries], *part
            given = do, q, *keys_values[:, :, :, keys], o, lse.contiguous(), into
            self._ops.attention_backward(*given, **_documents(starts, queries))
            total[:, :, :, keys] += part
        by_part = total.to(k_BKSE.dtype).movedim(3, 0).unflatten(0, (2 * self._n_ranks, -1))
        by_rank = torch.stack((by_part[: self._n_ranks], by_part[self._n_ranks :].flip(0)), dim=1)
        own = by_rank.new_empty(q_BHSE.shape[2], *by_rank.shape[3:])
        dist.reduce_scatter_tensor(own, by_rank.flatten(0, 2), group=self._group)
        for gradient, found in zip(gradients[1:], own.movedim(0, 3), strict=True):
            gradient.copy_(found)


def _documents(starts: Tensor | None, queries: slice) -> dict[str, Tensor]:
    return {} if starts is None else {"starts": starts[:, queries].contiguous()}
