"""Numbers of a step, read on the host once the next step is queued, so that the device never waits.

    deferred = Deferred(device, ("loss", "norm"))
    for step in range(first_step, n_steps):
        deferred.begin()                                 # what comes before it is around the step
        done = deferred.push(*train(step))               # loss and norm, on the device
        if done is not None:
            log.write(Step(step - 1, done.seconds, tokens, **done.values, learning_rate=schedule(step - 1)))
    done = deferred.flush()                              # of the last step

``push`` starts a copy of the step's scalars to pinned memory, behind the step on its stream, and then waits for the
copy of the step before. So the host is at most one step ahead of the device, and a loss is said one step late. On a CPU
the values are there at once, and come as late all the same.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Done:
    """What a step came to."""

    values: dict[str, float]
    seconds: float
    """From the end of the step before it, or from ``restart``, to its own, by the device's clock."""
    around_seconds: float
    """Of these, before ``begin`` and after the call of ``push``."""


class Deferred:
    """Scalars and seconds of each step, one step late.

    Args:
        device: where steps are queued, on the current stream.
        names: of the values that each step has.
    """

    def __init__(self, device: torch.device, names: tuple[str, ...]) -> None:
        self._device, self._names = device, names
        self._pending: tuple[Tensor, _Span, _Span] | None = None
        self.restart()

    def restart(self) -> None:
        """Let the next step's time begin here, as after an evaluation."""
        self._begun = self._work_begun = _Moment(self._device)

    def begin(self) -> None:
        """The step itself begins; not said, it does where the step before it ended."""
        self._work_begun = _Moment(self._device)

    def push(self, *values: Tensor) -> Done | None:
        """Take the values, tensors of one element, of the step that was just queued; returns the step before it."""
        work = self._work_begun, _Moment(self._device)
        scalars = torch.stack([value.detach().float().reshape(()) for value in values])
        if self._device.type == "cuda":
            scalars = torch.empty(scalars.shape, pin_memory=True, device="cpu").copy_(scalars, non_blocking=True)
        now = _Moment(self._device)
        before, self._pending = self._pending, (scalars, (self._begun, now), work)
        self._begun = self._work_begun = now
        return self._read(before)

    def flush(self) -> Done | None:
        """Wait for the last step; None if no step is left to be read."""
        before, self._pending = self._pending, None
        return self._read(before)

    def _read(self, pending: "tuple[Tensor, _Span, _Span] | None") -> Done | None:
        if pending is None:
            return None
        scalars, *spans = pending
        seconds, of_work = (ended.seconds_since(begun) for begun, ended in spans)
        return Done(dict(zip(self._names, scalars.tolist(), strict=True)), seconds, seconds - of_work)


class _Moment:
    """Now, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))
        self._host_s = time.perf_counter()

    def seconds_since(self, earlier: "_Moment") -> float:
        """Waits until the device is there."""
        if self._event is None or earlier._event is None:
            return self._host_s - earlier._host_s
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


_Span = tuple[_Moment, _Moment]
