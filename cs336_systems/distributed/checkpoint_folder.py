"""Checkpoints in a folder: a save that is killed at any moment loses none, and damage is noticed instead of loaded.

    temporary, saved_at = begin(folder, step)            # then write files into it, each flushed to the disk
    path = publish(temporary, {"step": step, "saved_at": saved_at, "files": ...})
    retire(folder, path, keep_last=2)
    complete, unreadable = survey(folder)

On the disk:

    step-00000200/         a checkpoint; its complete.json lists the sizes and CRC-32s of the other files, and its own
    .step-00000200.tmp/    a checkpoint that is being written or removed, or was when its process was killed
    .step-00000200.old-N/  what a later save of the same step has found under its name, N ns after 1970 began

A checkpoint is written under its temporary name, ``complete.json`` last, and renamed: under its own name it is whole
from the first moment. A folder with such a name that is not whole is damaged or somebody else's, and is left alone, as
is any other name: rename a checkpoint to have it kept. The newest is the one written last, whatever its step. One run
at a time saves into a folder, and all ranks must see the same one.
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
LAYOUT = 3  # the version of the marker and of the files beside it
_READ = (2, LAYOUT)
"""Layout 2 has files of ``torch.distributed.checkpoint``; layout 1 had no digests and no ``saved_at``."""

_CHECKPOINT = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old(-\d+)?")
_TEMPORARY = re.compile(r"\.step-\d{8,}(\.old(-\d+)?)?\.tmp")
_CHUNK_BYTES = 1 << 20  # bytes that are read at a time for a digest: few calls, and little memory

Tell = Callable[[str], object]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose marker is sound and whose files have the sizes that it lists.

    Attributes:
        saved_at: in ns since 1970; a later save into the same folder has a greater one in any case.
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
    """One checkpoint, or of this step alone, digests unchecked; ValueError if it is not complete, or OSError."""
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
    """The complete checkpoints of a folder, oldest first, digests unchecked, and why each of the others is not.

    ``folder`` may also be one checkpoint, which is then the only one.
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
    """Whether this is one checkpoint, complete or not, rather than a folder of them."""
    return _CHECKPOINT.fullmatch(path.resolve().name) is not None or (path / MARKER).exists()


def newest_sound(
    folder: Path,
    complete: list[StoredCheckpoint],
    unreadable: dict[Path, str],
    damage_of: Callable[[StoredCheckpoint], str | None],
) -> StoredCheckpoint | None:
    """The checkpoint to load of those that ``survey`` has found, or None if there is none; may change its arguments.

    ``damage_of`` says what is wrong with the contents of a checkpoint's files. If none is whole, it is a ValueError.
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
    """Say what the digests of these of a checkpoint's files show to be wrong, in 0.2 s of a core per GiB, or None."""
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
    """Name the checkpoints that cannot be read, and why, in one sentence."""
    if unreadable:
        tell(f"checkpoints that are neither loaded nor removed: {_describe(unreadable)}")


def _describe(unreadable: dict[Path, str]) -> str:
    return "; ".join(f"{path}: {reason}" for path, reason in unreadable.items())


def begin(folder: Path, step: int) -> tuple[Path, int]:
    """Remove what earlier saves left unfinished, and make a directory to fill; returns it and the ``saved_at``."""
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
    """Keep other processes that lock it out of a folder, where its file system has locks; yields the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def publish(temporary: Path, marker: dict[str, Any]) -> Path:
    """Write the marker of a directory that is filled and give it its name; each is on the disk before the next.

    Raises:
        OSError: a file that the marker lists cannot be seen here in its size, or something cannot be written.
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
    """Remove all complete checkpoints but the last ``keep_last`` steps, if ``newest`` is read back as the newest.

    Multiples of ``keep_every`` and ``keep_step`` stay, and do not count.
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
    """Remove a directory, under a temporary name: what a kill leaves of it must not look like a damaged checkpoint."""
    if path.is_symlink():  # what it points to stays
        return path.unlink()
    temporary = path if _TEMPORARY.fullmatch(path.name) else path.with_name(f".{path.name.removeprefix('.')}.tmp")
    try:
        shutil.rmtree(path.replace(temporary))
    except OSError as error:
        warnings.warn(f"{path} could not be removed: {error}", stacklevel=2)


def write_through(path: Path, parts: Iterable[Any]) -> tuple[int, int]:
    """Write a file that is on the disk when this returns; its size in bytes and its CRC-32."""
    n_bytes = checksum = 0
    with path.open("wb") as file:
        for part in parts:
            n_bytes += file.write(part)
            checksum = zlib.crc32(part, checksum)
        file.flush()
        os.fsync(file.fileno())
    return n_bytes, checksum


def _flush(folder: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _check_sizes(path: Path, files: dict[str, dict[str, int]]) -> None:
    """Raise ValueError, or OSError, unless these files are there in these sizes."""
    for name, listed in files.items():
        try:
            n_bytes = (path / name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
        if n_bytes != listed["bytes"]:
            raise ValueError(f"{name} has {n_bytes} bytes instead of {listed['bytes']}")


def _digest(marker: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(marker).encode())
