"""A whole tensor of which this rank holds a part, as ``torch.distributed.checkpoint`` writes and reads it: boxes.

What an optimizer's shards are cut from is a tensor in memory order, and a cut falls anywhere within its rows. The files
of a checkpoint know boxes alone: rows, columns and so on from an offset. So a stretch of elements of a matrix is at
most three boxes: the end of a row, whole rows, the beginning of one.

    Boxes.of_stretch(parameter, start, flat)      # elements start to start + len(flat), in memory order; shares memory
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Offsets = tuple[int, ...]


class Boxes(torch.Tensor):
    """Shape and dtype of the whole tensor, and this rank's boxes of it by offset; there is nothing to compute with."""

    boxes: dict[Offsets, Tensor]
    flat: Tensor | None
    """Of a stretch."""

    def __new__(cls, shape: torch.Size, dtype: torch.dtype, boxes: Mapping[Offsets, Tensor]) -> "Boxes":
        whole = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        whole.boxes, whole.flat = dict(boxes), None
        return whole

    @classmethod
    def of_stretch(cls, whole: Tensor, start: int, flat: Tensor) -> "Boxes":
        """Elements from ``start`` on of a tensor like ``whole``, in memory order; ``flat`` (n,) has their values."""
        strides = torch.empty_like(whole.detach(), device="meta").stride()
        order = sorted(range(whole.dim()), key=lambda d: -strides[d])  # of dimensions in memory
        back = sorted(range(whole.dim()), key=lambda d: order[d])
        boxes, begin = {}, 0
        for offsets, sizes in stretch_boxes([whole.shape[d] for d in order], start, start + flat.numel()):
            box = flat[begin : begin + prod(sizes)].view(sizes).permute(back)
            boxes[tuple(offsets[d] for d in back)] = box
            begin += prod(sizes)
        stretch = cls(whole.shape, flat.dtype, boxes)
        stretch.flat = flat
        return stretch

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor that is boxes in a checkpoint")

    # what torch.distributed.checkpoint asks of tensors that are not whole

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(box), self.shape),
            )
            for chunk, box in zip(self.__create_chunk_list__(), self.boxes.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]


def stretch_boxes(shape: list[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of boxes that are elements ``start`` to ``stop`` of a tensor, rows first; in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ([start], [stop - start]) if shape else ([], [])
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # of whole rows
    parts = [(start // row, start, stop)]
    if first <= last:
        parts = [(first - 1, start, first * row), (last, last * row, stop)]
    for i, begin, end in parts:
        if i == last and first < last:
            yield [first, *[0] * (len(shape) - 1)], [last - first, *shape[1:]]
        for offsets, sizes in stretch_boxes(shape[1:], begin - i * row, end - i * row):
            yield [i, *offsets], [1, *sizes]
