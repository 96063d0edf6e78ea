"""Host memory: how much of it this process can still take, and slabs of it, pinned for a device.

The machine's own figure of free memory does not hold inside a container. In sandboxes it may also be too small, as some
report a total that grows with what is used. So where the control group sets a limit, that limit counts.

A slab is one piece of memory, on the host or on a device, and tensors are views of it.

    host = host_slab(75 * 2**30, device)          # pinned, so that copies to and from the device run by themselves
    weights = host.take((4096, 4096), torch.bfloat16)
    again = host.view(0, (4096, 4096), torch.bfloat16)

Torch's own pinned allocator rounds every block up to a power of two, too much for a slab that fills a machine. Here
the system maps memory, in huge pages where it can, every core touches its share, and CUDA pins what is there. A slab
needs no closing: its memory is unpinned and given back when the slab and the last tensor in it are gone.
"""

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import psutil
import torch
from torch import Tensor

from cs336_systems.hardware import GIB
from cs336_systems.kernels.allocating import computes, imagined_on_host

ALIGNMENT = 256
"""Bytes, of every tensor in a slab: more than any copy engine or kernel asks for."""
TABLE_SHARE = 8 / 4096
"""Bytes of a GPU that each byte pinned for it costs: its page tables have an entry for each page of the host. Measured
on an H200: 0.739 GiB outside torch with nothing pinned, 0.878 with 71.4 GiB."""
_UNLIMITED = ("max", str(2**63 - mmap.PAGESIZE))
"""The contents of a limit file without a limit: v2 has this word, v1 its largest number of whole pages."""


def free_host_bytes() -> int:
    """Bytes that a new process could still take: the kernel's figure or the control group's, whichever is less."""
    available = psutil.virtual_memory().available
    limit = control_group_headroom()
    return available if limit is None else min(available, limit)


def allowed_host_bytes() -> int:
    """Bytes that the control group still allows; without a limit there, the kernel's figure."""
    limit = control_group_headroom()
    return psutil.virtual_memory().available if limit is None else limit


def control_group_headroom(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes left under the tightest memory limit of this process's control groups, v1 and v2; None without a limit.

    A limit binds every group below it, so all ancestors are asked; inside a container the visible root is the
    container's own group.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    headrooms = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, files = root, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (headroom := _headroom_of(folder, *files)) is not None:
                headrooms.append(headroom)
    return min(headrooms, default=None)


def _headroom_of(folder: Path, limit_file: str, usage_file: str, prefix: str) -> int | None:
    """Limit less usage of one control group, or None without a limit.

    Page cache does not count as used, however recently it was read, as the kernel gives it back.
    """
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"{prefix}{of}_file", 0)) for of in ("active", "inactive"))
        return None if limit in _UNLIMITED else int(limit) - usage + cache
    except (OSError, ValueError):
        return None


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to ``ALIGNMENT``."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Slab:
    """One piece of memory that hands out tensors by offset, or one after the other.

    Args:
        memory: uint8, one dimension, contiguous.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.n_taken = 0
        """Bytes handed out by ``take``."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole slab."""
        return self.memory.numel()

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The contiguous tensor at this byte.

        Raises:
            ValueError: the offset is not a multiple of ``ALIGNMENT``, or the tensor reaches beyond the slab.
        """
        end = offset + prod(shape) * dtype.itemsize
        if offset % ALIGNMENT or not 0 <= offset <= end <= self.n_bytes:
            raise ValueError(f"bytes {offset} to {end} are no aligned piece of a slab of {self.n_bytes} bytes")
        return self.memory[offset:end].view(dtype).view(tuple(shape))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next free piece; raises ValueError where too little is left."""
        tensor = self.view(self.n_taken, shape, dtype)
        self.n_taken = aligned(self.n_taken + tensor.nbytes)
        return tensor


def device_slab(n_bytes: int, device: torch.device) -> Slab:
    """Uninitialised memory of the device."""
    return Slab(torch.empty(n_bytes, dtype=torch.uint8, device=device))


def host_slab(n_bytes: int, device: torch.device) -> Slab:
    """Zeros in host memory, pinned for ``device`` if that is a GPU, and plain memory otherwise.

    On ``meta`` where nothing is computed.

    Raises:
        RuntimeError: this machine has too little memory left, or it cannot be pinned.
    """
    if not computes():
        return Slab(imagined_on_host(n_bytes))
    free = allowed_host_bytes()
    if n_bytes > free:
        raise RuntimeError(f"a host slab of {_gib(n_bytes)} GiB is asked for, and {_gib(free)} GiB are free here")
    if n_bytes == 0:
        return Slab(torch.empty(0, dtype=torch.uint8))
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # some sandboxes know none
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # holds on to the pages, as does every view
    if device.type == "cuda":
        memory.zero_()  # in many threads; cudaHostRegister would touch every page in one
        _pin(pages, memory.data_ptr(), n_bytes, device)
    return Slab(memory)


def _pin(pages: mmap.mmap, address: int, n_bytes: int, device: torch.device) -> None:
    """Pin memory for a device until ``pages`` is gone, whose last holder may be a tensor."""
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(address, n_bytes, 0)
    if int(error):
        why = cudart.cudaGetErrorString(error)
        raise RuntimeError(f"a host slab of {_gib(n_bytes)} GiB cannot be pinned: {why}")
    weakref.finalize(pages, cudart.cudaHostUnregister, address).atexit = False


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"
