"""Gathers the rows of all ranks, by a collective or by copies from memory that the ranks of a host have mapped.

A collective is a kernel, which takes multiprocessors from concurrent work. If ranks map each other's memory, each rank
instead fetches the others' rows by its copy engines, and ranks alternate between reading and writing rows (``Turns``).
``wait`` makes the current stream (on a CPU: the caller) wait for either.

On GPUs torch's symmetric memory maps the memory (over NVLink, or over PCIe with peer access); its
``_low_contention_all_gather`` copies in the same way. On CPUs it is a file in memory that all ranks have open.
"""

import os
import socket
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.process_group import on_every_rank

_mapped: "Counter[torch.device]" = Counter()  # for each GPU, bytes of this process that other ranks map


def mapped_bytes(device: torch.device) -> int:
    """Bytes on a GPU that other ranks map, which ``torch.cuda.max_memory_allocated`` leaves out."""
    return _mapped[device]


def why_not_mapped(device: torch.device, process_group: dist.ProcessGroup) -> str | None:
    """Say why these ranks cannot map each other's memory, or None if they can; all get the same; a collective."""
    places = on_every_rank(lambda: (socket.gethostname(), device.index), process_group)

    def reason() -> str | None:
        if len(hosts := {host for host, _ in places}) > 1:
            return f"ranks are on {len(hosts)} hosts"
        if device.type != "cuda":
            return None if hasattr(os, "memfd_create") else "memfd_create is only on Linux"
        if len(set(places)) < len(places):
            return f"several ranks see their GPU as number {device.index}"
        for other in {number for _, number in places} - {device.index}:
            if other >= torch.cuda.device_count() or not torch.cuda.can_device_access_peer(device.index, other):
                return f"GPU {device.index} cannot read the memory of GPU {other}"
        return None

    return next(filter(None, on_every_rank(reason, process_group)), None)


