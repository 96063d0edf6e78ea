"""Checkpoints of a model and its optimizer: every rank writes its shards, any number of ranks reads them.

    save_checkpoint(folder, model, optimizer, step, keep_last=2)
    step = load_checkpoint(folder, model, optimizer)          # None if there is none to resume from
    stored, skipped = find_checkpoint(folder)                 # in one process, without a process group
    weights = load_whole_model(stored, dict(model.named_parameters()))

Each rank writes the stretches of tensors that it holds (``stretches.py``). Replicated tensors, such as all without
FSDP, are written once, an equal part by each rank; each rank writes and reads its own shard of a ``ShardedOptimizer``'s
state, and each pipeline stage its own tensors. A run may resume under another wrapper, mesh or number of ranks. On
disk:

    step-00000200/  rank-0.safetensors, rank-1.safetensors  each rank's stretches
                    tensors.json                            where each tensor's stretches are
                    complete.json                           step, optimizer settings, size and CRC-32 of every file

``checkpoint_folder.py`` keeps a folder of checkpoints safe; ``stretches.py`` also reads those of earlier versions.
File sizes are checked whenever a folder is read. CRC-32s are checked before a checkpoint is loaded, each rank checking
some of the files.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed import checkpoint_folder
from cs336_systems.distributed.checkpoint_folder import StoredCheckpoint, Tell
from cs336_systems.distributed.checkpoint_state import BUFFER, MODEL, OPTIMIZER, NamedState, check_json, united
from cs336_systems.distributed.process_group import on_every_rank, on_rank_0
from cs336_systems.distributed.shards import wait_for_parameters
from cs336_systems.distributed.stretches import (
    OLD_LAYOUT,
    StoredTensor,
    Stretch,
    fill,
    read_index,
    read_old_index,
    read_whole,
    write_index,
    write_stretches,
)


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

    A complete checkpoint of the same step is replaced. Checkpoints that are damaged or another program's are neither
    removed nor counted; a warning names them.

    Args:
        model: under FSDP, under this suite's DDP, or whole and equal on every rank of the default group.
        keep_every: steps that are multiples of it are neither removed nor counted.
        extra: further values to read back, as JSON can hold them; those of the first rank are saved.

    Raises:
        ValueError: a number is out of range; the optimizer holds other parameters, or a state of a sharded parameter
            that is neither shaped like its shard nor a single number; a module has extra state; JSON cannot hold a
            setting; or safetensors does not support a tensor's dtype.
        OSError: a rank cannot write; existing checkpoints are untouched.
    """
    check_kept(step, keep_last, keep_every)
    return write(Path(folder), collect(model, optimizer, step, extra), None, keep_last, keep_every)


class Collected(NamedTuple):
    """The stretches that a rank writes, by name; ``marker`` becomes ``complete.json``, which all ranks share."""

    stretches: dict[str, Stretch]
    marker: dict[str, Any]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Mapping[str, Any] | None,
) -> Collected:
    """Collect what this rank writes, with its part of replicated tensors; a collective, which raises ValueError."""
    wait_for_parameters(model)
    view, rank = NamedState(model), dist.get_rank()
    marker: dict[str, Any] = {"step": step, "saved_at": 0, "optimizer": None, "scalars": {}, "extra": dict(extra or {})}

    stretches: dict[str, Stretch] = {}

    def collect_own() -> tuple[dict[Place, int], dict[str, Any], list[list[str]]]:
        own = view.model() | ({} if optimizer is None else view.optimizer(optimizer, marker))
        for name, stretch in own.items():
            mine = rank == 0 or not name.startswith(BUFFER)  # buffers are saved with rank 0's values
            if mine and (stretch.values.numel() or stretch.is_whole):
                stretches[name] = stretch
        for settings in (marker["extra"], marker["scalars"], *(marker["optimizer"] or [])):
            check_json(settings)
        held = {_place(name, stretch): stretch.values.nbytes for name, stretch in stretches.items()}
        return held, marker["scalars"], [group["params"] for group in marker["optimizer"] or []]

    of_ranks = on_every_rank(collect_own)
    marker["scalars"] = {entry: value for _, scalars, _ in of_ranks for entry, value in scalars.items()}
    for group, names in zip(marker["optimizer"] or [], united([groups for *_, groups in of_ranks]), strict=True):
        group["params"] = names
    writers = _writers([held for held, *_ in of_ranks])
    mine = {name: each for name, each in stretches.items() if writers.get(_place(name, each)) == rank}
    return Collected(mine, marker)


