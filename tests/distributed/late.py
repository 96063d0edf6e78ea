"""What other ranks update under a sharded optimizer, which comes when it is waited for, and no earlier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.scattered import ScatteredBucket
from cs336_systems.distributed.shards import FlatBuffer, _OwnedBucket


class Late:
    """Collectives that begin with the first ``wait``, which ranks must come to in the same order, and send what the
    buffers hold now."""

    def __init__(self, send: Callable[[], list[dist.Work]], buffers: list[FlatBuffer]) -> None:
        self._send = send
        self._contents = [(buffer.flat, buffer.flat.clone()) for buffer in buffers]

    @torch.no_grad()
    def wait(self) -> None:
        for flat, sent in self._contents:
            flat.copy_(sent)
        for work in self._send():
            work.wait()
        self._send, self._contents = list, []


@contextmanager
def late_updates() -> Iterator[None]:
    """Of the steps inside."""
    of_shards, of_owners = ScatteredBucket.send, _OwnedBucket.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScatteredBucket, "send", lambda own: [Late(lambda: of_shards(own), [own.buffer])])
        patch.setattr(
            _OwnedBucket, "send", lambda own: [Late(lambda: of_owners(own), [buffer for _, buffer in own.buffers])]
        )
        yield
