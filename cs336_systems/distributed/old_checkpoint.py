"""Checkpoints of layout 2, whose files ``torch.distributed.checkpoint`` wrote, read without running what they hold.

Where tensors are is in ``.metadata``, a pickle, and pickles run code: here it builds plain records of a few known names
and nothing else. A tensor is boxes (offsets and sizes in the whole), each of them an archive of ``torch.save`` within a
``.distcp`` file, read with ``weights_only=True``. Every rank reads whole tensors, one at a time, and takes its
stretch.
"""

import io
import pickle
from collections.abc import Collection
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from cs336_systems.distributed.stretches import StoredTensor

LAYOUT = 2

_MODULES = (
    *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "torch.serialization"),
    *("pathlib", "pathlib._local"),
)
_RECORDS = (
    *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"),
    *("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
)
_FAULTS = (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading a pickle that is damaged or describes something else."""


class _Record:
    """Stands for an object of these names, with the attributes that were pickled."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in _MODULES and name in _RECORDS:
            return _Record
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and describes tensors alone")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def read_index(folder: Path, files: Collection[str]) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name; raises ValueError unless ``.metadata`` describes tensors in these files."""
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        places = {(index.fqn, tuple(index.offset)): info for index, info in metadata.storage_data.items()}
        if foreign := {info.relative_path for info in places.values()}.difference(files):
            raise ValueError(f"it names {min(foreign)}, which is no file of the checkpoint")
        stored = {}
        for name, entry in metadata.state_dict_metadata.items():
            shape, dtype = tuple(entry.size), entry.properties.state[0]
            boxes = [(chunk.offsets, chunk.sizes, places[name, tuple(chunk.offsets)]) for chunk in entry.chunks]
            n = sum(prod(sizes) for _, sizes, _ in boxes)
            if n != prod(shape) or not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} of shape {shape} and {dtype} is described with {n} elements")
            stored[name] = StoredTensor(shape, dtype, [(0, n, partial(_read, folder, shape, dtype, boxes))])
        return stored
    except _FAULTS as error:
        raise ValueError(f"{folder / '.metadata'} is not read: {error}") from None


def _read(folder: Path, shape: tuple[int, ...], dtype: torch.dtype, boxes: Any, begin: int, end: int) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    for offsets, sizes, place in boxes:
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        box = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(box, Tensor) or box.shape != sizes:
            raise ValueError(f"{place.relative_path} holds no tensor of shape {sizes} at byte {place.offset}")
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = box
    return whole.view(-1)[begin:end]
