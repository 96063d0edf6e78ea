"""The command as a user meets it: one real run in a process of its own, then its options, endings and refusals."""

import csv
import io
import json
import re
from dataclasses import asdict

import pytest
import torch

from cs336_systems.experiments.driver import measured_by
from cs336_systems.experiments.model import ModelCell
from cs336_systems.harness import sweep
from cs336_systems.harness.record import Metric, RowFile, read_rows
from cs336_systems.processes import FreshProcess
from tests.benchmarks.commands import cells_of, refusal, run, run_in_a_process
from tests.harness.cells import fake_ceiling, fake_large_model, fake_model

ALWAYS_KNOWN = ("host", "python", "torch", "triton", "commit", "dirty", "argv", "seed", "timestamp")


def stand_in(monkeypatch, **fakes):
    """Have these functions measure cells instead."""
    monkeypatch.setattr("cs336_systems.experiments.model.measured_by", lambda module, name: fakes[name])


@pytest.fixture
def command(capsys):
    """Runs ``main`` in this process; returns (exit code, stdout, stderr)."""
    return lambda *arguments: run("benchmark_model", capsys, *arguments)


@pytest.fixture
def faked(monkeypatch):
    """Cells end at once: their measurements are stand-ins."""
    stand_in(monkeypatch, measure_ceiling=fake_ceiling, measure_model=fake_model)


@pytest.fixture
def refused(capsys, monkeypatch):
    """The sentence with which arguments are refused."""
    return lambda *arguments: refusal("benchmark_model", capsys, monkeypatch, *arguments)


@pytest.mark.slow
def test_what_cannot_fit_is_a_row_and_not_run(monkeypatch, command, tmp_path):
    stand_in(monkeypatch, measure_ceiling=fake_ceiling, measure_model=measured_by("model_measure", "measure_model"))
    options = ("--size", "tiny", "--mode", "step", "--context-length", 128, "--batch-size", 2**20)
    code, out, err = command(*options, "--out", tmp_path)
    assert code == 1
    (row,) = read_rows(tmp_path / "benchmark_model.csv").query("size == 'tiny'").to_dict("records")
    assert row["status"] == "predicted-oom"
    needed, free = re.fullmatch(r"needs (\S+) GiB, (\S+) GiB are free", row["message"]).groups()
    assert float(needed) > float(free) > 0
    assert (row["metric"], row["samples"]) == ("", [])
    assert f"predicted-oom: {row['message']}" in out
    assert json.loads(out.splitlines()[-1])["ok"] == 0
    assert err.splitlines()[-1] == f"benchmark_model: nothing was measured: predicted-oom: {row['message']}"


def press_ctrl_c_in_cell(number, monkeypatch):
    """From now on the ``number``-th cell, counted from 1, is interrupted while it is waited for."""
    really_receive, ended = FreshProcess.receive, []

    def receive(process):
        said = really_receive(process)
        if "status" in said:
            ended.append(said)
            if len(ended) == number:
                raise KeyboardInterrupt
        return said

    monkeypatch.setattr(FreshProcess, "receive", receive)


@pytest.mark.slow
def test_ctrl_c_exits_130_with_every_row_on_disk(faked, command, tmp_path, monkeypatch):
    """In the second of three models."""
    press_ctrl_c_in_cell(3, monkeypatch)
    code, out, err = command("--size", "tiny", "--out", tmp_path, "--format", "csv")
    assert code == 130
    assert next(csv.DictReader(io.StringIO(out)))["total ms"] == "2.00 (1.20–2.80)"
    rows = read_rows(tmp_path / "benchmark_model.csv")
    assert list(rows["status"]) == ["ok"] * 5 + ["interrupted"]
    assert rows.iloc[-1]["commit"]
    last = json.loads(out.splitlines()[-1])
    assert last["cells"][-1]["status"] == "interrupted"
    assert (last["ok"], last["asked"]) == (1, 3)
    assert "1 of 3 cells were not begun" in err


def test_what_runs_and_each_result_is_said_at_once(faked, command):
    """On no terminal: a line when a cell begins, with the time, and one with its main figures when it has ended."""
    _, _, err = command("--size", "tiny", "--mode", "step")
    lines = [line for line in err.splitlines() if line.startswith("[1/1] tiny")]
    assert re.search(r"step: runs since \d\d:\d\d:\d\d$", lines[0])
    assert re.search(r"step: ok \(\d+\.\d s\), forward 0.5 ms, step 2 ms, tokens_per_s 1.28e\+05 1/s$", lines[1])


def test_a_full_disk_is_said_once_and_what_was_measured_is_shown(faked, command, tmp_path, monkeypatch):
    really_append, appended = RowFile.append, []

    def append(self, rows):
        if len(appended) == 2:
            raise OSError(28, "No space left on device")
        appended.append(rows)
        really_append(self, rows)

    monkeypatch.setattr(RowFile, "append", append)
    code, out, err = command("--size", "tiny", "--out", tmp_path)
    assert code == 2
    assert "No space left on device" in err.splitlines()[-1]
    assert str(tmp_path / "benchmark_model.csv") in err.splitlines()[-1]
    assert "Traceback" not in err
    assert len(re.findall(r"^\| tiny", out, re.MULTILINE)) == 2
    assert list(read_rows(tmp_path / "benchmark_model.csv")["variant"]) == ["ceiling"] * 2 + ["eager"] * 3


