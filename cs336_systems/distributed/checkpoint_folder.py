"""Checkpoints in a folder: killing a save at any moment loses no checkpoint, and damage is detected, not loaded.

    temporary, saved_at = begin(folder, step)            # then write files into it, each flushed to disk
    path = publish(temporary, {"step": step, "saved_at": saved_at, "files": ...})
    retire(folder, path, keep_last=2)
    complete, unreadable = survey(folder)

On disk:

    step-00000200/         a checkpoint; its complete.json lists the sizes and CRC-32s of the other files, and its own
    .step-00000200.tmp/    a checkpoint that is being written or removed, or was when its process was killed
    .step-00000200.old-N/  the folder that a later save of the same step replaced, at N ns since 1970

A checkpoint is written under its temporary name, ``complete.json`` last, and then renamed, so it is complete as soon as
it has its final name. An incomplete folder with a final name is damaged or another program's, and is left alone. So is
a folder with any other name: rename a checkpoint to keep it. The newest checkpoint is the one written last, whatever
its step. Only one run at a time may save into a folder, and all ranks must see the same folder.
"""

import fcntl
import json
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "complete.json"
LAYOUT = 3  # the version of the format of the marker and the files beside it
_READ = (2, LAYOUT)
"""Layout 2 has files of ``torch.distributed.checkpoint``; layout 1 had no CRC-32s and no ``saved_at``."""

_CHECKPOINT = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old(-\d+)?")
_TEMPORARY = re.compile(r"\.step-\d{8,}(\.old(-\d+)?)?\.tmp")
_CHUNK_BYTES = 1 << 20  # bytes read at a time to compute a CRC-32: few calls, little memory

Tell = Callable[[str], object]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose marker is valid and whose files have the sizes that it lists.

    Attributes:
        saved_at: in ns since 1970; always greater for a later save into the same folder.
        files: by name, the ``bytes`` and ``crc32`` of each file but the marker.
        extra: the ``extra`` of ``save_checkpoint``.
        marker: all of ``complete.json``.
    """

    path: Path
    step: int
    saved_at: int
    files: dict[str, dict[str, int]]
    extra: dict[str, Any]
    marker: dict[str, Any]


def name_of(step: int) -> str:
    """The name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def read(path: Path, step: int | None = None) -> StoredCheckpoint:
    """Read a marker and check file sizes, not CRC-32s; ValueError if incomplete or not of ``step``, or OSError."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"it has no {MARKER}") from None
    except ValueError:
        marker = None
    if not isinstance(marker, dict):
        raise ValueError(f"its {MARKER} is damaged")
    if (layout := marker.get("layout", 1)) not in _READ:
        raise ValueError(f"it is of layout {layout}, written by another version of this code, which reads {_READ}")
    if marker.pop("crc32", None) != _digest(marker):
        raise ValueError(f"its {MARKER} is damaged")
    _check_sizes(path, marker["files"])
    if step not in (None, marker["step"]):
        raise ValueError(f"it has been renamed, it is of step {marker['step']}")
    return StoredCheckpoint(path, marker["step"], marker["saved_at"], marker["files"], marker.get("extra", {}), marker)


def survey(folder: Path) -> tuple[list[StoredCheckpoint], dict[Path, str]]:
    """The complete checkpoints of a folder, oldest first, and why each of the others is not; CRC-32s are not checked.

    ``folder`` may also be a single checkpoint.
    """
    complete, unreadable = [], {}
    steps: dict[Path, int | None] = {}
    if folder.exists() and is_checkpoint(folder):
        steps[folder] = None
    else:
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            if (found := _CHECKPOINT.fullmatch(path.name)) is not None and not path.is_file():
                steps[path] = int(found[1] or found[2])
    for path, step in steps.items():
        try:
            complete.append(read(path, step))
        except (OSError, ValueError) as error:
            unreadable[path] = str(error)
    return sorted(complete, key=lambda stored: stored.saved_at), unreadable


def is_checkpoint(path: Path) -> bool:
    """Whether the path is one checkpoint, complete or not, rather than a folder of checkpoints."""
    return _CHECKPOINT.fullmatch(path.resolve().name) is not None or (path / MARKER).exists()


def newest_sound(
    folder: Path,
    complete: list[StoredCheckpoint],
    unreadable: dict[Path, str],
    damage_of: Callable[[StoredCheckpoint], str | None],
) -> StoredCheckpoint | None:
    """Choose the checkpoint to load from the results of ``survey``, which it may change; None if there are none.

    ``damage_of`` says what is wrong with the contents of a checkpoint's files. Raises ValueError if none is complete.
    """
    while complete:
        newest = complete.pop()
        if (damage := damage_of(newest)) is None:
            return newest
        unreadable[newest.path] = damage
    if unreadable:
        found = _describe(unreadable)
        raise ValueError(f"{folder} holds no checkpoint that is whole; move these away to begin anew: {found}")
    return None


def find_damage(stored: StoredCheckpoint, names: Iterable[str]) -> str | None:
    """Check the CRC-32s of these files of a checkpoint, in 0.2 s of a core per GiB; say what is wrong, or None."""
    for name in names:
        checksum = 0
        try:
            with (stored.path / name).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    checksum = zlib.crc32(chunk, checksum)
        except OSError as error:
            return str(error)
        if checksum != stored.files[name]["crc32"]:
            return f"the contents of {name} have changed since they were written"
    return None


def tell_of(unreadable: dict[Path, str], tell: Tell = warnings.warn) -> None:
    """Name the unreadable checkpoints and the reasons in one sentence."""
    if unreadable:
        tell(f"checkpoints that are neither loaded nor removed: {_describe(unreadable)}")


def _describe(unreadable: dict[Path, str]) -> str:
    return "; ".join(f"{path}: {reason}" for path, reason in unreadable.items())


def begin(folder: Path, step: int) -> tuple[Path, int]:
    """Remove what earlier saves left unfinished and make a directory to fill; returns it and its ``saved_at``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            discard(path)
    complete, unreadable = survey(folder)
    tell_of(unreadable)
    temporary = folder / f".{name_of(step)}.tmp"
    temporary.mkdir()
    now = time.time_ns()
    return temporary, max(now, complete[-1].saved_at + 1) if complete else now  # clocks may be set back


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold an exclusive lock on a folder, if its file system supports locks; yields the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def publish(temporary: Path, marker: dict[str, Any]) -> Path:
    """Write the marker of a filled directory, then rename it; each step is on disk before the next begins.

    Raises:
        OSError: a file that the marker lists is missing here or has another size, or a write fails.
    """
    try:
        _check_sizes(temporary, marker["files"])
    except ValueError as error:
        raise OSError(f"{temporary} was not written as a whole into a folder that all ranks share: {error}") from error
    body = {"layout": LAYOUT} | marker
    write_through(temporary / MARKER, [json.dumps(body | {"crc32": _digest(body)}, indent=1).encode()])
    _flush(temporary)
    final = temporary.with_name(name_of(marker["step"]))
    if os.path.lexists(final):
        aside = final.with_name(f".{final.name}.old-{time.time_ns()}")
        try:
            read(final, marker["step"])
        except (OSError, ValueError) as error:
            warnings.warn(f"{final} is kept as {aside}, as it is no complete checkpoint: {error}", stacklevel=2)
        final.replace(aside)
    temporary.replace(final)
    _flush(final.parent)
    return final


