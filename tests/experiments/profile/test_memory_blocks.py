"""Every allocation drawn by itself: where it lies, when it falls, and that nothing is missing."""

import random

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.profile.memory_blocks import draw_allocations, places
from cs336_systems.profiling.memory_history import Allocation, reconstruct
from cs336_systems.training import TrainingCase
from tests.profiling.snapshots import EventLog, simulated_snapshot

GIB = 1024**3


def test_what_lies_above_falls_when_something_below_is_freed():
    below, middle, top = Allocation(1, 10, 0, 3), Allocation(2, 5, 1, 6), Allocation(3, 2, 2, 5)
    later = Allocation(4, 10, 4, 6)
    assert places([below, middle, top, later]) == [
        [(0, 0)],
        [(1, 10), (3, 0)],
        [(2, 15), (3, 5)],
        [(4, 7), (5, 5)],
    ]


def random_log(seed: int) -> EventLog:
    """Two hundred events on blocks of which some existed before, some of them freed here, some never."""
    draw, log = random.Random(seed), EventLog()
    for address in range(1, 9):
        log.exists(address, draw.randrange(1, 1000))
    for address in range(100, 300):
        if log.living and draw.random() < 0.5:
            log.free(draw.choice([*log.living]))
        else:
            log.alloc(address, draw.randrange(1, 1000))
    return log


def active_bytes(log: EventLog) -> list[int]:
    """What the allocator counts after each event, back from what is alive at the end."""
    active = [sum(log.living.values())]
    for event in reversed(log.events):
        if event["action"] != "free_completed":
            active.append(active[-1] + event["size"] * (1 if event["action"] == "free_requested" else -1))
    return active[::-1]


@pytest.mark.parametrize("largest", [8000, 30])
@pytest.mark.parametrize("seed", range(4))
def test_shapes_and_band_fill_what_the_allocator_counts_after_every_event(tmp_path, drawn, seed, largest):
    log = random_log(seed)
    history = reconstruct(log.snapshot([[5, "parameters", "w"], [3, "gradients", "g"]]))
    draw_allocations(history, tmp_path / "x.png", "random", largest)
    active = np.array(active_bytes(log))
    assert len(active) == history.n_events + 1
    shapes = outlines(drawn[0])
    assert len(shapes) == min(largest, len(history.allocations))
    bands = [patch.get_data() for patch in drawn[0].axes[0].patches]
    for event in range(history.n_events + 1):
        spans = [(0.0, 0.0), *(span for shape in shapes if (span := span_at(shape, event)))]
        spans += [(band.baseline[event], band.values[event]) for band in bands]
        bottoms, tops = np.array(sorted(spans)).T
        assert bottoms * 1024 == pytest.approx([0, *tops[:-1] * 1024])  # neither gaps nor overlaps
        assert tops[-1] * 1024 == pytest.approx(active[event])


def span_at(outline: np.ndarray, event: int) -> tuple[float, float] | None:
    """Lower and upper edge of a shape between an event and the next, where it has any."""
    upper, lower = np.split(outline[: len(outline) // 2 * 2], 2)
    after = np.searchsorted(upper[:, 0], event, side="right")
    if after in (0, len(upper)):
        return None
    return lower[::-1][after, 1], upper[after, 1]


def test_what_existed_before_lies_below_and_what_lives_longest_lowest(tmp_path, drawn):
    log = EventLog()
    for address, n_bytes in ((1, 1), (2, 2), (3, 4), (4, 8)):
        log.exists(address, n_bytes * GIB)
    log.free(1)
    log.alloc(5, GIB)
    log.free(3)
    history = reconstruct(log.snapshot([[2, "parameters", "w"]]))
    draw_allocations(history, tmp_path / "x.png", "four blocks")
    spans = [span_at(shape, 0) for shape in outlines(drawn[0])]
    assert spans[:-1] == [(0, 2), (2, 10), (10, 14), (14, 15)]  # the weight, what stays, what is freed last, then first


def test_neighbours_differ_in_shade_where_they_are_high_enough(tmp_path, drawn):
    log = EventLog()
    for address, n_bytes in enumerate((10**6, 10**6, 1000, 500, 400, 10**6)):
        log.alloc(address, n_bytes)
    draw_allocations(reconstruct(log.snapshot()), tmp_path / "x.png", "six blocks")
    (shapes,) = [each for each in drawn[0].axes[0].collections if isinstance(each, PolyCollection)]
    lightness = shapes.get_facecolors().sum(axis=1)
    assert (lightness > lightness.min()).tolist() == [False, True, False, False, False, False]


def outlines(figure) -> list[np.ndarray]:
    (shapes,) = [each for each in figure.axes[0].collections if isinstance(each, PolyCollection)]
    return [path.vertices for path in shapes.get_paths()]


def test_shapes_have_the_length_and_height_of_their_allocations(tmp_path, drawn):
    log = EventLog()
    log.exists(1, 3 * GIB)
    log.alloc(2, 2 * GIB)
    log.alloc(3, 4 * GIB)
    log.free(2)
    history = reconstruct(log.snapshot([[1, "parameters", "w"]]))
    draw_allocations(history, path := tmp_path / "folder" / "x.png", "three blocks")
    assert path.exists()
    weights, freed, kept = outlines(drawn[0])
    assert (weights.min(axis=0).tolist(), weights.max(axis=0).tolist()) == ([0, 0], [4, 3])
    assert (freed.min(axis=0).tolist(), freed.max(axis=0).tolist()) == ([1, 3], [3, 5])
    corners = [[2, 9], [3, 9], [3, 7], [4, 7], [4, 3], [3, 3], [3, 5], [2, 5]]
    assert kept[:8].tolist() == corners
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["temporaries", "parameters"]


@pytest.mark.parametrize("largest", [8000, 20])
def test_a_step_is_as_high_as_its_peak_with_the_small_ones_as_one_band(tmp_path, drawn, largest):
    history = reconstruct(simulated_snapshot(TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2), "step"))
    draw_allocations(history, tmp_path / "x.png", "tiny", largest)
    axes, peak = drawn[0].axes[0], history.peak().n_bytes / 1024**2
    shapes = outlines(drawn[0])
    assert len(shapes) == min(largest, len(history.allocations))
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    if largest == 8000:
        assert max(shape[:, 1].max() for shape in shapes) == pytest.approx(peak)
        assert not axes.patches
    else:
        (band,) = [patch.get_data() for patch in axes.patches]
        assert band.values.max() == pytest.approx(peak)
        assert labels[0].startswith(f"{len(history.allocations) - 20:,} below ")
        assert max(shape[:, 1].max() for shape in shapes) == pytest.approx(band.baseline.max())
