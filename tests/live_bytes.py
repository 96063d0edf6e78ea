"""The bytes of every storage that operations made and something still refers to."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Those that are alive ``now``, and their ``peak``; also of fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ for cls in types if cls is not FakeTensor):
            return NotImplemented  # a DTensor's operation becomes others, which come here
        made = func(*args, **(kwargs or {}))
        self.add(made)
        return made

    def add(self, values: Any) -> None:
        """Count the tensors among the values, which may be nested; of DTensors this rank's parts."""
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                self._add(getattr(value, "_local_tensor", value).untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self.resize(storage)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew, if it is counted: ``resize_`` is no operation."""
        if storage._cdata in self._sizes:
            self.now += storage.nbytes() - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.now)
