"""Dispatch modes by which tests watch what operators do."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A mode that does not make torch import its compiler, which takes three seconds, to keep it from looking in."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Largest(Mode):
    """Elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.n_elements = max(self.n_elements, result.numel())
        return result
