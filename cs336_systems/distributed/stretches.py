"""Stretches: consecutive elements of whole tensors, written by the ranks that hold them, read by any number of ranks.

    described = write_stretches(folder / "rank-0.safetensors", {"model/w": Stretch((4, 6), start=0, values=rows)})
    write_index(folder, [described, ...])                # of all ranks
    stored = read_index(folder, names_of_files)          # name -> StoredTensor
    fill(Stretch((4, 6), start=6, values=torch.empty(3, 6)), stored["model/w"])

Every rank writes one safetensors file, in which each tensor is the rank's flat stretch of it. ``tensors.json`` says
where each tensor's stretches are: ``{"model/w": {"shape": [4, 6], "dtype": "F32", "stretches": [["rank-0.safetensors",
0, 12], ...]}}``, with file, first element and number of elements. Reading intersects these intervals with the requested
one. Elements are counted in row-major order; if a rank's stretch is consecutive in another order of the dimensions, as
slices of a transposed weight are, ``"order"`` lists the dimensions, outermost first. If tensor ranks divide a tensor
along another dimension than the first, ``"parts": [1, 2]`` says that its two parts along dimension 1 are stored one
after the other. Files are written one tensor at a time, so that host memory holds one tensor besides those saved.

Checkpoints of layout 2, whose files ``torch.distributed.checkpoint`` wrote, are read without executing their contents:
the positions of tensors are in ``.metadata``, a pickle, from which only plain records of a few known names are built.
A tensor is stored as boxes (offsets and sizes in the whole), each an archive of ``torch.save`` in a ``.distcp`` file.
"""

import io
import json
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cs336_systems.distributed.checkpoint_folder import write_through

INDEX = "tensors.json"

_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BF16": torch.bfloat16},
    **{"F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
}
"""Dtypes by safetensors' names."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive elements of a whole tensor of this shape, and the memory to save them from or load them into.

    Attributes:
        start: the first element's position in the whole tensor, its dimensions permuted to ``order`` and flattened.
        values: the elements, flattened in row-major order, in a plain tensor.
        order: the dimensions, outermost first; empty for their own order.
        parts: (dimension, number of equal parts along it): elements are counted part by part; empty for one part.
    """

    shape: tuple[int, ...]
    start: int
    values: Tensor
    order: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.values) not in (Tensor, nn.Parameter):
            raise ValueError(f"checkpoints hold plain tensors, got a {type(self.values).__name__} of {self.shape}")

    @classmethod
    def whole(cls, tensor: Tensor) -> "Stretch":
        """The stretch that is the whole tensor."""
        return cls(tuple(tensor.shape), 0, tensor)

    def like(self, values: Tensor) -> "Stretch":
        """The same elements of another tensor of the same shape."""
        return replace(self, values=values)

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the whole tensor."""
        return self.values.numel() == prod(self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; shape, order and parts as those of ``Stretch``.

    Attributes:
        pieces: for each piece its first element, its number of elements, and a function that reads its elements
            ``begin`` to ``end``; together the pieces are the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[tuple[int, int, Callable[[int, int], Tensor]]]
    order: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` on the CPU; ValueError where a file is not as described, or OSError."""
        elements = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        for first, n, read in self.pieces:
            begin, end = max(start, first), min(stop, first + n)
            if begin < end:
                elements[begin - start : end - start] = read(begin - first, end - first)
        return elements


@torch.no_grad()
def fill(stretch: Stretch, stored: StoredTensor) -> None:
    """Read the elements of a stretch from a tensor of the same shape; raises as ``StoredTensor.read``."""
    stop = stretch.start + stretch.values.numel()
    if (stretch.order, stretch.parts) == (stored.order, stored.parts):
        elements = stored.read(stretch.start, stop)
    else:  # this reads the whole tensor, as consecutive elements in one order are scattered in another
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        there = stored.read(0, prod(stored.shape))
        for part in _in_order(whole, stored.order, stored.parts):
            part.copy_(there[: part.numel()].view(part.shape))
            there = there[part.numel() :]
        in_order = [part.reshape(-1) for part in _in_order(whole, stretch.order, stretch.parts)]
        elements = torch.cat(in_order)[stretch.start : stop]
    stretch.values.copy_(elements.view(stretch.values.shape))


def _in_order(whole: Tensor, order: Sequence[int], parts: Sequence[int]) -> list[Tensor]:
    """Views of the parts of a tensor, with their dimensions in the order in which elements are stored."""
    divided = whole.chunk(parts[1], parts[0]) if parts else [whole]
    return [part.permute(*order) if order else part for part in divided]


@torch.no_grad()
def read_whole(stored: StoredTensor) -> Tensor:
    """All of a tensor, on the CPU."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    fill(Stretch.whole(tensor), stored)
    return tensor


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint: its size, its CRC-32, and the entries of ``tensors.json`` for what it holds."""

    name: str
    n_bytes: int
    crc32: int
    entries: dict[str, dict[str, Any]]


