"""Where a number comes from: device, driver, library versions, NCCL's settings, commit, the device's state around it.

Nothing here changes a setting: clocks, power and temperature are read through NVML and recorded, so that a throttled
run can be told from a slow one. Where the source was shipped without its ``.git`` folder, the environment variable
``CS336_SYSTEMS_COMMIT`` (a hash, with ``-dirty`` appended if so) says what was shipped.

    with sampled_state(device) as states:
        run()
    states.values("power_w")          # one float per reading, [] where the device does not say

A reading before and one after a run tell nothing of what happened between: a GPU lowers its clock within milliseconds
of reaching its power limit and raises it again as fast. Limits of sampling: since Ampere NVML's power is itself an
average over the last second, so a run must last longer than that before its readings are its own; and the thread takes
the interpreter for some tens of microseconds per reading, which a loop that launches microsecond kernels would feel.
Importing this module imports no torch.
"""

import functools
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cs336_systems.processes import n_cores

if TYPE_CHECKING:
    import torch

COMMIT_VARIABLE = "CS336_SYSTEMS_COMMIT"

_MEASURED_SOURCES = ("cs336_systems", "benchmarks", "scripts", "pyproject.toml", "uv.lock")
"""Paths whose uncommitted changes make a measurement dirty; results and prose do not."""

_THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
}


@functools.cache
def source_version() -> tuple[str, bool]:
    """(commit hash, whether measured sources differ from it); ("unknown", True) where neither git nor variable says."""
    declared = os.environ.get(COMMIT_VARIABLE)
    if declared:
        return declared.removesuffix("-dirty"), declared.endswith("-dirty")
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, errors="replace", check=True, timeout=20
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit, bool(git("status", "--porcelain", "--", *_MEASURED_SOURCES))
    except (OSError, subprocess.SubprocessError):
        return "unknown", True


@functools.cache
def host_name() -> str:
    """The CPU's model, six digits of a hash of the boot id, which tell equal hosts apart, and this process's cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace", encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    boot = Path("/proc/sys/kernel/random/boot_id")
    number = boot.read_text(encoding="utf-8") if boot.exists() else platform.node()
    return f"{model}, {hashlib.sha256(number.encode()).hexdigest()[:6]}, {n_cores()} cores"


def _nvml_handle(device_index: int) -> Any:
    """NVML's handle of the GPU that torch calls ``device_index``, found by UUID as CUDA_VISIBLE_DEVICES may reorder."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device_index).uuid}")


def versions(device: "torch.device | str") -> dict[str, Any]:
    """The schema's columns that name device, driver and libraries; empty strings where a column does not apply."""
    import torch

    device = torch.device(device)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    commit, dirty = source_version()
    row: dict[str, Any] = {"gpu": "", "gpu_count": 0, "driver": "", "cuda": "", "nccl": ""}
    if device.type == "cuda":
        import pynvml
        import torch.distributed as dist

        from cs336_systems.distributed.process_group import SHARE_GPUS

        pynvml.nvmlInit()
        version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
        # What is set for NCCL and for torch's use of it: it chooses algorithms, channels and waits.
        chosen = "NCCL_", "TORCH_NCCL_", SHARE_GPUS
        settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(chosen)}
        row |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_count": 1,
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cuda": torch.version.cuda,
            "nccl": json.dumps({"version": version, "environment": settings}),
        }
    return row | {
        "host": host_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit,
        "dirty": dirty,
        "argv": shlex.join([Path(sys.argv[0]).name, *map(_without_folders, sys.argv[1:])]),
    }


def _without_folders(argument: str) -> str:
    """The last part of an absolute path: rows do not tell where a machine keeps its files."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def device_state(device: "torch.device") -> dict[str, Any]:
    """The host's load; clocks (MHz), power (W), temperature (C), active throttle reasons of a GPU; clock of a CPU."""
    load = {"load_1min": round(os.getloadavg()[0], 2)}
    if device.type != "cuda":
        frequency = psutil.cpu_freq()
        return load | {"cpu_mhz": round(frequency.current) if frequency else None}
    import pynvml

    handle = _nvml_handle(device.index or 0)
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return load | {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "throttle": [name for bit, name in _THROTTLE_REASONS.items() if reasons & bit],
    }


def memory_used_bytes(device: "torch.device") -> int:
    """Bytes of a GPU that all its processes use, with contexts and libraries, which torch does not see.

    What the driver has reserved for itself is not among them: ``torch.cuda.mem_get_info`` has it in neither number.
    """
    import pynvml

    handle = _nvml_handle(device.index or 0)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def timestamp() -> str:
    """Now, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class States(list[dict[str, Any]]):
    """Readings of ``device_state``."""

    def values(self, name: str) -> list[float]:
        """Every reading of one quantity; empty if this kind of device has none."""
        return [float(state[name]) for state in self if state.get(name) is not None]


@contextmanager
def sampled_state(device: "torch.device", interval_s: float = 0.05) -> Iterator[States]:
    """Read ``device_state`` on entering, then every ``interval_s`` seconds until the body ends.

    An error of the reading thread is raised on leaving unless the body has one of its own.
    """
    states, done = States([device_state(device)]), threading.Event()

    def read() -> None:
        while not done.wait(interval_s):
            states.append(device_state(device))

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        try:
            yield states
        finally:
            done.set()
    reading.result()
