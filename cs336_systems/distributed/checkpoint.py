"""Checkpoints of a model and its optimizer: every rank writes its shards, any number of ranks reads them.

    save_checkpoint(folder, model, optimizer, step, keep_last=2)
    step = load_checkpoint(folder, model, optimizer)          # None if there is none to resume from
    stored, skipped = find_checkpoint(folder)                 # in one process, without a process group
    weights = load_whole_model(stored, dict(model.named_parameters()))

Each rank writes the stretches of tensors that it holds (``stretches.py``). What is replicated, as without FSDP, is
written once, by the ranks in equal parts; of a ``ShardedOptimizer``'s state every rank writes and reads its share, and
so does a stage of a pipeline. A run may resume under another wrapper, mesh or number of ranks. On the disk:

    step-00000200/  rank-0.safetensors, rank-1.safetensors  each rank's stretches
                    tensors.json                            where each tensor's stretches are
                    complete.json                           step, optimizer settings, size and CRC-32 of every file

``checkpoint_folder.py`` keeps a folder of them safe, and ``stretches.py`` reads those of earlier versions, too. Sizes
are checked whenever a folder is looked at, and digests, of which every rank reads some, before a checkpoint is loaded.
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

    A complete checkpoint of the same step is replaced. What is damaged or of another program is neither removed nor
    counted, and warned of.

    Args:
        model: under FSDP, under this suite's DDP, or whole and equal on every rank of the default group.
        keep_every: steps that are multiples of it are neither removed nor counted.
        extra: what else is to be read back, as JSON can hold it; the first rank's counts.

    Raises:
        ValueError: a number is out of range; the optimizer holds other parameters, or a state of a sharded parameter
            that is neither shaped like its shard nor a single number; a module has extra state; JSON cannot hold a
            setting; or a tensor's dtype is none of safetensors'.
        OSError: a rank cannot write; the checkpoints that were there are untouched.
    """
    check_kept(step, keep_last, keep_every)
    return write(Path(folder), collect(model, optimizer, step, extra), None, keep_last, keep_every)


class Collected(NamedTuple):
    """A rank writes these stretches, by name; ``marker`` becomes ``complete.json``, which all ranks share."""

    stretches: dict[str, Stretch]
    marker: dict[str, Any]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Mapping[str, Any] | None,
) -> Collected:
    """Collect what this rank is to write, with its part of what all have; a collective, which raises ValueError."""
    wait_for_parameters(model)
    view, rank = NamedState(model), dist.get_rank()
    marker: dict[str, Any] = {"step": step, "saved_at": 0, "optimizer": None, "scalars": {}, "extra": dict(extra or {})}

    stretches: dict[str, Stretch] = {}

    def collect_own() -> tuple[dict[Place, int], dict[str, Any], list[list[str]]]:
        own = view.model() | ({} if optimizer is None else view.optimizer(optimizer, marker))
        for name, stretch in own.items():
            mine = rank == 0 or not name.startswith(BUFFER)  # rank 0's values of buffers count
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
"""The elements of a stretch: the tensor's name, the first element, their number."""


def _place(name: str, stretch: Stretch) -> Place:
    return name, stretch.start, stretch.values.numel()


def _writers(held_by: Sequence[Mapping[Place, int]]) -> dict[Place, int]:
    """The rank that writes each place, so that every element is written once, and all ranks about as many bytes.

    Two stages of a pipeline that hold a tensor may cut it in different places: one stage's pieces are taken.

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
    """Write files, marker and name, or remove what was written, which may be what fills the disk; a collective."""
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
        if dist.get_rank(group) == 0 and temporary.exists():  # all ranks know by now that they have failed
            checkpoint_folder.discard(temporary)
        raise
    on_rank_0(lambda: checkpoint_folder.retire(root, final, keep_last, keep_every, keep_step), group)
    return final


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> int | None:
    """As ``resume_checkpoint``, but returns the step alone, or None if there is no checkpoint."""
    found = resume_checkpoint(folder, model, optimizer)
    return found.step if found else None


def resume_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    tell: Tell = warnings.warn,
) -> StoredCheckpoint | None:
    """Read the checkpoint of ``folder`` that was written last into the model and the optimizer; a collective.

    ``folder`` may also be one checkpoint.

    One that is damaged is told of, by ``tell`` on the first rank, and the one before it read in its place. Returns the
    one that was read, or None if the folder holds no checkpoint.

    Raises:
        ValueError: it is of another model or optimizer, or its files are malformed, or the folder holds checkpoints of
            which none is whole; nothing was changed.
    """

    def damage(one: StoredCheckpoint) -> str | None:
        own = sorted(one.files)[dist.get_rank() :: dist.get_world_size()]  # every rank reads some
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
    """The checkpoints of ``folder`` that are whole, in the order in which they were written; digests unchecked."""
    return [stored.path for stored in checkpoint_folder.survey(Path(folder))[0]]


def find_checkpoint(path: Path) -> tuple[StoredCheckpoint, dict[Path, str]]:
    """The checkpoint ``path``, or the newest sound one of that folder, and why each of the others was passed over.

    One process reads all files for their digests. It is a ValueError if there is none, or none that is whole.
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
    """The whole parameters of a checkpoint, on the CPU in the dtypes in which they were saved; in one process.

    Of the model's ``parameters`` only names and shapes count. Those of another model are a ValueError.
    """
    there = {name: tensor for name, tensor in _tensors_of(stored).items() if name.startswith(MODEL)}
    expected = {
        MODEL + name: Stretch.whole(parameter.to("meta", there[MODEL + name].dtype if MODEL + name in there else None))
        for name, parameter in parameters.items()
    }
    _check_tensors(stored.path, [_described(expected)], there)
    return {name.removeprefix(MODEL): read_whole(there[name]) for name in expected}


def check_kept(step: int, keep_last: int, keep_every: int | None) -> None:
    """Raise ValueError for what no checkpoint can be saved with."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if keep_last < 1:
        raise ValueError(f"keep_last must be positive, got {keep_last}")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every must be positive, got {keep_every}")


def _described(tensors: Mapping[str, Stretch]) -> dict[str, str]:
    """Shape and dtype of whole tensors, by name, as errors say them."""
    return {name: f"{stretch.shape} {stretch.values.dtype}" for name, stretch in tensors.items()}


def _check_tensors(path: Path, expected: Sequence[Mapping[str, str]], stored: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError unless the checkpoint holds exactly the tensors that ranks expect, each some, as described."""
    theirs = {name: f"{tensor.shape} {tensor.dtype}" for name, tensor in stored.items()}
    ours = {item for of_rank in expected for item in of_rank.items()}
    ours |= {(name, "absent") for name in theirs.keys() - {name for name, _ in ours}}
    differing = sorted((name, here) for name, here in ours if theirs.get(name) != here)
    if differing:
        told = [f"{name} is {theirs.get(name, 'absent')} there, {here} here" for name, here in differing]
        more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
        raise ValueError(f"{path} is a checkpoint of another model: {'; '.join(told[:3])}{more}")
