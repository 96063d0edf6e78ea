"""The command: what it prints, its refusals, and Ctrl-C and a kill in the middle of its work."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cs336_systems.pretraining.token_file import TokenFileWriter
from cs336_systems.pretraining.token_stream import Dataset

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(load_script, tmp_path, monkeypatch, capsys):
    """(exit code, stdout, stderr) of the command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    script = load_script("scripts/tokenize_data.py")

    def run(*arguments):
        try:
            code = script.main(["--processes", "1", *map(str, arguments)])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    for number in range(60):
        (tmp_path / "source" / f"{number}.py").write_text(f"x = {number}\n" * 10)
    return tmp_path / "source"


def test_a_run_says_what_it_made_and_where(run, source):
    arguments = ("--input", source, "--vocab-size", "300", "--evaluation-fraction", "0.2")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "source: 60 files, vocabulary " in out
    assert "|   documents |" in out
    last = json.loads(out.splitlines()[-1])
    dataset = Dataset.open(Path("data/source-bpe300"))
    assert last["out"] == "data/source-bpe300"
    assert last["documents"] == 60
    assert (
        last["tokens"]
        == last["train_tokens"] + last["evaluation_tokens"]
        == len(dataset.train) + len(dataset.evaluation)
    )
    assert last["bytes"] / last["tokens"] == pytest.approx(last["bytes_per_token"], abs=1e-3)
    code, _, err = run(*arguments)
    assert (code, err) == (2, "tokenize_data: --out data/source-bpe300 is there already; --replace makes it anew\n")
    assert run(*arguments, "--replace")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere"], "nowhere does not exist"),
        (["--input", "source", "--suffix", ".rs"], "folder source has no files that end in .rs"),
        (["--tokenizer", "nowhere"], "tokenizer nowhere: there is no nowhere, and made here are bpe and bytes"),
        (
            ["--evaluation-fraction", "1"],
            "--evaluation-fraction 1 leaves nothing to train a BPE on: name a",
        ),
        (["--eos-token", "<e>"], "--eos-token <e> is for a tokenizer.json, and --tokenizer is bpe"),
        (["--input", "source", "--vocab-size", "10"], "a vocabulary of bytes and an end of text has 257, got 10"),
        (["--evaluation-fraction", "1.5"], "--evaluation-fraction must lie in 0..1, got 1.5"),
        (["--evaluation-fraction", "nan"], "--evaluation-fraction must lie in 0..1, got nan"),
        (["--shard-tokens", "0"], "--shard-tokens must lie in 1..2147483647, got 0"),
        (["--sample-mb", "0"], "--sample-mb must be positive, got 0"),
        (["--processes", "0"], "--processes must be positive, got 0"),
        (["--out", "source"], "--out source is there and no dataset; name another folder"),
        (["--input", "source", "--tokenizer", "bytes", "--out", "source/1.py/out"], "Not a directory"),
    ],
)
def test_bad_input_is_one_sentence(run, source, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tokenize_data: ")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_a_full_disk_is_said_with_the_folder_and_one_file_is_one(run, source, monkeypatch):
    one = ("--input", "source/1.py", "--tokenizer", "bytes", "--evaluation-fraction", "0")
    assert " 1 file, vocabulary 257\n" in run(*one)[1]

    def full(writer, tokens):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenFileWriter, "append", full)
    code, out, err = run("--input", "source", "--tokenizer", "bytes", "--out", "full")
    assert (code, out, err) == (2, "", "tokenize_data: full: No space left on device\n")
    assert sorted(path.name for path in source.parent.iterdir()) == ["data", "source"]


def start(folder, *arguments):
    """The command in a process of its own, once it has written some tokens."""
    command = [sys.executable, ROOT / "scripts/tokenize_data.py", "--tokenizer", "bytes", "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *arguments], cwd=folder, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 2**20 for path in folder.glob("data/.*/.train*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.005)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_leaves_nothing_and_a_kill_nothing_that_looks_complete(tmp_path):
    process, children = start(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "tokenize_data: interrupted; nothing was written\n")
    assert list((tmp_path / "data").iterdir()) == []
    assert psutil.wait_procs(children, timeout=10)[1] == []

    process, children = start(tmp_path)
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert [path.name for path in (tmp_path / "data").iterdir()] == [f".stdlib-bytes.{process.pid}.tmp"]

    process, _ = start(tmp_path)
    assert process.wait(120) == 0, process.stderr.read()
    assert len(Dataset.open(tmp_path / "data/stdlib-bytes").train) > 5e6
