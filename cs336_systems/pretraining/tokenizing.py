"""Text to a folder of token files, over all cores: the same bytes whatever their number, all of them or nothing.

    dataset = tokenize(TokenizeOptions(input=(Path("web.jsonl"),), tokenizer="Qwen2.5-0.5B"))

    data/web-Qwen2.5-0.5B/
      train-00000.bin ...        100 million tokens each; a document may begin in one file and end in the next
      evaluation-00000.bin ...
      tokenizer.json             the tokenizer that made them, and what transformers reads with it, if it is there
      dataset.json               files, documents, bytes of text and tokens of each split; vocabulary, end of text

Processes encode batches of documents, and results come in the order of the documents. A document is held out for
evaluation by the hash of its text alone: the same documents on every machine and in every order, and equal documents
stay together. The folder appears when it is complete (``publishing.py``).
"""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cs336_systems.pretraining.corpus import SUFFIXES, Corpus, Document
from cs336_systems.pretraining.dataset import MANIFEST, Dataset, TokenWriter, describe
from cs336_systems.pretraining.publishing import published
from cs336_systems.pretraining.tokenizer import ByteTokenizer, Tokenizer, copy_tokenizer, load_tokenizer, train_bpe
from cs336_systems.processes import Died, FreshProcess, start_server

_SAMPLE_CHARACTERS = 16_000_000
"""Characters of the first training documents on which a BPE is trained: more change few of its merges."""
_BATCH_CHARACTERS = 2**19
"""Characters of text that a process encodes at once: so many that handing them over costs little."""


