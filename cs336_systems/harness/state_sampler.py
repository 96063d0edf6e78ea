"""Clocks and power of the device while something runs, sampled by a thread.

    with sampled_state(device) as states:
        run()
    states.values("power_w")          # one float per reading, [] where the device does not say

A reading before and one after a run tell nothing of what happened between: a GPU lowers its clock within milliseconds
of reaching its power limit and raises it again as fast. Limits: since Ampere NVML's power is itself an average over the
last second, so a run must last longer than that before its readings are its own; and the thread takes the interpreter
for some tens of microseconds per reading, which a loop that launches microsecond kernels would feel.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from cs336_systems.harness.provenance import device_state


class States(list[dict[str, Any]]):
    """Readings of ``device_state``."""

    def values(self, name: str) -> list[float]:
        """Every reading of one quantity; empty if this kind of device has none."""
        return [float(state[name]) for state in self if state.get(name) is not None]


@contextmanager
def sampled_state(device: torch.device, interval_s: float = 0.05) -> Iterator[States]:
    """Reads ``device_state`` on entering, then every ``interval_s`` seconds until it is left.

    An error of the thread is raised on leaving unless the body has one of its own.

    Raises:
        ValueError: the interval is not positive.
    """
    if not interval_s > 0:
        raise ValueError(f"interval_s must be positive, got {interval_s}")
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
