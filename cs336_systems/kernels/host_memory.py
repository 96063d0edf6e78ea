"""Host memory: how much of it this process can still take, slabs of it pinned for a device, and copies to and from it.

Inside a container the kernel's figure of free memory does not apply. In sandboxes it may also be too small, as some
report a total that grows with use. So if the control group sets a limit, that limit is used.

A slab is one piece of memory, on the host or on a device, and tensors are views of it.

    host = host_slab(75 * 2**30, device)          # pinned, so that copies to and from the device are asynchronous
    weights = host.take((4096, 4096), torch.bfloat16)
    again = host.view(0, (4096, 4096), torch.bfloat16)

Torch's pinned allocator rounds every block up to a power of two, too much for a slab that fills a machine. Here the
system maps memory, in huge pages if possible, all cores fault it in, and CUDA then pins it. A slab needs no closing:
its memory is unpinned and freed when the slab and the last tensor in it are gone.

A ``HostLink`` copies between a device and host memory while the device computes.

    link = HostLink(device)
    coming = link.fetch([host])          # starts at once
    (tensor,) = coming.wait()            # work enqueued later sees the values
    link.send([tensor], [host])          # copies the values after all work enqueued so far
    link.release()                       # work enqueued later waits for all sends

Each direction has a stream, as both run at full speed at once (102 of twice 55.5 GB/s on an H200). The host never
waits: a caller that reads host memory must synchronize with the device first. A tensor that is sent stays alive
until the device has waited for its copy, so memory is bounded however far the host runs ahead: a later send makes
the device wait for earlier ones, except the newest and up to ``in_flight_bytes``. Host memory should be pinned, or
the host waits after all. On a CPU copies are synchronous.
"""

import mmap
import resource
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch
from torch import Tensor

from cs336_systems.hardware import GIB
from cs336_systems.kernels.allocating import computes, imagined_on_host

ALIGNMENT = 256
"""Bytes; the alignment of every tensor in a slab, more than any copy engine or kernel needs."""
_UNLIMITED = ("max", str(2**63 - mmap.PAGESIZE))
"""The contents of a limit file without a limit: v2 has this word, v1 its largest number of whole pages."""


def free_host_bytes() -> int:
    """Bytes that a new process could still allocate: the smaller of the kernel's and the control group's figures."""
    available = psutil.virtual_memory().available
    limit = control_group_headroom()
    return available if limit is None else min(available, limit)


def allowed_host_bytes() -> int:
    """Bytes that the control group still allows; without a limit there, the kernel's figure."""
    limit = control_group_headroom()
    return psutil.virtual_memory().available if limit is None else limit


def highest_resident_bytes() -> int:
    """The peak resident set of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def control_group_headroom(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes left under the tightest memory limit of this process's control groups, v1 and v2; None without a limit.

    A limit applies to every group below it, so all ancestors are read; inside a container the visible root is the
    container's own group.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
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
        limit, usage = (
            (folder / limit_file).read_text(encoding="utf-8").strip(),
            int((folder / usage_file).read_text(encoding="utf-8")),
        )
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        cache = sum(int(stat.get(f"{prefix}{of}_file", 0)) for of in ("active", "inactive"))
        return None if limit in _UNLIMITED else int(limit) - usage + cache
    except (OSError, ValueError):
        return None


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device, without waiting for the copy.

    Raises:
        RuntimeError: a CUDA graph is captured, whose replays would copy from freed memory.
    """
    check_uncaptured(device)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def check_uncaptured(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured, whose replays would not see new values from the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "addresses, hyperparameters or targets would come from the host while a CUDA graph is captured: take a "
            "step before the capture, clear gradients in place, and give targets on the device"
        )


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to ``ALIGNMENT``."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Slab:
    """One piece of memory from which tensors are taken by offset, or one after the other.

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
        raise RuntimeError(
            f"a host slab of {n_bytes / GIB:.2f} GiB is asked for, and {free / GIB:.2f} GiB are free here"
        )
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
        raise RuntimeError(f"a host slab of {n_bytes / GIB:.2f} GiB cannot be pinned: {why}")
    weakref.finalize(pages, cudart.cudaHostUnregister, address).atexit = False


@dataclass(frozen=True, eq=False)
class Coming:
    """Tensors on the device that are being fetched."""

    tensors: list[Tensor]
    done: torch.cuda.Event | None
    """None if the values have arrived already."""
    hosts: Sequence[Tensor] = ()
    """Their destination, if that is on the host."""

    def wait(self) -> list[Tensor]:
        """Make the device's current stream wait for the values; the host does not wait."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.done)
        return self.tensors


class HostLink:
    """Copies from and to one device, each direction in its own order.

    Args:
        in_flight_bytes: bytes that may be in flight to the host besides the newest send.
    """

    def __init__(self, device: torch.device, in_flight_bytes: int = 0) -> None:
        self.device, self.in_flight_bytes = device, in_flight_bytes
        self._inward, self._outward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._leaving: deque[Coming] = deque()

    def fetch(self, hosts: Sequence[Tensor]) -> Coming:
        """Start copies to the device, or return the source of an unfinished send to these same host tensors."""
        for leaving in reversed(self._leaving):  # the newest, if several went to the same place
            if list(map(id, leaving.hosts)) == list(map(id, hosts)):
                self._leaving.remove(leaving)
                return leaving
        tensors = [torch.empty_like(host, device=self.device) for host in hosts]
        return Coming(tensors, self._copy(self._inward, tensors, hosts))

    def send(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        """Start copying the tensors' present values to the host; the tensors must not be changed afterwards."""
        done = self._copy(self._outward, hosts, tensors)
        self._leaving.append(Coming(list(tensors), done, list(hosts)))
        before = sum(tensor.nbytes for one in list(self._leaving)[:-1] for tensor in one.tensors)
        while before > self.in_flight_bytes:
            before -= sum(tensor.nbytes for tensor in self._leaving.popleft().wait())

    def release(self) -> None:
        """Make the device wait for all sends, and drop the tensors that were kept alive for them."""
        while self._leaving:
            self._leaving.popleft().wait()

    def _copy(
        self, stream: torch.cuda.Stream | None, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> torch.cuda.Event | None:
        if stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        # Earlier work may still compute the data to send, or use the memory into which data is fetched.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return stream.record_event()