class PeerMemory:
    """Mapped zeros of every rank, ``of_rank[rank]`` (numel,). Making them is a collective; OSError without memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup) -> None:
        size = max(1, numel)  # no bytes cannot be mapped
        map_all = _map_symmetric if device.type == "cuda" else _map_files
        self.of_rank = [memory[:numel] for memory in map_all(size, dtype, device, process_group)]
        if device.type == "cuda":
            _mapped[device] += (n_bytes := size * dtype.itemsize)
            weakref.finalize(self, _mapped.subtract, {device: n_bytes})


def _map_symmetric(
    size: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup
) -> list[Tensor]:
    import torch.distributed._symmetric_memory as symmetric

    # New memory each time: a pool's may have been mapped before, and ranks might get different pieces of it.
    own = symmetric.empty(size, dtype=dtype, device=device)
    handle = symmetric.rendezvous(own, process_group)
    mapped = [handle.get_buffer(rank, (size,), dtype) for rank in range(process_group.size())]
    mapped[process_group.rank()] = own.zero_()
    return mapped


def _map_files(size: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup) -> list[Tensor]:
    file = os.memfd_create("rows of a rank")  # unlinked, so that nothing is left of it, however the process ends
    mapped: list[Tensor] = []

    def reserve() -> str:
        os.posix_fallocate(file, 0, size * dtype.itemsize)  # a write beyond memory would end the process
        return f"/proc/{os.getpid()}/fd/{file}"

    def open_all() -> None:
        mapped.extend(torch.from_file(path, shared=True, size=size, dtype=dtype) for path in paths)

    try:
        paths = on_every_rank(reserve, process_group)
        on_every_rank(open_all, process_group)  # until all ranks have it open
    finally:
        os.close(file)
    return mapped


class Turns:
    """The stream of gathers, and the turns in which the ranks of a group read each other's rows and write their own.

    Args:
        taken: whether ranks copy rows; if they only use collectives, turns are not needed and do nothing.
        replicas: the ranks with the same rows, this one among them, if there are others.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup, taken: bool, replicas: dist.ProcessGroup | None
    ) -> None:
        self.device, self.group, self.taken, self.replicas = device, group, taken, replicas
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """The stream of gathers, so that casts do not queue behind the computation."""
        self._token = torch.zeros(1, device=device) if taken else torch.empty(0)
        self.reading = False
        """Whether ranks may read mapped rows: at other times code that writes rows would not wait for reads."""

    @property
    def n_ranks(self) -> int:
        """The number of ranks over which gradients are averaged: the group's size times the number of replicas."""
        return self.group.size() * (self.replicas.size() if self.replicas else 1)

    def on_stream(self) -> AbstractContextManager:
        """Run the body on the stream of gathers, after the current stream's work so far."""
        if self._stream is None:
            return nullcontext()
        # The memory may have been another tensor's a moment ago, and the optimizer may still be writing the shards.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def begin_reading(self) -> None:
        """Make later copies wait for the writes so far on all ranks' current streams."""
        if not self.taken:
            return
        with self.on_stream():
            dist.all_reduce(self._token, group=self.group)
        self.reading = True

    def end_reading(self) -> None:
        """Make the current stream wait for the copies that all ranks have begun."""
        if not self.taken:
            return
        self.reading = False
        self.meet()
        self._wait_for_copies()

    def break_off(self) -> None:
        """End reading after an error, without other ranks, which may not take part; the host does not wait."""
        self.reading = False
        self._wait_for_copies()  # the memory that copies write may be freed next and reused

    def _wait_for_copies(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def meet(self) -> None:
        """Make the stream of gathers wait for those of all ranks."""
        where: AbstractContextManager = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with where:
            dist.all_reduce(self._token, group=self.group)


class PackedGather:
    """An all-gather of several tensors as one message; ``wait`` waits for it and unpacks it.

    Each of ``inputs`` is (n,); the corresponding one of ``outputs`` is (world_size * n,), of the same dtype.
    """

    def __init__(self, process_group: dist.ProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        world_size, sizes = process_group.size(), [shard.numel() for shard in inputs]
        self._outputs = [output.view(world_size, size) for output, size in zip(outputs, sizes, strict=True)]
        packed = torch.cat(tuple(inputs))
        received = packed.new_empty(world_size, sum(sizes))
        self._parts = received.split(sizes, dim=1)
        self._work = dist.all_gather_into_tensor(received.view(-1), packed, group=process_group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        torch._foreach_copy_(self._outputs, self._parts)


def all_gather(
    process_group: dist.ProcessGroup, outputs: list[Tensor], inputs: list[Tensor]
) -> "dist.Work | PackedGather":
    """Start to gather each of the flat ``inputs`` into the corresponding one of ``outputs``, all in one collective.

    On CPUs the message is packed here: gloo's own coalesced all-gather corrupts the heap (torch 2.11), as its two
    workers write the name of a finished operation to one ``std::string`` without a lock, and the name makes it grow.
    """
    if dist.get_backend(process_group) != "gloo":
        return process_group.allgather_into_tensor_coalesced(outputs, inputs)
    return PackedGather(process_group, outputs, inputs)


class Copies:
    """An all-gather by this rank alone; the others must not change their inputs meanwhile.

    Each of ``outputs`` is (world_size * n,); the corresponding ``inputs``, one of each rank, are (n,).
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]]) -> None:
        self._pairs = [
            pair
            for output, shards in zip(outputs, inputs, strict=True)
            for pair in zip(output.chunk(len(shards)), shards, strict=True)
        ]
        self._device = outputs[0].device
        self._done: torch.cuda.Event | None = None

    def begin(self) -> "Copies":
        """Copy on the current stream; these copies must not be in progress already."""
        for place, shard in self._pairs:
            place.copy_(shard)  # of contiguous memory, which CUDA gives to a copy engine
        if self._device.type == "cuda":
            self._done = torch.cuda.current_stream(self._device).record_event()
        return self

    def wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
