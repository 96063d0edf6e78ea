"""Folders that appear complete or not at all.

    with published(Path("data/stdlib")) as folder:
        (folder / "train.bin").write_bytes(...)

A kill leaves ``.NAME.PID.tmp``, which can be removed, and beside it ``.NAME.PID.old`` if it came between two renames:
the earlier folder, to be given its name again.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A hidden folder, which gets the name, and an earlier folder's place, if the block ends well; else it goes.

    Its files are on the disk before it has the name, and may be read as the usual umask says, whoever wrote them. Where
    the name is a link, the folder that it leads to is replaced.

    Raises:
        OSError: something cannot be written; it names the place in ``out``.
    """
    given, out = out, out.resolve()
    hidden = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    earlier = hidden.with_suffix(".old")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        for path in (*hidden.rglob("*"), hidden):
            if path.is_file():
                path.chmod(hidden.stat().st_mode & 0o666)  # the umask's; safetensors writes files with 0600
            flush(path)
        if out.exists():
            out.rename(earlier)
        hidden.rename(out)
        flush(out.parent)
    except OSError as error:
        named = str(error.filename or given).replace(str(hidden), str(given))
        raise OSError(error.errno, error.strerror or str(error), named) from error
    finally:
        if earlier.exists() and not out.exists():
            earlier.rename(out)
        for left in (hidden, earlier):
            shutil.rmtree(left, ignore_errors=True)


def flush(path: Path) -> None:
    """Have a file or a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
