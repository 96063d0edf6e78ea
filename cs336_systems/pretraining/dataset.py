"""Token files, the stream of tokens that several make, and the folder that ``tokenize_data.py`` writes.

    dataset = Dataset.open(Path("data/stdlib-bpe4096"))     # .train, .evaluation, .tokenizer, .vocab_size, .eos_id
    dataset.train.copy(start, out)                          # whatever the files into which tokens are divided

A token file has a header of 1,024 bytes and then token ids, little-endian uint32 (uint16 in some files of before
2026-11-27), which are mapped into memory and read from the disk when touched. The header is 256 little-endian int32:
version 2 of llm.q's layout, so that llm.q reads these files, with a note of ours in words that it leaves unused.

    words     0-1            2  3                4       5           6      8-9         10
    content   "BIN.TOK\\n"    2  bytes per token  tokens  vocabulary  masks  "cs336sys"  EOS id or -1

Beside the file of conversations (``Dataset.chat``) NAME.marks has a byte for each token: ``ANSWER`` if it is part of an
answer, and ``BEGIN`` at the first of a conversation.

Ids beyond the vocabulary are refused when they are written. Opening a file compares its size with its header; the
loader checks every id that it returns.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cs336_systems.pretraining.tokenizer import TOKENIZER, ByteTokenizer

MANIFEST = "dataset.json"
LAYOUT = 2
"""The version of the manifest; 1 had no conversations, and is read, too."""
HEADER_BYTES = 1024
MARKS = ".marks"
ANSWER, BEGIN = 1, 2
"""Bits of a mark."""
FILE_TOKENS = 100_000_000
"""The tokens of a file, 400 MB: few files for a large corpus, and each small enough to copy."""

_MAGIC = b"BIN.TOK\n"
_VERSION = 2
_HEADER = struct.Struct("<8s5i4x8si")
"""Magic, version, bytes per token, tokens, vocabulary, masks; our tag and the id of the end-of-text token."""
_TAG = b"cs336sys"
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class TokenFile:
    """A complete token file: (n_tokens,) uint16 or uint32 ids, all below ``vocab_size``, and perhaps their marks."""

    path: Path
    vocab_size: int
    tokens: NDArray[Any]
    marks: NDArray[np.uint8] | None = None

    @classmethod
    def open(cls, path: Path, *, marked: bool = False) -> Self:
        """Read the header and map the tokens, and their marks; ValueError if it is no such file, or torn."""
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            n_bytes = file.seek(0, os.SEEK_END)
        if len(header) < HEADER_BYTES:
            raise ValueError(f"{path} is torn or no token file: it has {n_bytes} bytes, a header {HEADER_BYTES}")
        magic, version, width, n_tokens, vocab_size, masks, _, _ = _HEADER.unpack_from(header)
        if (magic, version, masks) != (_MAGIC, _VERSION, 0) or width not in _DTYPES:
            found = f"{magic!r}, version {version}, {width} bytes per token, masks {masks}"
            raise ValueError(f"{path} is no token file of this suite: its header begins with {found}")
        expected = HEADER_BYTES + n_tokens * width
        if n_tokens < 1 or n_bytes != expected:
            counted = f"{n_tokens:,} tokens of {width} bytes, {expected:,} bytes in total"
            raise ValueError(f"{path} is torn: its header counts {counted}, and it has {n_bytes:,}")
        marks = None
        if marked:
            beside = path.with_suffix(MARKS)
            if (n_marks := beside.stat().st_size) != n_tokens:
                raise ValueError(f"{beside} is torn: {n_marks:,} bytes for {n_tokens:,} tokens")
            marks = np.memmap(beside, np.uint8, "r")
        return cls(path, vocab_size, np.memmap(path, _DTYPES[width], "r", HEADER_BYTES, (n_tokens,)), marks)


class TokenWriter:
    """Writes the tokens of a split to ``NAME-00000.bin`` and so on, each of ``FILE_TOKENS`` but the last.

    A file is none before it is complete: its header comes last, and not at all if the ``with`` statement ends badly.

    Args:
        vocab_size: ids are below it.
        eos_id: the token that ends each document.
    """

    def __init__(self, folder: Path, name: str, *, vocab_size: int, eos_id: int = -1) -> None:
        self.files: list[str] = []
        self.n_tokens = 0
        self._folder, self._name, self._vocab_size, self._eos_id = folder, name, vocab_size, eos_id
        self._file: BinaryIO | None = None
        self._marks: BinaryIO | None = None
        self._n_in_file = 0

    def append(self, tokens: ArrayLike, marks: NDArray[np.uint8] | None = None) -> None:
        """Append (n,) integer ids, and their (n,) marks, which all have or none.

        Raises:
            ValueError: one is beyond the vocabulary.
            OSError: they cannot be written.
        """
        left = np.asarray(tokens, np.int64)
        beyond = np.flatnonzero((left < 0) | (left >= self._vocab_size))
        if len(beyond):
            where = f"token {left[beyond[0]]} at position {self.n_tokens + int(beyond[0]):,}"
            raise ValueError(f"{where} is outside a vocabulary of {self._vocab_size:,}")
        self.n_tokens += len(left)
        while len(left):
            if self._file is None:
                self.files.append(f"{self._name}-{len(self.files):05d}.bin")
                self._file = (self._folder / self.files[-1]).open("wb")
                self._file.write(bytes(HEADER_BYTES))
                if marks is not None:
                    self._marks = (self._folder / self.files[-1]).with_suffix(MARKS).open("wb")
            part, left = np.split(left, [FILE_TOKENS - self._n_in_file])
            self._file.write(part.astype("<u4").tobytes())
            if marks is not None:
                assert self._marks is not None
                self._marks.write(marks[: len(part)].tobytes())
                marks = marks[len(part) :]
            self._n_in_file += len(part)
            if self._n_in_file == FILE_TOKENS:
                self.__exit__(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._file is None:
            return
        with self._file as file:
            if kind is None:
                file.seek(0)
                sizes = 4, self._n_in_file, self._vocab_size
                file.write(_HEADER.pack(_MAGIC, _VERSION, *sizes, 0, _TAG, self._eos_id))
        if self._marks is not None:
            self._marks.close()
        self._file, self._marks, self._n_in_file = None, None, 0


class TokenStream:
    """The tokens of several files, one after the other; ValueError if there is none, or two differ in vocabulary."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        sizes = {file.vocab_size: file.path for file in files}
        if len(sizes) != 1:
            found = ", ".join(f"{path} has {size:,} ids" for size, path in sizes.items())
            raise ValueError(f"a stream of tokens needs files of one vocabulary, got {found or 'no file'}")
        self.files = tuple(files)
        (self.vocab_size,) = sizes
        self._starts = np.cumsum([0] + [len(file.tokens) for file in self.files])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def copy(self, start: int, out: NDArray[Any], *, marks: bool = False) -> None:
        """Fill ``out``, (n,) integers, with the tokens from ``start`` on, or their marks; the stream has n."""
        assert start >= 0 and start + len(out) <= len(self), (start, len(out), len(self))
        number, done = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while done < len(out):
            first = start + done - int(self._starts[number])
            file = self.files[number]
            whole = file.marks if marks else file.tokens
            assert whole is not None, file.path
            part = whole[first : first + len(out) - done]
            out[done : done + len(part)] = part
            number, done = number + 1, done + len(part)

    def place(self, position: int) -> str:
        """The file of a token and its position there."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return f"{self.files[number].path}, position {position - int(self._starts[number]):,}"


@dataclass(frozen=True)
class Dataset:
    """A folder of token files, complete by the time it has its name, and the tokenizer that made them.

    Attributes:
        tokenizer: its ``tokenizer.json``.
        manifest: the content of ``dataset.json``, which ``describe`` writes.
    """

    folder: Path
    train: TokenStream | None
    evaluation: TokenStream | None
    tokenizer: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest and map all files that it lists.

        Raises:
            ValueError: the folder is no dataset, of another version, or a file in it is missing, torn or exchanged.
            OSError: it cannot be read.
        """
        path = folder / MANIFEST
        if not path.exists():
            raise ValueError(f"{folder} is no folder of scripts/tokenize_data.py: it has no {MANIFEST}")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if (layout := manifest["layout"]) in (1, LAYOUT):
                _check(manifest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None
        if layout not in (1, LAYOUT):
            raise ValueError(f"{path} is of layout {layout}; this version reads 1 and {LAYOUT}")
        chat = bool(manifest.get("chat"))
        streams: dict[str, TokenStream] = {}
        for name, split in manifest["splits"].items():
            streams[name] = stream = TokenStream(
                [TokenFile.open(folder / file, marked=chat) for file in split["files"]]
            )
            if len(stream) != split["tokens"]:
                said = f"its {MANIFEST} says {split['tokens']:,}"
                raise ValueError(f"{folder} has {len(stream):,} tokens to {name}, {said}")
        if not (folder / TOKENIZER).exists():
            raise ValueError(f"{folder} has no {TOKENIZER}")
        return cls(folder, streams.get("train"), streams.get("evaluation"), folder / TOKENIZER, manifest)

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def chat(self) -> bool:
        """Whether documents are conversations, with marks."""
        return bool(self.manifest.get("chat"))

    @property
    def eos_id(self) -> int:
        """The token that ends each document."""
        return self.manifest["tokenizer"]["eos_id"]


def _check(manifest: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or AttributeError if it lacks a value that readers need."""
    tokenizer, splits = manifest["tokenizer"], manifest["splits"].values()
    read: list[tuple[Any, type]] = [(manifest["corpus"], str), (tokenizer["name"], str)]
    read += [(tokenizer[name], int) for name in ("vocab_size", "eos_id")]
    read += [(split[name], kind) for split in splits for name, kind in (("files", list), ("tokens", int))]
    for value, kind in read:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind.__name__}")


def describe(
    folder: Path,
    tokenizer_json: str,
    tokenizer: dict[str, Any],
    corpus: str,
    n_files: int,
    splits: dict[str, Any],
    *,
    chat: bool = False,
) -> None:
    """Complete a folder of token files by its ``tokenizer.json`` and ``dataset.json``.

    Args:
        tokenizer: its name, vocab_size and eos_id.
        corpus: which text the tokens are, in words.
        n_files: the number of files of text.
        splits: for train and evaluation the names of files, and the numbers of documents, bytes of text and tokens.
        chat: whether documents are conversations.
    """
    manifest = {
        "layout": LAYOUT,
        "corpus": corpus,
        "files": n_files,
        "tokenizer": tokenizer,
        "chat": chat,
        "splits": splits,
    }
    (folder / TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A hidden folder, which replaces the folder of the name if the block ends without an error, and else is removed.

    Its files are on disk before it is renamed, and have the permissions of the usual umask. If the name is a link, the
    folder that it refers to is replaced. A kill leaves ``.NAME.PID.tmp``, which can be removed, and also
    ``.NAME.PID.old`` if it came between two renames: the earlier folder, which should be renamed back.

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
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_random_tokens(
    folder: Path, n_tokens: int, vocab_size: int, seed: int, lengths: tuple[int, int] | None
) -> Path:
    """Write a dataset of uniformly random ids, for runs that only measure speed; return its folder.

    Args:
        lengths: write conversations with these fewest and most tokens, of uniformly random length, ``n_tokens`` or
            slightly more in all. The first third of each is a question, the rest an answer.

    Raises:
        ValueError: the vocabulary is smaller than that of bytes, whose tokenizer it has.
        OSError: it cannot be written, or is there.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(f"random tokens need a vocabulary of {ByteTokenizer.vocab_size} or more, got {vocab_size}")
    marks = None
    if lengths is not None:
        drawn = np.random.default_rng(seed + 1).integers(lengths[0], lengths[1] + 1, size=-(-n_tokens // lengths[0]))
        drawn = drawn[: np.searchsorted(np.cumsum(drawn), n_tokens) + 1]
        n_tokens = int(drawn.sum())
        marks = np.full(n_tokens, ANSWER, np.uint8)
        for end, length in zip(np.cumsum(drawn), drawn, strict=True):
            begin = end - length
            marks[begin : begin + length // 3] = 0
            marks[begin] |= BEGIN
    folder.mkdir(parents=True)
    eos_id = ByteTokenizer.eos_id
    with TokenWriter(folder, "train", vocab_size=vocab_size, eos_id=eos_id) as writer:
        writer.append(np.random.default_rng(seed).integers(vocab_size, size=n_tokens), marks)
    split = {"files": writer.files, "documents": 1, "bytes": 4 * n_tokens, "tokens": n_tokens}
    tokenizer = {"name": "none", "vocab_size": vocab_size, "eos_id": eos_id}
    describe(folder, ByteTokenizer().json(), tokenizer, "random tokens", 1, {"train": split}, chat=marks is not None)
    return folder
