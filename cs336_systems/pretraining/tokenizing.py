"""Text to a folder of token files: all of them or nothing.

    dataset = tokenize(TokenizeOptions(input=(Path("web.jsonl"),), tokenizer="Qwen2.5-0.5B"))

    data/web-Qwen2.5-0.5B/
      train-00000.bin ...        100 million tokens each; a document may begin in one file and end in the next
      evaluation-00000.bin ...
      tokenizer.json             the tokenizer that made them, and what transformers reads with it, if it is there
      dataset.json               files, documents, bytes of text and tokens of each split; vocabulary, end of text

The tokenizers library encodes a batch of documents on all cores. A document is held out for evaluation by the hash of
its text alone: the same documents on every machine and in every order, and equal documents stay together. Of a single
document the last part is held out. The folder appears when it is complete.

With ``--chat`` each JSON line is a conversation (``chat.py``), and files of marks say which tokens are its answers.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cs336_systems.pretraining.chat import TEMPLATE, ChatEncoder, ChatReader, ChatTemplate
from cs336_systems.pretraining.corpus import JSON_LINES, SUFFIXES, Corpus, Document
from cs336_systems.pretraining.dataset import ANSWER, BEGIN, MANIFEST, Dataset, TokenWriter, describe, published
from cs336_systems.pretraining.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    copy_tokenizer,
    load_tokenizer,
    train_bpe,
)

_SAMPLE_CHARACTERS = 16_000_000
"""Characters of the first training documents on which a BPE is trained: more change few of its merges."""
_WITHIN = "answers begin within a token: the chat template should write a line's end, not a blank, in front of them"
_NAME_TEMPLATE = "; --chat-template names a file"
_ENDLESS = "the chat template ends answers by no token of its own, as eos_token, so a model will not stop there"
_BATCH_CHARACTERS = 2**19
"""Characters of text that are encoded at once: enough for all cores."""


@dataclass(frozen=True)
class TokenizeOptions:
    """From text to token files, split into training and evaluation."""

    input: tuple[Path, ...] = ()
    """Text, .jsonl and .parquet files, and folders of such; all but the last also as .gz, .zst, .bz2 or .xz. By default
    the standard library of the running Python."""
    suffix: tuple[str, ...] = SUFFIXES
    """Suffixes of the files that are taken from folders; by default those of JSON lines alone for --chat."""
    field: str = "text"
    """Field of a JSON line or Parquet row that holds the text."""
    separator: str | None = None
    """Separator between the documents of a text file, such as <|endoftext|>; by default each file is a document."""
    encoding: str | None = None
    """Encoding of files without a byte-order mark, such as latin-1; by default UTF-8."""
    chat: bool = False
    """Each JSON line is a conversation: messages (role and content), or prompt and completion. The tokenizer's chat
    template makes it text, and only the answers are to be learned."""
    chat_template: Path | None = None
    """Jinja file with the chat template, instead of the tokenizer's own."""
    tokenizer: str = "bpe"
    """bpe: byte-level BPE, trained on this text; bytes; or a tokenizer.json, or a Hugging Face folder with one."""
    vocab_size: int = 4096
    """Vocabulary of a BPE that is trained here."""
    eos_token: str | None = None
    """Token that ends each document; by default that of the tokenizer_config.json next to tokenizer.json, else
    <|endoftext|>."""
    evaluation_fraction: float = 0.05
    """Share of the documents that is held out, chosen by the hash of their text: the same on every machine, and equal
    documents stay together. Of a single document the last part is."""
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
        if self.chat_template is not None and not self.chat:
            raise ValueError(f"--chat-template {self.chat_template} is for --chat")
        if self.chat and not self.input:
            raise ValueError("--chat needs --input with JSON lines of conversations")


