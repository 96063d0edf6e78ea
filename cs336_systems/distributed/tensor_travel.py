"""Tensor parallelism whose rows travel while products run (asynchronous tensor parallelism).

    ranks = TravellingRanks(mesh.group("tensor"), device)      # in place of GroupRanks

A gather gives the rank's own rows at once, and a product of them runs while the others come; a product whose sums
belong to several ranks begins with the rows that leave, and its own rows run while they are under way (Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"; torch's
``fused_all_gather_matmul`` is another implementation). Every rank sends to every other; nothing goes round a ring.

On GPUs ranks map each other's memory. What is for others is written into a slot of one's own, a flag is raised in
theirs, and their copy engines fetch it. Flags are raised and awaited by the stream (``cuStreamWriteValue32``,
``cuStreamWaitValue32``), not by kernels, which would wait for a multiprocessor until the product has left one. On CPUs
rows are gloo's messages.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.peer_memory import PeerMemory, why_not_mapped
from cs336_systems.distributed.tensor import GroupRanks
from cs336_systems.model.tensor_ranks import ALONE, Arriving, Part, TensorRanks

Wait = Callable[[], None]

N_SLOTS = 3
"""A rank that begins an exchange has waited for the one before the last, so all others have fetched the third last."""


class Exchange(Protocol):
    """Equally many numbers go from each rank to each other; ranks make the same exchanges in the same order."""

    def offer(self, x: Tensor) -> None:
        """Let every other rank fetch x, which stays until this rank has waited for its ``copy``."""

    def place(self, peer: int, like: Tensor) -> Tensor:
        """Memory for what another rank is to fetch, as ``like``."""

    def send(self, peer: int) -> None:
        """Let that rank fetch what the current stream has written there."""

    def fetch(self, peer: int, into: Tensor) -> Wait:
        """Begin to fetch what that rank has for this one."""

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        """Begin to copy."""


class TravellingRanks(GroupRanks):
    """The ranks of a process group, whose rows travel while products run; ``gather`` and ``scatter`` are collectives.

    Raises:
        ValueError: these GPUs cannot map each other's memory.
    """

    under_products = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        kind = _Imagined if device.type == "meta" else _Mapped if device.type == "cuda" else _Messages
        self._exchanges = kind(group, device)
        self._peers = [(self.rank + step) % self.n_ranks for step in range(1, self.n_ranks)]

    def arriving(self, x: Tensor) -> Arriving:
        whole = x.new_empty(self.n_ranks * len(x), *x.shape[1:])
        own, exchange = self._rows(whole, self.rank), self._exchanges.begin(x)
        exchange.offer(x)
        parts: list[Part] = [(own, x, lambda: None)]
        for peer in self._peers:
            rows = self._rows(whole, peer)
            parts.append((rows, whole[rows], exchange.fetch(peer, whole[rows])))
        return Arriving(whole, tuple(parts), finish=exchange.copy(x, whole[own]))  # after what others wait for

    def sums(self, compute: Callable[[Tensor, slice], object], like: Tensor, width: int) -> Tensor:
        own = like.new_empty(len(like) // self.n_ranks, width)
        exchange = self._exchanges.begin(own)
        for peer in self._peers:
            compute(exchange.place(peer, own), self._rows(like, peer))
            exchange.send(peer)
        fetched = [torch.empty_like(own) for _ in self._peers]
        waits = [exchange.fetch(peer, into) for peer, into in zip(self._peers, fetched, strict=True)]
        compute(own, self._rows(like, self.rank))
        for wait, addend in zip(waits, fetched, strict=True):
            wait()
            own += addend
        return own

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same bits on every rank."""
        of_all = self.arriving(torch.cat([tensor.flatten() for tensor in tensors]))
        of_all.wait()
        summed = of_all.whole.view(self.n_ranks, -1).sum(0).split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(summed, tensors, strict=True)]

    def _rows(self, whole: Tensor, rank: int) -> slice:
        n = len(whole) // self.n_ranks
        return slice(rank * n, (rank + 1) * n)


