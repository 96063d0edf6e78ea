"""Asynchronous tensor parallelism: rows are sent while matmuls run.

    ranks = TravellingRanks(mesh.group("tensor"), device)      # in place of GroupRanks

``arriving`` returns a rank's own rows at once, so that they are multiplied while the others' rows arrive. ``sums``
first computes the rows that other ranks need, and this rank's own while those are fetched (Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models"; torch's
``fused_all_gather_matmul`` is another implementation). All ranks exchange directly with each other, not around a ring.

On GPUs ranks map each other's memory. A rank writes the rows that others need into a slot of its own memory and raises
a flag in the memory of each reader, whose copy engine then fetches them on a separate stream (``copy_stream.py``). On
CPUs gloo sends rows as messages.

Small numbers of rows are sent by collectives, which were faster there (``costs.parallelism.step.COPIED_FROM``), most
likely because the host takes longer to start copies than matmuls take.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.copy_stream import CopyStream, Wait
from cs336_systems.distributed.peer_memory import PeerMemory, why_not_mapped
from cs336_systems.distributed.tensor import GroupRanks, as_integers
from cs336_systems.model.tensor_ranks import ALONE, Arriving, Part, TensorRanks

N_SLOTS = 3
"""Exchange n reuses the slot of exchange n - 3. Before it begins, a rank has waited for its fetches of n - 2, so every
peer has raised its flag of n - 2, which it does after its own fetches of n - 3: no rank still reads that slot."""
MAX_PARTS = 64
"""The most cached views of slots. At one more all are dropped, as shapes that vary so much will go on varying."""


class Exchange(Protocol):
    """Every rank fetches equally many bytes from every other; all ranks make the same exchanges in the same order.

    The returned functions make the current stream (on a CPU: the caller) wait.
    """

    def begin(self, like: Tensor) -> "Exchange":
        """Begin an exchange, in which each rank fetches from every other a tensor of ``like``'s shape and dtype."""

    def offer(self, x: Tensor) -> None:
        """Let all others fetch x, which the caller must not change before it has waited for ``copy``, the last step."""

    def place(self, peer: int, like: Tensor) -> Tensor:
        """Memory of the shape and dtype of ``like``, to fill with the data that ``peer`` fetches."""

    def send(self, peer: int) -> None:
        """Let that rank fetch the data that the current stream has written to its ``place``."""

    def fetch(self, peer: int, into: Tensor) -> Wait:
        """Begin to fetch the data that the rank offers or has sent, into memory allocated before ``begin``."""

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        """Begin to copy the data that this rank offers, after the fetches."""


