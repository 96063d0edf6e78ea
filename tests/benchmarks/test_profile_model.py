"""The command as a user meets it: one real run on the CPU, then its grid, its endings and its refusals."""

import gzip
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336_systems.experiments.profile import measure_profile, trace_path, workload_of
from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.sweep import Outcome
from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.recording import ROUNDS
from cs336_systems.profiling.traces import kineto, nsys
from cs336_systems.profiling.traces.kernels import MATMUL, kernel_class
from cs336_systems.profiling.traces.tables import TraceError
from tests.benchmarks.commands import SWEEP, cells_of, refusal, run

FIXTURES = Path(__file__).parents[1] / "profiling" / "traces" / "fixtures"


@pytest.fixture
def command(capsys):
    """Runs ``main`` in this process; returns exit code, stdout and stderr."""
    return lambda *arguments: run("profile_model", capsys, *arguments)


@pytest.fixture
def refused(capsys, monkeypatch):
    """The sentence with which arguments are refused."""
    return lambda *arguments: refusal("profile_model", capsys, monkeypatch, *arguments)


def cells_for(line: str, device: str = "cpu") -> list:
    return cells_of("profile", *line.split(), device=device)


def test_modes_are_innermost_and_names_tell_workloads_apart():
    line = "--size tiny small --context-length 64 128 --dtype fp32 bf16 --compile off on --mode step forward"
    cells = cells_for(line)
    assert len(cells) == len(set(cells)) == 2**5
    assert [cell.mode for cell in cells[:4]] == ["step", "forward"] * 2
    assert len({cell.name for cell in cells}) == 2**4
    (cell,) = cells_for("--mode step --size XL-2026 --attention tiled --compile --optimizer torch-fused")
    assert cell.name == "2.7b-b1-c128-fp32-tiled-compiled-fused-kineto"
    assert replace(cell, optimizer="fused").name == "2.7b-b1-c128-fp32-tiled-compiled-fused-adamw-kineto"
    recorded = workload_of(cell, recorded=True)
    assert (recorded.warmup, recorded.steps) == (1, 2)


def test_bad_values(refused, monkeypatch, tmp_path):
    faults = {
        "--profiler nsys": "--profiler nsys .*--profiler kineto",
        "--recorded-steps 0": "--recorded-steps .*0",
        "--dtype tf32": "--dtype tf32",
        "--accumulate 1 2": "--accumulate 1 2",
        "--cuda-graph on --optimizer torch-fused": "cuda",
    }
    for line, message in faults.items():
        assert re.search(message, refused("--out", tmp_path / "new", *line.split())), line
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as attached:
        attached.setenv("NSYS_PROFILING_SESSION_ID", "1")
        assert "already runs under nsys" in refused()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "developer.nvidia.com/nsight-systems" in refused("--device", "cuda", "--profiler", "nsys")


@pytest.mark.slow
def test_a_cell_recorded_by_nsys(monkeypatch, tmp_path):
    """Stands in for nsys: a program that prints no times is an error, one whose export is there is read."""
    (cell,) = (replace(cell, profiler="nsys") for cell in cells_for("--mode step --context-length 16"))
    monkeypatch.setattr(nsys, "record", lambda program, report: "Generating report\n")
    with pytest.raises(TraceError, match="printed no times"):
        measure_profile(cell, raw=tmp_path, out=None)
    times = {phase: [5.0, 6.0, 7.0] for phase in ("forward", "backward", "optimizer", "step")}
    export = trace_path(cell, tmp_path).with_suffix(".sqlite")
    export.parent.mkdir(parents=True, exist_ok=True)
    export.write_bytes(gzip.decompress((FIXTURES / "nsys.sqlite.gz").read_bytes()))
    monkeypatch.setattr(nsys, "record", lambda program, report: f"Generating report\n{json.dumps(times)}\ndone\n")
    metrics = {metric.name: metric for metric in measure_profile(cell, raw=tmp_path, out=None)}
    assert metrics["recorded_step"].samples == [5.0, 6.0, 7.0]
    assert metrics["operations"].samples == [322]
    assert metrics["matmul_share"].samples[0] == pytest.approx(81, abs=1)
    assert workload_of(cell, recorded=True).warmup == cell.warmup


@pytest.mark.slow
def test_the_cells_that_succeeded_get_their_digest(command, monkeypatch, tmp_path):
    def sweep_here(name, cells, measure, **_):
        for cell in cells:
            outcome = Outcome(cell, "error", "no kernels", rows=[{"gpu": "", "host": "this one"}])
            with suppress(TraceError):
                outcome.metrics, outcome.status = measure(cell), "ok"
            yield outcome

    monkeypatch.setattr(SWEEP, sweep_here)
    monkeypatch.setattr("cs336_systems.experiments.profile.measure_profile", fail_in_forward)
    code, out, _ = command("--raw", tmp_path, "--out", tmp_path / "out")
    assert code == 1
    cells = json.loads(out.splitlines()[-1])["cells"]
    assert [cell["status"] for cell in cells] == ["error", "ok"]
    assert {path.stem.rpartition("-")[2] for path in (tmp_path / "out").glob("*.png")} == {"step"}
    assert "mode step" in out and "mode forward" not in out


def fail_in_forward(cell, *, raw, out):
    """Stands in for ``measure_profile``."""
    if cell.mode == "forward":
        raise TraceError("no kernels")
    path = trace_path(cell, raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((FIXTURES / "kineto.json.gz").read_bytes())
    phases = ("forward", "backward", "optimizer", "step")
    return [
        Metric(f"{how}_{phase}", "ms", [5.0]) for how in ("unprofiled", "annotated", "recorded") for phase in phases
    ]


@pytest.mark.gpu
def test_backward_is_attributed_on_a_gpu(tmp_path):
    (cell,) = cells_for("--mode step --size small --context-length 128 --steps 2 --recorded-steps 2", "cuda")
    measure_profile(cell, raw=tmp_path, out=None)
    trace = kineto.read(trace_path(cell, tmp_path))
    backward = trace.instances("backward", inside="step")
    held = trace.operations(backward)
    assert (held["launch_tid"] != backward["tid"].iloc[0]).mean() > 0.9
    product = trace.operations(trace.instances("layers.3.ffn.w2 (backward)", inside=STEP))
    assert sum(kernel_class(name) == MATMUL for name in product["name"]) == 2 * 2


@pytest.mark.slow
def test_a_bare_run_on_a_cpu_ends_in_files_and_rows(command, tmp_path):
    code, out, err = command("--profiler", "kineto", "--raw", tmp_path / "raw", "--out", tmp_path / "out")
    assert code == 0, err
    assert [cell["status"] for cell in json.loads(out.splitlines()[-1])["cells"]] == ["ok", "ok"]
    name = "tiny-b1-c128-fp32-kineto"
    written = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {f"{name}-forward.png", f"{name}-step.png"}
    assert written == {f"{name}-kernels.csv", f"{name}-ranges.csv", "profile_model.csv", *pictures}
    assert "CPU operators busy ms" in out
    rows = read_rows(tmp_path / "out" / "profile_model.csv")
    step = rows[rows["mode"] == "step"].set_index("metric")
    assert (step.loc["unprofiled_step", "n"], step.loc["recorded_step", "n"]) == (ROUNDS * 3, 2)
    quotient = step.loc["annotated_step", "median"] / step.loc["unprofiled_step", "median"]
    assert step.loc["annotation_ratio", "median"] == pytest.approx(quotient, rel=1e-5)
    assert step.loc["matmul_share", "median"] > 0 and "idle" not in step.index
