"""Host memory that this process can still take, by the kernel and by the control group.

Inside a container the machine's own figure is a promise nobody keeps. In sandboxes it may also be too small, as some
report a total that grows with what is used: where the control group sets a limit, that is the one to believe.
"""

import mmap
from pathlib import Path

import psutil

_UNLIMITED = ("max", str(2**63 - mmap.PAGESIZE))
"""What limit files say without a limit: v2's word, and v1's largest number of whole pages."""


def free_host_bytes() -> int:
    """Bytes that a new process could still take: the kernel and the control group asked, whichever allows less."""
    available = psutil.virtual_memory().available
    limit = control_group_headroom()
    return available if limit is None else min(available, limit)


def allowed_host_bytes() -> int:
    """Bytes that the control group still allows; without a limit there, what the kernel says."""
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
    """Limit less usage of one control group, or None without a limit; page cache, which the kernel gives back, does not
    count as used, however recently it was read.
    """
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"{prefix}{of}_file", 0)) for of in ("active", "inactive"))
        return None if limit in _UNLIMITED else int(limit) - usage + cache
    except (OSError, ValueError):
        return None
