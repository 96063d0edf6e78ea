"""Wrappers ask two things of the parameters of a module: that their shapes are known, and that none joins later.

A parameter that is added, or comes with a layer that replaces another, would be trained by each rank alone. Torch tells
of every registration in any module, which ``Members`` counts; only when the count has changed does a forward look at
the module's parameters, so that a step without changes pays for the comparison of two numbers.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class _Registrations:
    """The number of parameters and modules that any module has been given since the first wrapper was made."""

    def __init__(self) -> None:
        self.n: int | None = None

    def start(self) -> None:
        """Count from now on, for as long as the process lives."""
        if self.n is None:
            self.n = 0
            register_module_module_registration_hook(self._count)
            register_module_parameter_registration_hook(self._count)

    def _count(self, *_: object) -> None:
        assert self.n is not None
        self.n += 1


_registrations = _Registrations()


class Members:
    """The parameters of a module as its wrapper knows them.

    Args:
        known: returns them, in whatever form the module may hold them.
    """

    def __init__(self, module: nn.Module, known: Callable[[], Iterable[Tensor]]) -> None:
        _registrations.start()
        self._module, self._known = module, known
        self._seen = _registrations.n

    def check(self) -> None:
        """Raise RuntimeError if the module has a parameter that it had not when it was wrapped."""
        if self._seen == _registrations.n:
            return
        known = set(self._known())
        for name, parameter in self._module.named_parameters():
            if parameter not in known:
                raise RuntimeError(
                    f"{name} was added or replaced after wrapping, so that each rank would train its own: "
                    "copy values into what was there, or wrap the module as it is now"
                )
        self._seen = _registrations.n


def check_shapes_are_known(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a named tensor of a lazy module, which its first forward makes."""
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no shape before the first forward of its lazy module: run one first")
