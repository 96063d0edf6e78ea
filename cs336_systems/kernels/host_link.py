"""Copies between a device and host memory while the device computes.

    link = HostLink(device)
    coming = link.fetch([host])          # starts at once
    (tensor,) = coming.wait()            # work that is queued from here on finds the values there
    link.send([tensor], [host])          # copies the values after all work queued so far
    link.release()                       # work that is queued from here on waits for everything that was sent

Each direction has a stream, as both run at full speed at once (102 of twice 55.5 GB/s on an H200). The host waits for
nothing: a caller that reads host memory synchronizes with the device first. A tensor that is sent stays alive until the
device has waited for its copy, so memory is bounded by order, not by how far the host runs ahead: a later send makes
the device wait for the ones before it, except the newest and as many bytes as ``in_flight_bytes``.

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
    done: torch.cuda.Event | None
    """None if the values are there already."""

    def wait(self) -> list[Tensor]:
        """Let the device's current stream wait for the values; the host does not wait."""
        if self.done is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.done)
        return self.tensors


@dataclass(frozen=True, eq=False)
class _Leaving:
    """Tensors on their way to the host; ``done`` is as in ``Coming``."""

    tensors: list[Tensor]
    hosts: list[Tensor]
    done: torch.cuda.Event | None

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def goes_to(self, hosts: Sequence[Tensor]) -> bool:
        return list(map(id, hosts)) == list(map(id, self.hosts))


class HostLink:
    """Copies from and to one device, each direction in its own order.

    Args:
        in_flight_bytes: bytes that may be on their way to the host besides the newest send.
    """

    def __init__(self, device: torch.device, in_flight_bytes: int = 0) -> None:
        self.device, self.in_flight_bytes = device, in_flight_bytes
        self._inward, self._outward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._leaving: deque[_Leaving] = deque()

    def fetch(self, hosts: Sequence[Tensor]) -> Coming:
        """Start copies to the device, or return the source of a send to these very tensors that is still under way."""
        for leaving in reversed(self._leaving):  # the newest, if several went to the same place
            if leaving.goes_to(hosts):
                self._leaving.remove(leaving)
                return Coming(leaving.tensors, leaving.done)
        tensors = [torch.empty_like(host, device=self.device) for host in hosts]
        return Coming(tensors, self._copy(self._inward, tensors, hosts))

    def send(self, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        """Start copying the tensors' present values to the host; nobody may change the tensors after that."""
        done = self._copy(self._outward, hosts, tensors)
        self._leaving.append(_Leaving(list(tensors), list(hosts), done))
        while len(self._leaving) > 1 and sum(one.n_bytes for one in list(self._leaving)[:-1]) > self.in_flight_bytes:
            self._release_oldest()

    def release(self) -> None:
        """Let the device wait for everything that was sent, and drop the tensors that were kept alive for it."""
        while self._leaving:
            self._release_oldest()

    def _copy(
        self, stream: torch.cuda.Stream | None, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> torch.cuda.Event | None:
        if stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        # Before that the device still computes what is sent, and uses the memory of what is fetched for something else.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def _release_oldest(self) -> None:
        leaving = self._leaving.popleft()
        Coming(leaving.tensors, leaving.done).wait()
