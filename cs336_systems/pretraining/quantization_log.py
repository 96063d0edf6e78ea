"""What quantization to fp8 does to each tensor, in a run's log, every n steps.

    sampler = QuantizationSampler(log, model, every=100)
    with sampler.step(step):
        train_step(*batch)
    sampler.tell(step)                   # once the step is known to be done, as when its loss has been read

The step itself is watched (``blocks/watched.py``), and learns what it would have learned. What is found is copied to
pinned memory behind it, and read when the step is known to be done: nothing waits for the device. In other steps
nothing is done. A run of several ranks tells of the first rank's part.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cs336_systems.blocks.watched import watching
from cs336_systems.pretraining.run_log import RunLog
from cs336_systems.pretraining.run_records import Quantization


class QuantizationSampler:
    """Writes a record of every ``every``th step, none if that is None."""

    def __init__(self, log: RunLog, model: nn.Module, every: int | None) -> None:
        self._log, self._model, self._every = log, model, every
        self._pending: tuple[int, list[tuple[int, str]], Tensor] | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around this step."""
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