@dataclass(frozen=True)
class TokenizeOptions:
    """From text to token files, split into training and evaluation."""

    input: tuple[Path, ...] = ()
    """Text, .jsonl and .parquet files, and folders of such; by default the standard library of the running Python."""
    suffix: tuple[str, ...] = SUFFIXES
    """Suffixes of the files that are taken from folders."""
    field: str = "text"
    """Field of a JSON line or Parquet row that holds the text."""
    separator: str | None = None
    """Separator between the documents of a text file, such as <|endoftext|>; by default each file is a document."""
    tokenizer: str = "bpe"
    """bpe: byte-level BPE, trained on this text; bytes; or a tokenizer.json, or a Hugging Face folder with one."""
    vocab_size: int = 4096
    """Vocabulary of a BPE that is trained here."""
    eos_token: str | None = None
    """Token that ends each document; by default that of the tokenizer_config.json next to tokenizer.json, else
    <|endoftext|>."""
    evaluation_fraction: float = 0.05
    """Share of the documents that is held out, chosen by the hash of their text: the same on every machine, and equal
    documents stay together."""
    processes: int | None = None
    """Number of processes, by default one per core; it does not change the files."""
    out: Path | None = None
    """New folder; by default data/CORPUS-TOKENIZER."""
    replace: bool = False
    """Replace an earlier dataset in that folder."""

    def check(self) -> None:
        """Raise ValueError for a number out of range."""
        if not 0 <= self.evaluation_fraction <= 1:
            raise ValueError(f"--evaluation-fraction must lie in 0..1, got {self.evaluation_fraction:g}")
        if self.tokenizer == "bpe" and self.evaluation_fraction == 1:
            raise ValueError("--evaluation-fraction 1 leaves nothing to train a BPE on: name a --tokenizer")
        if self.tokenizer in ("bpe", "bytes") and self.eos_token is not None:
            fault = f"is for a tokenizer.json, and --tokenizer is {self.tokenizer}"
            raise ValueError(f"--eos-token {self.eos_token} {fault}")
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"--processes must be positive, got {self.processes}")


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
    if out.exists() and not (out / MANIFEST).exists():
        raise ValueError(f"--out {out} is there and no dataset; name another folder")
    if out.exists() and not options.replace:
        raise ValueError(f"--out {out} is there already; --replace makes it anew")
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]}"))
    if corpus.skipped:
        others = ", ".join(f"{number:,} {suffix}" for suffix, number in corpus.skipped[:10])
        n_skipped = sum(number for _, number in corpus.skipped)
        print(f"{n_skipped:,} files are passed over for their suffix: {others}", file=sys.stderr)
    shown = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with shown as progress:
        progress.add_task(f"tokenizer {options.tokenizer}", total=corpus.n_bytes, tokens="")
        tokenizer = _make_tokenizer(options, corpus)
        with published(out) as folder:
            splits = _write(folder, options, corpus, tokenizer, progress)
            if options.tokenizer not in ("bpe", "bytes"):
                copy_tokenizer(Path(options.tokenizer), folder)
            named = {"name": options.tokenizer, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
            describe(folder, tokenizer.json(), named, corpus.description, len(corpus.files), splits)
    return Dataset.open(out)


def default_folder(options: TokenizeOptions, corpus: Corpus) -> Path:
    """The folder below ``data`` with the names of corpus and tokenizer."""
    path = Path(options.tokenizer).resolve()
    folder = path.parent if path.suffix == ".json" else path
    named = {"bpe": f"bpe{options.vocab_size}", "bytes": "bytes"}.get(options.tokenizer, folder.name)
    return Path("data") / f"{corpus.name}-{named}"


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is for evaluation, as about this fraction of different documents is."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _make_tokenizer(options: TokenizeOptions, corpus: Corpus) -> Tokenizer:
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    if options.tokenizer == "bpe":
        return train_bpe(_sample(options, corpus), options.vocab_size)
    path = Path(options.tokenizer)
    if len(path.parts) == 1 and not path.exists():
        raise ValueError(f"tokenizer {path}: there is no {path}, and made here are bpe and bytes")
    return load_tokenizer(path, options.eos_token)


def _sample(options: TokenizeOptions, corpus: Corpus) -> Iterator[str]:
    """The first documents for training, as many as the BPE is to be trained on."""
    left = _SAMPLE_CHARACTERS
    for document in corpus.documents():
        if left <= 0:
            return
        if not is_held_out(document.text, options.evaluation_fraction):
            yield document.text
            left -= len(document.text)


class _Encoded(NamedTuple):
    """Documents of one split: their tokens one after the other, their number, and the bytes of their text."""

    tokens: NDArray[np.uint32]
    documents: int
    n_bytes: int


def _write(
    folder: Path, options: TokenizeOptions, corpus: Corpus, tokenizer: Tokenizer, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Fill the folder with token files; returns the manifest's splits, those that have any document."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fraction, n_processes = options.evaluation_fraction, options.processes or cores or 1
    (task,) = progress.task_ids
    progress.update(task, description="tokenizing")
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    said = {name: {"documents": 0, "bytes": 0} for name in ("train", "evaluation")}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(TokenWriter(folder, name, **sizes)) for name in said}
        for batch, encoded in _encode_all(corpus.documents(), tokenizer, fraction, n_processes):
            for (name, writer), part in zip(writers.items(), encoded, strict=True):
                writer.append(part.tokens)
                said[name]["documents"] += part.documents
                said[name]["bytes"] += part.n_bytes
            n_tokens = f"{sum(writer.n_tokens for writer in writers.values()):,} tokens"
            progress.update(task, advance=sum(document.file_bytes for document in batch), tokens=n_tokens)
    n_documents = sum(split["documents"] for split in said.values())
    if not n_documents:
        raise ValueError(f"there is no text in {corpus.description}")
    for name, wanted in (("train", fraction < 1), ("evaluation", fraction > 0)):
        if wanted and not said[name]["documents"]:
            fault = f"none of {n_documents} documents is for {name} at --evaluation-fraction {fraction:g}"
            advice = "--separator says where documents end, and fraction 0 holds none out"
            raise ValueError(f"{fault}: {advice}")
    return {
        name: {"files": writer.files, **said[name], "tokens": writer.n_tokens}
        for name, writer in writers.items()
        if writer.files
    }


def _encode_all(
    documents: Iterable[Document], tokenizer: Tokenizer, fraction: float, n_processes: int
) -> Iterator[tuple[list[Document], tuple[_Encoded, _Encoded]]]:
    """Batches of documents in their order, each encoded; a process has one batch at a time.

    Raises:
        RuntimeError: a process was killed.
    """
    if n_processes == 1:
        for batch in _batches(documents):
            yield batch, _encode([document.text for document in batch], tokenizer, fraction)
        return
    start_server(__name__)
    busy: deque[tuple[FreshProcess, list[Document]]] = deque()
    with ExitStack() as processes:
        for batch in _batches(documents):
            finished = None
            if len(busy) == n_processes:
                process, earlier = busy.popleft()
                finished = earlier, _receive(process)
            else:
                process = FreshProcess(_serve, tokenizer, fraction)
                processes.callback(process.end)
            process.connection.send([document.text for document in batch])
            busy.append((process, batch))
            if finished is not None:
                yield finished
        for process, batch in busy:
            yield batch, _receive(process)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _receive(process: FreshProcess) -> tuple[_Encoded, _Encoded]:
    try:
        answer = process.receive()
    except Died as death:
        raise RuntimeError(f"a process that encodes text {death}") from None
    if isinstance(answer, ValueError):
        raise answer
    return answer


def _serve(connection: Connection, tokenizer: Tokenizer, fraction: float) -> None:
    """Run in a process: encode the texts that come, until the other side hangs up."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have processes of their own
    with suppress(EOFError, OSError):  # the latter where the other side went in the middle of a message
        while True:
            texts = connection.recv()
            try:
                answer: Any = _encode(texts, tokenizer, fraction)
            except ValueError as error:
                answer = error
            connection.send(answer)


def _encode(texts: Sequence[str], tokenizer: Tokenizer, fraction: float) -> tuple[_Encoded, _Encoded]:
    """The documents for training, and those for evaluation."""
    held_out, ids = [is_held_out(text, fraction) for text in texts], tokenizer.encode(texts)

    def split(evaluation: bool) -> _Encoded:
        own = [number for number, held in enumerate(held_out) if held == evaluation]
        tokens = np.concatenate([np.zeros(0, np.uint32), *(ids[number] for number in own)])
        return _Encoded(tokens, len(own), sum(len(texts[number].encode()) for number in own))

    return split(False), split(True)