def tokenize(options: TokenizeOptions) -> Dataset:
    """Write the dataset that the options describe.

    Raises:
        ValueError: the options, the text or the tokenizer are not as they must be, or the folder is there already.
        OSError: something cannot be read or written.
    """
    options.check()
    how: dict[str, Any] = {"field": options.field, "separator": options.separator, "encoding": options.encoding}
    suffixes = JSON_LINES if options.chat and options.suffix == SUFFIXES else options.suffix
    corpus = Corpus.find(options.input, suffixes=suffixes, **how)
    template = None
    if options.chat:
        made_here = options.tokenizer in ("bpe", "bytes")
        own = None if made_here else Path(options.tokenizer)
        template = ChatTemplate.find(own, options.chat_template, options.eos_token, advice=_NAME_TEMPLATE)
        corpus = replace(corpus, chat=ChatReader(template, corpus.counted))
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
    if _is_cut(options, corpus):
        share = f"the last {100 * options.evaluation_fraction:g}% of it is held out for evaluation"
        print(f"{corpus.description} is one document, {share}; --separator says where documents end", file=sys.stderr)
    shown = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with shown as progress:
        progress.add_task(f"tokenizer {options.tokenizer}", total=corpus.n_bytes, tokens="")
        tokenizer = _make_tokenizer(options, corpus)
        with published(out) as folder:
            splits = _write(folder, options, corpus, tokenizer, progress)
            if options.tokenizer not in ("bpe", "bytes"):
                copy_tokenizer(Path(options.tokenizer), folder)
            named = {"name": options.tokenizer, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
            if template is not None:
                (folder / TEMPLATE).write_text(template.source, encoding="utf-8")
            described = corpus.description, len(corpus.files), splits
            describe(folder, tokenizer.json(), named, *described, chat=options.chat)
    for what, number in corpus.counted.items():
        if number:
            print(f"{number:,} {what}", file=sys.stderr)
    with suppress(ValueError):  # the template may refuse a conversation that is not the corpus's
        if template is not None and not template.stops(ChatEncoder(tokenizer.json()), tokenizer.eos_id):
            print(f"{corpus.description}: {_ENDLESS}", file=sys.stderr)
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


def _is_cut(options: TokenizeOptions, corpus: Corpus) -> bool:
    """Whether the text is a single document for training and evaluation; ValueError if it looks like several."""
    if corpus.chat is not None:
        return False
    documents = list(islice(corpus.documents(), 2))
    if len(documents) != 1 or not 0 < options.evaluation_fraction < 1:
        return False
    if options.separator is None and END_OF_TEXT in documents[0].text:
        raise ValueError(f"{corpus.description} has {END_OF_TEXT} in it: --separator '{END_OF_TEXT}' divides it there")
    return True


def _divided(options: TokenizeOptions, corpus: Corpus) -> Iterator[tuple[Document, bool]]:
    """Each document, or each of the two parts of a single one, and whether it is held out."""
    fraction = options.evaluation_fraction
    if _is_cut(options, corpus):
        ((text, n_bytes, _),) = corpus.documents()
        n_train = int(len(text) * (1 - fraction))
        parts = (Document(text[:n_train], n_bytes), False), (Document(text[n_train:], 0), True)
        yield from ((part, held_out) for part, held_out in parts if part.text)
    else:
        yield from ((document, is_held_out(document.text, fraction)) for document in corpus.documents())


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
    for document, held_out in _divided(options, corpus):
        if left <= 0:
            return
        if not held_out:
            # A template spells the special token, which is no text to learn merges from.
            yield document.text.replace(END_OF_TEXT, "") if options.chat else document.text
            left -= len(document.text)


def _write(
    folder: Path, options: TokenizeOptions, corpus: Corpus, tokenizer: Tokenizer, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Fill the folder with token files; returns the manifest's splits, those that have any document."""
    fraction = options.evaluation_fraction
    (task,) = progress.task_ids
    progress.update(task, description="tokenizing")
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    of_chat = ChatEncoder(tokenizer.json()) if options.chat else None
    counts = {"documents": 0, "bytes": 0} | ({"answer_tokens": 0} if options.chat else {})
    said = {name: dict(counts) for name in ("train", "evaluation")}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(TokenWriter(folder, name, **sizes)) for name in said}
        for batch in _batches(_divided(options, corpus)):
            tokens: dict[str, list[np.ndarray]] = {name: [] for name in said}
            texts = [document.text for document, _ in batch]
            marks: dict[str, list[np.ndarray]] = {name: [] for name in said}
            encoded: list[tuple[np.ndarray, np.ndarray | None]]
            if of_chat is None:
                encoded = [(ids, None) for ids in tokenizer.encode(texts)]
            else:
                first = batch[0][0]
                begun = any(split["documents"] for split in said.values())
                if not begun and of_chat.begins_within_a_token(first.text, first.answers):
                    print(f"{corpus.description}: {_WITHIN}", file=sys.stderr)
                encoded = list(of_chat.encode(texts, [document.answers for document, _ in batch]))
            for (document, held_out), (ids, is_answer) in zip(batch, encoded, strict=True):
                name = "evaluation" if held_out else "train"
                tokens[name].append(ids)
                if is_answer is not None:
                    marks[name].append(is_answer * np.uint8(ANSWER))
                    marks[name][-1][:1] |= BEGIN
                    said[name]["answer_tokens"] += int(is_answer.sum())
                said[name]["documents"] += 1
                said[name]["bytes"] += len(document.text.encode())
            for name, writer in writers.items():
                joined = np.concatenate([np.zeros(0, np.uint32), *tokens[name]])
                of_joined = [np.concatenate([np.zeros(0, np.uint8), *marks[name]])] if options.chat else []
                writer.append(joined, *of_joined)
            n_tokens = f"{sum(writer.n_tokens for writer in writers.values()):,} tokens"
            progress.update(task, advance=sum(document.file_bytes for document, _ in batch), tokens=n_tokens)
    n_documents = sum(split["documents"] for split in said.values())
    if not n_documents:
        left_out = ", ".join(f"{n:,} {what}" for what, n in corpus.counted.items() if n)
        what = "conversation with an answer" if options.chat else "text"
        raise ValueError(f"there is no {what} in {corpus.description}{left_out and ': '}{left_out}")
    for name, wanted in (("train", fraction < 1), ("evaluation", fraction > 0)):
        if wanted and not said[name]["documents"]:
            what = "conversations" if options.chat else "documents"
            fault = f"none of {n_documents} {what} is for {name} at --evaluation-fraction {fraction:g}"
            larger = "a larger one holds some out, and 0 needs none"
            advice = larger if name == "evaluation" else "a smaller one or more text leaves some"
            asked = options.chat or options.separator is not None
            separator = "" if asked else "; --separator says where documents end"
            raise ValueError(f"{fault}: {advice}{separator}")
    return {
        name: {"files": writer.files, **said[name], "tokens": writer.n_tokens}
        for name, writer in writers.items()
        if writer.files
    }


def _batches(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    batch: list[tuple[Document, bool]] = []
    size = 0
    for document, held_out in documents:
        batch.append((document, held_out))
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
