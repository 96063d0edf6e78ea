"""Scores of saved models are those of their runs, with a standard error that says how far samples lie apart."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cs336_systems.config import MODEL_SIZES
from cs336_systems.distributed.process_group import joined
from cs336_systems.model import TransformerLM
from cs336_systems.pretraining.evaluation import Scores, score
from cs336_systems.pretraining.loader import Sequences
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation
from cs336_systems.pretraining.trainer import train
from scripts.evaluate import main
from tests.pretraining.trained import counting, options, write_chat, write_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs on text and on conversations, with checkpoints after 5 and 10 steps and an evaluation of all there is."""
    folder = tmp_path_factory.mktemp("scored")
    write_dataset(folder / "data")
    write_chat(folder / "chat")
    with joined("cpu") as rank:
        for name in ("data", "chat"):
            train(options(folder, data=folder / name, out=folder / f"of-{name}", evaluation_sequences=None), rank)
    return folder


def scores_of(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]


@pytest.mark.parametrize("name", ["data", "chat"])
def test_every_checkpoint_has_the_loss_that_its_run_saw(folder, name, capsys):
    run = folder / f"of-{name}"
    found = scores_of(capsys, run, "--data", folder / name, "--context-length", 16, "--all", "--batch-size", 5)
    logged = read_run(run / LOG).all(Evaluation)[1:]
    assert [row["step"] for row in found] == [5, 10] == [one.step for one in logged]
    for row, one in zip(found, logged, strict=True):
        assert row["loss"] == pytest.approx(one.loss, rel=1e-5)
        assert row["targets"] == one.tokens
        assert row["perplexity"] == pytest.approx(math.exp(one.loss), rel=1e-5)
    if name == "data":  # 500 tokens of a byte each
        assert found[0]["bits_per_byte"] == pytest.approx(logged[0].loss / math.log(2), rel=1e-5)
    else:
        assert found[0]["bits_per_byte"] is None


def test_two_sources_have_scores_of_their_own_and_other_tokens_are_refused(folder, capsys):
    found = scores_of(capsys, folder / "of-data", "--data", folder / "data", folder / "chat", "--sequences", 2)
    assert [Path(row["data"]).name for row in found] == ["data", "chat"]
    assert [row["sequences"] for row in found] == [2, 2]
    assert found[0]["loss"] != found[1]["loss"]
    other = folder / "other"
    write_dataset(other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"b"', '"bb"'))
    assert main([str(folder / "of-data"), "--data", str(other)]) == 2
    assert "has other tokens than" in capsys.readouterr().err
    assert main([str(folder / "of-data"), "--data", str(folder / "data"), "--context-length", "99"]) == 2
    assert "--context-length 99 is beyond the model's context of 16" in capsys.readouterr().err


def test_the_standard_error_is_the_spread_of_means_over_samples():
    config = MODEL_SIZES["tiny"].at_context(8)
    torch.manual_seed(0)
    model, stream = TransformerLM(config), counting(8 * 200 + 1)
    stream.files[0].tokens[:] = np.random.RandomState(0).randint(0, 16, len(stream)) ** 2
    sequences = Sequences(stream, 8, config.vocab_size)
    whole = score(model, sequences, 64)
    each = np.array([score(model, _Only(sequences, i), 1).loss for i in range(200)])
    assert whole.loss == pytest.approx(each.mean(), rel=1e-6)
    assert whole.standard_error == pytest.approx(each.std(ddof=1) / math.sqrt(200), rel=1e-6)
    assert math.isnan(score(model, _Only(sequences, 0), 1).standard_error)
    assert Scores(1000.0, 0.0, 1, 1).perplexity == math.inf


class _Only:
    """One of several sequences."""

    def __init__(self, sequences, number):
        self._sequences, self._number = sequences, number
        self.send = sequences.send

    def __len__(self):
        return 1

    def read(self, numbers):
        return self._sequences.read([self._number])
