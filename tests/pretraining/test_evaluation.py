"""Scores of saved models are those of their runs, with a standard error that says how far samples lie apart."""

import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cs336_systems.config import MODEL_SIZES
from cs336_systems.model import TransformerLM
from cs336_systems.pretraining.checkpoint import load_weights
from cs336_systems.pretraining.dataset import Dataset
from cs336_systems.pretraining.evaluation import Scores, score
from cs336_systems.pretraining.export import export_saved
from cs336_systems.pretraining.loader import Sequences
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation, TaskScores
from cs336_systems.pretraining.trainer import train
from scripts.evaluate import main
from tests.pretraining.trained import counting, options, write_chat, write_dataset


@pytest.fixture(scope="module")
def folder(folder, alone):
    """Runs on text and on conversations, with checkpoints after 5 and 10 steps and an evaluation of all there is."""
    write_chat(folder / "chat")
    for name in ("data", "chat"):
        train(options(folder, data=folder / name, out=folder / f"of-{name}", evaluation_sequences=None), alone)
    return folder


def scores_of(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0, capsys.readouterr().err
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
    assert main([str(folder / "of-chat"), "--data", str(folder / "chat"), "--context-length", "9", "--all"]) == 0
    assert (
        len(re.findall(r"chat: \d conversations in \d rows .*; \d beyond the context are cut", capsys.readouterr().err))
        == 1
    )


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


def likelihood_of(folder, capsys, n_targets):
    """(text, the log-likelihood of its first targets given the first byte, by evaluate.py)."""
    stream = np.empty(n_targets + 1, np.int64)
    Dataset.open(folder / "data").evaluation.copy(0, stream)
    asked = ("--data", folder / "data", "--context-length", n_targets, "--sequences", 1)
    (row,) = scores_of(capsys, folder / "of-data", *asked)
    assert row["targets"] == n_targets
    return bytes(stream.astype(np.uint8).tolist()).decode("latin-1"), -n_targets * row["loss"]


@pytest.fixture(scope="module")
def exported(folder):
    return export_saved(folder / "hf", load_weights(folder / "of-data")).folder


def test_the_loss_is_the_likelihood_that_transformers_finds(folder, exported, capsys):
    transformers = pytest.importorskip("transformers")
    text, ours = likelihood_of(folder, capsys, 15)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    assert ids.shape == (1, 16)
    with torch.no_grad():
        each = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert ours == pytest.approx(each.sum().item(), rel=1e-5)


def test_the_loss_is_the_likelihood_that_lm_eval_finds(folder, exported, capsys):
    models = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    text, ours = likelihood_of(folder, capsys, 15)
    request = Instance("loglikelihood", {}, (text[0], text[1:]), 0)
    ((theirs, _),) = models.HFLM(str(exported), device="cpu", dtype="float32").loglikelihood(
        [request], disable_tqdm=True
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_tasks_need_lm_eval_or_write_its_scores_into_the_runs_log(folder, capsys, tmp_path):
    assert main([str(folder / "of-data")]) == 2
    assert "give --data or --tasks" in capsys.readouterr().err
    lines = [{"text": "ab", "choices": ["c", "d"], "label": i % 2} for i in range(4)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, lines)))
    task = tmp_path / "letters.yaml"
    task.write_text(TASK.format(rows=tmp_path / "rows.json"))
    code = main([str(folder / "of-data"), "--tasks", str(task), "--sequences", "3"])
    said = capsys.readouterr()
    if importlib.util.find_spec("lm_eval") is None:
        assert code == 2 and said.err.count("\n") == 1 and "uv sync --extra evaluation" in said.err
        return
    assert code == 0, said.err
    scores = json.loads(said.out.splitlines()[-1])["tasks"][str(folder / "of-data")]
    assert 0 < scores["letters"]["acc"] < 1 and scores["letters"]["acc_stderr"] > 0
    logged = read_run(folder / "of-data" / LOG).last(TaskScores)
    assert (logged.step, logged.scores) == (10, scores)
    assert main([str(folder / "of-data"), "--tasks", "no_such_task"]) == 2
    assert "knows no task 'no_such_task'" in capsys.readouterr().err


TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {rows}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
"""
