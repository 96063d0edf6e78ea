"""What a checkpoint's files say, without running what they hold: checkpoints are passed around, and pickles run code.

``torch.distributed.checkpoint`` reads tensors safely, but where they are by ``pickle.load``. Here that builds its own
descriptions of tensors and nothing else. Extra state of modules is read as ``torch.load(weights_only=True)`` does.
"""

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

_NAMES = {
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    filesystem.__name__: ("_StorageInfo",),
    metadata.__name__: (
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}
_NAMES["pathlib._local"] = _NAMES["pathlib"]  # Python 3.13 on


class MetadataReader(dcp.FileSystemReader):
    """Reads the checkpoint in a folder.

    Raises:
        ValueError: in ``read_metadata``, its ``.metadata`` asks for anything but a description of tensors, or is none.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                read = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not read: {error}") from None
        if not isinstance(read, metadata.Metadata):
            raise ValueError(f"{path} is not read: it holds {type(read).__name__}, which describes no tensors")
        if read.storage_meta is None:
            read.storage_meta = metadata.StorageMeta()
        read.storage_meta.load_id = self.load_id
        return read


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and describes tensors alone")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def pack(value: Any, name: str) -> Tensor:
    """Plain data and tensors as bytes, (n,) uint8.

    Raises:
        ValueError: there is anything else among them; ``name`` says where it is from.
    """
    file = io.BytesIO()
    torch.save(value, file)
    content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    unpack(content, name, torch.device("cpu"))
    return content


def unpack(content: Tensor, name: str, device: torch.device) -> Any:
    """What was packed, its tensors on the device; raises ValueError as ``pack``."""
    try:
        return torch.load(io.BytesIO(content.numpy().tobytes()), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or str(error).partition("\n")[0]
        raise ValueError(f"{name} is to be plain data and tensors, and is more: {reason}") from None
