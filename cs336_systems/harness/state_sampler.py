"""What the device was doing while something ran: clocks and power, read again and again by a thread beside it.

    with StateSampler(device) as sampler:
        run()
    sampler.values("power_w")        # one float per reading, [] where the device does not say

A reading before and one after a run tell nothing of what happened between: a GPU lowers its clock within milliseconds
of reaching its power limit and raises it again as fast. Limits: since Ampere NVML's power is itself an average over the
last second, so a run must last longer than that before its readings are its own; and the thread takes the interpreter
for some tens of microseconds per reading, which a loop that launches microsecond kernels would feel.
"""

import threading
from types import TracebackType
from typing import Any

import torch

from cs336_systems.harness.provenance import device_state


class StateSampler:
    """Reads ``device_state`` on entering, then every ``interval_s`` seconds until it is left.

    Raises:
        ValueError: the interval is not positive.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.05) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s must be positive, got {interval_s}")
        self.device = device
        self.interval_s = interval_s
        self.readings: list[dict[str, Any]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> "StateSampler":
        self.readings.append(device_state(self.device))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop reading; an error of the thread is raised here unless the body has one of its own."""
        self._done.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _read(self) -> None:
        try:
            while not self._done.wait(self.interval_s):
                self.readings.append(device_state(self.device))
        except Exception as error:
            self._failure = error

    def values(self, name: str) -> list[float]:
        """Every reading of one quantity of ``device_state``; empty if this kind of device has none."""
        return [float(reading[name]) for reading in self.readings if reading.get(name) is not None]
