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


def test_figures_are_written_where_asked(script, capsys, tmp_path):
    """The limits of the second picture of scaling lie outside of it."""
    asked = (["pipeline"], ["scaling"], ["scaling", "--most-devices", "1024", "--context-length", "4"], ["failures"])
    for i, question in enumerate(asked):
        path = tmp_path / "figures" / f"{i}.png"
        assert script.main([*question, "--figure", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["figure"] == str(path)


def test_bad_input_is_one_sentence(script, capsys):
    for line, value in (
        *(("ring --world-size 0", "0"), ("pipeline --microbatches 6", "6"), ("scaling --most-devices 8", "8")),
        *(("accounting --tp 0", "0"), ("mesh --tokens 0", "0"), ("failures --save 0", "0.0")),
    ):
        assert script.main(line.split()) == 2
        question = line.split()[0]
        (said,) = capsys.readouterr().err.strip().splitlines()
        assert said.startswith(f"parallelism {question}: ")
        assert said.endswith(f"got {value}")
