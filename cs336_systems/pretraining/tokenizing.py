"""Text to a folder of token files, over all cores: the same bytes whatever their number, all of them or nothing.

    dataset = tokenize(TokenizeOptions(input=(Path("web.jsonl"),), tokenizer="Qwen2.5-0.5B"))

    data/web-Qwen2.5-0.5B/
      train-00000.bin ...        --shard-tokens each; documents run on from one file into the next
      evaluation-00000.bin ...
      tokenizer.json             what they were made with
      dataset.json               files, documents, bytes of text and tokens of each split; vocabulary, end of text

The folder is filled under a hidden name and gets its own when it is complete, so Ctrl-C, a full disk or a kill leave no
dataset; after a kill the hidden folder (``.NAME.PID.tmp``) remains and can be removed.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cs336_systems.pretraining.corpus import Corpus
from cs336_systems.pretraining.encoding import Encoded, encode, is_held_out
from cs336_systems.pretraining.publishing import published
from cs336_systems.pretraining.token_file import TokenFileWriter, check_width
from cs336_systems.pretraining.token_stream import LAYOUT, MANIFEST, Dataset
from cs336_systems.pretraining.tokenize_options import TokenizeOptions
from cs336_systems.pretraining.tokenizer import TOKENIZER, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe


def tokenize(options: TokenizeOptions) -> Dataset:
    """Write the dataset that the options describe.

    Raises:
        ValueError: the options, the text or the tokenizer are not as they must be, or the folder is there already.
        OSError: something cannot be read or written.
        RuntimeError: a process that encodes was killed.
    """
    options.check()
    corpus = Corpus.find(options.input, suffixes=options.suffix, field=options.field, separator=options.separator)
    out = options.out or default_folder(options, corpus)
    _check_target(out, options.replace)
    with _progress(corpus.n_bytes) as progress:
        tokenizer = _make_tokenizer(options, corpus, progress)
        check_width(tokenizer.vocab_size, options.bytes_per_token)
        with _named(out), published(out) as folder:
            splits = _write(folder, options, corpus, tokenizer, progress)
            named = {"name": options.tokenizer, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
            described = {"layout": LAYOUT, "corpus": corpus.description, "files": len(corpus.files)}
            manifest = described | {"tokenizer": named, "splits": splits}
            (folder / TOKENIZER).write_text(tokenizer.json(), encoding="utf-8")
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return Dataset.open(out)


def default_folder(options: TokenizeOptions, corpus: Corpus) -> Path:
    """Below ``data``, by the names of corpus and tokenizer."""
    path = Path(options.tokenizer).resolve()
    folder = path.parent if path.suffix == ".json" else path
    named = {"bpe": f"bpe{options.vocab_size}", "bytes": "bytes"}.get(options.tokenizer, folder.name)
    return Path("data") / f"{corpus.name}-{named}"


def _check_target(out: Path, replace: bool) -> None:
    """Raise ValueError unless the folder can be made: nothing is there, or what may be replaced."""
    if not out.exists():
        return
    if not (out / MANIFEST).exists():
        raise ValueError(f"--out {out} is there and no dataset; name another folder")
    if not replace:
        raise ValueError(f"--out {out} is there already; --replace makes it anew")


@contextmanager
def _named(out: Path) -> Iterator[None]:
    """An OSError of the block says what could not be written, at least the folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), error.filename or str(out)) from error


def _make_tokenizer(options: TokenizeOptions, corpus: Corpus, progress: "_Bar") -> Tokenizer:
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    if options.tokenizer != "bpe":
        path = Path(options.tokenizer)
        if len(path.parts) == 1 and not path.exists():
            raise ValueError(f"tokenizer {path}: there is no {path}, and made here are bpe and bytes")
        return load_tokenizer(path, options.eos_token)
    progress.say(f"training a vocabulary of {options.vocab_size:,}")
    return train_bpe(_sample(options, corpus), options.vocab_size)


def _sample(options: TokenizeOptions, corpus: Corpus) -> Iterator[str]:
    """The first documents for training, as many as the BPE is to be trained on."""
    left = options.sample_mb * 1e6
    for document in corpus.documents():
        if left <= 0:
            return
        if not is_held_out(document.text, options.evaluation_fraction):
            yield document.text
            left -= len(document.text)


def _write(
    folder: Path, options: TokenizeOptions, corpus: Corpus, tokenizer: Tokenizer, progress: "_Bar"
) -> dict[str, dict[str, Any]]:
    """Fill the folder with token files; what the manifest says of each split that has any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fraction, n_processes = options.evaluation_fraction, options.processes or cores or 1
    progress.say("tokenizing")
    with (
        _Shards(folder, "train", options, tokenizer) as train,
        _Shards(folder, "evaluation", options, tokenizer) as evaluation,
    ):
        for batch, encoded in encode(corpus.documents(), tokenizer, fraction, n_processes):
            train.append(encoded.train)
            evaluation.append(encoded.evaluation)
            progress.advance(sum(document.file_bytes for document in batch), train.tokens + evaluation.tokens)
    n_documents = train.documents + evaluation.documents
    if not n_documents:
        raise ValueError(f"there is no text in {corpus.description}")
    for split, wanted in ((train, fraction < 1), (evaluation, fraction > 0)):
        if wanted and not split.documents:
            fault = f"none of {n_documents} documents is for {split.name} at --evaluation-fraction {fraction:g}"
            raise ValueError(f"{fault}: take another, or --separator to divide the text into more")
    return {split.name: split.summary() for split in (train, evaluation) if split.documents}


class _Shards:
    """The token files of one split, each full but the last."""

    def __init__(self, folder: Path, name: str, options: TokenizeOptions, tokenizer: Tokenizer) -> None:
        self.name = name
        self.documents = self.bytes = self.tokens = 0
        self._folder, self._options, self._tokenizer = folder, options, tokenizer
        self._files: list[str] = []
        self._writer: TokenFileWriter | None = None
        self._unfinished = ExitStack()

    def append(self, part: Encoded) -> None:
        self.documents += part.documents
        self.bytes += part.bytes
        self.tokens += len(part.tokens)
        left = part.tokens
        while len(left):
            writer = self._writer = self._writer or self._next()
            room = self._options.shard_tokens - writer.n_tokens
            writer.append(left[:room])
            left = left[room:]
            if writer.n_tokens == self._options.shard_tokens:
                self._unfinished.close()
                self._writer = None

    def summary(self) -> dict[str, Any]:
        return {"files": self._files, "documents": self.documents, "bytes": self.bytes, "tokens": self.tokens}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._unfinished.__exit__(*error)

    def _next(self) -> TokenFileWriter:
        self._files.append(f"{self.name}-{len(self._files):05d}.bin")
        writer = TokenFileWriter(
            self._folder / self._files[-1],
            vocab_size=self._tokenizer.vocab_size,
            bytes_per_token=self._options.bytes_per_token,
            eos_id=self._tokenizer.eos_id,
        )
        return self._unfinished.enter_context(writer)


class _Bar:
    """How far it is, for who waits at a terminal."""

    def __init__(self, progress: Progress, n_bytes: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=n_bytes, tokens="")

    def say(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def advance(self, n_bytes: int, n_tokens: int) -> None:
        self._progress.update(self._task, advance=n_bytes, tokens=f"{n_tokens:,} tokens")


@contextmanager
def _progress(n_bytes: int) -> Iterator[_Bar]:
    console = Console(stderr=True)
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]}")]
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with progress:
        yield _Bar(progress, n_bytes)
