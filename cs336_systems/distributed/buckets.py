"""Buckets: tensors that travel together, and gradients that lie side by side so that one collective carries them.

A collective has a latency besides its bytes, so small tensors are sent in groups. ``partition`` makes the groups;
``Bucket.gather`` brings the gradients of one group into one piece of memory and leaves every ``.grad`` a view of it:
the average need not be copied back, and the next backward accumulates where the gradients travel from.

    after zero_grad(set_to_none=True), or the first time    one multi-tensor copy per bucket (reads and writes it once)
    after zero_grad(set_to_none=False)                      no copy
    a bucket of one gradient                                no copy, unless its memory is shared

The ``.grad`` views own that memory, the bucket does not: clearing the gradients frees it. Why not shared memory:
autograd may hand a parameter a view of a gradient that the rest of backward still reads (of ``x + p.view_as(x)``, say;
it is not marked as a view), and what travels is overwritten.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T", bound=Tensor)

MIB = 1024**2

_BROADCAST_BYTES = 250 * MIB
"""Most that one broadcast packs into a temporary copy, unless a single tensor is larger."""


def partition(tensors: Iterable[T], capacity_bytes: float) -> list[list[T]]:
    """Groups of one dtype and device, at most ``capacity_bytes`` each; a tensor beyond that is a group of its own.

    Tensors keep their order inside a group, and groups are ordered by their last tensor: if the tensors become ready
    in the order given, so do the groups.
    """
    groups: list[list[tuple[int, T]]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[int, T]]] = {}
    room: dict[tuple[torch.dtype, torch.device], float] = {}
    for position, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        if kind not in filling or tensor.nbytes > room[kind]:
            filling[kind], room[kind] = [], capacity_bytes
            groups.append(filling[kind])
        filling[kind].append((position, tensor))
        room[kind] -= tensor.nbytes
    groups.sort(key=lambda group: group[-1][0])
    return [[tensor for _, tensor in group] for group in groups]


@torch.no_grad()
def broadcast_from_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite the tensors with those of the group's rank 0; ranks pass the same shapes and dtypes in the same order.

    They travel packed, and as bytes, because not every backend sends every dtype. The default group if None.
    """
    for part in partition(tensors, _BROADCAST_BYTES):
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in part])
        dist.broadcast(packed.view(torch.uint8), group=group, group_src=0)
        if dist.get_rank(group) != 0:
            for tensor, piece in zip(part, packed.split([tensor.numel() for tensor in part]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _current_stream(tensor: Tensor) -> tuple[int, int, int]:
    """The current stream of its device: ``stream_id``, ``device_index`` and ``device_type`` of ``torch.cuda.Stream``.

    A hook asks at every gradient, and ``torch.cuda.current_stream``, which makes an object each time, is slow for that.
    """
    return torch._C._cuda_getCurrentStream(tensor.get_device())


@dataclass(frozen=True)
class _Slot:
    """Where a gradient lies in its bucket, in elements: from the start, and from one index to the next."""

    offset: int
    stride: tuple[int, ...]


class Bucket:
    """Parameters of one dtype and device whose gradients travel together, each in its parameter's memory format.

    It also counts: ``waiting_for`` is how many of them have no gradient yet in the current backward.

    Args:
        names: of the parameters, for errors.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str] | None = None) -> None:
        self.parameters = list(parameters)
        self.names = list(names or (f"parameter {i}" for i in range(len(self.parameters))))
        self.slots: list[_Slot] = []
        self.numel = 0
        for parameter in self.parameters:
            dense = torch.empty_like(parameter.detach(), device="meta")
            self.slots.append(_Slot(self.numel, dense.stride()))
            self.numel += parameter.numel()
        self._storage: StorageWeakRef | None = None
        """The storage in whose slots the last gather left the gradients; a reference that does not keep it alive."""
        self.reset()

    def __reduce__(self) -> Any:
        """For pickle and deepcopy: without the reference to memory, which both would free."""
        return Bucket, (self.parameters, self.names)

    def reset(self) -> None:
        """Wait for all gradients again."""
        self.waiting_for = len(self.parameters)
        self._streams: set[tuple[int, int, int]] = set()
        """The streams that compute gradients, as ``_current_stream`` numbers them."""

    def gradient_is_ready(self) -> None:
        """Count one gradient, and remember the stream that computes it."""
        self.waiting_for -= 1
        if self.parameters[0].is_cuda:
            self._streams.add(_current_stream(self.parameters[0]))

    def gather(self) -> Tensor:
        """All gradients as one flat tensor of which every ``.grad`` is now a view; a missing gradient becomes zeros.

        The tensor is ready for what the current stream does next.

        Raises:
            ValueError: a gradient is not dense.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self._wait_for_streams(gradients)
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"the gradient of {name} must be dense to be averaged, got layout {gradient.layout}")
        flat = self._in_place(gradients)
        if flat is None:
            flat = self._moved(gradients)
        return flat

    def _in_place(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients as one flat tensor if they lie in their slots already and nobody else reads them, else None."""
        first = gradients[0]
        if first is None:
            return None
        storage = first.untyped_storage()
        own = self._storage is not None and storage._cdata == self._storage.cdata
        holders = torch._C._storage_Use_Count(storage._cdata) - 1  # this function's reference is one
        if not own and (len(gradients) > 1 or holders > 1):
            return None
        start = first.storage_offset()
        for gradient, slot in zip(gradients, self.slots, strict=True):
            if (
                gradient is None
                or gradient.untyped_storage()._cdata != storage._cdata
                or gradient.storage_offset() != start + slot.offset
                or gradient.stride() != slot.stride
            ):
                return None
        if not own:  # from now on: a collective that has just ended may hold it a moment longer
            self._storage = StorageWeakRef(storage)
        return first.as_strided((self.numel,), (1,), start)

    @torch.no_grad()
    def _moved(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradients, copied side by side into new memory."""
        first = self.parameters[0]
        flat = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        self._storage = StorageWeakRef(flat.untyped_storage())
        sources, targets, missing = [], [], []
        for parameter, gradient, slot in zip(self.parameters, gradients, self.slots, strict=True):
            parameter.grad = flat.as_strided(parameter.shape, slot.stride, slot.offset)
            if gradient is None:
                missing.append(parameter.grad)
            else:
                sources.append(gradient)
                targets.append(parameter.grad)
        if sources:
            torch._foreach_copy_(targets, sources)
        if missing:
            torch._foreach_zero_(missing)
        return flat

    def _wait_for_streams(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the current stream see gradients that other streams compute, and keep their memory until it has."""
        others = self._streams and self._streams - {_current_stream(self.parameters[0])}
        for stream_id, device_index, device_type in others:
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            current = torch.cuda.current_stream(self.parameters[0].device)
            current.wait_stream(stream)
            for gradient in gradients:
                if gradient is not None:
                    gradient.record_stream(current)
