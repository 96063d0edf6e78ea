"""Buckets: tensors sent together, and gradients made contiguous so that one collective sends them.

*Neighbours* are parameters that together fill one storage, as consecutive rows of one matrix: merged q | k | v, for
example, which a module multiplies as one matrix without a copy. No flag marks them: code that moves parameters compares
their addresses and keeps neighbours together. A tensor on ``meta`` has a storage too.

Each collective has a fixed latency, so small tensors are sent in groups. ``partition`` makes the groups;
``Bucket.gather`` copies the gradients of one group into one buffer, by one multi-tensor copy, and makes every ``.grad``
a view of it: the average need not be copied back, and clearing the gradients frees the buffer. A single gradient is
sent in place unless its memory is shared. The collective overwrites what it sends, and autograd may give a parameter a
view of a gradient that the rest of backward still reads (for ``x + p.view_as(x)``, which is not marked as a view).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.hardware import MIB

T = TypeVar("T", bound=Tensor)

_BROADCAST_BYTES = 250 * MIB  # packed into a temporary copy by one broadcast, unless one tensor is larger


def partition(tensors: Iterable[T], capacity_bytes: float) -> list[list[T]]:
    """Group tensors by dtype and device, at most ``capacity_bytes`` each; a larger tensor is a group of its own.

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

    They are packed and sent as bytes, because not every backend sends every dtype. None means the default group.
    """
    for part in partition(tensors, _BROADCAST_BYTES):
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in part])
        dist.broadcast(packed.view(torch.uint8), group=group, group_src=0)
        if dist.get_rank(group) != 0:
            for tensor, piece in zip(part, packed.split([tensor.numel() for tensor in part]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def used_on_any_rank(
    used: list[bool], device: torch.device, group: dist.ProcessGroup | None
) -> tuple[list[bool], dist.Work]:
    """Find which parameters have a gradient on any rank, by a collective of a byte per parameter.

    The host waits for the result only if this rank did not use some parameter.
    """
    complete = all(used)
    flags = torch.ones(len(used), dtype=torch.uint8, device=device)
    if not complete:  # else filled on the device: a copy from the host would wait for backward
        flags.copy_(torch.tensor(used))
    work = dist.all_reduce(flags, dist.ReduceOp.MAX, group, async_op=True)
    assert work is not None
    if not complete:
        work.wait()
        used = flags.bool().tolist()
    return used, work


def _current_stream(tensor: Tensor) -> tuple[int, int, int]:
    """The device's current stream: ``stream_id``, ``device_index`` and ``device_type`` of ``torch.cuda.Stream``.

    A hook calls this for every gradient; ``torch.cuda.current_stream`` makes an object each time, which is too slow.
    """
    return torch._C._cuda_getCurrentStream(tensor.get_device())


class Bucket:
    """Parameters of one dtype and device whose gradients are sent together, each in its parameter's memory format.

    ``waiting_for`` is the number of them without a gradient so far in the current backward.

    Args:
        offsets: where each gradient begins in the buffer that is sent, in elements; None means without gaps.
        numel: elements of that buffer; None means those of all gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Mapping[Tensor, str],
        offsets: Sequence[int] | None = None,
        numel: int | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.names = [names[parameter] for parameter in self.parameters]
        *packed, total = accumulate((parameter.numel() for parameter in self.parameters), initial=0)
        self.offsets, self.numel = list(offsets or packed), numel or total
        self._strides = [torch.empty_like(p.detach(), device="meta").stride() for p in self.parameters]
        self.reset()

    def reset(self) -> None:
        """Expect a gradient of every parameter that currently requires one."""
        self.waiting_for = sum(parameter.requires_grad for parameter in self.parameters)
        self._streams: set[tuple[int, int, int]] = set()
        """The streams that compute gradients, as ``_current_stream`` returns them."""

    def gradient_is_ready(self) -> None:
        """Count one gradient and record the stream that computes it."""
        self.waiting_for -= 1
        if self.parameters[0].is_cuda:
            self._streams.add(_current_stream(self.parameters[0]))

    def gather(self) -> Tensor:
        """Return all gradients as one flat tensor and make every ``.grad`` a view of it; a missing gradient is zeros.

        Work that the current stream is given next may use the tensor.

        Raises:
            ValueError: a gradient is not dense or has a graph of its own, or some of the parameters have been cast.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self._wait_for_streams(gradients)
        dtype = self.parameters[0].dtype
        for name, parameter, gradient in zip(self.names, self.parameters, gradients, strict=True):
            if parameter.dtype != dtype:
                raise ValueError(
                    f"{name} is of {parameter.dtype} and {self.names[0]} of {dtype}, whose gradients travel together: "
                    "cast a module before wrapping it"
                )
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"the gradient of {name} must be dense to be averaged, got layout {gradient.layout}")
            if gradient is not None and gradient.requires_grad:
                raise ValueError(
                    f"the gradient of {name} has a graph of its own, which the average over ranks would not: "
                    "call backward without create_graph=True"
                )
        flat = self._in_place(gradients)
        if flat is None:
            flat = self._moved(gradients)
        return flat

    def _in_place(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The only gradient, flat, if it is laid out as it is sent and shares its memory with nothing; else None."""
        gradient = gradients[0]
        if gradient is None or self.numel != gradient.numel() or gradient.stride() != self._strides[0]:
            return None
        storage = gradient.untyped_storage()
        holders = torch._C._storage_Use_Count(storage._cdata) - 1  # this function holds one reference
        # The last part of a merged gradient has no other reference, but would keep the memory of all parts alive.
        alone = holders == 1 and storage.nbytes() == gradient.nbytes
        return gradient.as_strided((self.numel,), (1,)) if alone else None

    @torch.no_grad()
    def _moved(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Copy the gradients into new memory, one after the other."""
        first = self.parameters[0]
        flat = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        sources, targets, missing = [], [], []
        for parameter, offset, stride, gradient in zip(
            self.parameters, self.offsets, self._strides, gradients, strict=True
        ):
            parameter.grad = flat.as_strided(parameter.shape, stride, offset)
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
        """Make the current stream wait for gradients of other streams, and keep their memory until it has read them."""
        others = self._streams and self._streams - {_current_stream(self.parameters[0])}
        for stream_id, device_index, device_type in others:
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            current = torch.cuda.current_stream(self.parameters[0].device)
            current.wait_stream(stream)
            for gradient in gradients:
                if gradient is not None:
                    gradient.record_stream(current)


def neighbours(tensors: Iterable[T], alike: Callable[[T], object] = lambda tensor: None) -> list[list[T]]:
    """Sort the tensors into runs: neighbours in the order of their memory, and every other tensor by itself.

    Runs are ordered by the first given of their tensors; the tensors of a run are ``alike``.
    """
    tensors = list(tensors)
    sharing: dict[int, list[T]] = {}
    for tensor in tensors:
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    run_of: dict[T, list[T]] = {}
    for some in sharing.values():
        in_order = sorted(some, key=Tensor.storage_offset)
        if len(in_order) > 1 and len(set(map(alike, in_order))) == 1 and _fill_one_storage(in_order):
            run_of |= dict.fromkeys(in_order, in_order)
    runs = {id(run[0]): run for run in (run_of.get(tensor, [tensor]) for tensor in tensors)}
    return list(runs.values())


def _fill_one_storage(tensors: Sequence[Tensor]) -> bool:
    first, end = tensors[0], 0
    for tensor in tensors:
        rows_alike = tensor.dim() > 0 and tensor.shape[1:] == first.shape[1:] and tensor.dtype == first.dtype
        if not (rows_alike and tensor.is_contiguous() and tensor.storage_offset() == end):
            return False
        end += tensor.numel()
    return first.untyped_storage().nbytes() == end * first.element_size()


def starts_in(run: Sequence[Tensor]) -> list[int]:
    """The offset of each tensor of a run, in elements from the first."""
    return list(accumulate((tensor.numel() for tensor in run[:-1]), initial=0))


def empty_like_run(
    run: Sequence[Tensor], *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> list[Tensor]:
    """Allocate new memory for a run, in which its tensors are neighbours again."""
    if len(run) == 1:
        return [torch.empty_like(run[0], dtype=dtype, device=device)]
    numel = sum(tensor.numel() for tensor in run)
    buffer = torch.empty(numel, dtype=dtype or run[0].dtype, device=device or run[0].device)
    return [alias(buffer, start, tensor.shape) for tensor, start in zip(run, starts_in(run), strict=True)]


def alias(buffer: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A contiguous tensor in ``buffer``'s storage with its own version counter, which a view would share.

    Autograd refuses a saved tensor whose version has changed; other writes to the buffer must not count as a change.
    """
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(
        buffer.untyped_storage(), offset, torch.Size(shape), stride
    )
