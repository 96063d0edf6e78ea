"""Memory that a run takes and memory that a machine has: the measured side of ``costs/memory.py``.

On a GPU the peak is the caching allocator's high-water mark of allocated bytes. On a CPU it is the growth of the
process's resident set, which includes what libraries take, and is that of a cell only in a process that has measured
no other. What is free is asked of the driver, or of the kernel and
the control group, whichever allows less: inside a container the machine's own figure is a promise nobody keeps.
"""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES

_OLDER_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
"""Torch's default before Hopper."""


def cublas_workspace_bytes(device: torch.device) -> int:
    """What torch allocates for each cuBLAS handle on this device; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return CUBLAS_WORKSPACE_BYTES if torch.cuda.get_device_capability(device)[0] >= 9 else _OLDER_WORKSPACE_BYTES


def allocated_bytes(device: torch.device) -> int:
    """What tensors take on a GPU; 0 on a CPU, which does not say."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Bytes that a new process could still allocate on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit = _cgroup_headroom()
    return available if limit is None else min(available, limit)


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
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
            base, files = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base) and (headroom := _headroom_of(folder, *files)) is not None:
                headrooms.append(headroom)
    return min(headrooms, default=None)


def _headroom_of(folder: Path, limit_file: str, usage_file: str, inactive_name: str) -> int | None:
    """Limit less usage of one control group, or None without a limit; reclaimable page cache does not count as used."""
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - usage + int(stat.get(inactive_name, 0))
    except (OSError, ValueError):
        return None


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

    def peak_bytes(self) -> int | None:
        """None, not measured, on a CPU in a process that has measured a cell before or was started by a launcher."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if _used:
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - self.baseline)
