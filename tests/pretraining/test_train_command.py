"""The command: what it leaves and says, signals, kills at any moment, and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from matplotlib.figure import Figure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from cs336_systems.distributed import background_checkpoint
from cs336_systems.distributed.checkpoint import complete_checkpoints
from cs336_systems.pretraining.checkpoint import load_trained, load_weights
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import End
from cs336_systems.training.step import TrainStep
from tests.distributed.checks import free_port
from tests.pretraining.trained import losses_and_norms, write_dataset

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--device", "cpu", "--data", "data", "--context-length", "16", "--warmup-steps", "3", "--walltime", "900")


def start(folder, *arguments, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(ROOT / "scripts/train.py"), *SMALL, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for_steps(process, log, n):
    while not log.exists() or log.read_bytes().count(b'"kind": "step"') < n:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_resumed(main, tmp_path):
    process = start(tmp_path, "--out", "run", "--steps", "100000", "--save-every", "100000", "--evaluate-every", "None")
    wait_for_steps(process, tmp_path / "run" / LOG, 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    line = json.loads(out.splitlines()[-1])
    made = line["steps"]
    assert (line["reason"], line["resumed_at"], "exported" in line) == ("interrupted", 0, False)
    assert made >= 5 and complete_checkpoints(tmp_path / "run")[-1].name == f"step-{made:08d}"
    assert read_run(tmp_path / "run" / LOG).last(End).step == made
    code, out, err = main(*SMALL, "--out", "run", "--steps", str(made + 3))
    assert (code, err) == (0, "")
    line = json.loads(out.splitlines()[-1])
    assert (line["reason"], line["steps"], line["resumed_at"]) == ("done", made + 3, made)
    assert line["evaluation_loss"] < 6
    assert (tmp_path / line["picture"]).stat().st_size > 10_000
    exported = load_trained(tmp_path / line["exported"], device="cpu", dtype=torch.float32)
    saved = load_weights(tmp_path / "run").weights
    assert all(torch.equal(parameter, saved[name]) for name, parameter in exported.model.named_parameters())
    assert len(losses_and_norms(tmp_path / "run")) == made + 3


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["--tensor", "--context"])
def test_a_rank_that_is_killed_is_one_sentence_on_the_other(tmp_path, sharing):
    write_dataset(tmp_path / "data")
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    asked = ("--out", "run", "--steps", "100000", "--evaluate-every", "None", "--keep", "products", sharing, "2")
    first, second = (start(tmp_path, *asked, **place, RANK=rank) for rank in "01")
    try:
        wait_for_steps(first, tmp_path / "run" / LOG, 3)
        second.kill()
        _, err = first.communicate()  # well before a collective's 600 s
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 1
    assert re.fullmatch(r"train: rank 0 has lost another rank; the same command goes on from .*\n", err), err


@pytest.fixture
def main(command, monkeypatch, tmp_path):
    """The command, in a folder with data."""
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "data")
    return partial(command, "train")


QUICK = ("--data", "data", "--out", "run", "--context-length", "16", "--warmup-steps", "0")


def test_no_memory_is_printed_of_adapters_that_are_too_large(main):
    code, out, err = main("--lora-rank", "65", "--save-every", "None", "--no-export", "--print-memory")
    assert (code, out) == (2, "")
    assert "a LoRA rank of 65 is larger than layers.0.attn.q_proj.weight, which is 64 x 64" in err


@pytest.mark.parametrize("what", ["--print-config", "--print-memory", "--print-plan"])
def test_the_first_of_several_ranks_prints_for_all(main, monkeypatch, what):
    card = ["--gpu", "h100"] if what == "--print-plan" else []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        code, out, err = main("--size", "tiny", what, *card)
        assert (code, err, bool(out)) == (0, "", rank == "0")


@pytest.mark.slow
def test_memory_is_printed_without_training(main, tmp_path):
    offload = ["m", "v", "residual"]
    options = ["--device", "cuda", "--size", "qwen2.5-14b", "--keep", "input", "--offload", *offload, "--print-memory"]
    code, out, err = main(*options)
    assert (code, err) == (0, "")
    said = dict(re.findall(r"^\| (.+?) +\| +([\d.]+) +\|$", out, flags=re.MULTILINE))
    for name in ("weights", "m on the host", "v on the host"):
        assert float(said[name]) == pytest.approx(2 * 14.77e9 / 2**30, rel=0.01)
    assert float(said["residual on the host"]) == 48 * 16 * 1024 * 5120 * 2 / 2**30
    assert "m" not in said and "and bf16" in out.splitlines()[0]
    assert not (tmp_path / "runs").exists()


def test_bad_input_is_one_sentence_and_code_2(main, tmp_path, monkeypatch):
    write_dataset(tmp_path / "torn")
    with (tmp_path / "torn" / "train-00000.bin").open("r+b") as file:
        file.truncate(1200)
    (tmp_path / "run.toml").touch()
    sharing, caps = ["--device", "cpu", "--keep", "products"], ["--device-gib", "1", "--host-gib", "2"]
    for arguments, value in (
        (["--size", "tinny"], "'tinny'"),
        (["--config", "nowhere.toml"], "nowhere.toml: No such file or directory"),
        (["--gpu", "h100"], "--gpu is for --print-plan"),
        (["--final-fraction", "2", "--data", "nowhere"], "see --warmup-steps"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "torn"], "torn/train-00000.bin"),
        (["--data", "data", "--zero", "1", "--cuda-graph", "on"], "got cpu"),
        (["--data", "data", "--init", "."], "config.json"),
        (["--data", "data", "--init", "Qwen/Qwen2.5-0.5B"], "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"),
        (["--data", "data", "--out", "run.toml"], "run.toml"),
        (
            ["--data", "data", *sharing, "--tensor", "2"],
            "multiple of 2 ranks, got 1; torchrun --nproc-per-node N",
        ),
        (["--data", "data", *sharing, "--tensor", "3"], "tensor 3 does not divide n_heads 4, n_kv_heads 4, vocab_size"),
        (["--data", "data", *sharing, "--context", "2", "--context-length", "18"], "4 equal parts, got 18 tokens"),
        (["--data", "data", *sharing, "--context", "2", "--attention", "sdpa-flash"], "reference, flash, hopper have"),
        (["--data", "data", "--context", "2", *caps], "--context 2 does not go together with --device-gib"),
    ):
        code, out, err = main(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("train: ") and value in err
    assert not (tmp_path / "runs").exists()
    code, _, err = main("--learning-rat", "1")
    assert code == 2 and "learning-rat" in err
    monkeypatch.setenv("RANK", "2")
    for local_rank, n_lines in (("0", 1), ("1", 0)):  # each node says what it lacks
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        code, out, err = main("--config", "nowhere.toml")
        assert (code, out, err.count("\n")) == (2, "", n_lines)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    main("--config", "nowhere.toml")  # the rank that is silent leaves its sentence to torchrun
    report = str(ChildFailedError("train", {1: ProcessFailure(1, 7, 2, str(tmp_path / "error.json"))}))
    assert "traceback : train: nowhere.toml: No such file or directory\n" in report


@pytest.mark.slow
def test_a_full_disk_at_the_end_costs_no_figure_and_damaged_checkpoints_are_said_and_left(main, tmp_path, monkeypatch):
    """The command says what it could not write; an earlier picture stays."""

    def full(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert main(*QUICK, "--steps", "1")[0] == 0
    earlier = (tmp_path / "run/log.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", full)
    code, out, err = main(*QUICK, "--steps", "2")
    assert (code, err) == (1, "train: run/log.png: No space left on device\n")
    said = json.loads(out.splitlines()[-1])
    assert (said["steps"], said["exported"], "picture" in said) == (2, "run/hf-2", False)
    assert (tmp_path / "run/log.png").read_bytes() == earlier
    assert not list((tmp_path / "run").glob(".log.png*"))
    markers = [path / "complete.json" for path in complete_checkpoints(tmp_path / "run")]
    for marker in markers:
        marker.write_text("{")
    code, out, err = main(*QUICK, "--steps", "3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run holds no checkpoint that is whole" in err
    assert [marker.read_text() for marker in markers] == ["{"] * 2


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_could_not_be_written_says_so(main, monkeypatch):
    monkeypatch.setattr(background_checkpoint, "write", Mock(side_effect=OSError(28, "No space left on device")))
    code, out, _ = main(*QUICK, "--steps", "2")
    said = json.loads(out.splitlines()[-1])
    fault = "no checkpoint of step 2: [Errno 28] No space left on device"
    assert (code, said["complaint"], "exported" in said) == (1, fault, False)


@pytest.mark.slow
def test_runs_that_fail(main, tmp_path, monkeypatch):
    """Memory is compared before anything is built where it can be known; else the device says that it is short."""
    with monkeypatch.context() as patched:
        patched.setattr("cs336_systems.harness.memory.free_bytes", lambda device: 2**20)
        code, out, err = main(*QUICK, "--steps", "2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("train: a step of tiny needs 0.0 GiB, 0.0 GiB are free")
    assert not (tmp_path / "run").exists()
    code, out, err = main(*QUICK, "--learning-rate", "1e36", "--weight-decay", "0", "--steps", "5")
    assert (code, err) == (1, "")
    assert "error: step 1: loss" in out
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity")
    monkeypatch.setattr(TrainStep, "__call__", Mock(side_effect=short))
    code, _, err = main(*QUICK, "--out", "other", "--steps", "2")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("train: CUDA out of memory; earlier checkpoints are kept")


@pytest.mark.slow
def test_under_caps_it_trains_exports_and_samples(main, command, tmp_path):
    caps = [*QUICK, "--device-gib", "0.5", "--host-gib", "2", "--steps", "2"]
    code, out, err = main(*caps, "--print-memory")
    assert (code, err) == (0, "")
    assert "One more GiB of host memory would bring nothing." in out and "| in all on the host" in out
    assert out.startswith("This is for a CPU and fp32, with the rates of an NVIDIA H200; ")
    assert not (tmp_path / "run").exists()
    code, out, err = main(*caps)
    said = json.loads(out.splitlines()[-1])
    assert (code, err, said["steps"], said["exported"]) == (0, "", 2, "run/hf-2")
    for where in ("run", "run/hf-2"):
        code, out, _ = command("sample", where, "--device", "cpu", "--max-tokens", "3")
        assert code == 0 and json.loads(out.splitlines()[-1])["new_tokens"] > 0


@pytest.mark.slow
def test_only_the_command_without_any_option_has_a_time_limit_and_what_ended_a_run_is_said(
    main, load_script, monkeypatch
):
    script, asked = load_script("scripts/train.py"), []
    with monkeypatch.context() as patch:
        patch.setattr(script, "_train", lambda options: asked.append(options.walltime) or 0)
        for arguments in ([], ["--steps", "300"], ["--size", "tiny"], ["--walltime", "9"]):
            script.main(arguments)
    assert asked == [70.0, None, None, 9.0]
    code, out, err = main(*QUICK, "--steps", "900", "--walltime", "1e-3", "--no-export")
    assert (code, err) == (0, "")
    said, line = out.splitlines()[-2:]
    assert "--walltime 0.001 s" in said and json.loads(line)["reason"] == "walltime"
