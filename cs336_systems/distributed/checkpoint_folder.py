"""Checkpoints in a folder: a save that is killed at any moment loses none, and damage is noticed instead of loaded.

    temporary, saved_at = begin(folder, step)            # then write files into it, each flushed to the disk
    path = publish(temporary, {"step": step, "saved_at": saved_at, "files": ...})
    retire(folder, path, keep_last=2)
    complete, unreadable = survey(folder)

On the disk:

    step-00000200/       a checkpoint; its complete.json lists the sizes and CRC-32s of the other files, and its own
    .step-00000200.tmp/  none: not yet, or no more
    .step-00000200.old/  what a later save of the same step has found under its name

A checkpoint is written under its temporary name, ``complete.json`` last, and renamed: under its own name it is whole
from the first moment. What is not whole there is damaged, or somebody else's; it is left alone, as is any other name:
rename a checkpoint to have it kept. A ``damaged.txt`` in one says that its digests were found wrong. The newest
checkpoint is the one written last, whatever its step: a run may have been taken up again from an early one.

Limits: one run at a time saves into a folder; all ranks must see the same one.
"""

import json
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "complete.json"
DAMAGED = "damaged.txt"
"""Says what digests have shown, so that a damaged checkpoint is not counted among those to keep, nor removed."""
LAYOUT = 2
"""Of the marker and the files beside it; layout 1 had no digests and no ``saved_at``."""

_CHECKPOINT = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old(-\d+)?")
_TEMPORARY = re.compile(r"\.step-\d{8,}(\.old(-\d+)?)?\.tmp")
_CHUNK_BYTES = 1 << 20


class NoneWhole(RuntimeError):
    """A folder has checkpoints, all of them damaged."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose marker is sound and whose files have the sizes that it lists."""

    path: Path
    marker: dict[str, Any]

    @property
    def step(self) -> int:
        return self.marker["step"]

    @property
    def extra(self) -> dict[str, Any]:
        """What whoever saved it has added."""
        return self.marker.get("extra", {})

    @property
    def saved_at(self) -> int:
        """When it was saved, in ns since 1970; a later save into the same folder has a greater one in any case."""
        return self.marker["saved_at"]

    @property
    def files(self) -> dict[str, dict[str, int]]:
        """By name, the ``bytes`` and ``crc32`` of each file but the marker."""
        return self.marker["files"]


def survey(folder: Path) -> tuple[list[StoredCheckpoint], dict[Path, str]]:
    """The complete checkpoints of a folder, oldest first, and why each of the others is not to be read.

    Sizes are compared, digests are not: that would read everything.
    """
    complete, unreadable = [], {}
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if (found := _CHECKPOINT.fullmatch(path.name)) is None or path.is_file():
            continue
        try:
            complete.append(StoredCheckpoint(path, _read_marker(path, int(found[1] or found[2]))))
        except (OSError, ValueError) as error:
            unreadable[path] = str(error)
    return sorted(complete, key=lambda stored: stored.saved_at), unreadable


def read(path: Path) -> StoredCheckpoint:
    """One checkpoint, whatever its name is now; digests unchecked.

    Raises:
        ValueError: it is not complete.
        OSError: it cannot be read.
    """
    return StoredCheckpoint(path, _read_marker(path, None))


def is_checkpoint(path: Path) -> bool:
    """Whether this is one checkpoint, complete or not, rather than a folder of them."""
    return _CHECKPOINT.fullmatch(path.resolve().name) is not None or (path / MARKER).exists()


def newest_sound(
    folder: Path,
    complete: list[StoredCheckpoint],
    unreadable: dict[Path, str],
    damage_of: Callable[[StoredCheckpoint], str | None],
) -> StoredCheckpoint | None:
    """Of what ``survey`` has found, the checkpoint to load, or None if there is none at all; may change its arguments.

    Args:
        damage_of: what is wrong with the contents of a checkpoint's files.

    Raises:
        NoneWhole: there are checkpoints, and none is whole.
    """
    while complete:
        newest = complete.pop()
        damage = damage_of(newest)
        if damage is None:
            return newest
        unreadable[newest.path] = damage
    if unreadable:
        raise NoneWhole(
            f"{folder} holds no checkpoint that is whole; move these away to begin anew: {describe(unreadable)}"
        )
    return None


def find_damage(stored: StoredCheckpoint, names: Iterable[str]) -> str | None:
    """What is wrong with the contents of these of a checkpoint's files, by their digests."""
    for name in names:
        try:
            if crc32(stored.path / name) != stored.files[name]["crc32"]:
                return f"the contents of {name} have changed since they were written"
        except OSError as error:
            return str(error)
    return None


def describe(unreadable: dict[Path, str]) -> str:
    """Paths and reasons in one sentence."""
    return "; ".join(f"{path}: {reason}" for path, reason in unreadable.items())


def warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)


def tell_of(unreadable: dict[Path, str], tell: Callable[[str], None] = warn) -> None:
    if unreadable:
        tell(f"checkpoints that are neither loaded nor removed: {describe(unreadable)}")


