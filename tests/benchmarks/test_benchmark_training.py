"""Steady tokens per second of a run, on a CPU."""

import json

import pytest

from cs336_systems.experiments.training.cells import TrainingRunCell
from cs336_systems.experiments.training.measure import Enough, Watch, measure
from cs336_systems.pretraining.run_records import Step
from cs336_systems.pretraining.synthetic import write_random_tokens
from cs336_systems.pretraining.token_stream import Dataset

from .commands import cells_of, run_in_a_process

SHAPE = {"size": "tiny", "context_length": 16, "batch_size": 2, "total_batch_tokens": 64, "dtype": "fp32"}
WAY = {"keep": "autograd", "attention": "reference", "cuda_graph": "off", "warmup": 2, "seconds": 1e-6, "seed": 0}


def test_a_run_ends_when_it_was_steady_long_enough():
    watch = Watch(2, 3.0)
    with pytest.raises(Enough):
        for step in range(99):
            watch.write(Step(step, 1.0, 1000, 2.0, 1.0, 1e-3))
    assert [step.step for step in watch.steady] == [2, 3, 4]


@pytest.mark.parametrize("how", ["ours", "transformers"])
def test_both_ways_are_measured(how):
    if how == "transformers":
        pytest.importorskip("transformers")
    found = {metric.name: metric for metric in measure(TrainingRunCell("cpu", how=how, **SHAPE | WAY))}
    assert len(found["step"].samples) == 1
    (rate,), (ms,) = found["tokens_per_s"].samples, found["step"].samples
    assert rate == pytest.approx(64 / (ms / 1000))


def test_ours_alone_has_keep_and_graph_and_bad_input_is_said():
    cells = cells_of("training", "--how", "ours", "transformers", "--keep", "autograd", "all")
    assert [(cell.how, cell.keep) for cell in cells] == [("ours", "autograd"), ("ours", "all"), ("transformers", "")]
    for arguments, message in (
        (["--seconds", "0"], "--seconds must be positive and finite, got 0"),
        (["--seconds", "inf"], "--seconds must be positive and finite, got inf"),
        (["--attention", "magic"], "unknown attention 'magic'"),
        (["--size", "tinny"], "unknown model size 'tinny'"),
        (["--total-batch-tokens", "1000"], "--total-batch-tokens 1,000 is no multiple of 512"),
        (["--keep", "everything"], "unknown level"),
    ):
        with pytest.raises(ValueError, match=message):
            cells_of("training", *arguments)


def test_random_tokens_say_what_they_are(tmp_path):
    dataset = Dataset.open(write_random_tokens(tmp_path / "data", 1000, 5000))
    assert dataset.manifest["corpus"] == "random tokens"
    assert (len(dataset.train), dataset.evaluation, dataset.vocab_size) == (1000, None, 5000)
    with pytest.raises(ValueError, match="need a vocabulary of"):
        write_random_tokens(tmp_path / "other", 1000, 5)


@pytest.mark.slow
def test_the_command(tmp_path):
    small = ("--seconds", "0.1", "--context-length", "16", "--total-batch-tokens", "64", "--out", tmp_path)
    code, out, err = run_in_a_process("benchmark_training", *small)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["cells"][0]["tokens_per_s"] > 0
