"""The GPU's clock, power, temperature and memory in a run's log, every n steps.

NVML is asked from a thread, beside the step that runs: some of its answers take a millisecond. None waits for the
device's work.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from cs336_systems.harness.provenance import device_state, memory_used_bytes
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import GpuState


def read_gpu_state(step: int, device: torch.device) -> GpuState:
    """NVML's word on a GPU.

    Raises:
        pynvml.NVMLError: it says nothing of this GPU, as of a slice of one.
    """
    state = device_state(device)
    return GpuState(
        step,
        sm_mhz=state["sm_mhz"],
        memory_mhz=state["memory_mhz"],
        power_w=state["power_w"],
        temperature_c=state["temperature_c"],
        throttle=", ".join(state["throttle"]),
        memory_used_bytes=memory_used_bytes(device),
    )


class GpuSampler:
    """Writes a reading to the log every ``every`` steps; nothing on other devices than CUDA's.

    A reading that is not done when the next is due lets that one pass. One that fails is said, and is the last. It is
    closed before the log, as it may still be writing there.

    Raises:
        ValueError: ``every`` is not positive.
    """

    def __init__(self, log: RunLog, device: torch.device, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"the GPU's state can be read every step or more rarely, got every {every}")
        self._log, self._device, self._every = log, device, every
        self._thread = ThreadPoolExecutor(1, "gpu-state") if device.type == "cuda" else None
        self._reading: Future[bool] | None = None

    def step(self, step: int) -> None:
        """This step was queued."""
        if self._thread is None or step % self._every:
            return
        if self._reading is None or (self._reading.done() and self._reading.result()):
            self._reading = self._thread.submit(self._read, step)

    def close(self) -> None:
        """Wait for the reading that is under way; no more come."""
        if self._thread is not None:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, step: int) -> bool:
        """Whether there is more to be read."""
        import pynvml

        try:
            self._log.write(read_gpu_state(step, self._device))
        except pynvml.NVMLError as error:
            self._log.say(f"the GPU's state is not in this log: {error}", "warning")
            return False
        return True
