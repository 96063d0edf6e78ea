"""Memory that all ranks of a host can read, and when: a rank copies what it needs, and the others need not take part.

A collective is a kernel. It takes multiprocessors from what runs beside it, and holds them while it waits for ranks
that come later. Where ranks map each other's memory, a rank fetches the rows of the others by its copy engines. What
ranks have to agree on is only when rows are read and when they are written (``Turns``).

On GPUs memory is mapped by torch's symmetric memory (over NVLink, or PCIe where GPUs reach each other), whose
``_low_contention_all_gather`` copies likewise. On CPUs it is a file in memory that all ranks have open.
"""

import os
import socket
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.process_group import on_every_rank

_IN_MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""


def why_not_mapped(device: torch.device, process_group: dist.ProcessGroup) -> str | None:
    """What keeps these ranks from mapping each other's memory, the same on all; None if nothing does; a collective."""
    places = on_every_rank(lambda: (socket.gethostname(), device.index), process_group)

    def reason() -> str | None:
        if len(hosts := {host for host, _ in places}) > 1:
            return f"ranks are on {len(hosts)} hosts"
        if device.type != "cuda":
            return None if _IN_MEMORY.is_dir() else f"there is no {_IN_MEMORY}"
        unreached = [index for _, index in places if index != device.index and not _reaches(device.index, index)]
        return f"GPU {device.index} cannot read the memory of GPU {unreached[0]}" if unreached else None

    return next(filter(None, on_every_rank(reason, process_group)), None)


def _reaches(one: int, other: int) -> bool:
    return other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(one, other)


def map_memory(numel: int, dtype: torch.dtype, device: torch.device, process_group: dist.ProcessGroup) -> list[Tensor]:
    """Zeros, (numel,) on every rank: each rank's, in their order, this rank's own among them; a collective.

    Raises:
        OSError: on a CPU, there is no room for them.
    """
    if device.type != "cuda":
        return _map_files(numel, dtype, process_group)
    import torch.distributed._symmetric_memory as symmetric

    # Of the pool, so that the allocator's statistics count it.
    with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
        own = torch.zeros(numel, dtype=dtype, device=device)
    handle = symmetric.rendezvous(own, process_group)
    return [
        own if rank == process_group.rank() else handle.get_remote_tensor(rank, own.shape, dtype)
        for rank in range(process_group.size())
    ]


def _map_files(numel: int, dtype: torch.dtype, process_group: dist.ProcessGroup) -> list[Tensor]:
    size = max(1, numel)  # no empty file can be mapped
    with tempfile.NamedTemporaryFile(dir=_IN_MEMORY) as file:

        def reserve() -> str:
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)  # a write beyond memory ends the process
            return file.name

        names = on_every_rank(reserve, process_group)
        mapped = [torch.from_file(name, shared=True, size=size, dtype=dtype)[:numel] for name in names]
        dist.barrier(process_group)  # a file has a name until all ranks have opened it
    return mapped


class Turns:
    """When ranks read what they have mapped of each other, and when they write their own; all take part in both.

    Args:
        stream: of the copies; None on a CPU.
        device: of the memory.
        process_group: of the ranks.
    """

    def __init__(
        self, stream: "torch.cuda.Stream | None", device: torch.device, process_group: dist.ProcessGroup
    ) -> None:
        self._stream, self._group = stream, process_group
        self._token = torch.zeros(1, device=device)

    def begin_reading(self) -> None:
        """Copies wait from now on for what all ranks have written: on their current streams, or that of copies."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._meet()

    def end_reading(self) -> None:
        """The current stream waits from now on for the copies that all ranks have begun."""
        self._meet()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _meet(self) -> None:
        where: AbstractContextManager = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with where:
            dist.all_reduce(self._token, group=self._group)
