"""Provenance: the commit that ran, whether it was dirty, and every column of the schema that says where."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from cs336_systems.harness import provenance
from cs336_systems.harness.record import schema_columns

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


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
def checkout(tmp_path, monkeypatch):
    """A small repository with the package's layout, in which provenance believes to live."""
    for name in ("cs336_systems/measurement/provenance.py", "benchmarks/b.py", "README.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "cs336_systems/measurement/provenance.py"))
    return tmp_path


def test_the_commit_of_this_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("the source was shipped without its .git folder")
    assert provenance.source_version()[0] == git(ROOT, "rev-parse", "HEAD")


def test_a_clean_checkout(checkout):
    assert provenance.source_version() == (git(checkout, "rev-parse", "HEAD"), False)


@pytest.mark.parametrize(
    ("name", "dirty"),
    [
        ("cs336_systems/measurement/provenance.py", True),
        ("benchmarks/new.py", True),
        ("pyproject.toml", True),
        ("README.md", False),
        ("profiles/results/new.csv", False),
    ],
)
def test_only_changes_of_measured_sources_are_dirt(checkout, name, dirty):
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("two\n")
    assert provenance.source_version() == (git(checkout, "rev-parse", "HEAD"), dirty)


def test_a_deleted_source_is_dirt(checkout):
    (checkout / "benchmarks/b.py").unlink()
    assert provenance.source_version()[1] is True


@pytest.mark.parametrize(
    ("declared", "expected"), [("0123abcd", ("0123abcd", False)), ("0123abcd-dirty", ("0123abcd", True))]
)
def test_the_variable_says_what_was_shipped(checkout, monkeypatch, declared, expected):
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, declared)
    assert provenance.source_version() == expected


def test_without_git_or_variable_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "cs336_systems/measurement/provenance.py"))
    assert provenance.source_version() == ("unknown", True)
    provenance.source_version.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert provenance.source_version() == ("unknown", True)


def test_every_provenance_column_is_filled(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/long/path/benchmark_x.py", "--size", "two words", "--out", "/home/me/out"])
    row = provenance.versions(CPU)
    columns = schema_columns(())
    by_the_sweep = {"seed", "timestamp", "state_before", "state_after"}
    assert set(row) == set(columns[columns.index("gpu") :]) - by_the_sweep
    assert {name for name, value in row.items() if value == ""} == {"gpu", "driver", "cuda", "nccl"}
    assert row["argv"] == "benchmark_x.py --size 'two words' --out out"
    assert row["torch"] == torch.__version__
    assert row["gpu_count"] == 0
    assert row["host"].endswith("cores")


def test_what_is_set_for_nccl_is_recorded(monkeypatch):
    for name in [name for name in os.environ if "NCCL" in name]:
        monkeypatch.delenv(name)
    assert provenance.nccl_environment() == {}
    set_here = {"NCCL_MAX_CTAS": "8", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    for name, value in (set_here | {"NOT_NCCL_MAX_CTAS": "1"}).items():
        monkeypatch.setenv(name, value)
    assert provenance.nccl_environment() == set_here
    if torch.distributed.is_nccl_available():
        assert [int(part) for part in provenance.nccl_version().split(".")] == list(torch.cuda.nccl.version())


def test_everything_recorded_is_json():
    state = provenance.device_state(CPU)
    assert json.loads(json.dumps(state)) == state
    assert state["load_1min"] >= 0
    json.dumps(provenance.versions(CPU))


def test_the_timestamp_is_now_in_utc():
    stamp = datetime.fromisoformat(provenance.timestamp())
    assert abs((datetime.now(UTC) - stamp).total_seconds()) < 5
    assert stamp.utcoffset().total_seconds() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_provenance_column_is_filled_on_a_gpu():
    row, state = provenance.versions(torch.device("cuda")), provenance.device_state(torch.device("cuda"))
    assert "" not in {row[name] for name in ("gpu", "driver", "cuda")}
    assert json.loads(row["nccl"])["version"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert row["gpu_count"] == 1
    assert state["power_w"] > 0
    assert state["sm_mhz"] > 0
    assert isinstance(state["throttle"], list)
    json.dumps([row, state])
