"""``benchmark_training.py`` on a CPU, from the command line, and the tokens that it trains on."""

import json

import pytest

from cs336_systems.pretraining.synthetic import write_random_tokens
from cs336_systems.pretraining.token_stream import Dataset

from .commands import cells_of, run_in_a_process


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "inf"], "--seconds must be positive and finite, got inf"),
        (["--attention", "magic"], "unknown attention 'magic': known are reference"),
        (["--attention", "flashh"], "unknown attention 'flashh': did you mean 'flash'\\? known are reference"),
        (["--size", "tinny"], "unknown model size 'tinny'"),
        (["--keep", "everything"], "unknown level"),
    ],
)
def test_bad_input_is_said(arguments, message):
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
