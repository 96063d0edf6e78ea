"""The command: what it prints, its refusals, and Ctrl-C in the middle of its work."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from cs336_systems.pretraining.dataset import Dataset, TokenWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(command, tmp_path, monkeypatch):
    """The command, in a folder of its own that has ``source``, 60 files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    for number in range(60):
        (tmp_path / "source" / f"{number}.py").write_text(f"x = {number}\n" * 10)
    return partial(command, "tokenize_data")


def test_a_run_says_what_it_made_and_where(run, monkeypatch):
    arguments = ("--input", "source", "--vocab-size", "300", "--evaluation-fraction", "0.2")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    last, dataset = json.loads(out.splitlines()[-1]), Dataset.open(Path("data/source-bpe300"))
    assert (last["out"], last["documents"]) == ("data/source-bpe300", 60)
    tokens = last["train_tokens"] + last["evaluation_tokens"]
    assert last["tokens"] == tokens == len(dataset.train) + len(dataset.evaluation)
    assert last["bytes"] / last["tokens"] == pytest.approx(last["bytes_per_token"], abs=1e-3)
    assert run(*arguments)[0] == 2
    assert run(*arguments, "--replace")[0] == 0
    Path("rows.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    code, _, err = run("--input", "rows.jsonl", "--tokenizer", "bytes", "--evaluation-fraction", "0")
    assert (code, err) == (0, "1 rows without text left out\n")
    Path("rows.jsonl").unlink()
    monkeypatch.setattr(TokenWriter, "append", Mock(side_effect=OSError(28, "No space left on device")))
    code, out, err = run("--input", "source", "--tokenizer", "bytes", "--out", "full")
    assert (code, out, err) == (2, "", "tokenize_data: full: No space left on device\n")
    assert sorted(path.name for path in Path().iterdir()) == ["data", "source"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--input", "nowhere"], "nowhere"),
        (["--tokenizer", "nowhere"], "nowhere"),
        (["--tokenizer", "org/model"], "hf download org/model --local-dir model fetches it"),
        (["--input", "source", "--encoding", "latin-99"], "--encoding latin-99 is unknown"),
        (["--evaluation-fraction", "1"], "--evaluation-fraction 1 "),
        (["--eos-token", "<e>"], "--eos-token <e> "),
        (["--input", "source", "--vocab-size", "10"], "got 10"),
        (["--evaluation-fraction", "1.5"], "got 1.5"),
        (["--out", "source"], "--out source "),
        (["--input", "source", "--tokenizer", "bytes", "--out", "source/1.py/out"], "Not a directory"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, value):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tokenize_data: ") and value in err and err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["source"]


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_leaves_nothing(tmp_path):
    command = [sys.executable, ROOT / "scripts/tokenize_data.py", "--tokenizer", "bytes"]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "start_new_session": True}
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **how)
    while not any(path.stat().st_size > 2**20 for path in tmp_path.glob("data/.*/train*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "tokenize_data: interrupted; nothing was written\n")
    assert list((tmp_path / "data").iterdir()) == []
