"""Memory that a run takes and memory that a machine has: the measured side of ``costs/memory.py``.

On a GPU the peak is the caching allocator's high-water mark of allocated bytes. On a CPU it is the growth of the
process's resident set, which includes what libraries take. What is free is asked of the driver, or of the kernel and
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


def free_bytes(device: torch.device) -> int:
    """Bytes that a new process could still allocate on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit = _cgroup_headroom()
    return available if limit is None else min(available, limit)


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the memory limit of this control group (v2, then v1), or None without a limit.

    Reclaimable page cache counts as used in ``memory.current``, so inactive file pages are given back.
    """
    for limit_name, usage_name, inactive_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = (root / limit_name).read_text().strip(), int((root / usage_name).read_text())
            stat_file = (root / usage_name).with_name("memory.stat")
            stat = dict(line.split() for line in stat_file.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        return int(limit) - usage + int(stat.get(inactive_name, 0))
    return None


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

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - self.baseline)
