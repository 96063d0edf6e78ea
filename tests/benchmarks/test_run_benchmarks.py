"""scripts/run_benchmarks.py: several benchmarks in one launch, each with rows of its own."""

import os
import subprocess
import sys

import pytest

from cs336_systems.harness.record import read_rows
from scripts import run_benchmarks
from tests.benchmarks.commands import ROOT

TINY = "--device cpu --size tiny --context-length 16 --batch-size 1 --warmup 0 --steps 1"


def run_by_torchrun(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *launcher, "scripts/run_benchmarks.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_every_command_writes_its_rows_though_one_before_it_failed(tmp_path):
    """What an earlier sweep has left in the launcher's store is not what a rank says of the next one."""
    commands = [
        f"benchmark_ddp {TINY} --ddp naive --attention hopper --out {tmp_path}/failed",
        f"benchmark_ddp {TINY} --ddp 5",
        f"benchmark_ddp {TINY} --ddp naive --out {tmp_path}/ddp",
    ]
    done = run_by_torchrun(*" + ".join(commands).split(), ranks=2)
    rows = {path.parent.name: read_rows(path) for path in tmp_path.glob("*/*.csv")}
    found = {name: (set(own["status"]), set(own["argv"].str.split().str[0])) for name, own in rows.items()}
    assert found == {
        "failed": ({"unsupported"}, {"benchmark_ddp.py"}),
        "ddp": ({"ok"}, {"benchmark_ddp.py"}),
    }, done.stderr
    assert done.returncode == 1


def test_what_is_no_benchmark_is_named(capsys):
    assert run_benchmarks.main(["benchmark_dpd"]) == 2
    assert "benchmark_dpd is no benchmark: known are benchmark_attention," in capsys.readouterr().err
    assert run_benchmarks.main(["benchmark_ddp", "+"]) == 2
    assert "a benchmark's name stands at the beginning" in capsys.readouterr().err
