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


@pytest.mark.slow
def test_runs_become_a_picture_also_while_one_is_being_written(run, tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name / "log.jsonl", *opening(60), *training(60, stop=20, end=None))
    with (tmp_path / "b/log.jsonl").open("a") as file:
        file.write('{"kind": "st')
    code, out, err = run("a", "b/log.jsonl", "--x", "tokens")
    assert code == 0
    assert err == "plot_run: b/log.jsonl: left out its last line, which is not whole\n"
    assert json.loads(out.splitlines()[-1]) == {"command": "plot_run", "out": "a/compared.png", "runs": ["a", "b"]}
    assert (tmp_path / "a/compared.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(run("a")[1])["out"] == "a/log.png" and (tmp_path / "a/log.png").exists()
    (tmp_path / "c/a").mkdir(parents=True)
    (tmp_path / "c/a/log.jsonl").write_bytes((tmp_path / "a/log.jsonl").read_bytes())
    told = json.loads(run("a", "c/a", "--out", "pictures/both.png")[1])
    assert told["runs"] == ["a/log.jsonl", "c/a/log.jsonl"] and (tmp_path / "pictures/both.png").exists()


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
