"""The Hopper launchers where there is no such GPU: they do all that they do on the host, and launch nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.attention.hopper import backward, forward, host
from cs336_systems.kernels import launching

STREAM = 5


class Kernel:
    """Takes the place of ``launching.Form``: keeps what it would launch."""

    made = 0
    launched: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]

    def __init__(self, kernel: Any, *arguments: Any, **constants_and_options: Any) -> None:
        Kernel.made += 1
        n_described = sum(hasattr(argument, "block_shape") for argument in arguments)
        self.compiled = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[None] * n_described))
        self.name, self.constants = kernel.fn.__name__, constants_and_options

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        assert stream == STREAM
        Kernel.launched[self.name] = arguments, self.constants


def encode(descriptor: Any, metadata: Any) -> list[Any]:
    return [(descriptor.base.data_ptr(), tuple(descriptor.shape), tuple(descriptor.strides))]


@contextmanager
def hopper_unlaunched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, ``Kernel.launched`` holds by name what the kernels would have been given last."""
    caches = forward._prepared, backward._prepared
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launching, "Form", Kernel)
    monkeypatch.setattr(launching, "make_tensordesc_arg", encode)
    monkeypatch.setattr(host, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(host, "counter", lambda device, stream: counter)
    for module in (forward, backward):
        monkeypatch.setattr(module, "n_multiprocessors", lambda device: 132)
    Kernel.made, Kernel.launched = 0, {}
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
