"""Every allocation drawn by itself: where it lies, when it falls, and that nothing is missing."""

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
