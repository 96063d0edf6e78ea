"""What other ranks update under a sharded optimizer, which comes when it is waited for, and no earlier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.shards import ParameterBucket


class Late:
    """Collectives that begin with the first ``wait``, which ranks must come to in the same order, and send what the
    bucket holds now."""

    def __init__(self, send: Callable[[], list[dist.Work]], flat: torch.Tensor) -> None:
        self._send = send
        self._contents = [(flat, flat.clone())]

    @torch.no_grad()
    def wait(self) -> None:
        for flat, sent in self._contents:
            flat.copy_(sent)
        for work in self._send():
            work.wait()
        self._send, self._contents = list, []


@contextmanager
def late_updates() -> Iterator[None]:
    """The steps inside send late."""
    send = ParameterBucket.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterBucket, "send", lambda own: [Late(lambda: send(own), own.flat)])
        yield
