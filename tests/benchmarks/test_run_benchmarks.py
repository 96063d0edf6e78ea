"""scripts/run_benchmarks.py: several benchmarks in one launch, each with rows of its own."""

import sys

import pytest

from cs336_systems.harness.record import read_rows
from scripts import run_benchmarks

TINY = "--device cpu --size tiny --context-length 16 --batch-size 1 --warmup 0 --steps 1"


@pytest.mark.slow
def test_every_command_writes_its_rows_though_one_before_it_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py"])
    commands = [
        f"benchmark_ddp {TINY} --ddp naive --attention hopper --out {tmp_path}/failed",
        f"benchmark_ddp {TINY} --ddp 5",
        f"benchmark_ddp {TINY} --ddp naive --out {tmp_path}/ddp",
    ]
    assert run_benchmarks.main(" + ".join(commands).split()) == 1
    rows = {path.parent.name: read_rows(path) for path in tmp_path.glob("*/*.csv")}
    found = {name: (set(own["status"]), set(own["argv"].str.split().str[0])) for name, own in rows.items()}
    argv = {"benchmark_ddp.py"}
    assert found == {"failed": ({"unsupported"}, argv), "ddp": ({"ok"}, argv)}


def test_what_is_no_benchmark_is_named(capsys):
    assert run_benchmarks.main(["benchmark_dpd"]) == 2
    assert "benchmark_dpd is no benchmark: known are benchmark_attention," in capsys.readouterr().err
    assert run_benchmarks.main(["benchmark_ddp", "+"]) == 2
    assert "a benchmark's name stands at the beginning" in capsys.readouterr().err


def test_ctrl_c_in_one_benchmark_ends_them_all(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py"])
    monkeypatch.setattr(run_benchmarks, "BENCHMARKS", tmp_path)
    for name, code in (("failed", 1), ("interrupted", 130), ("next", 0)):
        (tmp_path / f"{name}.py").write_text(f"def main(arguments):\n    print('{name}')\n    return {code}\n")
    assert run_benchmarks.main(["failed", "+", "interrupted", "+", "next"]) == 130
    told = capsys.readouterr()
    assert told.out == "failed\ninterrupted\n"
    assert "1 of 3 commands were not begun" in told.err
