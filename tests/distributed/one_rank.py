"""One rank of a world that has no others, on a CPU, and the bytes of every storage that is alive in it.

Nothing arrives (torch's fake process group), and collectives are asked for as on GPUs, so that no communication of a
CPU's takes memory.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from tests.live_bytes import LiveBytes


class RealBytes(LiveBytes):
    """Not those of storages on ``meta``, which take no memory."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._add(storage)


@contextmanager
def first_of(world_size: int) -> Iterator[LiveBytes]:
    """Inside, this process is rank 0 of the world, with which the others agree in everything.

    Python's collector is off: what nobody needs must go by itself.
    """
    live, resize = RealBytes(), torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        live.resize(storage)

    gc.collect()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", watched_resize)
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
        try:
            yield live
        finally:
            dist.destroy_process_group()
            gc.enable()
