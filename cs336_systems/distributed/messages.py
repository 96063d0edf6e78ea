"""Messages between ranks: activations and their gradients, sent between pipeline stages or ranks that stream layers.

    messages = GroupMessages(rank, group)             # a collective; or CopiedMessages
    under_way = messages.send(activations, peer=1)    # rank 1 calls messages.receive(into, peer=0)
    under_way.wait()

Receivers take a sender's messages in the order in which they are sent.

If the GPUs of all ranks can access each other's memory, a message is a series of copies: the sender's copy engine
writes each piece into the receiver's mailbox and raises a flag there; the receiver's copies the piece out and raises a
flag at the sender (``copy_stream.py``). No kernel waits. Otherwise messages use torch's process groups, one for
messages to higher ranks and one for the others, so that neither kind waits behind the other. Under NCCL a message is a
kernel that waits for its peer, and its ``MAX_CTAS`` thread blocks occupy multiprocessors meanwhile.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.copy_stream import CopyStream, Wait
from cs336_systems.distributed.peer_memory import PeerMemory, why_not_mapped
from cs336_systems.distributed.process_group import Rank, nccl_options

MAX_CTAS = 2
"""The most thread blocks of a message. Two copy some 40 GB/s over NVLink: 1.7 ms for 8,192 x 4,096 bf16 numbers."""
PIECE_BYTES = 16 * 2**20
"""Bytes of a piece, unless ``Mailbox.holding`` needs larger ones. By calculation 16 MiB take 50 us over NVLink, a few
of them for calls and flags."""


@dataclass(frozen=True)
class Mailbox:
    """The size of the buffer into which one other rank copies pieces for this rank to receive; equal on all ranks."""

    piece_bytes: int = PIECE_BYTES
    """Bytes of a piece; the last of a message may have fewer."""
    n_pieces: int = 4
    """Pieces for which there is room."""

    @classmethod
    def holding(cls, n_messages: int, message_bytes: int) -> "Mailbox":
        """Make a mailbox for ``n_messages`` whole messages of up to ``message_bytes``, each in at most two pieces.

        A piece is a whole number of MiB, and at least ``PIECE_BYTES``.
        """
        return cls(max(PIECE_BYTES, -(-message_bytes // (2 * 2**20)) * 2**20), 2 * n_messages)

    def n_bytes(self, n_ranks: int) -> int:
        """Total bytes of the ``n_ranks - 1`` mailboxes of one GPU, one for each other rank."""
        return (n_ranks - 1) * self.n_pieces * self.piece_bytes


class Underway(Protocol):
    """A message in progress."""

    def wait(self) -> Any:
        """Make the current stream (on a CPU: the caller) wait for its end."""


def open_messages(
    rank: Rank, group: dist.ProcessGroup | None = None, by: str = "auto", *, mailbox: Mailbox = Mailbox()
) -> "GroupMessages":
    """Open messages between the ranks of a group (None: all ranks); a collective. ``how`` says which kind and why.

    Args:
        by: ``messages`` for torch's process groups; ``copies`` for copies on GPUs and process groups on CPUs; ``auto``
            for copies if these GPUs can map each other's memory, else process groups.
        mailbox: the size of each mailbox, for copies; the same on all ranks.

    Raises:
        ValueError: ``by`` is ``copies``, but these GPUs cannot map each other's memory.
        OSError: there is no room for the mailboxes.
    """
    if by == "messages" or not _on_gpu(rank):
        return GroupMessages(rank, group)
    reason = why_not_mapped(rank.device, group or dist.distributed_c10d._get_default_group())
    if reason is None:
        return CopiedMessages(rank, group, mailbox)
    if by == "copies":
        raise ValueError(f"ranks cannot copy into each other's memory, as {reason}")
    return GroupMessages(rank, group, reason)


def ring_messages(rank: Rank) -> "GroupMessages":
    """Open messages between all ranks, by copies if possible, and connect each pair; a collective. Raises OSError as
    ``open_messages``."""
    found = open_messages(rank)
    found.connect(permutations(range(rank.world_size), 2))
    return found


def planned_as_copies(messages: "GroupMessages | None") -> bool:
    """Whether a plan assumes copies (``copied_messages`` of ``Rates.of``). On GPUs, whether messages are copies; a plan
    made on a CPU, or without messages, is for GPUs that can copy."""
    return messages is None or messages.copied or not _on_gpu(messages.rank)


def _on_gpu(rank: Rank) -> bool:
    return rank.device.type == "cuda"


class GroupMessages:
    """Messages by torch's process groups, which arrive in the order of sending; construction is a collective.

    Peers are ranks in ``group``. Tensors are contiguous, and have the same shape and dtype on both sides.

    Args:
        rank: this process, as ``process_group.joined`` yields it.
        group: the ranks that exchange messages; None means all.
        reason: why copies are not used, for ``how``.
    """

    copied = False
    """Whether copy engines send messages, not kernels."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup | None = None, reason: str | None = None) -> None:
        self.rank, self.ranks = rank, dist.get_process_group_ranks(group)
        self.place = self.ranks.index(rank.rank)
        self.how = f"Ranks hand activations on by messages of {rank.backend}{f', as {reason}' if reason else ''}."
        self._open(group or dist.distributed_c10d._get_default_group())

    def _open(self, group: dist.ProcessGroup) -> None:
        options = nccl_options(self.rank, MAX_CTAS) if self.rank.backend == "nccl" else None
        how: dict[str, Any] = {"timeout": timedelta(seconds=self.rank.timeout_s), "pg_options": options}
        self._up, self._down = (dist.new_group(self.ranks, use_local_synchronization=True, **how) for _ in range(2))

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect each pair (sender, receiver) before any message; all ranks pass the same pairs."""
        probe = torch.zeros(1, device=self.rank.device)
        for source, target in pairs:  # NCCL connects when it is first used
            if self.place in (source, target):
                (self.send(probe, target) if self.place == source else self.receive(probe, source)).wait()

    def send(self, tensor: Tensor, peer: int) -> Underway:
        """Begin to send once the current stream's work so far is done."""
        work = dist.isend(tensor, group=self._up if peer > self.place else self._down, group_dst=peer)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int) -> Underway:
        """Begin to receive into a tensor once the current stream's work so far is done."""
        work = dist.irecv(tensor, group=self._up if peer < self.place else self._down, group_src=peer)
        assert work is not None
        return work


