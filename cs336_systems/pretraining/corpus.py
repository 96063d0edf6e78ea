"""Documents from files: text, source files in folders, JSON lines, Parquet; by default Python's own standard library.

    corpus = Corpus.find([Path("books")], suffixes=(".txt", ".md"))  # a folder, each file a document
    for document in corpus.documents(): ...

The order is that of the paths given, and of names within a folder. Files may be compressed (``unpacked.py``). Text is
UTF-8, or in the encoding of a byte-order mark or of the caller; other bytes raise ValueError, so that no text changes
silently. Only in the standard library, whose tests contain such files, do invalid bytes become U+FFFD. Documents
without text are left out. Only the current document, or the current batch of Parquet rows, is in memory.
"""

import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as declared
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from cs336_systems.config import how_to_download
from cs336_systems.pretraining.chat import HALF_PAIRS, Answers, ChatReader
from cs336_systems.pretraining.unpacked import PACKED, Utf8File, plain_name, unpacked

SUFFIXES = (".py", ".txt", ".md", ".jsonl", ".parquet")
"""Default suffixes of the files that are read from folders."""
MOST_BYTES = 64 * 2**20
"""The most bytes of a document in a text file: a larger file without separators is rarely meant as one document."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_CHUNK_BYTES = 2**20

WITHOUT_TEXT = "rows without text left out"
REPLACED, RECODED = "files not UTF-8 in places, where bytes became U+FFFD", "files read as "


class Document(NamedTuple):
    """A text, how many bytes of its file it accounts for, and the spans of answers if it is a conversation."""

    text: str
    file_bytes: int
    answers: Answers = ()


@dataclass(frozen=True)
class Corpus:
    """Files whose documents are read one after the other.

    Attributes:
        name: a short name, for folders.
        field: the field of a JSON line, or the column of Parquet, that holds the text.
        separator: the text between the documents of a text file; without one each file is a document.
        strict: reject text that is in another encoding.
        encoding: the encoding of files without a byte-order mark; UTF-8 if None.
        skipped: how many files with each other suffix the folders have, the most frequent first.
        chat: if given, reads each JSON line as a conversation.
        counted: counts of what the last pass over all files left out, replaced or recoded.
    """

    name: str
    description: str
    files: tuple[Path, ...]
    field: str = "text"
    separator: str | None = None
    strict: bool = True
    encoding: str | None = None
    skipped: tuple[tuple[str, int], ...] = ()
    chat: ChatReader | None = None
    counted: Counter[str] = declared(default_factory=Counter)

    @classmethod
    def find(
        cls,
        paths: Sequence[Path],
        *,
        suffixes: Sequence[str] = SUFFIXES,
        field: str = "text",
        separator: str | None = None,
        encoding: str | None = None,
    ) -> Self:
        """Find the files that paths name; without a path, the standard library of the running Python.

        Args:
            suffixes: read files with these suffixes from folders, ignoring case; hidden files are skipped.

        Raises:
            ValueError: a path does not exist, a folder has no such files, a file's compression is not supported, the
                encoding is unknown, or the separator is empty.
            OSError: a folder cannot be read.
        """
        try:
            "".encode(encoding or "utf-8")
        except LookupError:
            raise ValueError(f"--encoding {encoding} is unknown; known are latin-1, cp1252, utf-16, ...") from None
        if separator == "":
            raise ValueError("a separator of documents has at least one character")
        if not paths:
            files, _ = _files(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_STANDARD)
            return cls("stdlib", f"the standard library of Python {platform.python_version()}", files, strict=False)
        found: dict[Path, None] = {}
        skipped: Counter[str] = Counter()
        for path in paths:
            if not path.exists():
                is_file = plain_name(path).suffix.lower() in (*suffixes, *JSON_LINES)
                fetch = "" if is_file else how_to_download(path, "--repo-type dataset ")
                raise ValueError(f"{path} does not exist{fetch}")
            files, others = _files(path, suffixes) if path.is_dir() else ((path,), Counter())
            if not files:
                raise ValueError(f"folder {path} has no files that end in {', '.join(suffixes)}")
            found |= dict.fromkeys(files)
            skipped += others
        if packed := [path for path in found if path.suffix.lower() == ".zip" or _is_packed_parquet(path)]:
            raise ValueError(f"{packed[0]} is compressed: unpack it first")
        name, description = plain_name(paths[0].resolve()).stem, ", ".join(map(str, paths))
        how: dict[str, Any] = {"encoding": encoding, "skipped": tuple(skipped.most_common())}
        return cls(name, description, tuple(found), field, separator, **how)

    @property
    def n_bytes(self) -> int:
        """The total size of all files."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield all documents, in order.

        Raises:
            ValueError: a file's content does not match its suffix or encoding, lacks the field, is too large to be one
                document, or needs a library that is not installed.
            OSError: a file cannot be read.
        """
        self.counted.clear()
        for path in self.files:
            suffix = plain_name(path).suffix.lower()
            if self.chat is not None and suffix not in JSON_LINES:
                raise ValueError(f"{path} has no conversations: --chat reads {', '.join(JSON_LINES)}")
            found = _parquet(path, self.field, self.counted) if suffix == ".parquet" else self._of_text(path, suffix)
            yield from (document for document in found if document.text)

    def _of_text(self, path: Path, suffix: str) -> Iterator[Document]:
        """Yield the documents of a text file or of JSON lines."""
        with unpacked(path, self.encoding) as file:
            if file.encoding != "utf-8":
                self.counted[RECODED + file.encoding] += 1
            if self.chat is not None:
                found = _conversations(path, file, self.chat)
            elif suffix in JSON_LINES:
                found = _json_lines(path, file, self.field, self.counted)
            else:
                found = _text(path, file, self.separator, None if self.strict else self.counted)
            n_told = 0
            for document in found:
                if not file.direct:
                    document, n_told = document._replace(file_bytes=file.n_read - n_told), file.n_read
                yield document


def _is_packed_parquet(path: Path) -> bool:
    """Return whether the path is a compressed Parquet file; Parquet has compression of its own."""
    return path.suffix.lower() in PACKED and plain_name(path).suffix.lower() == ".parquet"


def _files(
    folder: Path, suffixes: Sequence[str], excluded: Collection[str] = ()
) -> tuple[tuple[Path, ...], Counter[str]]:
    """Return a folder's files with one of the suffixes, compressed or not, sorted, and counts of the others' suffixes.

    Hidden files and excluded folders are skipped. Links to folders are followed, each folder once.

    Raises:
        OSError: a folder cannot be read.
    """
    found: list[Path] = []
    others: Counter[str] = Counter()
    seen: set[Path] = set()
    wanted = tuple(suffix.lower() for suffix in suffixes)

    def refuse(error: OSError) -> NoReturn:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := Path(parent).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if plain_name(path).name.lower().endswith(wanted):
                found.append(path)
            else:
                others[path.suffix.lower() or "without suffix"] += 1
    return tuple(sorted(found)), others


def _text(path: Path, file: Utf8File, separator: str | None, replaced: Counter[str] | None) -> Iterator[Document]:
    """Yield the documents between separators; with ``replaced``, invalid bytes are replaced and the file counted."""
    rest, end, start, is_whole = b"", (separator or "").encode(), file.start, True

    def decoded(data: bytes) -> str:
        nonlocal is_whole
        if replaced is None:
            return _decoded(data, str(path), start)
        text = data.decode(errors="replace")
        is_whole = is_whole and text.encode() == data
        return text

    while chunk := file.read(_CHUNK_BYTES):
        *pieces, rest = (rest + chunk).split(end) if end else [rest + chunk]
        if len(rest) > MOST_BYTES:
            size = f"{len(rest) / 2**20:.0f} MiB or more"
            raise ValueError(f"{path} has a document of {size}: --separator says where its documents end")
        for piece in pieces:
            text = decoded(piece)
            start += len(piece) + len(end)
            yield Document(text, len(piece) + len(end))
    yield Document(decoded(rest), len(rest))
    if replaced is not None and not is_whole:
        replaced[REPLACED] += 1


def _decoded(data: bytes, place: str, start: int) -> str:
    """Decode bytes at offset ``start`` of ``place``; raises ValueError if they are not UTF-8 or hold a zero byte."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        fault = f"{place} is no UTF-8 text from byte {start + error.start:,} on"
        raise ValueError(f"{fault}: if it is text, --encoding says in which encoding, such as latin-1") from None
    if "\0" in text:
        raise ValueError(f"{place} has a zero byte, at {start + data.index(0):,}: it is no text, or in UTF-16")
    return text


