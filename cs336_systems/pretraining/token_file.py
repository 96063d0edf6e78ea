"""Token files: a header of 1,024 bytes, then token ids; mapped into memory, never loaded as a whole.

    with TokenFileWriter(path, vocab_size=4096, eos_id=0) as file:
        file.append(ids)            # any number of times; the file has its own name once all is on the disk
    file = TokenFile.open(path)
    file.tokens[1000:2000]          # little-endian uint16 or uint32, read from the disk when touched

The header is 256 little-endian int32. What is written is version 2 of llm.q's layout, with a note of ours in words that
llm.q leaves unused, so llm.q reads these files as long as tokens have 4 bytes, the only size it knows.

    words     0-1              2        3                4       5                6      7   8-9         10
    llm.q     "BIN.TOK\\n"      1 or 2   bytes per token  tokens  vocabulary (v2)  masks
    ours      "BIN.TOK\\n"      2        2 or 4           tokens  vocabulary       0      0   "cs336sys"  EOS id or -1
    llm.c     20240520, 1 (GPT-2, uint16) or 20240801, 7 (Llama 3, uint32); word 2: tokens

All three are read. llm.c and llm.q's version 1 do not say their vocabulary. llm.q's masks, bits behind the tokens that
choose what to learn, are refused.

Tokens beyond the vocabulary are refused when they are written. Opening checks the size of the file against its header;
ids are looked at by the loader, every one that it deals out.
"""

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

HEADER_BYTES = 1024
MOST_TOKENS = 2**31 - 1
"""In one file: the count is an int32."""

_MAGIC = b"BIN.TOK\n"
_VERSION = 2
_HEADER = struct.Struct("<8s5i4x8si")
"""Magic, version, bytes per token, tokens, vocabulary, masks; our tag and the id of the end-of-text token."""
_TAG = b"cs336sys"
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_LLM_C = {(20240520, 1): 2, (20240801, 7): 4}
"""Bytes per token, by magic and version."""


@dataclass(frozen=True)
class TokenFile:
    """A complete token file.

    Attributes:
        vocab_size: ids are below it; None where the layout does not say.
        eos_id: of the token that ends each document; None where that is not known.
        tokens: (n_tokens,) uint16 or uint32.
    """

    path: Path
    vocab_size: int | None
    eos_id: int | None
    tokens: NDArray[Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header and map the tokens.

        Raises:
            OSError: it is missing or cannot be read.
            ValueError: it is no token file, of an unknown version, torn, or has masks.
        """
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            n_bytes = file.seek(0, os.SEEK_END)
        if len(header) < HEADER_BYTES:
            raise ValueError(f"{path} is torn or no token file: it has {n_bytes} bytes, a header {HEADER_BYTES}")
        if header.startswith(_MAGIC):
            width, n_tokens, vocab_size, eos_id = _read_header(path, header)
        else:
            magic, version, n_tokens = struct.unpack_from("<3i", header)
            if (magic, version) not in _LLM_C:
                raise ValueError(f"{path} is no token file: it begins with {header[:8]!r}, neither llm.q's nor llm.c's")
            width, vocab_size, eos_id = _LLM_C[magic, version], None, None
        expected = HEADER_BYTES + n_tokens * width
        if n_tokens < 0 or n_bytes != expected:
            raise ValueError(
                f"{path} is torn: its header counts {n_tokens:,} tokens of {width} bytes, {expected:,} bytes in all, "
                f"and it has {n_bytes:,}"
            )
        shape = (n_tokens,)
        mapped = np.memmap(path, _DTYPES[width], "r", HEADER_BYTES, shape) if n_tokens else np.zeros(0, _DTYPES[width])
        return cls(path, vocab_size, eos_id, mapped)


def _read_header(path: Path, header: bytes) -> tuple[int, int, int | None, int | None]:
    """(bytes per token, tokens, vocabulary, end of text) of llm.q's layout."""
    _, version, width, n_tokens, vocab_size, masks, tag, eos_id = _HEADER.unpack_from(header)
    if version not in (1, _VERSION):
        raise ValueError(f"{path} is a token file of version {version}; known are 1 and {_VERSION}")
    if width not in _DTYPES:
        raise ValueError(f"{path} has {width} bytes per token; known are 2 and 4")
    if version == 1:
        return width, n_tokens, None, None
    if masks:
        raise ValueError(f"{path} has masks of what to learn, which this trainer cannot follow")
    return width, n_tokens, vocab_size, eos_id if tag == _TAG and eos_id >= 0 else None


class TokenFileWriter:
    """Writes a token file under a temporary name beside its own, which it gets when the ``with`` statement ends well.

    If that ends by an exception there is no file; if the process is killed, ``.NAME.tmp`` is left over, which no reader
    takes for a token file.

    Args:
        path: what is there will be replaced.
        vocab_size: ids are below it.
        bytes_per_token: 4, or 2 where the vocabulary allows; llm.q reads 4 alone.
        eos_id: of the token that ends each document, if there is one.

    Raises:
        ValueError: ids below ``vocab_size`` do not fit.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, vocab_size: int, bytes_per_token: int = 4, eos_id: int | None = None) -> None:
        check_width(vocab_size, bytes_per_token)
        self.path = path
        self.n_tokens = 0
        self._vocab_size = vocab_size
        self._width = bytes_per_token
        self._eos_id = eos_id
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = self._temporary.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, tokens: ArrayLike) -> None:
        """Append (n,) integer ids.

        Raises:
            ValueError: one of them is negative or beyond the vocabulary, or there are more than a file may have.
        """
        ids = np.asarray(tokens)
        beyond = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(beyond):
            place = self.n_tokens + int(beyond[0])
            raise ValueError(
                f"token {ids[beyond[0]]} at position {place:,} is outside a vocabulary of {self._vocab_size:,}"
            )
        if self.n_tokens + len(ids) > MOST_TOKENS:
            raise ValueError(f"a token file has at most {MOST_TOKENS:,} tokens")
        self._file.write(ids.astype(_DTYPES[self._width]).tobytes())
        self.n_tokens += len(ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._finish()
            if kind is None:
                self._temporary.replace(self.path)
        finally:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        eos_id = -1 if self._eos_id is None else self._eos_id
        header = _HEADER.pack(_MAGIC, _VERSION, self._width, self.n_tokens, self._vocab_size, 0, _TAG, eos_id)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())


def check_width(vocab_size: int, bytes_per_token: int) -> None:
    """Raise ValueError unless ids below ``vocab_size`` fit into so many bytes."""
    if bytes_per_token not in _DTYPES:
        raise ValueError(f"tokens have 2 or 4 bytes, got {bytes_per_token}")
    if not 0 < vocab_size <= min(256**bytes_per_token, MOST_TOKENS):
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit into {bytes_per_token} bytes per token")
