"""Documents from files: text, source files in folders, JSON lines, Parquet; by default Python's own standard library.

    corpus = Corpus.find([Path("books")], suffixes=(".txt", ".md"))  # a folder, each file a document
    for document in corpus.documents(): ...

The order is that of the paths given, and of names within a folder. What is not UTF-8 text is refused, so that no text
is changed silently; only in the standard library, whose tests hold such files, such bytes become U+FFFD. Documents
without text are left out. Only the present document, or the present rows of Parquet, are in memory.
"""

import codecs
import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from cs336_systems.pretraining.chat import Answers, ChatReader

SUFFIXES = (".py", ".txt", ".md", ".jsonl", ".parquet")
"""Suffixes of the files that are taken from folders, unless others are asked for."""
MOST_BYTES = 64 * 2**20
"""The most bytes of a document in a text file: one without separators is rarely meant to be one document."""

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_CHUNK_BYTES = 2**20


class Document(NamedTuple):
    """A text, how many bytes of its file it accounts for, and where in a conversation the answers are."""

    text: str
    file_bytes: int
    answers: Answers = ()


@dataclass(frozen=True)
class Corpus:
    """Files whose documents are read one after the other.

    Attributes:
        name: a short one, for folders.
        field: the field of a JSON line, or the column of Parquet, that holds the text.
        separator: the text between the documents of a text file; without one each file is a document.
        strict: refuse text that is not UTF-8.
        skipped: how many files of each other suffix the folders have, the most frequent first.
        chat: reads each JSON line as a conversation instead.
    """

    name: str
    description: str
    files: tuple[Path, ...]
    field: str = "text"
    separator: str | None = None
    strict: bool = True
    skipped: tuple[tuple[str, int], ...] = ()
    chat: ChatReader | None = None

    @classmethod
    def find(
        cls,
        paths: Sequence[Path],
        *,
        suffixes: Sequence[str] = SUFFIXES,
        field: str = "text",
        separator: str | None = None,
    ) -> Self:
        """The files that paths name; without a path, the standard library of the running Python.

        Args:
            suffixes: those of the files that are taken from folders, in upper or lower case; hidden files are not.

        Raises:
            ValueError: a path is not there, a folder has no such files, one is compressed, or the separator is empty.
        """
        if separator == "":
            raise ValueError("a separator of documents has at least one character")
        if not paths:
            files, _ = _files(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_STANDARD)
            return cls("stdlib", f"the standard library of Python {platform.python_version()}", files, strict=False)
        found: dict[Path, None] = {}
        skipped: Counter[str] = Counter()
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path} does not exist")
            files, others = _files(path, suffixes) if path.is_dir() else ((path,), Counter())
            if not files:
                raise ValueError(f"folder {path} has no files that end in {', '.join(suffixes)}")
            found |= dict.fromkeys(files)
            skipped += others
        if packed := [path for path in found if path.suffix.lower() in _COMPRESSED]:
            raise ValueError(f"{packed[0]} is compressed: unpack it first")
        name, description = paths[0].resolve().stem, ", ".join(map(str, paths))
        return cls(name, description, tuple(found), field, separator, skipped=tuple(skipped.most_common()))

    @property
    def n_bytes(self) -> int:
        """The size of all files together."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[Document]:
        """All documents, in order.

        Raises:
            ValueError: a file is not what its name says, no UTF-8 text, lacks the field, is too large to be one
                document, or needs a library that is not installed.
            OSError: a file cannot be read.
        """
        if self.chat is not None:
            self.chat.counted.clear()
        for path in self.files:
            suffix = path.suffix.lower()
            if self.chat is not None and suffix not in _JSON_LINES:
                raise ValueError(f"{path} has no conversations: --chat reads {', '.join(_JSON_LINES)}")
            if self.chat is not None:
                found = _conversations(path, self.chat)
            elif suffix in _JSON_LINES:
                found = _json_lines(path, self.field)
            elif suffix == ".parquet":
                found = _parquet(path, self.field)
            else:
                found = _text(path, self.separator, self.strict)
            yield from (document for document in found if document.text)


def _files(
    folder: Path, suffixes: Sequence[str], excluded: Collection[str] = ()
) -> tuple[tuple[Path, ...], Counter[str]]:
    """The files below a folder that have one of the suffixes, compressed or not, sorted; the suffixes of the others.

    None is hidden or in an excluded folder. Links to folders are followed, each folder once.
    """
    found: list[Path] = []
    others: Counter[str] = Counter()
    seen: set[Path] = set()
    wanted = tuple(suffix.lower() for suffix in suffixes)
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := Path(parent).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            suffix = path.suffix.lower()
            plain = path.stem if suffix in _COMPRESSED else path.name
            if plain.lower().endswith(wanted):
                found.append(path)
            else:
                others[suffix or "without suffix"] += 1
    return tuple(sorted(found)), others


def _text(path: Path, separator: str | None, strict: bool) -> Iterator[Document]:
    rest, end, start = b"", (separator or "").encode(), 0
    with path.open("rb") as file:
        if strict:
            start = _after_byte_order_mark(file)
        while chunk := file.read(_CHUNK_BYTES):
            *pieces, rest = (rest + chunk).split(end) if end else [rest + chunk]
            if len(rest) > MOST_BYTES:
                size = f"{len(rest) / 2**20:.0f} MiB or more"
                raise ValueError(f"{path} has a document of {size}: --separator says where its documents end")
            for piece in pieces:
                text = _decoded(piece, str(path), start) if strict else piece.decode(errors="replace")
                start += len(piece) + len(end)
                yield Document(text, len(piece) + len(end))
    yield Document(_decoded(rest, str(path), start) if strict else rest.decode(errors="replace"), len(rest))


def _after_byte_order_mark(file: BinaryIO) -> int:
    """Go to where the text of a new file begins, and return that position: behind the mark that some editors write."""
    return file.seek(len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0)


def _decoded(data: bytes, place: str, start: int) -> str:
    """The text of bytes that begin ``start`` bytes into the place; ValueError if they are no UTF-8 or hold a zero."""
    try:
        text = data.decode()
        if "\0" not in text:
            return text
        first = data.index(0)
    except UnicodeDecodeError as error:
        first = error.start
    fault = f"{place} is no UTF-8 text from byte {start + first:,} on"
    raise ValueError(f"{fault}: convert it first, as with iconv -f ENCODING -t UTF-8, or leave it out")


def _conversations(path: Path, chat: ChatReader) -> Iterator[Document]:
    for row, place, n_bytes in _rows(path):
        text, answers = chat.read(row, place)
        yield Document(text, n_bytes, answers)


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    for row, place, n_bytes in _rows(path):
        if not isinstance(row, dict) or field not in row:
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{place}: no text under {field!r}, it has {has}")
        text = row[field] or ""  # null is left out, as that of Parquet
        if not isinstance(text, str):
            raise ValueError(f"{place}: no text under {field!r}, it has {type(text).__name__} there")
        yield Document(text.encode(errors="replace").decode(), n_bytes)  # JSON can spell half a surrogate pair


def _rows(path: Path) -> Iterator[tuple[Any, str, int]]:
    """The value of each line, its place in words, and its bytes."""
    with path.open("rb") as file:
        _after_byte_order_mark(file)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            content = _decoded(line, place, 0)
            try:
                row = json.loads(content)
            except ValueError as error:
                raise ValueError(f"{place}: not JSON, of which each line has to be one object: {error}") from None
            yield row, place, len(line)


def _parquet(path: Path, field: str) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(f"reading {path} needs pyarrow: uv sync --extra parquet") from None
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(f"{path} has no column {field!r}, it has {', '.join(file.schema_arrow.names)}")
            share = path.stat().st_size // max(1, file.metadata.num_rows)
            for rows in file.iter_batches(batch_size=1024, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise ValueError(f"{path}: column {field!r} holds {type(text).__name__}, not text")
                    yield Document(text or "", share)
    except ArrowException as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