def _conversations(path: Path, file: Utf8File, chat: ChatReader) -> Iterator[Document]:
    for row, place, n_bytes in _rows(path, file):
        text, answers = chat.read(row, place)
        yield Document(text, n_bytes, answers)


def _json_lines(path: Path, file: Utf8File, field: str, counted: Counter[str]) -> Iterator[Document]:
    for row, place, n_bytes in _rows(path, file):
        if not isinstance(row, dict) or field not in row:
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{place}: no text under {field!r}, it has {has}")
        text = row[field] or ""  # null is left out, as in Parquet
        if not isinstance(text, str):
            raise ValueError(f"{place}: no text under {field!r}, it has {type(text).__name__} there")
        whole = text.encode(errors="replace").decode()  # JSON can spell half a surrogate pair
        counted[WITHOUT_TEXT] += not text
        counted[HALF_PAIRS] += whole != text
        yield Document(whole, n_bytes)


def _rows(path: Path, file: Utf8File) -> Iterator[tuple[Any, str, int]]:
    """Yield the value of each line, its place in words, and its number of bytes."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        content = _decoded(line, place, 0)
        try:
            row = json.loads(content, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON, of which each line has to be one object: {error}") from None
        yield row, place, len(line)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raises ValueError for a repeated key, whose first value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key!r} is there twice")
    return found


def _parquet(path: Path, field: str, counted: Counter[str]) -> Iterator[Document]:
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
                    counted[WITHOUT_TEXT] += not text
                    yield Document(text or "", share)
    except ArrowException as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