class TravellingRanks(GroupRanks):
    """The ranks of a process group, whose rows are sent while matmuls run.

    ``gather`` and ``scatter`` are collectives; ``total`` and ``largest_`` use copies if the last rows were copied.

    Args:
        copied_from: the fewest elements of a rank's rows that are copied; fewer are sent by collectives.

    Raises:
        ValueError: these GPUs cannot map each other's memory.
    """

    under_products = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, copied_from: int = 0) -> None:
        super().__init__(group)
        self.copied_from = copied_from
        kind = {"meta": _Slots, "cuda": _Mapped}.get(device.type, _Messages)
        self._exchanges: Exchange = kind(group, device)
        self._peers = [(self.rank + step) % self.n_ranks for step in range(1, self.n_ranks)]
        self._copied = copied_from == 0
        """Whether the last rows were copied, not sent by a collective."""

    def arriving(self, x: Tensor, *, whole: bool = True) -> Arriving:
        self._copied = x.numel() >= self.copied_from
        return self._fetched(x, whole) if self._copied else super().arriving(x, whole=whole)

    def _fetched(self, x: Tensor, whole: bool) -> Arriving:
        rows = x.new_empty(self.n_ranks * len(x), *x.shape[1:])
        each, exchange = rows.chunk(self.n_ranks), self._exchanges.begin(x)
        exchange.offer(x)
        parts: list[Part] = [(self._rows(rows, self.rank), x, lambda: None)]
        for peer in self._peers:
            parts.append((self._rows(rows, peer), each[peer], exchange.fetch(peer, each[peer])))
        own = each[self.rank]
        if whole:
            return Arriving(rows, tuple(parts), finish=exchange.copy(x, own))  # after the rows for which others wait
        return Arriving(rows, tuple(parts), finish=lambda: own.copy_(x))

    def sums(self, compute: Callable[[Tensor, slice], object], like: Tensor, width: int) -> Tensor:
        self._copied = len(like) // self.n_ranks * width >= self.copied_from
        if not self._copied:
            return super().sums(compute, like, width)
        own = like.new_empty(len(like) // self.n_ranks, width)
        fetched = [torch.empty_like(own) for _ in self._peers]
        exchange = self._exchanges.begin(own)
        for peer in self._peers:
            compute(exchange.place(peer, own), self._rows(like, peer))
            exchange.send(peer)
        waits = [exchange.fetch(peer, into) for peer, into in zip(self._peers, fetched, strict=True)]
        compute(own, self._rows(like, self.rank))
        for wait, addend in zip(waits, fetched, strict=True):
            wait()
            own += addend
        return own

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum over the ranks of each tensor, the same bits on every rank."""
        if not self._copied:
            return super().total(tensors)
        summed = self._of_all(torch.cat([tensor.flatten() for tensor in tensors])).sum(0)
        parts = summed.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def largest_(self, magnitudes: Tensor) -> Tensor:
        if not self._copied:
            return super().largest_(magnitudes)
        bits = as_integers(magnitudes)
        bits.copy_(self._of_all(bits.flatten()).amax(0).view_as(bits))
        return magnitudes

    def _of_all(self, x: Tensor) -> Tensor:
        """The values (n,) of each rank: (ranks, n)."""
        arriving = self._fetched(x, whole=True)
        arriving.wait()
        whole: Tensor = arriving.whole
        return whole.view(self.n_ranks, -1)

    def _rows(self, whole: Tensor, rank: int) -> slice:
        n = len(whole) // self.n_ranks
        return slice(rank * n, (rank + 1) * n)


class _Messages:
    """Exchanges by gloo, whose messages between two ranks arrive in the order in which they were sent."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._peers = group, [peer for peer in range(group.size()) if peer != group.rank()]
        self._places: dict[int, Tensor] = {}
        self._sent: list[dist.Work | None] = []

    def begin(self, like: Tensor) -> "_Messages":
        return _Messages(self._group, like.device)

    def offer(self, x: Tensor) -> None:
        for peer in self._peers:
            self._places[peer] = x
            self.send(peer)

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        into.copy_(x)
        return lambda: None

    def place(self, peer: int, like: Tensor) -> Tensor:
        self._places[peer] = torch.empty_like(like)
        return self._places[peer]

    def send(self, peer: int) -> None:
        self._sent.append(dist.isend(self._places[peer], group=self._group, group_dst=peer))

    def fetch(self, peer: int, into: Tensor) -> Wait:
        under_way = [dist.irecv(into, group=self._group, group_src=peer)]

        def wait() -> None:
            for works in (under_way, self._sent):  # the latter's memory is held until then
                while works:  # gloo would wait for a second message
                    if (work := works.pop()) is not None:
                        work.wait()

        return wait


class _Slots:
    """Exchanges through slots. This class has no other ranks, as in a dry run: it takes memory and fetches nothing."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._rank = group, device, group.rank()
        self._number, self._room = 0, 0
        self._slots: list[dict[int, Tensor]] = []
        """Slots by rank, of the ranks whose memory this one can read."""
        self._same = False
        """Whether all others fetch the same data (``offer``), not each its own (``place``)."""

    def begin(self, like: Tensor) -> "_Slots":
        room = (self._group.size() - 1) * like.nbytes
        if room > self._room:
            self._room = room
            self._make(room)
        self._number += 1
        self._same = False
        return self

    def _make(self, n_bytes: int) -> None:
        slots = (torch.empty(n_bytes, dtype=torch.uint8, device=self._device) for _ in range(N_SLOTS))
        self._slots = [{self._rank: own} for own in slots]

    def _part(self, owner: int, peer: int, like: Tensor) -> Tensor:
        """The region of the owner's slot that the peer fetches."""
        slot, start = self._slots[self._number % N_SLOTS][owner], self._offset(owner, peer, like)
        return slot[start : start + like.nbytes].view(like.dtype).view_as(like)

    def _offset(self, owner: int, peer: int, like: Tensor) -> int:
        return 0 if self._same else (peer - owner - 1) % self._group.size() * like.nbytes

    def offer(self, x: Tensor) -> None:
        self._same = True

    def place(self, peer: int, like: Tensor) -> Tensor:
        return self._part(self._rank, peer, like)

    def send(self, peer: int) -> None:
        pass

    def fetch(self, peer: int, into: Tensor) -> Wait:
        return lambda: None

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        into.copy_(x)
        return lambda: None


class _Mapped(_Slots):
    """Exchanges by copies from the mapped slots of other GPUs, on a separate stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        if (reason := why_not_mapped(device, group)) is not None:
            raise ValueError(f"rows cannot be copied between these GPUs: {reason}")
        self._stream = self._make_stream()
        self._flags = PeerMemory(group.size(), torch.int32, device, group)
        """Flag s of rank r: the number of the newest exchange for which rank s has written what rank r fetches."""
        own = self._flags.of_rank[self._rank].data_ptr()
        self._others = [peer for peer in range(group.size()) if peer != self._rank]
        self._own_flags = {peer: own + 4 * peer for peer in self._others}
        self._their_flags = {peer: self._flags.of_rank[peer].data_ptr() + 4 * self._rank for peer in self._others}
        self._mapped: list[PeerMemory] = []
        self._slot_places: list[list[int]] = []
        self._parts: dict[Hashable, Tensor] = {}
        self._waits: dict[int, list[Wait]] = {}
        """The waits for the fetches of an exchange, by its number."""

    def _make_stream(self) -> CopyStream:
        return CopyStream(self._device)

    def _make(self, n_bytes: int) -> None:
        self._stream.synchronize()
        dist.barrier(self._group)  # others may be reading the slots that are freed
        self._parts.clear()
        self._mapped = [PeerMemory(n_bytes, torch.uint8, self._device, self._group) for _ in range(N_SLOTS)]
        self._slots = [dict(enumerate(memory.of_rank)) for memory in self._mapped]
        self._slot_places = [[part.data_ptr() for part in memory.of_rank] for memory in self._mapped]

    def begin(self, like: Tensor) -> "_Mapped":
        super().begin(like)
        for wait in self._waits.pop(self._number - 2, ()):  # does nothing if the caller has waited already
            wait()
        self._waits[self._number] = []
        return self

    def offer(self, x: Tensor) -> None:
        self._same = True
        self._stream.follow()
        self._stream.copy(self._address(self._rank, self._rank, x), x.data_ptr(), x.nbytes)
        for peer in self._others:
            self._stream.raise_flag(self._their_flags[peer], self._number)

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        self._stream.copy(into.data_ptr(), x.data_ptr(), x.nbytes)
        return self._stream.reached()

    def place(self, peer: int, like: Tensor) -> Tensor:
        form = self._number % N_SLOTS, peer, like.shape, like.dtype
        if (part := self._parts.get(form)) is None:
            if len(self._parts) >= MAX_PARTS:
                self._parts.clear()
            part = self._parts[form] = super().place(peer, like)
        return part

    def send(self, peer: int) -> None:
        self._stream.follow()
        self._stream.raise_flag(self._their_flags[peer], self._number)

    def fetch(self, peer: int, into: Tensor) -> Wait:
        self._stream.await_flag(self._own_flags[peer], self._number)
        self._stream.copy(into.data_ptr(), self._address(peer, self._rank, into), into.nbytes)
        wait = self._stream.reached()
        self._waits[self._number].append(wait)
        return wait

    def _address(self, owner: int, peer: int, like: Tensor) -> int:
        """The address of ``_part``."""
        return self._slot_places[self._number % N_SLOTS][owner] + self._offset(owner, peer, like)


def tensor_ranks(group: dist.ProcessGroup | None, device: torch.device, by: str, copied_from: int = 0) -> TensorRanks:
    """The tensor ranks, whose rows are sent by ``collectives`` or by ``copies``; ``ALONE`` without a group.

    Args:
        copied_from: as for ``TravellingRanks``.
    """
    if group is None:
        return ALONE
    return TravellingRanks(group, device, copied_from) if by == "copies" else GroupRanks(group)
