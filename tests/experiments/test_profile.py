"""What is written about a profile: tables and page of the golden trace, the page of a memory profile, its pictures."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.kept import bytes_kept
from cs336_systems.experiments import memory_figures, memory_page, profile_page
from cs336_systems.experiments.memory_figures import allocations_figure, timeline_figure
from cs336_systems.profiling.memory_history import Allocation, reconstruct
from cs336_systems.profiling.memory_profile import MemoryProfile
from cs336_systems.profiling.traces.queries import times
from cs336_systems.profiling.traces.tables import OPERATOR
from cs336_systems.report.tables import digits
from cs336_systems.training import TrainingCase
from tests.experiments.profiles import golden_profile
from tests.profiling.snapshots import EventLog, simulated_snapshot

CASE = TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2)
ROUNDING = 12_288
GIB, MIB = 1024**3, 1024**2


@pytest.fixture(scope="module")
def profile():
    return golden_profile()


@pytest.fixture(scope="module")
def watched():
    """A training step watched on the CPU."""
    history = reconstruct(simulated_snapshot(CASE, "step"))
    peak = history.peak().n_bytes + ROUNDING
    return MemoryProfile(CASE, "step", history, peak, peak, peak, 2 * peak, Path("raw/x.pickle"))


def test_phases_stand_beside_the_clock(profile):
    table = profile_page.phase_table(profile)
    frame = table.frame.set_index("phase")
    assert list(frame.index) == ["forward", "backward", "optimizer", "step"]
    assert frame["harness ms"].tolist() == ["5.50", "9.50", "0.500", "15.5"]
    found = times(profile.trace, profile.trace.instances("backward", inside="step"))
    assert frame.loc["backward", "GPU busy ms"] == digits(found.unioned_ms)
    assert frame.loc["backward", "operations"] == "204"
    assert "1.100" in table.caption and "1.200" in table.caption, "what annotation and recording add"


def test_kernels_and_their_classes_add_up(profile):
    assert list(profile.passes()) == ["forward", "forward + backward", "full step"]
    inference = replace(profile, workload=replace(profile.workload, mode="forward"), unprofiled_ms={"forward": 1.0})
    assert list(inference.passes()) == ["inference forward"]
    frame = profile_page.kernels_table(profile, "forward + backward", top=5).frame
    assert len(frame) == 6 and frame["class"].iloc[0] == "matmul"
    assert sum(float(share) for share in frame["share %"]) == pytest.approx(100, abs=0.5)
    assert sum(float(count) for count in frame["per step"]) == 114 + 204
    classes = profile_page.class_table([profile]).frame.set_index("pass")
    shares = classes["matmul %"].astype(float)
    assert shares["forward"] > 80 and shares["optimizer alone"] == 0
    assert shares["full step"] < shares["forward + backward"]
    assert (classes.filter(like="%").astype(float).sum(axis=1) - 100).abs().max() < 0.5


def test_attentions_stages_with_their_ratios_to_softmax(profile):
    frame = profile_page.stage_table(profile).frame.set_index(["direction", "stage"])
    assert len(frame) == 6
    assert frame.loc[("forward", "scores matmul"), "FLOPs / softmax"] == digits(2 * 64 / 5)
    assert frame.loc[("backward", "softmax"), "time / softmax"] == "1.00"
    spent = times(profile.trace, profile.trace.instances("values matmul", inside="step")).summed_ms
    assert frame.loc[("forward", "values matmul"), "GPU ms"] == digits(spent)
    ranges = profile.trace.ranges
    fused = replace(profile.trace, ranges=ranges[~ranges["name"].str.contains("softmax|matmul")])
    assert profile_page.stage_table(replace(profile, trace=fused)) is None


def test_the_page_its_files_and_its_verdict(profile, tmp_path, drawn):
    page = profile_page.write_page([profile], "case", "NVIDIA H200", "kineto", tmp_path / "new")
    written = sorted(path.name for path in page.parent.iterdir())
    assert written == ["case-kernels.csv", "case-ranges.csv", "case-step.png", "case.md"]
    kernels = pd.read_csv(page.parent / "case-kernels.csv")
    step = kernels[kernels["passes"] == "full step"]
    assert (step["count"].sum(), step["share_percent"].sum()) == (322, pytest.approx(100, abs=1e-3))
    assert "layers.1.attn (backward)" in set(pd.read_csv(page.parent / "case-ranges.csv")["range"])
    text = page.read_text()
    assert "![step](case-step.png)" in text and "% of peak" in text and "77%" in profile_page.verdict(profile)
    waiting = replace(profile, unprofiled_ms={**profile.unprofiled_ms, "step": 50.0})
    assert "**overhead**" in profile_page.verdict(waiting) and "71 %" in profile_page.verdict(waiting)
    trace = replace(profile.trace, ops=profile.trace.ops.assign(kind=OPERATOR))
    without = profile_page.page_text([replace(profile, trace=trace)], "case", "some CPU", "kineto")
    assert "Without a GPU" in without and "CPU operators ms" in without and "% of peak" not in without


def test_the_peak_adds_up_to_what_the_allocator_reported(watched):
    frame = memory_page.peak_frame(watched)
    assert frame["gib"].sum() * GIB == pytest.approx(watched.peak_allocated_bytes)
    assert frame["percent"].sum() == pytest.approx(100)
    assert frame.set_index("category")["gib"]["allocator's rounding"] * GIB == ROUNDING == watched.rounding_bytes
    shown = memory_page.peak_table(watched).frame["category"]
    assert shown.str.startswith("predicted").sum() == 1
    compiled = replace(watched, case=replace(CASE, compile="on"))
    assert not memory_page.peak_table(compiled).frame["category"].str.startswith("predicted").any()
    phases = memory_page.phase_table(watched.history).frame
    assert phases["phase"].tolist() == ["forward", "backward", "optimizer"]
    assert max(phases["most GiB"].astype(float)) == pytest.approx(watched.history.peak().n_bytes / GIB, rel=5e-3)
    figures = memory_page.main_figures(watched, [memory_page.account_block(CASE, compile=False)])
    assert figures["peak_gib"] * GIB == watched.peak_allocated_bytes
    assert figures["peak_optimizer_state_gib"] * GIB == watched.history.peak().by_category["optimizer state"]


def test_equal_allocations_are_one_line_and_blocks_a_star(watched):
    frame = memory_page.allocation_frame(watched.history)
    total = sum(allocation.n_bytes for allocation in watched.history.allocations)
    assert (frame["mib"] * frame["made"]).sum() * MIB == pytest.approx(total)
    assert (frame["mib"] * frame["at_peak"]).sum() * MIB == pytest.approx(watched.history.peak().n_bytes)
    weights = frame[frame["what"] == "layers.*.ffn.w1.weight"].iloc[0]
    assert (weights["made"], weights["category"], weights["phase"]) == (2, "parameters", "before")
    first = memory_page.allocation_table(watched.history).frame.iloc[0]
    assert (first["MiB each"], first["made"]) == ("0.500", 2), "the scores of each block"
    assert first["source"].endswith(" attention")


def test_a_pass_that_ran_out_of_memory_says_so(watched):
    failed = replace(watched, out_of_memory="CUDA out of memory. Tried 2 GiB.\nmore", unwatched_peak_bytes=0)
    account = [memory_page.account_block(CASE, compile=False)]
    page, whole = (memory_page.page_text("name", "x", each, account, "Some GPU") for each in (failed, watched))
    assert "CUDA out of memory. Tried 2 GiB.\n" in page and "Out of memory" not in whole
    assert "saves full-size tensors 3 times, in 2 storages" in whole and "nan" not in whole
    assert str(Path.cwd()) not in whole
    assert memory_page.peak_table(failed).frame.set_index("category")["GiB"]["the same, unwatched"] == "–"


@pytest.mark.parametrize("changes", [{"dtype": "autocast-bf16"}, {"keep": "all-norm"}])
def test_without_cuda_the_block_is_accounted_for(tmp_path, changes):
    case = replace(CASE, **changes)
    path, figures = memory_page.write_memory_page(case, "step", tmp_path / "out", tmp_path / "raw", compiled=False)
    page = path.read_text()
    assert memory_page.NEEDS_CUDA in page and "max_memory_allocated" not in page
    assert sorted(path.suffix for path in path.parent.iterdir()) == [".csv", ".md"]
    rows = pd.read_csv(next(path.parent.glob("*-residuals.csv")))
    kept = rows.loc[rows["kind"] == "activation", "mib"].sum()
    assert kept == pytest.approx(figures["eager_block_activations_mib"], rel=1e-4)
    if case.written_out:
        assert kept == pytest.approx(bytes_kept(*case.work, case.precision, case.keep) / MIB, rel=1e-4)
    assert not (tmp_path / "raw").exists()


# ---- pictures


def test_a_step_is_drawn_with_its_phases_peak_and_categories(watched):
    figure, peak = timeline_figure(watched.history), watched.history.peak()
    notes = [text.get_text() for text in figure.axes[0].texts]
    assert [note.split("\n")[0] for note in notes[:3]] == ["forward", "backward", "optimizer"]
    assert notes[3] == f"peak {peak.n_bytes / MIB:.2f} MiB"
    shown = dict(entry.get_text().split("\n") for entry in figure.legends[0].get_texts())
    assert list(shown) == ["temporaries", "activations", "gradients", "optimizer state", "parameters", "other"]
    assert shown["activations"].startswith(f"{peak.by_category['activations'] / MIB:.2f} MiB (")
    assert max(patch.get_data().values.max() for patch in figure.axes[0].patches) * MIB == pytest.approx(peak.n_bytes)


def test_what_lies_above_falls_when_something_below_is_freed():
    below, middle, top = Allocation(1, 10, 0, 3), Allocation(2, 5, 1, 6), Allocation(3, 2, 2, 5)
    found = memory_figures.places([below, middle, top, Allocation(4, 10, 4, 6)])
    assert found == [[(0, 0)], [(1, 10), (3, 0)], [(2, 15), (3, 5)], [(4, 7), (5, 5)]]


@pytest.mark.parametrize("largest", [8000, 30])
def test_shapes_and_band_fill_what_is_alive_after_every_event(largest):
    """Two hundred events on blocks of which some existed before, some are freed, some never."""
    draw, log = random.Random(0), EventLog()
    for address in range(1, 9):
        log.exists(address, draw.randrange(1, 1000))
    active = [sum(log.living.values())]
    for address in range(100, 300):
        if log.living and draw.random() < 0.5:
            log.free(draw.choice([*log.living]))
        else:
            log.alloc(address, draw.randrange(1, 1000))
        active.append(sum(log.living.values()))
    history = reconstruct(log.snapshot([[5, "parameters", "w"], [3, "gradients", "g"]]))
    (axes,) = allocations_figure(history, largest).axes
    (drawn,) = [each for each in axes.collections if isinstance(each, PolyCollection)]
    shapes = [path.vertices for path in drawn.get_paths()]
    assert len(shapes) == min(largest, len(history.allocations))
    bands = [patch.get_data() for patch in axes.patches]
    scale = memory_figures.unit_of(history.peak())[1]
    for event, expected in enumerate(active):
        spans = [(0.0, 0.0), *(span for shape in shapes if (span := span_at(shape, event)))]
        spans += [(band.baseline[event], band.values[event]) for band in bands]
        bottoms, tops = np.array(sorted(spans)).T
        assert bottoms * scale == pytest.approx([0, *tops[:-1] * scale])  # neither gaps nor overlaps
        assert tops[-1] * scale == pytest.approx(expected)


def span_at(outline: np.ndarray, event: int) -> tuple[float, float] | None:
    """Lower and upper edge of a shape between an event and the next, where it has any."""
    upper, lower = np.split(outline[: len(outline) // 2 * 2], 2)
    after = np.searchsorted(upper[:, 0], event, side="right")
    if after in (0, len(upper)):
        return None
    return lower[::-1][after, 1], upper[after, 1]
