"""Copies of tensors in host memory, in one slab that is used again: 50 GB/s from a GPU, as it is pinned.

    slab = HostSlab.like(tensors, device)       # takes a while: pages are touched and pinned
    copies = slab.copies_of(tensors)            # by name; until the next call
    slab.free()

One slab of the system's allocator, pinned where it is: torch's own pinned allocator rounds each tensor up to a power of
two, and never gives back. What is shown as a part of a whole tensor (a ``DTensor``, ``Boxes``) becomes ``Boxes``.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cs336_systems.distributed.checkpoint_boxes import Boxes

_ALIGNMENT = 64
_PINNED_AT_A_TIME = 2**28
"""Bytes, so that launches from other threads get between."""


class HostSlab:
    """So many bytes of host memory; pinned for a CUDA device.

    Raises:
        OSError: they cannot be had, or not be pinned.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._device = device
        self._pinned: list[int] = []
        try:
            self._slab = torch.empty(n_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(f"{n_bytes:,} bytes of host memory cannot be had: {str(error).splitlines()[0]}") from None
        if device.type == "cuda":
            self._pin()

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], device: torch.device) -> "HostSlab":
        """With room for copies of these; raises OSError."""
        return cls(n_bytes_of(tensors), device)

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether there is room for copies of these."""
        return n_bytes_of(tensors) <= len(self._slab)

    def copies_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies, complete when this returns; earlier ones are overwritten."""
        copies, begin = dict[str, Tensor](), 0
        for name, whole in tensors.items():
            own = {}
            for offsets, part in _parts(whole):
                copy = self._slab[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
                own[offsets] = copy.copy_(part, non_blocking=True)
                begin += _aligned(part.nbytes)
            split = isinstance(whole, DTensor | Boxes)
            copies[name] = Boxes(whole.shape, whole.dtype, own) if split else next(iter(own.values()))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def free(self) -> None:
        """Give the memory back; copies are no longer to be read."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned = []
        self._slab = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        self._slab.zero_()  # by all cores, which touch pages faster than the driver does
        begin, end = self._slab.data_ptr(), self._slab.data_ptr() + len(self._slab)
        for address in range(begin, end, _PINNED_AT_A_TIME):
            n_bytes = min(_PINNED_AT_A_TIME, end - address)
            error = torch.cuda.cudart().cudaHostRegister(address, n_bytes, 0)
            if int(error) != 0:
                self.free()
                raise OSError(f"host memory for copies of checkpoints cannot be pinned: CUDA error {int(error)}")
            self._pinned.append(address)


def n_bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Of a slab for copies of these."""
    return sum(_aligned(part.nbytes) for whole in tensors.values() for _, part in _parts(whole))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


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
