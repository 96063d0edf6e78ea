"""Checkpoints of a model and its optimizer: every rank writes its shards, any number of ranks reads them.

    save_checkpoint(folder, model, optimizer, step, keep_last=2)
    step = load_checkpoint(folder, model, optimizer)          # None if there is none to resume from

``torch.distributed.checkpoint`` stores tensors by name with the rows that each file holds, so that ranks of another
number find theirs; FSDP's shards are shown to it as ``DTensor``s without copying. What is replicated, as without FSDP,
is written once, by the ranks in equal parts. Of a ``ShardedOptimizer``'s state every rank writes and reads its share,
as boxes of the whole (``checkpoint_boxes.py``). The names are the same in each case, so a run may go on under another
wrapper. On the disk:

    step-00000200/  .metadata, __0_0.distcp, __1_0.distcp   what torch writes
                    complete.json                           step, optimizer settings, size and CRC-32 of every file

What keeps a folder of them safe is in ``checkpoint_folder.py``. Sizes are checked whenever a folder is looked at, and
digests before a checkpoint is loaded: every rank reads its part of the files once more for that, and once when saving.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from cs336_systems.distributed import checkpoint_folder
from cs336_systems.distributed.arrivals import wait_for_parameters
from cs336_systems.distributed.checkpoint_boxes import Boxes
from cs336_systems.distributed.checkpoint_folder import MARKER, StoredCheckpoint
from cs336_systems.distributed.checkpoint_reading import MetadataReader, pack, unpack
from cs336_systems.distributed.checkpoint_state import BUFFER, MODEL, OPTIMIZER, NamedState
from cs336_systems.distributed.checkpoint_writing import InPlacePlanner, file_writer
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.process_group import on_every_rank, on_rank_0

__all__ = [
    "MARKER",
    "MODEL",
    "check_tensors",
    "complete_checkpoints",
    "load_checkpoint",
    "resume_checkpoint",
    "save_checkpoint",
    "stored_tensors",
]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    *,
    keep_last: int = 2,
    keep_every: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``folder/step-<step>``, then remove all but the ``keep_last`` that were written last; a collective.

    A complete checkpoint of the same step is replaced. What is damaged or of another program is neither removed nor
    counted, and warned of.

    Args:
        model: under FSDP, under this suite's DDP, or whole and equal on every rank of the default group.
        keep_every: steps that are multiples of it are neither removed nor counted.
        extra: what else is to be read back, as JSON can hold it; the first rank's counts.

    Raises:
        ValueError: ``step`` is negative, ``keep_last`` or ``keep_every`` is not positive, or the optimizer holds other
            parameters, or a state of a sharded parameter that is neither shaped like its shard nor a single number; or
            a module's extra state is more than plain data and tensors.
        OSError: a rank cannot write; the checkpoints that were there are untouched.
    """
    check_kept(step, keep_last, keep_every)
    group = group_of(model)
    return write(Path(folder), collect(model, optimizer, step, extra, group), group, keep_last, keep_every)


@dataclass
class Collected:
    """What a rank has to write.

    Attributes:
        tensors: by name; they share the memory of what is trained.
        marker: for ``complete.json``; the same on every rank.
    """

    tensors: dict[str, Tensor]
    marker: dict[str, Any]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
) -> Collected:
    """What this rank has to write: what it alone has, and its part of what all have; a collective.

    Raises:
        ValueError: as ``save_checkpoint``.
    """
    wait_for_parameters(model)
    view, tensors = NamedState(model), dict[str, Tensor]()
    marker: dict[str, Any] = {"step": step, "saved_at": 0, "optimizer": None, "scalars": {}, "extra": dict(extra or {})}

    def collect_own() -> tuple[dict[str, int], dict[str, Any]]:
        tensors.update(view.model())
        if optimizer is not None:
            tensors.update(view.optimizer(optimizer, marker))
        packed = {name: pack(module.get_extra_state(), name) for name, module in view.with_extra_state().items()}
        if group.rank() == 0:  # its value counts, as a buffer's does
            tensors.update(packed)
        else:
            for name in [name for name in tensors if name.startswith(BUFFER)]:
                del tensors[name]
        whole = {name: value.nbytes for name, value in tensors.items() if not isinstance(value, DTensor | Boxes)}
        return whole, marker["scalars"]

    of_ranks = on_every_rank(collect_own, group)
    marker["scalars"] = {entry: value for _, scalars in of_ranks for entry, value in scalars.items()}
    loads = [0] * group.size()
    for name, n_bytes in {name: n for whole, _ in of_ranks for name, n in whole.items()}.items():
        writer = min((rank for rank, (whole, _) in enumerate(of_ranks) if name in whole), key=lambda rank: loads[rank])
        loads[writer] += n_bytes
        if writer != group.rank():
            tensors.pop(name, None)
    return Collected(tensors, marker)


def write(root: Path, collected: Collected, group: dist.ProcessGroup, keep_last: int, keep_every: int | None) -> Path:
    """Write files, marker and name, then remove what is to go; a collective on this group alone.

    Raises:
        OSError: as ``save_checkpoint``; what was written is removed, as it may be what fills the disk.
    """
    marker = dict(collected.marker)
    temporary, marker["saved_at"] = on_rank_0(lambda: checkpoint_folder.begin(root, marker["step"]), group)
    try:
        final = _write_files(temporary, collected.tensors, marker, group)
    except Exception:
        if group.rank() == 0:  # all ranks know by now that they have failed
            checkpoint_folder.abandon(temporary)
        raise
    on_rank_0(lambda: checkpoint_folder.retire(root, final, keep_last, keep_every), group)
    return final