@pytest.mark.slow
def test_bad_values(refused, tmp_path, monkeypatch):
    faults = {
        "--size smal": "'smal'.*did you mean small",
        "--batch-size 4 -1": "--batch-size .*-1",
        "--timeout nan": "--timeout .*nan",
        "--dtype fp32 tf32": "--dtype tf32",
        "--mode": "--mode .*none",
        "--memory-budget-gib nan": "--memory-budget-gib .*nan",
        "--memory-budget-gib 9 --checkpoint full": "--memory-budget-gib .*--checkpoint full",
        "--memory-budget-gib 0.001 --mode step --size tiny": "0.001 GiB for tiny",
        "--kernels fused": "kernels fused need device cuda, got cpu",
        "--cuda-graph on": "--mode forward backward step",
        f"--compare {tmp_path}/missing.csv": "missing.csv",
        f"--compare {tmp_path}": str(tmp_path),
    }
    for line, message in faults.items():
        said = refused(*line.split(), "--out", tmp_path / "new")
        assert re.search(message, said), (line, said)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search("--device cuda.*--device cpu", refused("--device", "cuda"))


@pytest.mark.slow
def test_a_file_from_before_checkpointing_can_be_compared_with_but_not_continued(refused, faked, command, tmp_path):
    columns = [column for column in sweep.cell_columns(ModelCell) if column != "checkpoint"]
    file = RowFile(tmp_path / "benchmark_model.csv", columns)
    (cell,) = cells_of("model", "--size", "tiny", "--mode", "step")
    said = {name: value for name, value in asdict(cell).items() if name in columns}
    said |= {"variant": "eager", "schema_version": 1, "status": "ok"}
    file.append([said | Metric("step", "ms", [1.0, 2.0]).statistics()])
    message = refused("--size", "tiny", "--out", tmp_path)
    assert "missing ['checkpoint']" in message
    code, out, _ = command("--size", "tiny", "--mode", "step", "--compare", file.path)
    assert code == 0
    assert re.search(r"\| tiny +\| step +\| +1.500 +\| +2.000 ", out), out


@pytest.mark.slow
def test_a_budget_picks_the_policy_of_every_cell_and_says_so(faked, command, tmp_path, monkeypatch):
    stand_in(monkeypatch, measure_ceiling=fake_ceiling, measure_model=fake_large_model)
    options = ("--size", "tiny", "--batch-size", 64, "--context-length", 64, 128, "--mode", "step")
    code, out, err = command(*options, "--memory-budget-gib", 0.12, "--out", tmp_path)
    assert code == 0 and "2 of 2 above the budget of 0.12" in out
    rows = read_rows(tmp_path / "benchmark_model.csv").query("metric == 'step'")
    assert rows["checkpoint"].iloc[0] == "none"
    assert rows["checkpoint"].iloc[1].startswith("keep-matmuls-")
    assert len([line for line in err.splitlines() if "within 0.12 GiB, least recomputation" in line]) == 2


@pytest.mark.slow
def test_a_budget_chooses_what_hand_written_blocks_keep():
    line = "--size tiny --mode step --matmul-dtype e4m3 --memory-budget-gib 9"
    assert [cell.keep for cell in cells_of("model", *line.split())] == ["all"]


@pytest.mark.slow
def test_a_real_run_leaves_rows_with_their_provenance_and_a_figure(tmp_path):
    folder = tmp_path / "new" / "results"
    options = ("--size", "tiny", "--context-length", 64, "--batch-size", 2, "--mode", "step", "--steps", 3)
    code, out, err = run_in_a_process("benchmark_model", *options, "--out", folder)
    assert code == 0 and "Traceback" not in err and "Warning" not in err, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["benchmark"], summary["csv"]) == ("benchmark_model", str(folder / "benchmark_model.csv"))
    rows = read_rows(folder / "benchmark_model.csv")
    for column in ALWAYS_KNOWN:
        assert (rows[column].astype(str) != "").all(), column
    assert all(json.loads(state) for column in ("state_before", "state_after") for state in rows[column])
    cell = rows[rows["variant"] == "eager"].set_index("metric")
    assert [len(samples) for samples in cell.loc[["forward", "step", "warmup_step"], "samples"]] == [3, 3, 1]
    parts = zip(*cell.loc[["forward", "backward", "optimizer"], "samples"], strict=True)
    assert cell.loc["step", "samples"] == pytest.approx([sum(part) for part in parts], rel=1e-4)
    tokens_per_s = sorted(2 * 64 / (ms / 1e3) for ms in cell.loc["step", "samples"])
    assert cell.loc["tokens_per_s", "median"] == pytest.approx(tokens_per_s[1], rel=1e-5)
    ceilings = rows[rows["variant"] == "ceiling"]
    assert set(ceilings["metric"]) == {"matmul_ceiling", "copy_ceiling"}
    assert (folder / "benchmark_model.png").read_bytes().startswith(b"\x89PNG")
