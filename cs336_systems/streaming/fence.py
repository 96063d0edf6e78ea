"""Enforces memory caps: torch may not reserve more of the device, and measured use is compared with the caps.

    fence = Fence(device, device_bytes=24 * GIB, host_bytes=75 * GIB)    # before anything is allocated
    with refusals(device, 24 * GIB):                                     # ValueError where torch is refused memory
        ...
    fence.check()                                                        # RuntimeError if a cap was passed

Device use is the memory that torch has reserved, including the slab, and the rest that the driver reports: CUDA's
context, kernels and libraries. Another process on the same GPU would be counted as part of the context. Host use is
this process's peak resident set since the fence was made, including the slab; slabs of an earlier run are freed by
then.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from cs336_systems.hardware import GIB
from cs336_systems.kernels.host_memory import allowed_host_bytes, highest_resident_bytes

LATER = 256 * 2**20
"""Bytes by which the context may grow after the fence is up, as kernels are loaded."""


@dataclass(frozen=True)
class InUse:
    """The most bytes in use; 0 on a device that is the CPU."""

    device: int
    host: int
    context: int
    """Device bytes outside of torch's allocator."""


def check_cpu_caps(device_bytes: int, host_bytes: int) -> None:
    """Checks caps for a step on a CPU, whose device is the host's memory as well.

    Raises:
        ValueError: together they exceed the free memory.
    """
    if (n_bytes := device_bytes + host_bytes) > (free := allowed_host_bytes()):
        has = f"the {free / GIB:.2f} GiB of memory that are free here, where the device is a CPU"
        raise ValueError(f"caps of {n_bytes / GIB:.2f} GiB together are more than {has}")


class Fence:
    """Caps on one device and its host; memory left by earlier work of the process is freed, or counts.

    Raises:
        ValueError: the device has less memory than the cap, or its context alone exceeds the cap.
    """

    def __init__(self, device: torch.device, device_bytes: int, host_bytes: int) -> None:
        self.device, self.device_bytes, self.host_bytes = device, device_bytes, host_bytes
        self.overhead = 0
        """Device bytes outside of torch's allocator, or that torch does not release."""
        gc.collect()  # steps, which refer to themselves
        self._highest_before = highest_resident_bytes()
        if device.type != "cuda":
            return
        torch.cuda.init()
        total = torch.cuda.get_device_properties(device).total_memory
        if device_bytes > total:
            raise ValueError(f"a cap of {device_bytes / GIB:.2f} GiB is more than the device's {total / GIB:.2f} GiB")
        torch._C._cuda_clearCublasWorkspaces()  # cut from a larger piece, each would keep all of that
        torch.cuda.empty_cache()
        torch.empty(1, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        index = torch.cuda.current_device() if device.index is None else device.index  # the next call wants one
        context = self._context()
        kept = torch.cuda.memory_reserved(device)
        self.overhead = context + LATER + kept
        left = device_bytes - self.overhead
        if left <= 0:
            taken = f"the context's {self.overhead / GIB:.2f} GiB"
            raise ValueError(f"a cap of {device_bytes / GIB:.2f} GiB is below {taken}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, (left + kept) / total), index)

    def _context(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def in_use(self) -> InUse:
        """The memory that was in use since the fence is up."""
        highest, host = highest_resident_bytes(), psutil.Process().memory_info().rss  # which some sandboxes only have
        if highest > self._highest_before:
            host = max(highest, host)
        if self.device.type != "cuda":
            return InUse(0, host, 0)
        context = self._context()
        return InUse(torch.cuda.max_memory_reserved(self.device) + context, host, context)

    def check(self) -> InUse:
        """Returns the memory that was in use.

        Raises:
            RuntimeError: it exceeds a cap.
        """
        used = self.in_use()
        for what, n_bytes, cap in (("device", used.device, self.device_bytes), ("host", used.host, self.host_bytes)):
            if n_bytes > cap:
                others = f", {used.context / GIB:.2f} of them not torch's" if what == "device" else ""
                in_use = f"{n_bytes / GIB:.2f} GiB of the {what} were in use{others}"
                raise RuntimeError(f"{in_use}, the cap is {cap / GIB:.2f} GiB")
        return used


@contextmanager
def refusals(device: torch.device, cap_bytes: int) -> Iterator[None]:
    """Turns torch's error, when it is refused memory inside, into one sentence.

    Args:
        cap_bytes: the fence's cap on the device.

    Raises:
        ValueError: instead of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        raise ValueError(
            f"the device's cap of {cap_bytes / GIB:.2f} GiB is short: {used / GIB:.2f} GiB are in use, "
            f"{(held - used) / GIB:.2f} GiB lie in pieces too small for what a kernel asks for; raise --device-gib, or "
            "lower --chunk"
        ) from error
