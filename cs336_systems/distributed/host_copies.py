"""Copies of named tensors in one slab of host memory, which is used again: 50 GB/s from a GPU, as it is pinned.

    slab = host_slab(n_bytes_of(tensors), device)      # kernels/host_memory.py; takes a while
    copies = copies_in(slab, tensors)                  # by name; until the next call

What is shown as a part of a whole tensor (a ``DTensor``, ``Boxes``) becomes ``Boxes``.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cs336_systems.distributed.checkpoint_boxes import Boxes
from cs336_systems.kernels.host_memory import Slab, aligned


def n_bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Of a slab for copies of these."""
    return sum(aligned(part.nbytes) for whole in tensors.values() for _, part in _parts(whole))


def copies_in(slab: Slab, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, complete when this returns; earlier ones in the slab are overwritten.

    Raises:
        ValueError: the slab is too small.
    """
    copies, devices = dict[str, Tensor](), set()
    slab.n_taken = 0
    for name, whole in tensors.items():
        own = {}
        for offsets, part in _parts(whole):
            own[offsets] = slab.take(part.shape, part.dtype).copy_(part, non_blocking=True)
            devices.add(part.device)
        split = isinstance(whole, DTensor | Boxes)
        copies[name] = Boxes(whole.shape, whole.dtype, own) if split else next(iter(own.values()))
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copies


def _parts(whole: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """What is here of a tensor, by its offset."""
    if isinstance(whole, Boxes):
        yield from whole.boxes.items()
    elif isinstance(whole, DTensor):
        local = whole.to_local()
        if local.numel():
            (chunk,) = whole.__create_chunk_list__()
            yield tuple(chunk.offsets), local
    else:
        yield (0,) * whole.dim(), whole