def retire(
    folder: Path, newest: Path, keep_last: int, keep_every: int | None = None, keep_step: int | None = None
) -> None:
    """Remove complete checkpoints except of the last ``keep_last`` steps, if ``newest`` reads back as the newest.

    Multiples of ``keep_every`` and ``keep_step`` are neither removed nor counted.
    """
    complete, unreadable = survey(folder)
    if not complete or complete[-1].path != newest:
        return tell_of(unreadable)
    kept: set[int] = set()
    n_last = 0
    for stored in reversed(complete):
        stays = stored.step == keep_step or (keep_every is not None and stored.step % keep_every == 0)
        if stored.step in kept or (n_last == keep_last and not stays):
            discard(stored.path)
        else:
            kept.add(stored.step)
            n_last += not stays


def discard(path: Path) -> None:
    """Rename a directory to a temporary name and remove it, so a kill leaves nothing like a damaged checkpoint."""
    if path.is_symlink():  # what it points to stays
        return path.unlink()
    temporary = path if _TEMPORARY.fullmatch(path.name) else path.with_name(f".{path.name.removeprefix('.')}.tmp")
    try:
        shutil.rmtree(path.replace(temporary))
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error}", stacklevel=2)


def write_through(path: Path, parts: Iterable[Any]) -> tuple[int, int]:
    """Write a file and flush it to disk; returns its size in bytes and its CRC-32."""
    n_bytes = checksum = 0
    with path.open("wb") as file:
        for part in parts:
            n_bytes += file.write(part)
            checksum = zlib.crc32(part, checksum)
        file.flush()
        os.fsync(file.fileno())
    return n_bytes, checksum


def _flush(folder: Path) -> None:
    """Flush the entries of a directory to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _check_sizes(path: Path, files: dict[str, dict[str, int]]) -> None:
    """Raise ValueError or OSError unless these files exist with these sizes."""
    for name, listed in files.items():
        try:
            n_bytes = (path / name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if n_bytes != listed["bytes"]:
            raise ValueError(f"{name} has {n_bytes} bytes instead of {listed['bytes']}")


def _digest(marker: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(marker).encode())
