"""Provenance: the commit that ran, whether it was dirty, every column that says where, and readings beside a run."""

import json
import subprocess
import sys
import time

import pytest
import torch

from cs336_systems.harness import provenance
from cs336_systems.harness.record import schema_columns

CPU = torch.device("cpu")


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def uncached(monkeypatch):
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    provenance.source_version.cache_clear()
    yield
    provenance.source_version.cache_clear()


@pytest.fixture
def source_version(tmp_path, monkeypatch):
    """The function, which believes to live in ``tmp_path``, asked anew each time."""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "cs336_systems/measurement/provenance.py"))

    def ask():
        provenance.source_version.cache_clear()
        return provenance.source_version()

    return ask


def test_only_changes_of_measured_sources_are_dirt(tmp_path, source_version, monkeypatch):
    names = ("cs336_systems/measurement/provenance.py", "benchmarks/b.py", "README.md", "pyproject.toml")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    for name, dirty in (
        ("README.md", False),
        ("profiles/new.csv", False),
        *((name, True) for name in (*names[:2], "benchmarks/new.py", "pyproject.toml")),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("two\n")
        assert source_version() == (commit, dirty), name
        git(tmp_path, "stash", "-q", "-u")
    for declared, expected in (("0123abcd", ("0123abcd", False)), ("0123abcd-dirty", ("0123abcd", True))):
        monkeypatch.setenv(provenance.COMMIT_VARIABLE, declared)
        assert source_version() == expected


def test_without_git_or_variable_nothing_is_claimed(tmp_path, source_version, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_version() == ("unknown", True)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert source_version() == ("unknown", True)


def test_every_provenance_column_is_filled_and_is_json(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/long/path/benchmark_x.py", "--size", "two words", "--out", "/home/me/out"])
    row = provenance.versions(CPU)
    columns = schema_columns(())
    by_the_sweep = {"seed", "timestamp", "state_before", "state_after"}
    assert set(row) == set(columns[columns.index("gpu") :]) - by_the_sweep
    assert {name for name, value in row.items() if value == ""} == {"gpu", "driver", "cuda", "nccl"}
    assert row["argv"] == "benchmark_x.py --size 'two words' --out out"
    assert (row["torch"], row["gpu_count"]) == (torch.__version__, 0)
    assert row["host"].endswith("cores")
    state = provenance.device_state(CPU)
    assert json.loads(json.dumps([state, row])) == [state, row]
    assert state["load_1min"] >= 0


@pytest.mark.gpu
def test_every_provenance_column_is_filled_on_a_gpu():
    row, state = provenance.versions(torch.device("cuda")), provenance.device_state(torch.device("cuda"))
    assert "" not in {row[name] for name in ("gpu", "driver", "cuda")}
    assert json.loads(row["nccl"])["version"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert row["gpu_count"] == 1
    assert state["power_w"] > 0
    assert state["sm_mhz"] > 0
    assert isinstance(state["throttle"], list)
    json.dumps([row, state])


def test_readings_are_taken_while_the_body_runs_and_stop_with_it(monkeypatch):
    monkeypatch.setattr(provenance, "device_state", lambda device: {"power_w": 100, "throttle": [], "none": None})
    with provenance.sampled_state(CPU, interval_s=0.01) as states:
        time.sleep(0.3)
    taken = len(states)
    time.sleep(0.05)
    assert len(states) == taken > 3
    assert states.values("power_w") == [100.0] * taken
    assert states.values("none") == states.values("unknown") == []
    with provenance.sampled_state(CPU, interval_s=60) as states:
        pass
    assert len(states) == 1
