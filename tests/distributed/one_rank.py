"""One rank of a world that has no others, on a CPU, and the bytes of every storage that is alive in it.

Nothing arrives (torch's fake process group), and collectives are asked for as on GPUs, so that no communication of a
CPU's takes memory.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed import fsdp, fsdp_agreement, fsdp_parameters


class ResizedBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and something still refers to, as they are resized: ``now``, ``peak``.

    ``resize_``, which no operation is, must be told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(cls.__torch_dispatch__ is not Tensor.__torch_dispatch__ for cls in types):
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
        key = storage._cdata
        if storage.device.type == "meta":
            return
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self.resize(storage)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._sizes

    def resize(self, storage: torch.UntypedStorage) -> None:
        self.now += storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, self.now)


@contextmanager
def first_of(world_size: int) -> Iterator[ResizedBytes]:
    """Inside, this process is rank 0 of the world, with which the others agree in everything.

    Python's collector is off: what nobody needs must go by itself.
    """
    live, resize = ResizedBytes(), torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        if live.knows(storage):
            live.resize(storage)

    gc.collect()
    gc.disable()
    thresholds = gc.get_threshold()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", watched_resize)
        patch.setattr(fsdp, "check_same_across_ranks", lambda *_: None)
        patch.setattr(fsdp_agreement.Agreement, "check", lambda self, what, flags=(): list(flags))
        # As on GPUs, where nothing is packed.
        gather = lambda group, outputs, inputs: group.allgather_into_tensor_coalesced(outputs, inputs)  # noqa: E731
        patch.setattr(fsdp_parameters, "all_gather", gather)
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
        try:
            yield live
        finally:
            dist.destroy_process_group()
            gc.set_threshold(*thresholds)
            gc.enable()