@torch.no_grad()
def write_stretches(path: Path, stretches: Mapping[str, Stretch]) -> WrittenFile:
    """Write a safetensors file and flush it to disk; ValueError for unsupported dtypes, or OSError."""
    header, entries, end = {}, {}, 0
    for name, stretch in sorted(stretches.items(), key=lambda item: -item[1].values.itemsize):  # so all are aligned
        if (dtype := _NAMES.get(stretch.values.dtype)) is None:
            raise ValueError(f"{name} is of {stretch.values.dtype}, which safetensors files cannot hold")
        begin, end, n = end, end + stretch.values.nbytes, stretch.values.numel()
        header[name] = {"dtype": dtype, "shape": [n], "data_offsets": [begin, end]}
        how = {"order": stretch.order, "parts": stretch.parts}
        how = {key: value for key, value in how.items() if value}
        entries[name] = {"shape": stretch.shape, "dtype": dtype, **how, "stretches": [[path.name, stretch.start, n]]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    flat = (stretches[name].values.detach().reshape(-1).cpu() for name in header)
    contents = (each.view(torch.uint8).numpy().data for each in flat)
    written = write_through(path, chain([len(encoded).to_bytes(8, "little") + encoded], contents))
    return WrittenFile(path.name, *written, entries)


def write_index(folder: Path, files: Sequence[WrittenFile]) -> WrittenFile:
    """Write ``tensors.json`` for the files of all ranks, one line per tensor; raises OSError."""
    tensors: dict[str, dict[str, Any]] = {}
    for name, entry in (item for file in files for item in file.entries.items()):
        tensors.setdefault(name, entry | {"stretches": []})["stretches"] += entry["stretches"]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(tensors.items()))
    return WrittenFile(INDEX, *write_through(folder / INDEX, [f"{{\n{lines}\n}}\n".encode()]), {})


def read_index(folder: Path, files: Collection[str]) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name; only these of its files are opened.

    It is a ValueError if ``tensors.json`` or a safetensors header is malformed, or they contradict each other.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        named = {stretch[0] for entry in index.values() for stretch in entry["stretches"]}
        if foreign := named.difference(files):
            raise ValueError(f"it names {min(foreign)}, which is no file of the checkpoint")
        with ExitStack() as stack:
            opened = {name: stack.enter_context(safe_open(folder / name, "pt")) for name in named}
            return {name: _stored(folder, name, entry, opened) for name, entry in index.items()}
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder / INDEX} is not read: {error!r}") from None


def _stored(folder: Path, name: str, entry: dict[str, Any], opened: dict[str, Any]) -> StoredTensor:
    shape, order, dtype = tuple(entry["shape"]), tuple(entry.get("order", ())), _DTYPES[entry["dtype"]]
    parts = tuple(entry.get("parts", ()))
    pieces, n_before = [], 0
    for file, first, n in sorted(entry["stretches"], key=lambda stretch: stretch[1:]):
        there = opened[file].get_slice(name)
        if (first, there.get_dtype(), there.get_shape()) != (n_before, entry["dtype"], [n]):
            raise ValueError(f"{name} is not in {file} as it says")
        pieces.append((first, n, partial(_read_elements, folder / file, name)))
        n_before += n
    if n_before != prod(shape) or (order and sorted(order) != list(range(len(shape)))):
        raise ValueError(f"{name} of shape {shape} has {n_before} elements")
    if parts and not (len(parts) == 2 and 0 <= parts[0] < len(shape) and parts[1] > 0 == shape[parts[0]] % parts[1]):
        raise ValueError(f"{name} of shape {shape} cannot be in parts {parts}")
    return StoredTensor(shape, dtype, pieces, order, parts)


def _read_elements(path: Path, name: str, begin: int, end: int) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            return file.get_slice(name)[begin:end]
    except SafetensorError as error:
        raise ValueError(f"{path} is not read: {error}") from None


OLD_LAYOUT = 2

_MODULES = (
    *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "torch.serialization"),
    *("pathlib", "pathlib._local"),
)
_RECORDS = (
    *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"),
    *("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
)


class _Record:
    """Replaces an object of a known class; it has the attributes that were pickled."""

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


def read_old_index(folder: Path, files: Collection[str]) -> dict[str, StoredTensor]:
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
            stored[name] = StoredTensor(shape, dtype, [(0, n, partial(_read_boxes, folder, shape, dtype, boxes))])
        return stored
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / '.metadata'} is not read: {error}") from None


def _read_boxes(folder: Path, shape: tuple[int, ...], dtype: torch.dtype, boxes: Any, begin: int, end: int) -> Tensor:
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