Place = tuple[str, int, int]
"""The elements of a stretch: the tensor's name, the first element, the number of elements."""


def _place(name: str, stretch: Stretch) -> Place:
    return name, stretch.start, stretch.values.numel()


def _writers(held_by: Sequence[Mapping[Place, int]]) -> dict[Place, int]:
    """Assign a rank to each place, so that each element is written once and ranks write about equally many bytes.

    Two pipeline stages that hold the same tensor may cut it at different places: one stage's pieces are used.

    Args:
        held_by: the places that each rank holds, and their bytes.
    """
    loads, ends, writers = [0] * len(held_by), dict[str, int](), dict[Place, int]()
    for place, n_bytes in sorted({place: n for held in held_by for place, n in held.items()}.items()):
        name, start, n = place
        if start == ends.get(name, 0):
            ends[name] = start + n
            writer = min((i for i, held in enumerate(held_by) if place in held), key=lambda i: loads[i])
            loads[writer] += n_bytes
            writers[place] = writer
    return writers


def write(
    root: Path,
    collected: Collected,
    group: dist.ProcessGroup | None,
    keep_last: int,
    keep_every: int | None,
    keep_step: int | None = None,
) -> Path:
    """Write the files, marker and name; after an error remove them, as they may be filling the disk; a collective."""
    marker = dict(collected.marker)
    temporary, marker["saved_at"] = on_rank_0(lambda: checkpoint_folder.begin(root, marker["step"]), group)
    path = temporary / f"rank-{dist.get_rank(group)}.safetensors"
    try:
        files = on_every_rank(lambda: write_stretches(path, collected.stretches), group)

        def publish() -> Path:
            written = [*files, write_index(temporary, files)]
            marker["files"] = {file.name: {"bytes": file.n_bytes, "crc32": file.crc32} for file in written}
            return checkpoint_folder.publish(temporary, marker)

        final = on_rank_0(publish, group)
    except Exception:
        if dist.get_rank(group) == 0 and temporary.exists():  # by now all ranks know of the failure
            checkpoint_folder.discard(temporary)
        raise
    on_rank_0(lambda: checkpoint_folder.retire(root, final, keep_last, keep_every, keep_step), group)
    return final


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> int | None:
    """Like ``resume_checkpoint``, but return only the step, or None if there is no checkpoint."""
    found = resume_checkpoint(folder, model, optimizer)
    return found.step if found else None


def resume_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tell: Tell = warnings.warn,
) -> StoredCheckpoint | None:
    """Read the newest checkpoint of ``folder`` into the model and the optimizer; a collective.

    ``folder`` may also be one checkpoint.

    If the newest is damaged, the first rank reports it through ``tell``, and the one before it is read instead. Returns
    the checkpoint that was read, or None if the folder holds none.

    Raises:
        ValueError: it belongs to another model or optimizer, its files are malformed, or the folder holds checkpoints
            but no complete one; nothing was changed.
    """

    def damage(one: StoredCheckpoint) -> str | None:
        own = sorted(one.files)[dist.get_rank() :: dist.get_world_size()]  # every rank checks some of the files
        return next(filter(None, on_every_rank(lambda: checkpoint_folder.find_damage(one, own))), None)

    complete, unreadable = on_rank_0(lambda: checkpoint_folder.survey(Path(folder)))
    found = checkpoint_folder.newest_sound(Path(folder), complete, unreadable, damage)
    if dist.get_rank() == 0:
        checkpoint_folder.tell_of(unreadable, tell)
    if found is None:
        return None
    wait_for_parameters(model)
    view, stored = NamedState(model), _tensors_of(found)
    wanted = view.model()
    groups = united(on_every_rank(lambda: [] if optimizer is None else view.groups(optimizer)))
    if optimizer is None:
        stored = {name: there for name, there in stored.items() if not name.startswith(OPTIMIZER)}

    def expect() -> dict[str, str]:
        if optimizer is not None:
            wanted.update(view.empty_optimizer_state(found.path, optimizer, found.marker, stored, groups))
        return _described(wanted)

    _check_tensors(found.path, on_every_rank(expect), stored)

    def read() -> None:
        for name, stretch in wanted.items():
            fill(stretch, stored[name])

    on_every_rank(read)
    if optimizer is not None:
        view.restore_optimizer(optimizer, found.marker, wanted)
    return found


