"""Documents to tokens over all cores: processes encode batches, results come in the order of the documents.

    for batch, encoded in encode(corpus.documents(), tokenizer, fraction, n_processes):
        encoded.train.tokens, encoded.evaluation.tokens

A document is held out for evaluation by the hash of its text alone: the same documents on every machine and in every
order, and equal documents stay together, so that none that is held out is learned elsewhere.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from cs336_systems.pretraining.corpus import Document
from cs336_systems.pretraining.tokenizer import Tokenizer
from cs336_systems.processes import Died, FreshProcess, start_server

_BATCH_CHARACTERS = 2**19
"""Of text that a process encodes at once."""


@dataclass(frozen=True)
class Encoded:
    """Documents of one split: their tokens one after the other, and the bytes of their text."""

    tokens: NDArray[np.uint32]
    documents: int
    bytes: int


@dataclass(frozen=True)
class EncodedBatch:
    """What a batch of documents comes to."""

    train: Encoded
    evaluation: Encoded


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is for evaluation, as about this fraction of different documents is."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer, fraction: float, n_processes: int
) -> Iterator[tuple[list[Document], EncodedBatch]]:
    """Batches of documents in their order, each with what it comes to; a process has one batch at a time.

    Args:
        fraction: of documents held out for evaluation.

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
    """So many documents together that handing them on costs little."""
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


def _receive(process: FreshProcess) -> EncodedBatch:
    try:
        return process.receive()
    except Died as death:
        raise RuntimeError(f"a process that encodes text {death}") from None


def _serve(connection: Connection, tokenizer: Tokenizer, fraction: float) -> None:
    """A process's work, until the other side hangs up: texts come, tokens go."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have processes of their own
    with suppress(EOFError, OSError):  # the latter where the other side went in the middle of a message
        while True:
            connection.send(_encode(connection.recv(), tokenizer, fraction))


def _encode(texts: Sequence[str], tokenizer: Tokenizer, fraction: float) -> EncodedBatch:
    held_out = [is_held_out(text, fraction) for text in texts]
    ids = tokenizer.encode(texts)

    def split(evaluation: bool) -> Encoded:
        own = [number for number, held in enumerate(held_out) if held == evaluation]
        tokens = np.concatenate([np.zeros(0, np.uint32), *(ids[number] for number in own)])
        return Encoded(tokens, len(own), sum(len(texts[number].encode()) for number in own))

    return EncodedBatch(split(False), split(True))
