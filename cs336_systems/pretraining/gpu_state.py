"""The GPU's state as records of a run's log, beside every tenth step; of several ranks the first alone."""

import torch

from cs336_systems.harness.provenance import device_state, memory_used_bytes
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import GpuState

_GPU_EVERY = 10
"""Steps between two looks at the GPU's state: some answers of NVML take a millisecond."""


def read_gpu_state(step: int, device: torch.device) -> GpuState:
    """The state of a GPU, by NVML.

    Raises:
        pynvml.NVMLError: it says nothing of this GPU, as of a slice of one.
    """
    state, used = device_state(device), memory_used_bytes(device)
    numbers = {name: state[name] for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c")}
    return GpuState(step, **numbers, throttle=", ".join(state["throttle"]), memory_used_bytes=used)


class GpuSampler:
    """Writes the GPU's state to the log every 10 steps, nothing on other devices; a reading that fails is the last."""

    def __init__(self, log: RunLog, device: torch.device) -> None:
        self._log, self._device, self._reads = log, device, device.type == "cuda"

    def step(self, step: int) -> None:
        """This step was queued, so that the host has time."""
        if not self._reads or step % _GPU_EVERY:
            return
        import pynvml

        try:
            self._log.write(read_gpu_state(step, self._device))
        except pynvml.NVMLError as error:
            self._log.say(f"the GPU's state is not in this log: {error}", "warning")
            self._reads = False
