"""CUDA graphs emulated on a CPU: what is captured is recorded operator by operator, undone, and run again at replay.

As on a device, capturing changes nothing that was there before, and what it makes holds no values (NaN here) until the
first replay, which writes them to the same tensors. Launches of the fused AdamW are recorded, too. Memory is never used
twice, and nothing is forbidden: only a device shows what cannot be captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cs336_systems.kernels import adamw, linear_cross_entropy


class EmulatedGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, list[tuple[int, Tensor]]]] = []
        """Operators, their arguments, and which of their results are memory of their own."""
        self.n_replays = 0

    def reset(self) -> None:
        self.calls.clear()

    def replay(self) -> None:
        self.n_replays += 1
        with torch.no_grad():
            for function, args, kwargs, fresh in self.calls:
                again = tensors_of(finished(function(*args, **kwargs)))
                for i, kept in fresh:
                    kept.detach().copy_(again[i])


def finished(result: Any) -> Any:
    """A result, which is there: that of a collective is waited for."""
    for work in tree_leaves(result):
        if hasattr(work, "wait"):
            work.wait()
    return result


class Recorder(TorchDispatchMode):
    """Records into a graph, and keeps what the operators overwrite."""

    def __init__(self, graph: EmulatedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(x, x.detach().clone()) for x in tensors_of(given.get(argument.name))]
        result = finished(func(*args, **kwargs))
        there = {x.untyped_storage().data_ptr() for x in tensors_of((args, kwargs))}
        results = enumerate(tensors_of(result))
        fresh = [(i, x) for i, x in results if x.untyped_storage().data_ptr() not in there]
        self.graph.calls.append((func, args, kwargs, fresh))
        return result


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def capture(
    graph: EmulatedGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """In the place of ``torch.cuda.graph``."""
    recorder = Recorder(graph)
    launch, reduce_scatter = adamw.launch, dist.reduce_scatter_tensor
    adamw.launch = lambda *args, **kwargs: graph.calls.append((launch, args, kwargs, []))

    def recorded(*args: Any, **kwargs: Any) -> None:
        graph.calls.append((reduce_scatter, args, kwargs, []))
        with _disable_current_modes():  # gloo's copies its result by operators whenever somebody waits
            reduce_scatter(*args, **kwargs)

    dist.reduce_scatter_tensor = recorded
    try:
        with recorder:
            yield
    finally:
        adamw.launch, dist.reduce_scatter_tensor = launch, reduce_scatter
    with torch.no_grad():
        for tensor, values in reversed(recorder.before):
            tensor.detach().copy_(values)
        for _, _, _, fresh in graph.calls:
            for _, tensor in fresh:
                if tensor.is_floating_point():
                    tensor.detach().fill_(float("nan"))


class NoStream:
    """In the place of a stream."""

    device_index = 0

    def wait_stream(self, other: "NoStream") -> None:
        pass

    def synchronize(self) -> None:
        pass


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put these in the places of what they emulate."""
    # Targets of a captured step are on the device, where nobody knows how many count.
    monkeypatch.setattr(linear_cross_entropy, "rows_that_count", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", EmulatedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: NoStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NoStream())
