"""Sharded checkpoints of an FSDP model and its optimizer: every rank writes its shards, any number of ranks reads them.

    save_checkpoint(folder, fsdp, optimizer, step, keep_last=2)
    step = load_checkpoint(folder, fsdp, optimizer)          # None if there is none to resume from

``torch.distributed.checkpoint`` stores tensors by name with the rows that each file holds, so that ranks of another
number find theirs; shards are shown to it as ``DTensor``s without copying. On the disk:

    step-00000200/  .metadata, __0_0.distcp, __1_0.distcp   what torch writes
                    complete.json                           written last: step, optimizer settings, size of every file

A checkpoint is written under a temporary name on the same file system, flushed, and renamed; ``complete.json`` comes
after that, so a directory without it, or with files of other sizes than it lists, is a torn one and not loaded. It is
removed by the next save. Older checkpoints are removed only once a newer one is complete; one of the same step is kept
under a hidden name until then, from which the next save or load restores it if need be.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import ShardedParameter
from cs336_systems.distributed.fsdp_state_dict import WholeTensors

MARKER = "complete.json"
_PREFIX = "step-"
_REPLACED = ".old"

T = TypeVar("T")


def save_checkpoint(
    folder: Path, fsdp: FSDP, optimizer: torch.optim.Optimizer | None, step: int, *, keep_last: int = 2
) -> Path:
    """Write ``folder/step-<step>``, then remove all but the newest ``keep_last``; a collective.

    Raises:
        ValueError: ``step`` is negative, ``keep_last`` is not positive, or the optimizer holds a state of a sharded
            parameter that is neither shaped like its shard nor a single number.
        OSError: rank 0 cannot write; the checkpoints that were there are untouched.
    """
    if step < 0 or keep_last < 1:
        raise ValueError(f"step must not be negative and keep_last be positive, got {step} and {keep_last}")
    view = _View(fsdp)
    final = folder / f"{_PREFIX}{step:08d}"
    temporary = folder / f".{final.name}.tmp"

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _restore(folder)
        _remove(_torn(folder))
        temporary.mkdir()

    tensors = view.model()
    settings: dict[str, Any] = {"step": step, "optimizer": None, "scalars": {}}
    if optimizer is not None:
        tensors |= view.optimizer(optimizer, settings)
    _on_rank_0(fsdp, prepare)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary), process_group=fsdp.process_group)
    _on_rank_0(fsdp, lambda: _publish(temporary, final, settings))
    _on_rank_0(fsdp, lambda: _remove(complete_checkpoints(folder)[:-keep_last]))
    return final


def load_checkpoint(folder: Path, fsdp: FSDP, optimizer: torch.optim.Optimizer | None) -> int | None:
    """Read the newest complete checkpoint of ``folder`` into the model and the optimizer; a collective.

    Returns:
        The step at which it was saved, or None if there is no complete checkpoint, and nothing was changed.

    Raises:
        ValueError: it is of another model or optimizer; nothing was changed.
    """

    def newest() -> list[Path]:
        _restore(folder)
        return complete_checkpoints(folder)[-1:]

    found = _on_rank_0(fsdp, newest)
    if not found:
        return None
    path = found[0]
    settings = json.loads((path / MARKER).read_text())
    view = _View(fsdp)
    reader = dcp.FileSystemReader(path)
    stored = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    tensors = view.model()
    _check(path, tensors, {name: entry for name, entry in stored.items() if not name.startswith("optimizer/")})
    state = view.empty_optimizer_state(path, optimizer, settings, stored) if optimizer is not None else {}
    with torch.no_grad():
        dcp.load(tensors | state, storage_reader=reader, process_group=fsdp.process_group)
    if optimizer is not None:
        view.restore_optimizer(optimizer, settings, state)
    return settings["step"]


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of ``folder`` that are whole, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if _is_complete(path))


def _is_complete(path: Path) -> bool:
    try:
        sizes = json.loads((path / MARKER).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _restore(folder: Path) -> None:
    """Give back their names to checkpoints that a save of the same step was replacing when it was cut off."""
    for old in folder.glob(f".{_PREFIX}*{_REPLACED}"):
        final = folder / old.stem.removeprefix(".")
        if _is_complete(old) and not _is_complete(final):
            shutil.rmtree(final, ignore_errors=True)
            old.replace(final)


def _torn(folder: Path) -> list[Path]:
    """Directories that a save has left unfinished."""
    unfinished = [path for path in folder.glob(f"{_PREFIX}*") if not _is_complete(path)]
    return [*unfinished, *folder.glob(f".{_PREFIX}*")]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path)


def _publish(temporary: Path, final: Path, settings: dict[str, Any]) -> None:
    """Give a written checkpoint its name, then its marker; each step is on the disk before the next."""
    files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    _flush(temporary)
    if final.exists():
        final.replace(temporary.with_suffix(_REPLACED))
    temporary.replace(final)
    _flush(final.parent)
    marker = final / f".{MARKER}"
    with marker.open("w") as file:
        json.dump(settings | {"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    marker.replace(final / MARKER)
    _flush(final)
    shutil.rmtree(temporary.with_suffix(_REPLACED), ignore_errors=True)


def _flush(folder: Path) -> None:
    """Have the entries of a directory on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_rank_0(fsdp: FSDP, action: Callable[[], T]) -> T:
    """What ``action`` returns on the group's first rank, on every rank; or what it raises there."""
    outcome: list[Any] = [None, None]
    if fsdp.process_group.rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # the others wait for this rank's word
            outcome[1] = error
    dist.broadcast_object_list(outcome, group_src=0, group=fsdp.process_group, device=fsdp.device)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _check(path: Path, expected: dict[str, Tensor], stored: dict[str, TensorStorageMetadata]) -> None:
    """Raise ValueError unless the checkpoint holds exactly these tensors, in these shapes and dtypes."""

    def shorten(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    differences = []
    if missing := sorted(expected.keys() - stored.keys()):
        differences.append(f"it lacks {shorten(missing)}")
    if foreign := sorted(stored.keys() - expected.keys()):
        differences.append(f"it holds {shorten(foreign)} besides")
    for name in sorted(expected.keys() & stored.keys()):
        ours = (tuple(expected[name].shape), expected[name].dtype)
        theirs = (tuple(stored[name].size), stored[name].properties.dtype)
        if ours != theirs:
            differences.append(f"{name} is {theirs[0]} {theirs[1]} there and {ours[0]} {ours[1]} here")
    if differences:
        more = f"; and {len(differences) - 3} more differences" if len(differences) > 3 else ""
        raise ValueError(f"{path} is a checkpoint of another model: {'; '.join(differences[:3])}{more}")


class _View:
    """The model and its optimizer as named tensors for ``torch.distributed.checkpoint``, sharing their memory."""

    def __init__(self, fsdp: FSDP) -> None:
        self._module = fsdp.module
        self._whole = WholeTensors(fsdp.process_group, fsdp.device).of
        self._parameters = {parameter.names[0]: parameter for parameter in fsdp.managed_parameters()}
        self._name_of: dict[Tensor, str] = {p.sharded_param: name for name, p in self._parameters.items()}

    def model(self) -> dict[str, Tensor]:
        """Parameters, and the buffers that the module's own state dict would hold."""
        tensors = {
            f"model/{name}": self._whole(parameter, parameter.sharded_param.detach())
            for name, parameter in self._parameters.items()
        }
        parameters = {name for parameter in self._parameters.values() for name in parameter.names}
        buffers = {name: value for name, value in self._module.state_dict().items() if name not in parameters}
        return tensors | {f"buffer/{name}": value for name, value in buffers.items() if isinstance(value, Tensor)}

    def optimizer(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Tensor]:
        """The optimizer's tensors; its numbers and its groups go into ``settings``.

        Raises:
            ValueError: a state cannot be resharded.
        """
        tensors: dict[str, Tensor] = {}
        settings["optimizer"] = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            | {"params": [self._name_of[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        for sharded_param, state in optimizer.state.items():
            name = self._name_of[sharded_param]
            parameter = self._parameters[name]
            for key, value in state.items():
                entry = f"optimizer/{name}/{key}"
                if not isinstance(value, Tensor):
                    settings["scalars"][entry] = value
                elif value.shape == sharded_param.shape:
                    tensors[entry] = self._whole(parameter, value)
                elif value.numel() == 1 or not isinstance(parameter, ShardedParameter):
                    tensors[entry] = value
                else:
                    raise ValueError(
                        f"optimizer state {key} of {name} has shape {tuple(value.shape)}, its shard "
                        f"{tuple(sharded_param.shape)}: only states like the shard can be read by other "
                        "numbers of ranks"
                    )
        return tensors

    def empty_optimizer_state(
        self,
        path: Path,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        stored: dict[str, TensorStorageMetadata],
    ) -> dict[str, Tensor]:
        """Tensors for what the checkpoint holds of the optimizer, to be filled.

        Raises:
            ValueError: the checkpoint has no optimizer, or one over other parameters.
        """
        ours = [[self._name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in settings["optimizer"] or []]
        if ours != theirs:
            raise ValueError(
                f"{path} is a checkpoint of another optimizer: it holds parameter groups of "
                f"{[len(group) for group in theirs]} parameters, here are {[len(group) for group in ours]}, "
                "or their names differ"
            )
        tensors: dict[str, Tensor] = {}
        for entry, metadata in stored.items():
            if not entry.startswith("optimizer/"):
                continue
            parameter, dtype = self._parameters[entry.split("/")[1]], metadata.properties.dtype
            if metadata.size == parameter.shape:
                shard = torch.zeros_like(parameter.sharded_param, dtype=dtype).detach()
                tensors[entry] = self._whole(parameter, shard)
            else:
                tensors[entry] = torch.zeros(metadata.size, dtype=dtype)
        return tensors

    def restore_optimizer(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        """Hand the optimizer the filled tensors, the numbers and the settings of its groups."""
        names = [name for group in settings["optimizer"] for name in group["params"]]
        number_of = {name: number for number, name in enumerate(names)}
        state: dict[int, dict[str, Any]] = {}
        for entry, value in (tensors | settings["scalars"]).items():
            _, name, key = entry.split("/")
            local = value.to_local() if isinstance(value, DTensor) else value
            state.setdefault(number_of[name], {})[key] = local
        groups = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            | {"params": [number_of[name] for name in group["params"]]}
            for group in settings["optimizer"]
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it."""
    return value.item() if isinstance(value, Tensor) else value
