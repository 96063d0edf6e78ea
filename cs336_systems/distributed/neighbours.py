"""Neighbours: parameters that fill one storage between them, as the rows of one matrix, one after the other.

A module that multiplies several parameters together lays them out so, and sees one matrix there without a copy (merged
q | k | v, say). Nothing else declares it: whoever moves parameters, into flat buffers or to where shards are gathered,
looks at where they lie and keeps neighbours together, in their order and without gaps. A tensor on ``meta`` has a
storage too, which only has no memory, so a model says it there as well.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)


def neighbours(tensors: Iterable[T], alike: Callable[[T], object] = lambda tensor: None) -> list[list[T]]:
    """Sort the tensors into runs: neighbours in the order of their memory, and every other tensor by itself.

    Runs are ordered by whichever of their tensors was given first.

    Args:
        alike: what must be equal within a run.
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
    """The place at which each tensor of a run begins, in elements from the first."""
    return list(accumulate((tensor.numel() for tensor in run[:-1]), initial=0))


def empty_like_run(
    run: Sequence[Tensor], *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> list[Tensor]:
    """New memory for a run, in which its tensors are neighbours again."""
    if len(run) == 1:
        return [torch.empty_like(run[0], dtype=dtype, device=device)]
    numel = sum(tensor.numel() for tensor in run)
    buffer = torch.empty(numel, dtype=dtype or run[0].dtype, device=device or run[0].device)
    return [alias(buffer, start, tensor.shape) for tensor, start in zip(run, starts_in(run), strict=True)]


def alias(buffer: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A contiguous tensor in ``buffer``'s storage, with a version counter of its own, as a view would not have.

    Autograd refuses a saved tensor whose version has changed; what others do to the buffer must not count as a change.
    """
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(
        buffer.untyped_storage(), offset, torch.Size(shape), stride
    )
