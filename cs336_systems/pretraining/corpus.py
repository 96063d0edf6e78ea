"""Documents from files: text, source files in folders, JSON lines, Parquet; by default Python's own standard library.

    corpus = Corpus.find([])                                         # the standard library: there on every machine
    corpus = Corpus.find([Path("books")], suffixes=(".txt", ".md"))  # a folder, each file a document
    corpus = Corpus.find([Path("web.jsonl")], field="content")
    for document in corpus.documents():
        document.text

The order is that of the paths given, and of names within a folder. Bytes that are not UTF-8 become U+FFFD; documents
without text are left out. Only the present document, or the present rows of Parquet, are in memory.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

SUFFIXES = (".py", ".txt", ".md", ".jsonl", ".parquet")
"""Suffixes of the files that are taken from folders, unless others are asked for."""
MOST_BYTES = 64 * 2**20
"""The most bytes of a document in a text file: one without separators is rarely meant to be one document."""

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_CHUNK_BYTES = 2**20


class Document(NamedTuple):
    """A text, and how many bytes of its file it accounts for."""

    text: str
    file_bytes: int


@dataclass(frozen=True)
class Corpus:
    """Files whose documents are read one after the other.

    Attributes:
        name: a short one, for folders.
        field: the field of a JSON line, or the column of Parquet, that holds the text.
        separator: the text between the documents of a text file; without one each file is a document.
    """

    name: str
    description: str
    files: tuple[Path, ...]
    field: str = "text"
    separator: str | None = None

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
            suffixes: those of the files that are taken from folders; hidden files are not.

        Raises:
            ValueError: a path is not there, a folder has no such files, or the separator is empty.
        """
        if separator == "":
            raise ValueError("a separator of documents has at least one character")
        if not paths:
            version = ".".join(map(str, sys.version_info[:3]))
            files = _files(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_STANDARD)
            return cls("stdlib", f"the standard library of Python {version}", tuple(files))
        found: dict[Path, None] = {}
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path} does not exist")
            files = _files(path, suffixes) if path.is_dir() else [path]
            if not files:
                raise ValueError(f"folder {path} has no files that end in {', '.join(suffixes)}")
            found |= dict.fromkeys(files)
        return cls(paths[0].resolve().stem, ", ".join(map(str, paths)), tuple(found), field, separator)

    @property
    def n_bytes(self) -> int:
        """The size of all files together."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[Document]:
        """All documents, in order.

        Raises:
            ValueError: a file is not what its name says, compressed, lacks the field, is too large to be one document,
                or needs a library that is not installed.
            OSError: a file cannot be read.
        """
        for path in self.files:
            if path.suffix in _COMPRESSED:
                raise ValueError(f"{path} is compressed: unpack it first")
            if path.suffix in (".jsonl", ".ndjson"):
                found = _json_lines(path, self.field)
            elif path.suffix == ".parquet":
                found = _parquet(path, self.field)
            else:
                found = _text(path, self.separator)
            yield from (document for document in found if document.text)


def _files(folder: Path, suffixes: Sequence[str], excluded: set[str] | None = None) -> list[Path]:
    """All files below a folder that have one of the suffixes, sorted; none that is hidden, or in an excluded folder."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (excluded or ()) and not name.startswith(".")]
        found += [Path(parent, name) for name in names if name.endswith(tuple(suffixes)) and not name.startswith(".")]
    return sorted(found)


def _text(path: Path, separator: str | None) -> Iterator[Document]:
    rest, end = b"", (separator or "").encode()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            *pieces, rest = (rest + chunk).split(end) if end else [rest + chunk]
            if len(rest) > MOST_BYTES:
                size = f"{len(rest) / 2**20:.0f} MiB or more"
                advice = "--separator says where the documents of a text file end"
                raise ValueError(f"{path} has a document of {size}: {advice}")
            for piece in pieces:
                yield Document(piece.decode(errors="replace"), len(piece) + len(end))
    yield Document(rest.decode(errors="replace"), len(rest))


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode(errors="replace"))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            text = row.get(field) if isinstance(row, dict) else None
            if not isinstance(text, str):
                has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                has = f"{type(text).__name__} there" if text is not None else has
                raise ValueError(f"{path}, line {number}: no text under {field!r}, it has {has}")
            yield Document(text.encode(errors="replace").decode(), len(line))  # JSON can spell half a surrogate pair


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
