"""Muon (``muon.py``) with this suite's fused AdamW, for GPUs: bf16 is rounded stochastically.

Most updates of a weight are smaller than half the distance between two bf16 numbers, and would be lost by rounding to
nearest (``kernels/adamw.py``). Random bits are torch's, from the seed, the matrix's number among all parameters of the
optimizer, and the number of its updates, so they do not depend on the owner of the matrix or on resuming.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336_systems.training.fused_adamw import FusedAdamW
from cs336_systems.training.muon import MUON, Muon

_PRIME = 1_000_003
"""Seed, number and step are digits of this base; a model has fewer matrices, and a run fewer steps."""


class FusedMuon(Muon, FusedAdamW):
    """Takes the arguments of ``FusedAdamW``; cases refuse masters and states in host memory."""

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._matrices: set[Tensor] = set()
        self._n_made: dict[Tensor, int] = {}
        """Updates of each matrix, as the host counts them: it need not wait for the device's own count."""
        super().__init__(params, *args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if param_group.get(MUON):
            self._matrices.update(self.param_groups[-1]["params"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # as torch loads a state dict
        self._n_made.clear()

    def _state_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        if parameter in self._matrices:
            return {"momentum_buffer": self.state_dtype or parameter.dtype}
        return super()._state_dtypes(parameter)

    def _make_states(self, parameters: Sequence[Tensor]) -> None:
        FusedAdamW._make_states(self, parameters)

    def _step_others(self, scale: Tensor | None) -> None:
        FusedAdamW.step(self, grad_scale=scale)

    def _store(self, parameter: Tensor, group: dict[str, Any], values: Sequence[tuple[Tensor, Tensor]]) -> None:
        generator = None
        if parameter.device.type != "meta":
            if parameter not in self._n_made:
                self._n_made[parameter] = int(self.state[parameter]["step"])
            # A step that the guard skips is counted only here; the guard then lets no later step change anything.
            made, number = self._n_made[parameter], self._places[parameter][0]
            self._n_made[parameter] += 1
            seed = (group["seed"] * _PRIME + made) * _PRIME + number
            generator = torch.Generator(parameter.device).manual_seed(seed % 2**63)
        own = self.matrices.shape(parameter), self._places[parameter][1]
        for place, value in values:
            place.copy_(_rounded(value, generator, *own) if place.dtype == torch.bfloat16 else value)


def _rounded(value: Tensor, generator: torch.Generator | None, whole: torch.Size, first: int) -> Tensor:
    """Round fp32 numbers to bf16 stochastically, as ``kernels/adamw.py`` does.

    They are elements of a matrix of shape ``whole``, beginning at ``first``, and get the random bits that they would
    get if the whole matrix were rounded.
    """
    noise = torch.randint(0, 2**16, whole, generator=generator, dtype=torch.int32, device=value.device)
    noise = noise.flatten()[first : first + value.numel()].view(value.shape)
    bits = noise.add_(value.view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(value.isnan(), value, bits.view(torch.float32))  # the sum may turn a NaN into a number
