"""The page of a memory profile, from a step watched on the CPU, and what a machine without a GPU gets."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.experiments.profile.memory_digest import (
    NEEDS_CUDA,
    account_block,
    digest,
    main_figures,
    profile_name,
    write_memory_digest,
)
from cs336_systems.experiments.profile.memory_tables import (
    allocation_frame,
    allocation_table,
    peak_frame,
    peak_table,
    phase_table,
)
from cs336_systems.profiling.memory_history import reconstruct
from cs336_systems.profiling.memory_profile import MemoryProfile
from cs336_systems.training import TrainingCase
from tests.profiling.snapshots import simulated_snapshot

CASE = TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2)
ROUNDING = 12_288
GIB, MIB = 1024**3, 1024**2


@pytest.fixture(scope="module")
def profile():
    history = reconstruct(simulated_snapshot(CASE, "step"))
    peak = history.peak().n_bytes + ROUNDING
    return MemoryProfile(CASE, "step", history, peak, peak, peak, 2 * peak, Path("raw/x.pickle"))


@pytest.fixture(scope="module")
def accounts():
    return [account_block(CASE, compile=False)]


def test_the_peak_adds_up_to_what_the_allocator_reported(profile):
    frame = peak_frame(profile)
    assert frame["gib"].sum() * GIB == pytest.approx(profile.peak_allocated_bytes)
    assert frame["percent"].sum() == pytest.approx(100)
    assert frame.set_index("category")["gib"]["allocator's rounding"] * GIB == ROUNDING == profile.rounding_bytes
    shown = peak_table(profile)
    assert shown.frame["category"].tolist()[-4:] == [
        "max_memory_allocated",
        "the same, unwatched",
        "predicted (loss backward)",
        "reserved by the process",
    ]
    assert shown.caption.endswith(", in backward.")


def test_a_compiled_step_has_no_prediction(profile):
    compiled = replace(profile, case=replace(CASE, compile="on"))
    assert not peak_table(compiled).frame["category"].str.startswith("predicted").any()


def test_phases_show_the_most_that_was_alive(profile):
    frame = phase_table(profile.history).frame
    assert frame["phase"].tolist() == ["forward", "backward", "optimizer"]
    assert max(frame["most GiB"].astype(float)) == pytest.approx(profile.history.peak().n_bytes / GIB, rel=5e-3)
    assert frame["events"].sum() == profile.history.n_events


def test_equal_allocations_are_one_line_and_blocks_a_star(profile):
    frame = allocation_frame(profile.history)
    assert frame["mib"].is_monotonic_decreasing
    assert (frame["mib"] * frame["made"]).sum() * MIB == pytest.approx(
        sum(a.n_bytes for a in profile.history.allocations)
    )
    at_peak = (frame["mib"] * frame["at_peak"]).sum() * MIB
    assert at_peak == pytest.approx(profile.history.peak().n_bytes)
    weights = frame[frame["what"] == "layers.*.ffn.w1.weight"].iloc[0]
    assert (weights["made"], weights["category"], weights["phase"]) == (2, "parameters", "before")
    first = allocation_table(profile.history).frame.iloc[0]
    assert (first["MiB each"], first["made"]) == ("0.500", 2), "the scores of each block"
    assert first["source"].endswith(" attention")


def test_the_page_answers_the_questions(profile, accounts):
    page = digest(CASE, "step", profile, accounts, "Some GPU")
    assert page.startswith("# tiny, batch 2, context 128, fp32, mode step: where the memory goes\n")
    assert "![memory alive, by category](memory-tiny-b2-c128-fp32-step.png)" in page
    assert "![memory alive, each allocation](memory-tiny-b2-c128-fp32-step-active.png)" in page
    assert "2 x 128 x 64 elements of 4 bytes = **0.06 MiB**" in page
    listed = total_bytes(block_saved_tensors(CASE.config, 2, 128, PRECISIONS["fp32"]))
    assert f"Predicted for the eager block: {listed / MIB:,.2f} MiB." in page
    assert "One RMSNorm by itself, eager, saves full-size tensors 3 times, in 2 storages: " in page
    assert "```\ncs336_systems/model/ops.py:" in page and "_call_impl" not in page
    assert "Out of memory" not in page and "nan" not in page
    assert str(Path.cwd()) not in page


def test_a_pass_that_ran_out_of_memory_says_so(profile, accounts):
    failed = replace(
        profile, out_of_memory="CUDA out of memory. Tried to allocate 2 GiB.\nmore", unwatched_peak_bytes=0
    )
    page = digest(CASE, "step", failed, accounts, "Some GPU")
    assert "**Out of memory.** The pass ended early: CUDA out of memory. Tried to allocate 2 GiB.\n" in page
    assert peak_table(failed).frame.set_index("category")["GiB"]["the same, unwatched"] == "–"


def test_figures_are_named_with_their_units(profile, accounts):
    figures = main_figures(profile, accounts)
    assert figures["peak_gib"] * GIB == profile.peak_allocated_bytes
    assert figures["peak_optimizer_state_gib"] * GIB == profile.history.peak().by_category["optimizer state"]
    assert all(name.endswith(("_gib", "_mib")) for name in figures)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "memory-tiny-b2-c128-fp32-forward"),
        ({"compile": "on"}, "memory-tiny-b2-c128-fp32-compiled-forward"),
        ({"attention": "tiled", "optimizer": "torch-fused"}, "memory-tiny-b2-c128-fp32-tiled-torch-fused-forward"),
        ({"checkpoint": "full"}, "memory-tiny-b2-c128-fp32-checkpoint-full-forward"),
        ({"keep": "all-norm"}, "memory-tiny-b2-c128-fp32-keep-all-norm-forward"),
    ],
)
def test_names_tell_cases_apart(changes, name):
    assert profile_name(replace(CASE, **changes), "forward") == name


@pytest.mark.parametrize("attention", ["reference", "tiled"])
def test_without_cuda_the_block_is_accounted_for(tmp_path, attention):
    case = replace(CASE, dtype="autocast-bf16", attention=attention)
    written = write_memory_digest(case, "step", tmp_path / "out", tmp_path / "raw", compiled=False)
    page = written.page.read_text()
    assert NEEDS_CUDA in page and "max_memory_allocated" not in page
    assert ("Predicted for the eager block" in page) == (attention == "reference")
    assert sorted(path.suffix for path in written.page.parent.iterdir()) == [".csv", ".md"]
    rows = pd.read_csv(next(written.page.parent.glob("*-residuals.csv")))
    assert set(rows["kind"]) == {"activation", "parameter", "parameter copy", "table", "gradient"}
    kept = rows.loc[rows["kind"] == "activation", "mib"].sum()
    assert kept == pytest.approx(written.figures["eager_block_activations_mib"], rel=1e-4)
    assert not (tmp_path / "raw").exists()


def test_what_a_written_out_block_keeps_is_its_table(tmp_path):
    case = replace(CASE, keep="all-norm")
    written = write_memory_digest(case, "step", tmp_path / "out", tmp_path / "raw")
    assert "reference kernels, keep all-norm" in written.page.read_text()
    predicted = bytes_kept(*case.work, case.precision, case.keep) / MIB
    assert f"Predicted for the eager block: {predicted:,.2f} MiB." in written.page.read_text()
    assert written.figures["eager_block_activations_mib"] == pytest.approx(predicted)
