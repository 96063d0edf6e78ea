"""Small data, and runs of a small model that learns them in a few steps."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch._dynamo  # a group that is there when this is imported stays, and so does its port

from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.distributed.checkpoint_folder import name_of
from cs336_systems.distributed.process_group import Rank
from cs336_systems.pretraining.checkpoint import load_weights
from cs336_systems.pretraining.dataset import ANSWER, BEGIN, TokenFile, TokenStream, TokenWriter, describe
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import LoggedStep, Message
from cs336_systems.pretraining.tokenizer import ByteTokenizer
from cs336_systems.pretraining.trainer import NonFiniteStep, Outcome, train

LENGTHS = (12, 17, 3, 5, 9, 25, 2, 16, 7, 11, 4, 8)
"""Tokens of conversations; one is longer than a context of 16."""
BYTES = {"vocab_size": ByteTokenizer.vocab_size, "eos_id": ByteTokenizer.eos_id}


def listening() -> set[int]:
    """Ports at which this process and those below it wait for connections."""
    own = psutil.Process()
    found = set()
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found |= {at.laddr.port for at in each.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
    return found


def write_tokens(folder: Path, tokens, name="a", vocab_size=50_000, **options) -> TokenFile:
    """A token file, NAME-00000.bin, written and opened."""
    with TokenWriter(folder, name, vocab_size=vocab_size, **options) as writer:
        writer.append(np.asarray(tokens, np.int64))
    return TokenFile.open(folder / writer.files[0])


def counting(n_tokens: int, *shards: int, vocab_size: int = 1) -> TokenStream:
    """The tokens 0, 1, 2, ... in memory, in files that end at ``shards`` and say this vocabulary."""
    parts = np.split(np.arange(n_tokens, dtype=np.uint32), sorted(shards))
    return TokenStream([TokenFile(Path(f"{i}.bin"), vocab_size, part) for i, part in enumerate(parts)])


def write_dataset(folder: Path, n_train: int = 4000, n_evaluation: int | None = 500) -> Path:
    """A folder as of tokenize_data.py: noise over a rhythm, as bytes."""
    folder.mkdir(parents=True)
    splits = {}
    for name, n in (("train", n_train), ("evaluation", n_evaluation)):
        if n is not None:
            tokens = (np.random.RandomState(n).randint(0, 4, n) + np.arange(n) * 7) % 256
            write_tokens(folder, tokens, name, **BYTES)
            splits[name] = {"files": [f"{name}-00000.bin"], "documents": 1, "bytes": n, "tokens": n}
    describe(folder, ByteTokenizer().json(), {"name": "bytes"} | BYTES, "a rhythm", 1, splits)
    return folder


def options(folder: Path, **changes) -> TrainOptions:
    """A run of ten steps in ``folder``/run on the data in ``folder``/data."""
    plain = TrainOptions.default("cpu")
    small = {"data": folder / "data", "out": folder / "run", "context_length": 16, "batch_size": 8, "steps": 10}
    less = {"warmup_steps": 3, "evaluate_every": 5, "evaluation_sequences": 12, "save_every": 5, "walltime": None}
    return replace(plain, **small | less | {"learning_rate": 1e-2} | changes)


EXPLODING = {"learning_rate": 1e36, "warmup_steps": 0, "weight_decay": 0.0, "save_every": 1}
"""After one step no gradient is finite."""


def copy_until(step: int, run: Path, out: Path) -> None:
    """Copy a run as it was when it was killed after this checkpoint."""
    shutil.copytree(run, out)
    for checkpoint in complete_checkpoints(out):
        if checkpoint.name > name_of(step):
            shutil.rmtree(checkpoint)


def said_by(run: Path) -> list[str]:
    """The messages in a run's log."""
    return [message.text for message in read_run(run / LOG).all(Message)]


def assert_equal_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_weights(run).weights for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def losses_and_norms(folder: Path) -> list[tuple[float, float]]:
    """Loss and norm of each step that holds, in order."""
    steps = read_run(folder / LOG).all(LoggedStep)
    assert [step.step for step in steps] == list(range(len(steps)))
    return [(step.loss, step.norm) for step in steps]


def train_each(rank: Rank, runs: list[TrainOptions]) -> list[Outcome | str]:
    """One run after the other, for ``spawn``: its outcome, or why it stopped."""
    outcomes: list[Outcome | str] = []
    for one in runs:
        try:
            outcomes.append(train(one, rank))
        except NonFiniteStep as error:
            outcomes.append(str(error))
    return outcomes


def refused(rank: Rank, run: TrainOptions) -> str:
    """Why a run is refused, for ranks."""
    with pytest.raises(ValueError) as refusal:
        train(run, rank)
    return str(refusal.value)


def write_chat(folder: Path, lengths: Sequence[int] = LENGTHS, held_out: Sequence[int] = (9, 14, 5)) -> Path:
    """A folder as of tokenize_data.py --chat: conversations of so many bytes, the last half (third, ...) answers."""
    folder.mkdir(parents=True)
    splits = {}
    for name, sizes in (("train", lengths), ("evaluation", held_out)):
        with TokenWriter(folder, name, **BYTES) as writer:
            for i, n in enumerate(sizes):
                marks = np.where(np.arange(n) >= n - max(1, n // (2 + i % 4)), ANSWER, 0).astype(np.uint8)
                marks[0] |= BEGIN
                writer.append((np.random.RandomState(i).randint(0, 4, n) + np.arange(n) * 7) % 256, marks)
        splits[name] = {"files": writer.files, "documents": len(sizes), "bytes": sum(sizes), "tokens": sum(sizes)}
    describe(folder, ByteTokenizer().json(), {"name": "bytes"} | BYTES, "chat", 1, splits, chat=True)
    return folder
