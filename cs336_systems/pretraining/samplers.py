"""Records of every nth step that take a look beside the step: the GPU's state, and the effect of quantization to fp8.

Nothing here waits for the device's work. Of several ranks the first alone is looked at.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from cs336_systems.blocks.watched import watching
from cs336_systems.harness.provenance import device_state, memory_used_bytes
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import GpuState, Quantization

_GPU_EVERY = 10
"""Steps between two looks at the GPU's state: some answers of NVML take a millisecond of a thread."""


def read_gpu_state(step: int, device: torch.device) -> GpuState:
    """The state of a GPU, by NVML.

    Raises:
        pynvml.NVMLError: it says nothing of this GPU, as of a slice of one.
    """
    state, used = device_state(device), memory_used_bytes(device)
    numbers = {name: state[name] for name in ("sm_mhz", "memory_mhz", "power_w", "temperature_c")}
    return GpuState(step, **numbers, throttle=", ".join(state["throttle"]), memory_used_bytes=used)


class GpuSampler:
    """Writes the GPU's state to the log every 10 steps, from a thread; nothing on other devices than CUDA's.

    A reading that is not done when the next is due lets that one pass. One that fails is said, and is the last. The
    sampler is closed before the log, as it may still be writing there.
    """

    def __init__(self, log: RunLog, device: torch.device, every: int = _GPU_EVERY) -> None:
        self._log, self._device, self._every = log, device, every
        self._thread = ThreadPoolExecutor(1, "gpu-state") if device.type == "cuda" else None
        self._reading: Future[bool] | None = None

    def step(self, step: int) -> None:
        """This step was queued."""
        if self._thread is None or step % self._every:
            return
        if self._reading is None or (self._reading.done() and self._reading.result()):
            self._reading = self._thread.submit(self._read, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _read(self, step: int) -> bool:
        """Whether there is more to be read."""
        import pynvml

        try:
            self._log.write(read_gpu_state(step, self._device))
        except pynvml.NVMLError as error:
            self._log.say(f"the GPU's state is not in this log: {error}", "warning")
            return False
        return True


class QuantizationSampler:
    """Writes to the log, every so many steps, how many elements of each tensor quantization zeroed or cut off.

        with sampler.step(step):
            train_step(*batch)
        sampler.tell(step)                   # once the step is known to be done, as when its loss has been read

    The step is watched (``blocks/watched.py``) and learns the same. Counts are copied to pinned memory behind it.

    Args:
        every: steps from one look to the next; None for none.
    """

    def __init__(self, log: RunLog, model: nn.Module, every: int | None) -> None:
        self._log, self._model, self._every = log, model, every
        self._pending: tuple[int, list[tuple[int, str]], Tensor] | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Watch the step that runs inside, if it is one to look at."""
        if self._every is None or step % self._every:
            yield
            return
        with watching(self._model) as watched:
            yield
        found = [(one.block, name, counts) for one in watched for name, counts in one.found.items()]
        values = torch.stack([counts for *_, counts in found])
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
            values = pinned.copy_(values, non_blocking=True)
        self._pending = step, [(block, name) for block, name, _ in found], values

    def tell(self, step: int) -> None:
        """This step is done."""
        if self._pending is None or self._pending[0] != step:
            return
        _, found, values = self._pending
        self._pending = None
        tensors: dict[str, dict[str, list[float]]] = {}
        for (block, name), (absmax, zeroed, cut_off, n) in zip(found, values.tolist(), strict=True):
            shares = {"block": block, "absmax": absmax, "underflow": zeroed / n, "saturation": cut_off / n}
            for key, value in shares.items():
                tensors.setdefault(name, {}).setdefault(key, []).append(value)
        self._log.write(Quantization(step, tensors))
