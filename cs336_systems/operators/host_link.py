"""Tensors on their way between a device and host memory, beside what the device computes.

    link = HostLink(device)
    coming = link.fetch([host])          # starts at once
    (tensor,) = coming.wait()            # what the device does from here on finds the values there
    link.send([tensor], [host])          # of what the device has done until here
    link.release()                       # what it does from here on comes after all that was sent

A stream for each direction, as both run at full speed at once (102 of twice 55.5 GB/s on an H200). The host waits for
nothing: whoever reads host memory itself synchronizes with the device first. What is sent stays alive until the device
has waited for the copy, so memory is bounded by order, not by how far the host runs ahead: a later send makes the
device wait for the ones before it, but for the newest and as many bytes as ``in_flight_bytes``.

Host memory should be pinned (``pinned.py``), or the host waits after all. On a CPU everything is copied at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coming:
    """Tensors on the device whose values are on their way."""

    tensors: list[Tensor]
    done: torch.cuda.Event | None = None
    """None where they are there."""

    def wait(self) -> list[Tensor]:
        """Let the device's current stream wait for them, not the host."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.done)
        return self.tensors


@dataclass(frozen=True)
class _Leaving:
    tensors: list[Tensor]
    hosts: list[Tensor]
    done: torch.cuda.Event

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class HostLink:
    """Copies from and to one device, each direction in its own order.

    Args:
        in_flight_bytes: that may be on their way out besides the newest.
    """

    def __init__(self, device: torch.device, in_flight_bytes: int = 0) -> None:
        self.device, self.in_flight_bytes = device, in_flight_bytes
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._leaving: deque[_Leaving] = deque()

    def fetch(self, hosts: Sequence[Tensor]) -> Coming:
        """Start bringing copies to the device; what has not left it yet is brought back as it is."""
        for leaving in self._leaving:
            if all(map(_same, leaving.hosts, hosts)) and len(leaving.hosts) == len(hosts):
                return Coming(leaving.tensors, leaving.done)
        tensors = [torch.empty_like(host, device=self.device) for host in hosts]
        if not self._streams:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host)
            return Coming(tensors)
        inward = self._streams[0]
        inward.wait_stream(torch.cuda.current_stream(self.device))  # until then the memory may have another use
        with torch.cuda.stream(inward):
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        return Coming(tensors, inward.record_event())

    def send(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        """Start copying to the host what is there now, which nobody may change any more."""
        if not self._streams:
            for tensor, host in zip(tensors, hosts, strict=True):
                host.copy_(tensor)
            return
        outward = self._streams[1]
        outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(outward):
            for tensor, host in zip(tensors, hosts, strict=True):
                host.copy_(tensor, non_blocking=True)
        self._leaving.append(_Leaving(list(tensors), list(hosts), outward.record_event()))
        while len(self._leaving) > 1 and sum(one.n_bytes for one in list(self._leaving)[:-1]) > self.in_flight_bytes:
            self._release_oldest()

    def release(self) -> None:
        """Let the device wait for all that was sent, and give its memory up."""
        while self._leaving:
            self._release_oldest()

    def _release_oldest(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._leaving.popleft().done)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
