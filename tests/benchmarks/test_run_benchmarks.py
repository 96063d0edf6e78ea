"""scripts/run_benchmarks.py: several benchmarks in one launch, each as it runs alone."""

import sys
from dataclasses import asdict

from cs336_systems.harness.sweep import Outcome
from scripts import run_benchmarks
from tests.benchmarks.commands import SWEEP


def test_every_command_runs_under_its_own_name_though_one_before_it_failed(monkeypatch, capsys):
    ran = []

    def sweep_here(name, cells, measure, **_):
        ran.append((name, sys.argv[1:]))
        for cell in cells:
            yield Outcome(cell, "unsupported", "not here", rows=[asdict(cell) | {"gpu": "", "host": "here"}])

    monkeypatch.setattr(SWEEP, sweep_here)
    monkeypatch.setattr(sys, "argv", sys.argv)
    common = ["--device", "cpu", "--size", "tiny"]
    naive, fsdp = [*common, "--ddp", "naive"], [*common, "--fsdp", "ours"]
    commands = ["benchmark_ddp", *naive, "+", "benchmark_ddp", "--ddp", "5", "+", "benchmark_fsdp", *fsdp]
    assert run_benchmarks.main(commands) == 1, "the first code that is not 0"
    assert ran == [("benchmark_ddp", naive), ("benchmark_fsdp", fsdp)]
    assert "--ddp" in capsys.readouterr().err


def test_what_is_no_benchmark_is_named(capsys):
    assert run_benchmarks.main(["benchmark_dpd"]) == 2
    assert "benchmark_dpd is no benchmark: known are benchmark_attention," in capsys.readouterr().err
    assert run_benchmarks.main(["benchmark_ddp", "+"]) == 2
    assert "a benchmark's name stands at the beginning" in capsys.readouterr().err
