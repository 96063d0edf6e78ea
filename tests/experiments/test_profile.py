"""What is written about a profile: tables and files of the golden trace and of a memory profile."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.experiments import memory_digest, profile_digest
from cs336_systems.hardware import GIB, MIB
from cs336_systems.profiling.memory import MemoryProfile
from cs336_systems.training import TrainingCase
from tests.experiments.profiles import golden_profile
from tests.profiling.snapshots import simulated_history

CASE = TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2)
ROUNDING = 12_288


@pytest.fixture(scope="module")
def profile():
    return golden_profile()


@pytest.fixture(scope="module")
def watched():
    """A training step watched on the CPU."""
    history = simulated_history(CASE, "step")
    return MemoryProfile(CASE, "step", history, history.peak().n_bytes + ROUNDING)


def test_classes_of_kernels_add_up(profile):
    assert list(profile.passes()) == ["forward", "forward + backward", "full step"]
    inference = replace(profile, workload=replace(profile.workload, mode="forward"), unprofiled_ms={"forward": 1.0})
    assert list(inference.passes()) == ["inference forward"]
    classes = profile_digest.class_table([profile]).frame.set_index("pass")
    shares = classes["matmul %"].astype(float)
    assert shares["forward"] > 80 and shares["optimizer alone"] == 0
    assert shares["full step"] < shares["forward + backward"]
    assert (classes.filter(like="%").astype(float).sum(axis=1) - 100).abs().max() < 0.5


@pytest.mark.slow
def test_the_files_of_a_trace_and_what_limits_its_step(profile, tmp_path, drawn):
    profile_digest.write_digest([profile], "case", "NVIDIA H200", tmp_path / "new")
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == ["case-kernels.csv", "case-ranges.csv", "case-step.png"]
    kernels = pd.read_csv(tmp_path / "new" / "case-kernels.csv")
    step = kernels[kernels["passes"] == "full step"]
    assert (step["count"].sum(), step["share_percent"].sum()) == (322, pytest.approx(100, abs=1e-3))
    assert "layers.1.attn (backward)" in set(pd.read_csv(tmp_path / "new" / "case-ranges.csv")["range"])
    waiting = replace(profile, unprofiled_ms={**profile.unprofiled_ms, "step": 50.0})
    assert profile_digest.limits_table([profile, waiting]).frame["limited by"].tolist() == ["compute", "overhead"]


def test_the_peak_adds_up_to_what_the_allocator_reported(watched):
    frame = memory_digest.peak_frame(watched)
    assert frame["gib"].sum() * GIB == pytest.approx(watched.peak_allocated_bytes)
    assert frame["percent"].sum() == pytest.approx(100)
    assert frame.set_index("category")["gib"]["allocator's rounding"] * GIB == ROUNDING == watched.rounding_bytes
    found = {metric.name: metric.samples[0] for metric in memory_digest.peak_metrics(watched)}
    assert found["peak_gib"] * GIB == watched.peak_allocated_bytes
    assert found["peak_optimizer_state_gib"] * GIB == watched.history.peak().by_category["optimizer state"]
    assert found["predicted_peak_gib"] * GIB == pytest.approx(watched.peak_allocated_bytes, rel=0.2)
    unpredictable = replace(watched, case=replace(CASE, compile="on"), out_of_memory="CUDA out of memory.")
    changed = {metric.name for metric in memory_digest.peak_metrics(unpredictable)} ^ found.keys()
    assert changed == {"predicted_peak_gib", "out_of_memory"}


def test_equal_allocations_are_one_line_and_blocks_a_star(watched):
    frame = memory_digest.allocation_frame(watched.history)
    total = sum(allocation.n_bytes for allocation in watched.history.allocations)
    assert (frame["mib"] * frame["made"]).sum() * MIB == pytest.approx(total)
    assert (frame["mib"] * frame["at_peak"]).sum() * MIB == pytest.approx(watched.history.peak().n_bytes)
    weights = frame[frame["what"] == "layers.*.ffn.w1.weight"].iloc[0]
    assert (weights["made"], weights["category"], weights["phase"]) == (2, "parameters", "before")
    largest = frame.iloc[0]
    assert (largest["mib"], largest["made"]) == (0.5, 2), "the scores of each block"
    assert largest["source"].endswith(" attention") and str(Path.cwd()) not in largest["source"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"dtype": "autocast-bf16"}, {"keep": "all-norm"}])
def test_without_cuda_the_block_is_accounted_for(tmp_path, changes):
    case = replace(CASE, **changes)
    metrics = memory_digest.write_memory_digest(case, "step", tmp_path / "out", tmp_path / "raw")
    found = {metric.name: metric.samples[0] for metric in metrics}
    (file,) = (tmp_path / "out").iterdir()
    rows = pd.read_csv(file)
    kept = rows.loc[rows["kind"] == "activation", "mib"].sum()
    assert kept == pytest.approx(found["eager_block_activations_mib"], rel=1e-4)
    if case.written_out:
        assert kept == pytest.approx(bytes_kept(*case.work, case.precision, case.keep) / MIB, rel=1e-4)
    assert not (tmp_path / "raw").exists()


# ---- pictures
