"""Every question has a table and a last line of JSON; bad input has one sentence."""

import json
import math

import pytest


@pytest.fixture
def script(load_script):
    return load_script("scripts/parallelism.py")


@pytest.mark.parametrize(
    "question", ["ring", "forms", "mesh", "accounting", "pipeline", "scaling", "failures", "devices"]
)
def test_each_question_is_answered(script, capsys, question):
    assert script.main([question]) == 0
    printed = capsys.readouterr().out.strip().splitlines()
    assert json.loads(printed[-1])["question"] == question
    assert any(line.startswith(("|:-", "|--")) for line in printed), "no Markdown table"


def test_the_answers_of_the_4d_question(script, capsys):
    script.main(["accounting"])
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (answer["h100"], answer["fsdp"]) == (44, 38)
    assert math.ceil(answer["tokens per device, sum, rings of n"]) == 396
    assert math.ceil(answer["tokens per device, max, rings of n"]) == 320


@pytest.mark.slow
def test_figures_are_written_where_asked(script, capsys, tmp_path):
    for question in ("pipeline", "scaling", "failures"):
        path = tmp_path / f"{question}.png"
        assert script.main([question, "--figure", str(path)]) == 0
        assert path.exists()
        assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["figure"] == str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ring", "--world-size", "0"], "parallelism ring: world size must be positive, got 0"),
        (["ring", "--device", "h300"], "parallelism ring: unknown device 'h300': known are h100, h200, b200, tpu-v5p"),
        (
            ["pipeline", "--microbatches", "6"],
            "parallelism pipeline: interleaved needs a multiple of 4 microbatches, got 6",
        ),
        (
            ["scaling", "--most-devices", "8"],
            "parallelism scaling: --most-devices must be above one domain of 8, got 8",
        ),
        (["scaling", "--parameters", "0"], "parallelism scaling: n_parameters must be positive, got 0"),
        (["accounting", "--tp", "0"], "parallelism accounting: number of devices must be positive, got 0"),
        (["mesh", "--tokens", "0"], "parallelism mesh: tokens must be positive, got 0"),
        (["failures", "--save", "0"], "parallelism failures: time to save must be positive, got 0.0"),
        (["failures", "--nodes", "0"], "parallelism failures: number of nodes must be positive, got 0"),
    ],
)
def test_bad_input_is_one_sentence(script, capsys, arguments, message):
    assert script.main(arguments) == 2
    assert capsys.readouterr().err.strip() == message
