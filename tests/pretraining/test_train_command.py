"""The command: what it leaves and says, signals, kills at any moment, and exit codes."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining import preparation
from cs336_systems.pretraining.checkpoint import load_trained, load_weights
from cs336_systems.pretraining.loader import epoch_order
from cs336_systems.pretraining.run_log import LOG
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import End
from cs336_systems.pretraining.trainer import train
from cs336_systems.processes import Died, FreshProcess
from cs336_systems.training.step import TrainStep
from tests.distributed.checks import spawn
from tests.pretraining.trained import losses_and_norms, options, train_each, write_dataset

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--device", "cpu", "--data", "data", "--context-length", "16", "--warmup-steps", "3", "--log-every", "1")


def start(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts/train.py"), *SMALL, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for_steps(process, log, n):
    deadline = time.monotonic() + 120
    while not log.exists() or log.read_bytes().count(b'"kind": "step"') < n:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_from_beginning_to_end_with_interruptions(tmp_path):
    write_dataset(tmp_path / "data")
    endless = ("--out", "run", "--steps", "100000", "--save-every", "100000", "--evaluate-every", "100000")
    made = 0
    for number, code, reason in ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 0, "terminated")):
        process = start(tmp_path, *endless)
        wait_for_steps(process, tmp_path / "run" / LOG, made + 5)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (code, "")
        line = json.loads(out.splitlines()[-1])
        assert (line["reason"], line["resumed_at"]) == (reason, made)
        assert line["steps"] >= made + 5
        assert "exported" not in line
        assert out.splitlines()[-2] == f"run: the same command goes on from step {line['steps']:,}"
        made = line["steps"]
        assert complete_checkpoints(tmp_path / "run")[-1].name == f"step-{made:08d}"
        assert read_run(tmp_path / "run" / LOG).last(End).step == made
    process = start(tmp_path, "--out", "run", "--steps", str(made + 3))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    line = json.loads(out.splitlines()[-1])
    assert (line["reason"], line["steps"], line["resumed_at"]) == ("done", made + 3, made)
    assert line["evaluation_loss"] < 6
    assert (tmp_path / line["picture"]).stat().st_size > 10_000
    exported = load_trained(tmp_path / line["exported"], device="cpu", dtype=torch.float32)
    saved = load_weights(tmp_path / "run").weights
    for name, parameter in exported.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    assert len(losses_and_norms(tmp_path / "run")) == made + 3


def train_until_killed(connection, asked, n_operations, n_bytes):
    """Killed before that change to the checkpoints' files, or by the kernel as a file grows beyond so many bytes."""
    torch.set_num_threads(1)
    changes = 0

    def kill(event, args):
        nonlocal changes
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and "step-" in str(args[0]):
            changes += 1
            if changes == n_operations:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    with joined("cpu") as rank:
        train(asked, rank)
    connection.send(changes)


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save_a_run_goes_on_as_if_it_had_not_been(tmp_path):
    """At 14 moments between changes to the disk, spread over three saves, and at 6 in the middle of writing tensors."""
    write_dataset(tmp_path / "data")

    def asked(n_steps, name="run", **changes):
        fields = {"save_every": 1, "evaluate_every": None, "out": tmp_path / name, "schedule": "constant", **changes}
        return options(tmp_path, steps=n_steps, **fields)

    ended = FreshProcess(train_until_killed, asked(4, "counted"), None, resource.RLIM_INFINITY)
    of_three_saves = ended.receive() * 3 // 4
    ended.end()
    n_bytes = max(file.stat().st_size for file in (tmp_path / "counted").rglob("*.safetensors"))
    draw = random.Random(0)
    moments = [(of_three_saves * (i + 1) // 14, resource.RLIM_INFINITY) for i in range(14)]
    moments += [(None, draw.randrange(n_bytes // 4, n_bytes)) for _ in range(6)]
    draw.shuffle(moments)
    made = torn = 0
    for moment in moments:
        process = FreshProcess(train_until_killed, asked(400), *moment)
        with pytest.raises(Died, match="SIGXFSZ" if moment[0] is None else "SIGKILL"):
            process.receive()
        process.end()
        torn += any((tmp_path / "run").glob(".step-*.tmp"))
        assert made <= _newest(tmp_path / "run") <= made + 3
        made = _newest(tmp_path / "run")
    assert made >= 6
    assert torn >= 10, "few kills came during a save"
    shutil.copytree(tmp_path / "run", tmp_path / "two")
    (outcome, _) = spawn(train_each, 2, [asked(made + 2, "two", batch_size=4, total_batch_tokens=128)], timeout_s=120)
    assert outcome[0].first_step == made
    with joined("cpu") as rank:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert train(asked(made + 2), rank).first_step == made
            train(asked(made + 2, "whole", save_every=1000), rank)
        finally:
            torch.set_num_threads(threads)
    assert losses_and_norms(tmp_path / "run") == losses_and_norms(tmp_path / "whole")
    two, whole = (torch.tensor(losses_and_norms(tmp_path / name)) for name in ("two", "whole"))
    assert torch.equal(two[:made], whole[:made])
    torch.testing.assert_close(two, whole, rtol=2**-15, atol=0.0)


def _newest(folder):
    found = complete_checkpoints(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


@pytest.mark.slow
def test_a_fault_of_one_rank_is_said_by_it(tmp_path):
    """The second of two has the broken token, of its half of the third batch."""
    write_dataset(tmp_path / "data")
    tokens = np.memmap(tmp_path / "data" / "train-00000.bin", "<u4", "r+", offset=1024)
    tokens[16 * epoch_order(249, seed=0, epoch=0)[2 * 8 + 5] + 5] = 77_777
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "scripts/train.py")]
    asked = ["--out", "run", "--batch-size", "4", "--steps", "9", "--save-every", "2", "--evaluate-every", "None"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command, *SMALL, *asked],
        **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False},
    )
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if line.startswith("train: ")]
    assert len(said) == 1
    assert re.match(
        r"train: rank 1: token 77777 is beyond the model's vocabulary of 320: data/train-00000.bin", said[0]
    )


@pytest.fixture
def main(load_script, monkeypatch, tmp_path, capfd):
    """Runs the command in this process; returns code, stdout and stderr."""
    script = load_script("scripts/train.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cs336_systems.report.command_line.n_gpus", lambda: 0)

    def run(*arguments):
        try:
            code = script.main(list(arguments))
        except SystemExit as error:
            code = error.code
        return code, *capfd.readouterr()

    return run


def test_a_printed_config_is_a_config(main, tmp_path):
    code, out, err = main("--seed", "3", "--print-config")
    assert (code, err) == (0, "")
    (tmp_path / "run.toml").write_text(out)
    assert main("--config", "run.toml", "--print-config") == (0, out, "")
    assert "seed = 3\n" in out


def test_memory_is_printed_without_training(main, tmp_path):
    offload = ["m", "v", "residual"]
    options = ["--device", "cuda", "--size", "qwen2.5-14b", "--keep", "input", "--offload", *offload, "--print-memory"]
    code, out, err = main(*options)
    assert (code, err) == (0, "")
    said = dict(re.findall(r"^\| (.+?) +\| +([\d.]+) +\|$", out, flags=re.MULTILINE))
    for name, billions in (("weights", 2 * 14.77), ("m on the host", 2 * 14.77), ("v on the host", 2 * 14.77)):
        assert float(said[name]) == pytest.approx(billions * 1e9 / 2**30, rel=0.01)
    assert float(said["residual on the host"]) == 48 * 16 * 1024 * 5120 * 2 / 2**30
    assert "m" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "tinny"], "train: unknown model size 'tinny': did you mean tiny"),
        (["--config", "nowhere.toml"], "train: nowhere.toml: No such file or directory"),
        (["--config", "run.toml"], "train: run.toml: unknown option 'sizes': did you mean size? see --help"),
        (["--data", "nowhere"], "train: nowhere is no folder of scripts/tokenize_data.py: it has no dataset.json"),
        (["--data", "data", "--context-length", "5000"], "needs 5,001"),
        (["--data", "torn"], "train: torn/train-00000.bin"),
        (["--data", "data", "--zero", "1", "--cuda-graph", "on"], "train: cuda_graph on needs device cuda, got cpu"),
        (["--data", "data", "--init", "."], "config.json"),
        (["--data", "data", "--out", "run.toml"], "train: run.toml"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(main, tmp_path, arguments, message):
    write_dataset(tmp_path / "data")
    write_dataset(tmp_path / "torn")
    with (tmp_path / "torn" / "train-00000.bin").open("r+b") as file:
        file.truncate(1200)
    (tmp_path / "run.toml").write_text('sizes = "tiny"')
    code, out, err = main(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("train: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_each_node_says_what_it_lacks(main, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    for local_rank, said in (("0", "train: nowhere.toml: No such file or directory\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert main("--config", "nowhere.toml") == (2, "", said)


def test_damaged_checkpoints_are_said_and_left(main, tmp_path):
    write_dataset(tmp_path / "data")
    quick = ("--data", "data", "--out", "run", "--context-length", "16", "--warmup-steps", "0", "--no-export")
    assert main(*quick, "--steps", "1")[0] == 0
    marker = tmp_path / "run" / "step-00000001" / "complete.json"
    marker.write_text("{")
    code, out, err = main(*quick, "--steps", "2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run holds no checkpoint that is whole; move these away to begin anew" in err
    assert marker.read_text() == "{"


def test_a_disk_that_is_full_at_the_end_costs_no_figure(main, tmp_path, monkeypatch):
    """The command says what it could not write, and what was learned all the same; an earlier picture stays."""

    def full(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    write_dataset(tmp_path / "data")
    quick = ("--data", "data", "--out", "run", "--context-length", "16", "--warmup-steps", "0")
    assert main(*quick, "--steps", "1")[0] == 0
    earlier = (tmp_path / "run/log.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", full)
    code, out, err = main(*quick, "--steps", "2")
    assert (code, err) == (1, "train: run/log.png: No space left on device\n")
    said = json.loads(out.splitlines()[-1])
    assert (said["steps"], said["exported"], "picture" in said) == (2, "run/hf-2", False)
    assert (tmp_path / "run/log.png").read_bytes() == earlier
    assert not list((tmp_path / "run").glob(".log.png*"))


def test_memory_that_is_too_little_is_one_sentence(main, tmp_path, monkeypatch):
    """Before anything is built where it can be known; else when the device says so."""
    write_dataset(tmp_path / "data")
    quick = ("--data", "data", "--out", "run", "--context-length", "16", "--warmup-steps", "0", "--steps", "2")

    def full(step, *batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity")

    with monkeypatch.context() as patched:
        patched.setattr(preparation, "free_host_bytes", lambda: 2**20)
        patched.setattr(preparation.psutil, "swap_memory", lambda: SimpleNamespace(free=0))
        code, out, err = main(*quick)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(r"train: a step of tiny is predicted to take 0.0 GiB, and 0.0 are free: take a smaller --size", err)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(TrainStep, "__call__", full)
    code, _, err = main(*quick)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("train: CUDA out of memory; earlier checkpoints are kept: take a smaller --batch-size")


def test_a_run_that_fails_is_code_1(main, tmp_path):
    write_dataset(tmp_path / "data")
    wild = ("--learning-rate", "1e36", "--weight-decay", "0", "--warmup-steps", "0", "--context-length", "16")
    code, out, err = main("--data", "data", *wild, "--steps", "5")
    assert (code, err) == (1, "")
    assert "error: step 1: loss" in out


def test_under_caps_it_trains_exports_and_samples(main, load_script, tmp_path, capfd):
    write_dataset(tmp_path / "data")
    caps = ["--data", "data", "--out", "run", "--device-gib", "0.5", "--host-gib", "2"]
    short = ["--context-length", "16", "--steps", "2", "--warmup-steps", "0"]
    code, out, err = main(*caps, *short, "--print-memory")
    assert (code, err) == (0, "")
    assert "One more GiB of host memory would bring nothing." in out and "| in all on the host" in out
    assert not (tmp_path / "run").exists()
    code, out, err = main(*caps, *short)
    said = json.loads(out.splitlines()[-1])
    assert (code, err, said["steps"], said["exported"]) == (0, "", 2, "run/hf-2")
    for where in ("run", "run/hf-2"):
        assert load_script("scripts/sample.py").main([where, "--device", "cpu", "--max-tokens", "3"]) == 0
        assert json.loads(capfd.readouterr()[0].splitlines()[-1])["new_tokens"] > 0
    refused = "train: --zero 1 does not go together with --device-gib and --host-gib\n"
    assert main(*caps, *short, "--zero", "1") == (2, "", refused)


def test_an_option_that_is_none_is_refused(main):
    code, _, err = main("--learning-rat", "1")
    assert code == 2
    assert "learning-rat" in err
