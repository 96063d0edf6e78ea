"""Memory that a run takes and that a machine has: the measured counterpart of ``costs/memory.py``.

On a GPU the peak is the caching allocator's high-water mark of allocated bytes. On a CPU it is the growth of the
process's resident set, which includes what libraries take, and is that of a cell only in a process that has measured
no other. What is free is asked of the driver, or of the kernel and the control group.
"""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES
from cs336_systems.distributed.peer_memory import mapped_bytes
from cs336_systems.kernels.host_memory import free_host_bytes

_OLDER_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
"""Torch's default before Hopper."""


def cublas_workspace_bytes(device: torch.device) -> int:
    """Bytes that torch allocates for each cuBLAS handle; 0 on a CPU, and where there is no GPU an H200's."""
    if device.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        return CUBLAS_WORKSPACE_BYTES
    return CUBLAS_WORKSPACE_BYTES if torch.cuda.get_device_capability(device)[0] >= 9 else _OLDER_WORKSPACE_BYTES


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, which does not say."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Bytes that a new process could still allocate on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


_used = False
"""Whether this process holds memory of more than the present cell: the growth of its resident set says nothing then."""


def mark_used() -> None:
    """Say that a cell has been measured in this process, or that it is not one cell's alone."""
    global _used
    _used = True


class PeakMeter:
    """High-water mark of memory from construction on: ``peak_bytes()`` of this process on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):  # resets the kernel's high-water mark, where it can
                Path("/proc/self/clear_refs").write_text("5")
            self.baseline = psutil.Process().memory_info().rss

    def requested_bytes(self) -> int | None:
        """The most bytes that were asked for on a GPU: the peak without what the allocator rounds up; None on a CPU.

        By default a block that is free already is handed out whole if less than 1 MiB of it would be left over, so that
        the peaks of programs that need the same memory may differ; ``profiling/memory_profile.py`` tells by how much.
        """
        if self.device.type != "cuda":
            return None
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"] + mapped_bytes(self.device)

    def peak_bytes(self) -> int | None:
        """None, not measured, on a CPU in a process that has measured a cell before or was started by a launcher."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) + mapped_bytes(self.device)
        if _used:
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - self.baseline)
