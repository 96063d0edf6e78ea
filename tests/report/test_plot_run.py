"""The command: its picture and figures, a log that is being written, and refusals."""

import json
import re

import pytest

from tests.pretraining.runs import opening, training, write


@pytest.fixture
def run(load_script, tmp_path, monkeypatch, capsys):
    """(exit code, stdout, stderr) of the command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    script = load_script("scripts/plot_run.py")

    def run(*arguments):
        try:
            code = script.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def test_a_run_becomes_a_picture_beside_its_log(run, tmp_path):
    write(tmp_path / "first/log.jsonl", *opening(60), *training(60))
    code, out, err = run("first")
    assert (code, err) == (0, "")
    told = json.loads(out.splitlines()[-1])
    assert told["out"] == "first/log.png"
    assert (tmp_path / "first/log.png").read_bytes().startswith(b"\x89PNG")
    first = told["runs"]["first"]
    assert (first["steps"], first["n_steps"], first["ended"]) == (60, 60, "done")
    assert first["evaluation_loss"] > 0
    assert 150_000 < first["tokens_per_s"] < 170_000
    assert first["speed_of_light_percent"] is None


def test_several_runs_one_of_which_is_being_written(run, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name / "log.jsonl", *opening(60), *training(60, stop=20, end=None))
    with (tmp_path / "b/log.jsonl").open("a") as file:
        file.write('{"kind": "st')
    code, out, err = run("a", "b/log.jsonl", "--x", "tokens", "--out", "pictures/both.png")
    assert code == 0
    assert err == "plot_run: b/log.jsonl: left out its last line, which is not whole\n"
    told = json.loads(out.splitlines()[-1])
    assert list(told["runs"]) == ["a", "b"]
    assert (tmp_path / "pictures/both.png").exists()
    assert told["runs"]["b"]["ended"] is None
    (tmp_path / "c/a").mkdir(parents=True)
    (tmp_path / "c/a/log.jsonl").write_bytes((tmp_path / "a/log.jsonl").read_bytes())
    told = json.loads(run("a", "c/a", "--out", "both.png")[1])
    assert list(told["runs"]) == ["a/log.jsonl", "c/a/log.jsonl"]


def test_bad_input_is_one_sentence(run, tmp_path):
    (tmp_path / "text").write_text("Once upon a time.\n")
    (tmp_path / "newer").write_text('{"kind": "options", "schema": 99}\n')
    write(tmp_path / "good", *opening(5), *training(5))
    lines = (tmp_path / "good").read_bytes().splitlines(keepends=True)
    (tmp_path / "damaged").write_bytes(b"".join([*lines[:7], b"oh\n", *lines[7:]]))
    before = sorted(tmp_path.iterdir())
    faults = {"nowhere.jsonl": "nowhere.jsonl", "text": "text is no log", "newer": "newer, line 1: .* 99"}
    faults |= {
        "damaged": "damaged, line 8",
        "good good": "good is named twice",
        "good --out text/picture.png": "text: ",
    }
    for line, message in faults.items():
        code, out, err = run(*line.split())
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.match(f"plot_run: .*{message}", err), err
    assert sorted(tmp_path.iterdir()) == before
