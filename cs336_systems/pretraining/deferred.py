"""Numbers of a step, read on the host once the next step is enqueued, so that the device never waits.

    deferred = Deferred(device, ("loss", "norm"))
    deferred.begin()                                 # the time before it is around the step
    done = deferred.push(*train(step))               # of the step before, None for the first
    done = deferred.flush()                          # the last step

``push`` starts a copy of the step's scalars to pinned memory, after the step on its stream, and then waits for the
previous step's copy. So the host is at most one step ahead of the device, and a loss is reported one step late, also on
a CPU, where values are available at once.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Done:
    """The values of a step that is done.

    Attributes:
        seconds: from the end of the step before it, or from ``restart``, to its own, by the device's clock.
        around_seconds: the part of them before ``begin`` and after the call of ``push``.
    """

    values: dict[str, float]
    seconds: float
    around_seconds: float


class Deferred:
    """The named scalars and the seconds of each step, which is queued on the device's current stream, one step late."""

    def __init__(self, device: torch.device, names: tuple[str, ...]) -> None:
        self._device, self._names = device, names
        self._pending: tuple[Tensor, tuple[_Moment, ...]] | None = None
        self.restart()

    def restart(self) -> None:
        """Start the next step's time here, as after an evaluation."""
        self._begun = self._work_begun = _Moment(self._device)

    def begin(self) -> None:
        """Mark the beginning of the step itself; without this call it begins where the previous step ended."""
        self._work_begun = _Moment(self._device)

    def push(self, *values: Tensor) -> Done | None:
        """Take the values, tensors of one element, of the step that was just queued; returns the step before it."""
        work_ended = _Moment(self._device)
        scalars = torch.stack([value.detach().float().reshape(()) for value in values])
        if self._device.type == "cuda":
            scalars = torch.empty(scalars.shape, pin_memory=True, device="cpu").copy_(scalars, non_blocking=True)
        now = _Moment(self._device)
        before, self._pending = self._pending, (scalars, (self._begun, self._work_begun, work_ended, now))
        self._begun = self._work_begun = now
        return self._read(before)

    def flush(self) -> Done | None:
        """Wait for the last step; None if its values have been returned."""
        before, self._pending = self._pending, None
        return self._read(before)

    def _read(self, pending: "tuple[Tensor, tuple[_Moment, ...]] | None") -> Done | None:
        if pending is None:
            return None
        scalars, (begun, work_begun, work_ended, ended) = pending
        seconds = ended.seconds_since(begun)  # waits for the copy, too
        values = dict(zip(self._names, scalars.tolist(), strict=True))
        return Done(values, seconds, seconds - work_ended.seconds_since(work_begun))


class _Moment:
    """A point in time of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))
        self._host_s = time.perf_counter()

    def seconds_since(self, earlier: "_Moment") -> float:
        """Seconds from an earlier moment to this one; waits until the device is there."""
        if self._event is None or earlier._event is None:
            return self._host_s - earlier._host_s
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000