def _tensors_of(found: StoredCheckpoint) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by ``model/NAME``, ``buffer/NAME``, ``optimizer/NAME/KEY``; raises ValueError."""
    read = read_old_index if found.marker["layout"] == OLD_LAYOUT else read_index
    return read(found.path, found.files)


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints of ``folder``, in the order in which they were written; CRC-32s are not checked."""
    return [stored.path for stored in checkpoint_folder.survey(Path(folder))[0]]


def find_checkpoint(path: Path) -> tuple[StoredCheckpoint, dict[Path, str]]:
    """The checkpoint ``path``, or the newest undamaged one in that folder, and why each of the others was skipped.

    One process reads all files to check their CRC-32s. Raises ValueError if there is no complete checkpoint.
    """
    unreadable: dict[Path, str] = {}
    if checkpoint_folder.is_checkpoint(path):
        try:
            complete = [checkpoint_folder.read(path)]
        except ValueError as error:
            raise ValueError(f"{path} is no complete checkpoint: {error}") from None
    else:
        complete, unreadable = checkpoint_folder.survey(path)
    newest = checkpoint_folder.newest_sound(
        path, complete, unreadable, lambda stored: checkpoint_folder.find_damage(stored, stored.files)
    )
    if newest is None:
        raise ValueError(f"{path} holds no checkpoint")
    return newest, unreadable


def load_whole_model(stored: StoredCheckpoint, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load a checkpoint's whole parameters in one process, on the CPU, in the dtypes in which they were saved.

    Only the names and shapes of the model's ``parameters`` are used. Raises ValueError if they differ from the
    checkpoint's.
    """
    there = {name: tensor for name, tensor in _tensors_of(stored).items() if name.startswith(MODEL)}
    expected = {
        MODEL + name: Stretch.whole(parameter.to("meta", there[MODEL + name].dtype if MODEL + name in there else None))
        for name, parameter in parameters.items()
    }
    _check_tensors(stored.path, [_described(expected)], there)
    return {name.removeprefix(MODEL): read_whole(there[name]) for name in expected}


def check_kept(step: int, keep_last: int, keep_every: int | None) -> None:
    """Raise ValueError unless ``save_checkpoint`` accepts these numbers."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if keep_last < 1:
        raise ValueError(f"keep_last must be positive, got {keep_last}")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every must be positive, got {keep_every}")


def _described(tensors: Mapping[str, Stretch]) -> dict[str, str]:
    """Shape and dtype of whole tensors, by name, as error messages print them."""
    return {name: f"{stretch.shape} {stretch.values.dtype}" for name, stretch in tensors.items()}


def _check_tensors(path: Path, expected: Sequence[Mapping[str, str]], stored: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError unless the checkpoint holds exactly the tensors that the ranks together expect."""
    theirs = {name: f"{tensor.shape} {tensor.dtype}" for name, tensor in stored.items()}
    ours = {item for of_rank in expected for item in of_rank.items()}
    ours |= {(name, "absent") for name in theirs.keys() - {name for name, _ in ours}}
    differing = sorted((name, here) for name, here in ours if theirs.get(name) != here)
    if differing:
        told = [f"{name} is {theirs.get(name, 'absent')} there, {here} here" for name, here in differing]
        more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(f"{path} is a checkpoint of another model: {'; '.join(told[:3])}{more}")
