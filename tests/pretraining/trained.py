"""Data that a small model learns in a few steps, and runs on it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from cs336_systems.distributed.process_group import Rank
from cs336_systems.pretraining.nonfinite import NonFiniteStep
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import LOG
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import Step
from cs336_systems.pretraining.tokenizer import ByteTokenizer
from cs336_systems.pretraining.trainer import Outcome, train
from tests.pretraining.streams import write


def write_dataset(folder: Path, n_train: int = 4000, n_evaluation: int | None = 500) -> Path:
    """A folder as of tokenize_data.py: noise over a rhythm, as bytes."""
    folder.mkdir(parents=True)
    splits = {}
    for name, n in (("train", n_train), ("evaluation", n_evaluation)):
        if n is not None:
            tokens = (np.random.RandomState(n).randint(0, 4, n) + np.arange(n) * 7) % 256
            write(
                folder / f"{name}-00000.bin", tokens, vocab_size=ByteTokenizer.vocab_size, eos_id=ByteTokenizer.eos_id
            )
            splits[name] = {"files": [f"{name}-00000.bin"], "documents": 1, "bytes": n, "tokens": n}
    (folder / "tokenizer.json").write_text(ByteTokenizer().json(), encoding="utf-8")
    named = {"name": "bytes", "vocab_size": ByteTokenizer.vocab_size, "eos_id": ByteTokenizer.eos_id}
    manifest = {"layout": 1, "corpus": "a rhythm", "files": 1, "tokenizer": named, "splits": splits}
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


def options(folder: Path, **changes) -> TrainOptions:
    """A run of ten steps in ``folder``/run on the data in ``folder``/data."""
    plain = TrainOptions.default("cpu")
    small = {"data": folder / "data", "out": folder / "run", "context_length": 16, "batch_size": 8, "steps": 10}
    less = {"warmup_steps": 3, "evaluate_every": 5, "evaluation_sequences": 12, "save_every": 5, "walltime": None}
    less["learning_rate"] = 1e-2
    return replace(plain, **small | less | changes)


EXPLODING = {"learning_rate": 1e36, "warmup_steps": 0, "weight_decay": 0.0, "save_every": 1}
"""After one step no gradient is finite."""


def losses_and_norms(folder: Path) -> list[tuple[float, float]]:
    """Of each step that holds, in order."""
    steps = read_run(folder / LOG).all(Step)
    assert [step.step for step in steps] == list(range(len(steps)))
    return [(step.loss, step.norm) for step in steps]


def train_each(rank: Rank, runs: list[TrainOptions]) -> list[Outcome | str]:
    """One run after the other, for ``spawn``: what came of it, or why it stopped."""
    outcomes: list[Outcome | str] = []
    for one in runs:
        try:
            outcomes.append(train(one, rank))
        except NonFiniteStep as error:
            outcomes.append(str(error))
    return outcomes
