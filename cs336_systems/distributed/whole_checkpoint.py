"""The model of a sharded checkpoint in one process: no process group, no GPU, no optimizer, whoever wrote it.

    stored, skipped = find_checkpoint(Path("runs/stdlib"))       # the newest; or one: runs/stdlib/step-00000200
    weights = load_whole_model(stored, dict(shell.named_parameters()))  # name -> whole tensor

Only the parameters come into memory; the digests of all files are checked before, which reads them once.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from cs336_systems.distributed import checkpoint_folder
from cs336_systems.distributed.checkpoint import MODEL, check_tensors, stored_tensors
from cs336_systems.distributed.checkpoint_folder import StoredCheckpoint, find_damage
from cs336_systems.distributed.checkpoint_reading import MetadataReader


def find_checkpoint(path: Path) -> tuple[StoredCheckpoint, dict[Path, str]]:
    """The checkpoint ``path``, or the newest sound one of that folder, and why each of the others was passed over.

    Raises:
        ValueError: there is none, or none that is whole.
        OSError: the folder or the checkpoint cannot be read.
    """
    if checkpoint_folder.is_checkpoint(path):
        try:
            stored = checkpoint_folder.read(path)
        except ValueError as error:
            raise ValueError(f"{path} is no complete checkpoint: {error}") from None
        if damage := find_damage(stored, stored.files):
            raise ValueError(f"{path} is damaged: {damage}")
        return stored, {}
    complete, unreadable = checkpoint_folder.survey(path)
    try:
        newest = checkpoint_folder.newest_sound(
            path, complete, unreadable, lambda stored: find_damage(stored, stored.files)
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if newest is None:
        raise ValueError(f"{path} holds no checkpoint")
    return newest, unreadable


def load_whole_model(stored: StoredCheckpoint, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole parameters of a checkpoint, on the CPU in the dtypes in which they were saved.

    Args:
        parameters: of the model, by name; only their shapes count, so they may be on the meta device.

    Raises:
        ValueError: it is a checkpoint of another model, or asks for objects of Python.
    """
    reader = MetadataReader(stored.path)
    there = {name: entry for name, entry in stored_tensors(reader).items() if name.startswith(MODEL)}
    expected = {
        MODEL + name: torch.empty(
            parameter.shape,
            dtype=there[MODEL + name].properties.dtype if MODEL + name in there else parameter.dtype,
            device="meta",
        )
        for name, parameter in parameters.items()
    }
    check_tensors(stored.path, expected, there)
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is meant
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}
