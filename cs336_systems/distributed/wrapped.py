"""Checks for wrappers: parameters have shapes, none is added after wrapping, and the wrapper is not copied.

A parameter added after wrapping would be trained on each rank separately. Torch's hooks report every registration in
any module; these are counted from the first wrapper on, so a step without changes only compares two numbers.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_registered = [0]
"""The number of parameters and modules registered in any module since the first wrapper was made."""


@functools.cache
def _start_counting() -> None:
    def count(*_: object) -> None:
        _registered[0] += 1

    register_module_module_registration_hook(count)
    register_module_parameter_registration_hook(count)


class Members:
    """Detects parameters that were added to a module after wrapping.

    Args:
        known: returns the wrapper's parameters, in every form in which the module may hold them.
    """

    def __init__(self, module: nn.Module, known: Callable[[], Iterable[Tensor]]) -> None:
        _start_counting()
        self._module, self._known = module, known
        self._seen = _registered[0]

    def check(self) -> None:
        """Raise RuntimeError if a parameter was added to the module after it was wrapped."""
        if self._seen == _registered[0]:
            return
        known = set(self._known())
        for name, parameter in self._module.named_parameters():
            if parameter not in known:
                raise RuntimeError(
                    f"{name} was added or replaced after wrapping, so that each rank would train its own: "
                    "copy values into what was there, or wrap the module as it is now"
                )
        self._seen = _registered[0]


def check_shapes_are_known(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a lazy module's tensor, which has no shape before the first forward."""
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no shape before the first forward of its lazy module: run one first")


class NotCopied:
    """Base of classes that cannot be copied or pickled because they refer to process groups and other ranks' shards."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError; ``copy`` and ``pickle`` call this."""
        kind = type(self).__name__
        raise TypeError(f"{kind} cannot be copied or pickled: copy its module before wrapping, or use save_checkpoint")