@dataclass(frozen=True)
class _Copying:
    """A message whose copies have been enqueued."""

    wait: Wait
    memory: Tensor
    """Memory that the copies read or write, kept alive until they are done."""


class CopiedMessages(GroupMessages):
    """Messages by copies between GPUs of one host, in pieces, through one mailbox per pair of receiver and sender.

    The driver has no time-out for a stream that waits for a flag, so a thread watches the flags: if this rank waits for
    some and none has changed for ``rank.timeout_s``, it reports this on stderr and ends the process, as NCCL's watchdog
    does.

    Raises:
        OSError: there is no room for the mailboxes.
    """

    copied = True

    def __init__(self, rank: Rank, group: dist.ProcessGroup | None = None, mailbox: Mailbox = Mailbox()) -> None:
        self._mailbox = mailbox
        super().__init__(rank, group)
        self.how = "Ranks hand activations on by copies between the memories of their GPUs."

    def _open(self, group: dist.ProcessGroup) -> None:
        rank, n = self.rank, len(self.ranks)
        self._sending = {peer: self._make_stream() for peer in range(n) if peer != self.place}
        """A stream for each rank: a message that one rank has not received yet must not delay messages to others."""
        self._receiving = self._make_stream()
        self._sent, self._taken = [0] * n, [0] * n
        """The number of pieces so far, to and from each rank."""
        self._boxes = PeerMemory(self._mailbox.n_bytes(n), torch.uint8, rank.device, group)
        self._flags = PeerMemory(2 * n, torch.int32, rank.device, group)
        """For each of n ranks, int32: at s the number of pieces that rank s has written into its mailbox, at n + t the
        number of its pieces that rank t has taken out."""
        # A barrier: else a flag might be raised before its owner has set it to zero.
        dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
        self._awaited = [0] * (2 * n)
        """The values for which this rank waits, or has waited, at its own flags."""
        on_gpu = rank.device.type == "cuda"
        self._side = torch.cuda.Stream(rank.device) if on_gpu else None
        self._seen = torch.zeros(2 * n, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        """This rank's flags, as ``late`` has last seen them."""
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="messages", daemon=True).start()

    def _make_stream(self) -> CopyStream:
        return CopyStream(self.rank.device)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Do nothing: mapped memory needs no connection."""

    def send(self, tensor: Tensor, peer: int) -> Underway:
        own, stream = self.place, self._sending[peer]
        stream.follow()
        for address, n_bytes in self._pieces(tensor):
            self._sent[peer] = number = self._sent[peer] + 1
            # Ranks that stream layers cannot deadlock: all follow one order of messages (``order.py``), in which a send
            # and its receive have the same position. A send waits until earlier pieces, of this or an earlier message,
            # are taken; a receive waits until its piece is sent. So the first unfinished message always proceeds, even
            # if a GPU runs the work of all its streams in the order in which it was enqueued. That happens: CUDA loads
            # a kernel when it is first called, and loading may wait for all streams ("Lazy Loading" in the CUDA
            # Programming Guide); it has made two ranks of a test hang. Stages of a pipeline may each send before they
            # receive, so their mailboxes have room for ``Schedule.messages_ahead`` messages.
            self._await(stream, len(self.ranks) + peer, number - self._mailbox.n_pieces)  # its slot is free
            stream.copy(self._place(peer, own, number), address, n_bytes)
            stream.raise_flag(self._flag(peer, own), number)
        return _Copying(stream.reached(), tensor)

    def receive(self, tensor: Tensor, peer: int) -> Underway:
        own, stream = self.place, self._receiving
        stream.follow()
        for address, n_bytes in self._pieces(tensor):
            self._taken[peer] = number = self._taken[peer] + 1
            self._await(stream, peer, number)
            stream.copy(address, self._place(own, peer, number), n_bytes)
            stream.raise_flag(self._flag(peer, len(self.ranks) + own), number)
        return _Copying(stream.reached(), tensor)

    def _pieces(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """The address and number of bytes of each piece of a contiguous tensor."""
        assert tensor.is_contiguous()
        for start in range(0, tensor.nbytes, self._mailbox.piece_bytes):
            yield tensor.data_ptr() + start, min(self._mailbox.piece_bytes, tensor.nbytes - start)

    def _await(self, stream: CopyStream, flag: int, number: int) -> None:
        if number > 0:
            self._awaited[flag] = number
            stream.await_flag(self._flag(self.place, flag), number)

    def _flag(self, owner: int, flag: int) -> int:
        return self._flags.of_rank[owner].data_ptr() + flag * self._flags.of_rank[owner].itemsize

    def _place(self, owner: int, sender: int, number: int) -> int:
        """The address of a sender's piece in the owner's mailbox."""
        box, n = (sender - owner - 1) % len(self.ranks), self._mailbox.n_pieces
        return self._boxes.of_rank[owner].data_ptr() + (box * n + number % n) * self._mailbox.piece_bytes

    def late(self) -> tuple[list[int], list[int]]:
        """This rank's flags, as copied by an earlier call, and the ranks for which it waits."""
        awaited, n = list(self._awaited), len(self.ranks)
        with torch.cuda.stream(self._side):  # no effect on a CPU, where it is None; the host does not wait
            self._seen.copy_(self._flags.of_rank[self.place], non_blocking=True)
        flags = self._seen.tolist()
        # Compared as on the GPU, where numbers wrap around from 2^31 - 1 to -2^31.
        behind = [0 < (number - flag) % 2**32 < 2**31 for number, flag in zip(awaited, flags, strict=True)]
        return flags, sorted({self.ranks[i % n] for i, waits in enumerate(behind) if waits})


def _watch(of: "weakref.ref[CopiedMessages]") -> None:
    """End the process if it has waited for messages for the time-out without a change of any flag."""
    flags, since = None, time.monotonic()
    while (messages := of()) is not None:
        rank = messages.rank
        if rank.device.type == "cuda":
            torch.cuda.set_device(rank.device)  # in this thread, which would otherwise create a context on GPU 0
        now, late = messages.late()
        del messages
        if now != flags or not late:
            flags, since = now, time.monotonic()
        elif time.monotonic() - since > rank.timeout_s:
            whom = f"rank {late[0]}, which has" if len(late) == 1 else f"ranks {', '.join(map(str, late))}, which have"
            said = f"rank {rank.rank} has waited {rank.timeout_s:g} s for a message of {whom} gone or is stuck"
            print(said, file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may be blocked in a call of the driver
        time.sleep(1)
