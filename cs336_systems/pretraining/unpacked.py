"""The bytes of a text file as UTF-8, whatever its compression and encoding.

    with unpacked(Path("web.jsonl.gz")) as file:
        for line in file: ...                       # or file.read(n_bytes)

A suffix says how a file is packed, and a byte-order mark that it is UTF-8, UTF-16 or UTF-32. Other encodings are not
guessed: they are read if the caller names one, for files without a mark. Zstandard needs pyarrow.
"""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before that of UTF-16, with which it begins
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def _zstandard(file: BinaryIO) -> Any:
    try:
        from pyarrow import CompressedInputStream
    except ImportError:
        raise ValueError(f"reading {file.name} needs pyarrow: uv sync --extra parquet") from None
    return CompressedInputStream(file, "zstd")


_UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}
PACKED = (*_UNPACK, ".zip")
"""Suffixes of compressed files, in lower case; an archive is recognised to be refused (``corpus.py``)."""


def plain_name(path: Path) -> Path:
    """The path without the suffix that says how the file is compressed."""
    return path.with_suffix("") if path.suffix.lower() in PACKED else path


class Utf8File:
    """A file without its byte-order mark, as UTF-8 whatever its encoding.

    Attributes:
        encoding: the file's own.
        start: the number of bytes of its mark.
        direct: whether what is read are the file's bytes, neither unpacked nor encoded anew.
    """

    def __init__(self, raw: BinaryIO, file: io.BufferedReader, encoding: str | None, *, packed: bool) -> None:
        begin = file.peek(4)
        mark = next((mark for mark in _MARKS if begin.startswith(mark)), b"")
        file.read(len(mark))
        self._raw, self._file, self._text, self.start = raw, file, None, len(mark)
        self.encoding = codecs.lookup(_MARKS[mark] if mark else encoding or "utf-8").name
        if self.encoding != "utf-8":
            self._text = io.TextIOWrapper(file, encoding=self.encoding, newline="\n")  # which ends lines there alone
        self.direct = self._text is None and not packed

    def read(self, size: int) -> bytes:
        """Some bytes, about ``size``; none at the end."""
        return self._file.read(size) if self._text is None else self._text.read(size).encode()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file) if self._text is None else (line.encode() for line in self._text)

    @property
    def n_read(self) -> int:
        """Bytes of the file that have been read, compressed as they are."""
        return self._raw.tell()


@contextmanager
def unpacked(path: Path, encoding: str | None = None) -> Iterator[Utf8File]:
    """Open a text file.

    Args:
        encoding: that of files without a byte-order mark; UTF-8, which is not checked here, by default.

    Raises:
        ValueError: it is not packed as its suffix says, is no text of the encoding, or needs a library.
        OSError: it cannot be read.
    """
    suffix = path.suffix.lower()
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            file = stack.enter_context(_UNPACK[suffix](raw)) if suffix in _UNPACK else raw
            yield Utf8File(raw, io.BufferedReader(file), encoding, packed=suffix in _UNPACK)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no {error.encoding} text: {error.reason}") from None
    except UnicodeError as error:  # of UTF-16 and UTF-32 without a mark
        raise ValueError(f"{path} is no {encoding} text: {error}") from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be unpacked: {error}") from None
