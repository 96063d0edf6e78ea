"""scripts/measure_runs.sh: both parts, with a small model on a CPU in place of theirs on a GPU."""

import os
import re
import subprocess
import sys

import pytest

from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import Evaluation
from tests.benchmarks.commands import ROOT
from tests.pretraining.trained import write_dataset

RECIPE = ROOT / "scripts" / "measure_runs.sh"
SMALL = f"""#!/usr/bin/env bash
# Options that come last win.
case "$1" in
  scripts/sample.py) last=(--device cpu --max-tokens 5) ;;
  *) last=(--device cpu --size tiny --kernels reference --optimizer torch-fused --attention reference --dtype fp32
           --batch-size 2 --context-length 16 --total-batch-tokens 64 --steps 2) ;;
esac
exec {sys.executable} "$@" "${{last[@]}}"
"""


@pytest.mark.slow
def test_its_parts_leave_logs_and_samples(tmp_path):
    python = tmp_path / "python"
    python.write_text(SMALL)
    python.chmod(0o755)
    write_dataset(tmp_path / "work" / "stdlib-bytes")
    environment = os.environ | {"PYTHON": str(python), "WORK": str(tmp_path / "work")}
    parts = re.findall(r"^#   ([a-z0-9-]+)  +\d+  ", RECIPE.read_text(), re.MULTILINE)
    command = [str(RECIPE), str(tmp_path / "logs"), *parts]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    runs = {log.parent.name: read_run(log) for log in (tmp_path / "logs").glob("*/log.jsonl")}
    assert set(runs) == {"100m", "100m-400", "100m-400-transformers"}
    evaluations = {name: run.last(Evaluation) for name, run in runs.items()}
    assert {one.step for one in evaluations.values()} == {2}
    ours, theirs = (evaluations[name].loss for name in ("100m-400", "100m-400-transformers"))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert (tmp_path / "logs" / "samples.txt").read_text().count('"command": "sample"') == 3


def test_an_unknown_part_is_named(tmp_path):
    done = subprocess.run([str(RECIPE), str(tmp_path), "1b"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "unknown part '1b': parts are 100m, compared\n")