class _Messages:
    """An exchange by gloo, whose messages between two ranks arrive in the order in which they were sent."""

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
    """What both exchanges below have in common: their number, and memory for what others fetch, in turn."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self.number, self._room = group, device, 0, 0
        self._same = False
        """Whether every other rank fetches the same."""

    def begin(self, like: Tensor) -> Any:
        room = (self._group.size() - 1) * like.nbytes
        if room > self._room:
            self._room = room
            self._make(room)
        self.number += 1
        self._same = False
        return self

    def _make(self, n_bytes: int) -> None:
        raise NotImplementedError

    def _part(self, slot: Tensor, owner: int, peer: int, like: Tensor) -> Tensor:
        """Where in a slot of one rank there is what another is to fetch."""
        place = 0 if self._same else (peer - owner - 1) % self._group.size()
        return slot[place * like.nbytes : (place + 1) * like.nbytes].view(like.dtype).view_as(like)


class _Imagined(_Slots):
    """An exchange in a dry run, which has memory and no other ranks."""

    def _make(self, n_bytes: int) -> None:
        self._slots = [torch.empty(n_bytes, dtype=torch.uint8, device=self._device) for _ in range(N_SLOTS)]

    def offer(self, x: Tensor) -> None:
        pass

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        into.copy_(x)
        return lambda: None

    def place(self, peer: int, like: Tensor) -> Tensor:
        return self._part(self._slots[self.number % N_SLOTS], self._group.rank(), peer, like)

    def send(self, peer: int) -> None:
        pass

    def fetch(self, peer: int, into: Tensor) -> Wait:
        return lambda: None


class _Mapped(_Slots):
    """An exchange by copies from memory that GPUs map, on a stream of its own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        if (reason := why_not_mapped(device, group)) is not None:
            raise ValueError(f"rows cannot be copied between these GPUs: {reason}")
        from cuda.bindings import driver  # type: ignore[import-untyped]  # torch's own dependency

        self._driver, self._rank = driver, group.rank()
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._flags = PeerMemory(group.size(), torch.int32, device, group)
        """Of each rank: the number of the newest exchange that each other rank has brought something for."""
        self._slots: list[PeerMemory] = []
        self._done: dict[int, torch.cuda.Event] = {}
        """By the number of an exchange, when all that it fetches is here."""

    def _make(self, n_bytes: int) -> None:
        torch.cuda.synchronize(self._device)
        dist.barrier(self._group)  # others may be reading the slots that go
        self._slots = [PeerMemory(n_bytes, torch.uint8, self._device, self._group) for _ in range(N_SLOTS)]

    def begin(self, like: Tensor) -> "_Mapped":
        super().begin(like)
        before_last = self._done.pop(self.number - 2, None)
        if before_last is not None:
            torch.cuda.current_stream(self._device).wait_event(before_last)
        return self

    def offer(self, x: Tensor) -> None:
        self._same = True
        self._follow()
        with torch.cuda.stream(self._stream):
            self.place(self._rank, x).copy_(x)
            for peer in range(self._group.size()):
                if peer != self._rank:
                    self._raise_flag(peer)

    def copy(self, x: Tensor, into: Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            into.copy_(x)
        return self._wait_for(self._stream.record_event())

    def place(self, peer: int, like: Tensor) -> Tensor:
        return self._part(self._slots[self.number % N_SLOTS].of_rank[self._rank], self._rank, peer, like)

    def send(self, peer: int) -> None:
        self._follow()
        self._raise_flag(peer)

    def fetch(self, peer: int, into: Tensor) -> Wait:
        slot = self._slots[self.number % N_SLOTS].of_rank[peer]
        self._follow()  # memory to fetch into may have been another tensor's a moment ago
        with torch.cuda.stream(self._stream):
            flag = self._flags.of_rank[self._rank][peer:]
            self._call(
                self._driver.cuStreamWaitValue32, flag, self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            )
            into.copy_(self._part(slot, peer, self._rank, into))
        self._done[self.number] = event = self._stream.record_event()
        return self._wait_for(event)

    def _wait_for(self, event: torch.cuda.Event) -> Wait:
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def _follow(self) -> None:
        """Let the stream of copies wait for what the current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _raise_flag(self, peer: int) -> None:
        flag = self._flags.of_rank[peer][self._rank :]
        self._call(
            self._driver.cuStreamWriteValue32, flag, self._driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        )

    def _call(self, operation: Callable[..., Any], flag: Tensor, how: Any) -> None:
        (result,) = operation(self._stream.cuda_stream, flag.data_ptr(), self.number, int(how))
        if int(result):
            raise RuntimeError(f"{operation.__name__} failed: {result.name}")


def tensor_ranks(group: dist.ProcessGroup | None, device: torch.device, by: str) -> TensorRanks:
    """The ranks that share matrices, whose rows come by ``collectives`` or by ``copies``; ``ALONE`` without a group."""
    if group is None:
        return ALONE
    return TravellingRanks(group, device) if by == "copies" else GroupRanks(group)
