"""Many token files as one sequence of tokens, and the folder that ``tokenize_data.py`` writes.

    stream = TokenStream.open(["data/fineweb/train-*.bin"])      # paths or patterns
    dataset = Dataset.open(Path("data/stdlib-bpe4096"))          # .train, .evaluation, .tokenizer, .vocab_size, .eos_id

How tokens are divided into files makes no difference to who reads a stream.
"""

import glob
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cs336_systems.pretraining.token_file import TokenFile
from cs336_systems.pretraining.tokenizer import TOKENIZER

MANIFEST = "dataset.json"
LAYOUT = 1
"""Of the manifest."""


class TokenStream:
    """The tokens of several files, one after the other.

    Attributes:
        vocab_size: ids are below it; None where no file says.
        eos_id: of the token that ends each document; None where no file says.

    Raises:
        ValueError: there is no file, or two are of different vocabularies.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        if not files:
            raise ValueError("a stream of tokens needs at least one file")
        self.files = tuple(files)
        self.vocab_size = _shared(self.files, "vocab_size")
        self.eos_id = _shared(self.files, "eos_id")
        self._starts = np.cumsum([0] + [len(file.tokens) for file in self.files])

    @classmethod
    def open(cls, patterns: Iterable[str | Path]) -> Self:
        """The files that paths and patterns name: those of a pattern by name, each file once.

        Raises:
            ValueError: a pattern names no file, or one of them is not a whole token file.
            OSError: a file is missing or cannot be read.
        """
        paths: dict[str, None] = {}
        for pattern in map(str, patterns):
            names = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207  (Path: relative only)
            if not names:
                raise ValueError(f"no token files match {pattern}")
            paths |= dict.fromkeys(names)
        return cls([TokenFile.open(Path(path)) for path in paths])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def copy(self, start: int, out: NDArray[Any]) -> None:
        """Fill ``out``, (n,) integers, with the tokens from ``start`` on, of which the stream has n."""
        assert start >= 0 and start + len(out) <= len(self), (start, len(out), len(self))
        number, done = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while done < len(out):
            first = start + done - int(self._starts[number])
            part = self.files[number].tokens[first : first + len(out) - done]
            out[done : done + len(part)] = part
            number, done = number + 1, done + len(part)

    def place(self, position: int) -> str:
        """The file of a token and its position there."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return f"{self.files[number].path}, position {position - int(self._starts[number]):,}"


def _shared(files: Sequence[TokenFile], name: str) -> int | None:
    """What the files that say it agree on."""
    said = {getattr(file, name): file for file in files if getattr(file, name) is not None}
    if len(said) > 1:
        (one, first), (other, second) = list(said.items())[:2]
        raise ValueError(f"{first.path} has {name} {one}, {second.path} has {other}: they do not belong together")
    return next(iter(said), None)


@dataclass(frozen=True)
class Dataset:
    """A folder of token files, complete by the time it has its name, and the tokenizer that made them.

    Attributes:
        tokenizer: its ``tokenizer.json``.
        manifest: what is said of it in ``dataset.json``; ``tokenizing.py`` says what that is.
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
            manifest = json.loads(path.read_text())
            if (layout := manifest["layout"]) == LAYOUT:
                _check(manifest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}") from None
        if layout != LAYOUT:
            raise ValueError(f"{path} is of layout {layout}; this version reads {LAYOUT}")
        streams = {name: _open_split(folder, name, split) for name, split in manifest["splits"].items()}
        if not (folder / TOKENIZER).exists():
            raise ValueError(f"{folder} has no {TOKENIZER}")
        return cls(folder, streams.get("train"), streams.get("evaluation"), folder / TOKENIZER, manifest)

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def eos_id(self) -> int:
        """Of the token that ends each document."""
        return self.manifest["tokenizer"]["eos_id"]


def _check(manifest: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or AttributeError if it lacks what is read from it."""
    tokenizer = manifest["tokenizer"]
    read = [
        (manifest["corpus"], str),
        (tokenizer["name"], str),
        (tokenizer["vocab_size"], int),
        (tokenizer["eos_id"], int),
    ]
    for split in manifest["splits"].values():
        read += [(split["files"], list), (split["tokens"], int)]
    for value, kind in read:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind.__name__}")


def _open_split(folder: Path, name: str, split: dict[str, Any]) -> TokenStream:
    stream = TokenStream([TokenFile.open(folder / file) for file in split["files"]])
    if len(stream) != split["tokens"]:
        raise ValueError(f"{folder} has {len(stream):,} tokens to {name}, its {MANIFEST} says {split['tokens']:,}")
    return stream