def _write_files(temporary: Path, tensors: dict[str, Tensor], marker: dict[str, Any], group: dist.ProcessGroup) -> Path:
    """Fill a directory and give it its name."""
    try:
        writer = file_writer(temporary)
        dcp.save(tensors, storage_writer=writer, planner=InPlacePlanner(), process_group=group)
    except CheckpointException as error:  # which ``except Exception`` would not catch
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
        raise OSError(f"{temporary} could not be written: {reasons}") from error

    def describe_files() -> dict[str, dict[str, int]]:
        return {
            path.name: {"bytes": path.stat().st_size, "crc32": checkpoint_folder.crc32(path)}
            for path in sorted(temporary.iterdir())
            if _reads(group, path.name)
        }

    of_ranks = on_every_rank(describe_files, group)
    marker["files"] = {name: described for files in of_ranks for name, described in files.items()}
    return on_rank_0(lambda: checkpoint_folder.publish(temporary, marker), group)


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> int | None:
    """The step of ``resume_checkpoint``, which see; None if there is no checkpoint."""
    found = resume_checkpoint(folder, model, optimizer)
    return None if found is None else found.step


def resume_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tell: Callable[[str], None] = checkpoint_folder.warn,
) -> StoredCheckpoint | None:
    """Read the checkpoint of ``folder`` that was written last into the model and the optimizer; a collective.

    One that is damaged is told of, and the one before it read in its place.

    Args:
        tell: is given that sentence, on the first rank.

    Returns:
        The one that was read, or None if the folder holds no checkpoint, and nothing was changed.

    Raises:
        ValueError: it is of another model or optimizer, or asks for objects of Python; nothing was changed.
        NoneWhole: the folder holds checkpoints of which none is whole; nothing was changed.
    """
    group = group_of(model)
    found = _newest_sound(group, Path(folder), tell)
    if found is None:
        return None
    path, marker = found.path, found.marker
    wait_for_parameters(model)
    view = NamedState(model)
    reader = MetadataReader(path)
    stored = stored_tensors(reader)
    tensors, modules = view.model(), view.with_extra_state()
    extra = {name: torch.empty(stored[name].size if name in stored else 0, dtype=torch.uint8) for name in modules}
    of_model = {name: entry for name, entry in stored.items() if not name.startswith(OPTIMIZER)}
    check_tensors(path, tensors | extra, of_model)
    state = {}
    if optimizer is not None:
        state = view.empty_optimizer_state(path, optimizer, marker, stored)
        check_tensors(path, state, {name: stored[name] for name in stored.keys() - of_model.keys()})
    states = {}
    if extra:  # before anything is changed: it may be what is not read
        dcp.load(extra, storage_reader=reader, process_group=group)
        states = {name: unpack(content, name, view.device) for name, content in extra.items()}
    with torch.no_grad():
        dcp.load(tensors | state, storage_reader=reader, process_group=group)
    for name, module in modules.items():
        module.set_extra_state(states[name])
    if optimizer is not None:
        view.restore_optimizer(optimizer, marker, state)
    return found


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of ``folder`` that are whole, in the order in which they were written; digests unchecked."""
    return [stored.path for stored in checkpoint_folder.survey(Path(folder))[0]]


def check_kept(step: int, keep_last: int, keep_every: int | None) -> None:
    """Raise ValueError for what no checkpoint can be saved with."""
    if step < 0 or keep_last < 1:
        raise ValueError(f"step must not be negative and keep_last be positive, got {step} and {keep_last}")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every must be positive, got {keep_every}")


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """The ranks that save together."""
    return model.process_group if isinstance(model, FSDP) else dist.distributed_c10d._get_default_group()


def _newest_sound(group: dist.ProcessGroup, folder: Path, tell: Callable[[str], None]) -> StoredCheckpoint | None:
    """The checkpoint to load, its digests checked by all ranks together; or None if there are none at all."""
    complete, unreadable = on_rank_0(lambda: checkpoint_folder.survey(folder), group)
    found = checkpoint_folder.newest_sound(folder, complete, unreadable, lambda stored: _damage(group, stored))
    if group.rank() == 0:
        checkpoint_folder.tell_of(unreadable, tell)
    return found


def _damage(group: dist.ProcessGroup, stored: StoredCheckpoint) -> str | None:
    """What is wrong with the contents of a checkpoint's files; it is noted beside them."""

    own = [name for name in stored.files if _reads(group, name)]
    of_ranks = on_every_rank(lambda: checkpoint_folder.find_damage(stored, own), group)
    damage = next(filter(None, of_ranks), None)
    if damage and group.rank() == 0:
        checkpoint_folder.note_damage(stored.path, damage)
    return damage


def _reads(group: dist.ProcessGroup, name: str) -> bool:
    """Whether this rank reads a file for its digest: ``__<rank>_<number>.distcp`` is that rank's, others rank 0's."""
    owner = int(name.split("_")[2]) if name.startswith("__") else 0
    return owner % group.size() == group.rank()


def stored_tensors(reader: dcp.FileSystemReader) -> dict[str, TensorStorageMetadata]:
    """Sizes and dtypes of the tensors of a checkpoint, by ``model/NAME``, ``buffer/NAME``, ``optimizer/NAME/KEY``."""
    metadata = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def check_tensors(path: Path, expected: Mapping[str, Tensor], stored: Mapping[str, TensorStorageMetadata]) -> None:
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