def begin(folder: Path, step: int) -> tuple[Path, int]:
    """A new directory to be filled with a checkpoint, and when that is; what earlier saves left unfinished is removed.

    Raises:
        OSError: the directory cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            _discard(path)
    complete, unreadable = survey(folder)
    tell_of(unreadable)
    temporary = folder / f".step-{step:08d}.tmp"
    temporary.mkdir()
    now = time.time_ns()
    return temporary, max(now, complete[-1].saved_at + 1) if complete else now  # clocks may be set back


def publish(temporary: Path, marker: dict[str, Any]) -> Path:
    """Write the marker of a directory that is filled and give it its name; each is on the disk before the next.

    Args:
        marker: as JSON can hold it, with what ``StoredCheckpoint`` reads.

    Raises:
        OSError: a file that the marker lists cannot be seen here in its size, or something cannot be written.
    """
    try:
        check_sizes(temporary, marker["files"])
    except ValueError as error:
        raise OSError(f"{temporary} was not written as a whole into a folder that all ranks share: {error}") from error
    body = {"layout": LAYOUT} | marker
    with (temporary / MARKER).open("w") as file:
        json.dump(body | {"crc32": _digest(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush(temporary)
    final = temporary.with_name(f"step-{marker['step']:08d}")
    if os.path.lexists(final):
        _set_aside(final, marker["step"])
    temporary.replace(final)
    _flush(final.parent)
    return final


def retire(folder: Path, newest: Path, keep_last: int, keep_every: int | None = None) -> None:
    """Remove all complete checkpoints but the last ``keep_last`` steps, if ``newest`` is read back as the newest.

    Multiples of ``keep_every`` stay, and do not count.
    """
    complete, unreadable = survey(folder)
    if not complete or complete[-1].path != newest:
        tell_of(unreadable)
        return
    kept: set[int] = set()
    n_last = 0
    for stored in reversed(complete):
        stays = keep_every is not None and stored.step % keep_every == 0
        if stored.step in kept or (n_last == keep_last and not stays):
            _discard(stored.path)
        else:
            kept.add(stored.step)
            n_last += not stays


def abandon(temporary: Path) -> None:
    """Remove a directory that could not be filled; one that has its name by now stays."""
    if temporary.exists():
        _discard(temporary)


def note_damage(path: Path, reason: str) -> None:
    """Have a checkpoint neither loaded nor removed from now on, if this folder can be written."""
    with suppress(OSError):
        (path / DAMAGED).write_text(f"{reason} (remove {DAMAGED} to have it tried again)")


def check_sizes(path: Path, files: dict[str, dict[str, int]]) -> None:
    """Raise ValueError, or OSError, unless these files are there in these sizes."""
    for name, listed in files.items():
        try:
            n_bytes = (path / name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if n_bytes != listed["bytes"]:
            raise ValueError(f"{name} has {n_bytes} bytes instead of {listed['bytes']}")


def crc32(path: Path) -> int:
    """Of a file's contents; 0.2 s of a core per GiB that lies in the page cache, reading included (AMD EPYC)."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _read_marker(path: Path, step: int | None) -> dict[str, Any]:
    try:
        marker = json.loads((path / MARKER).read_text())
    except FileNotFoundError:
        raise ValueError(f"it has no {MARKER}") from None
    except ValueError:
        marker = None
    if not isinstance(marker, dict):
        raise ValueError(f"its {MARKER} is damaged")
    if (layout := marker.get("layout", 1)) != LAYOUT:
        raise ValueError(f"it is of layout {layout}, written by another version of this code, which reads {LAYOUT}")
    if marker.pop("crc32", None) != _digest(marker):
        raise ValueError(f"its {MARKER} is damaged")
    check_sizes(path, marker["files"])
    if step is not None and marker["step"] != step:
        raise ValueError(f"it has been renamed, it is of step {marker['step']}")
    if (path / DAMAGED).exists():
        raise ValueError((path / DAMAGED).read_text())
    return marker


def _digest(marker: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(marker).encode())


def _set_aside(path: Path, step: int) -> None:
    """Give what is in the place of a new checkpoint another name: an earlier one of the step, or something else."""
    n_before = 0
    while os.path.lexists(aside := path.with_name(f".{path.name}.old" + f"-{n_before}" * (n_before > 0))):
        n_before += 1
    try:
        _read_marker(path, step)
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is kept as {aside}, as it is no complete checkpoint: {error}", stacklevel=2)
    path.replace(aside)


def _discard(path: Path) -> None:
    """Remove a directory, under a temporary name: what a kill leaves of it must not look like a damaged checkpoint."""
    temporary = path if _TEMPORARY.fullmatch(path.name) else path.with_name(f".{path.name.removeprefix('.')}.tmp")
    try:
        shutil.rmtree(path.replace(temporary))
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error}", stacklevel=2)


def _flush(folder: Path) -> None:
    """Have the entries of a directory on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
