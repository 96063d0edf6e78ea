"""The picture of a log: that it is drawn, and that what it says is in the history."""

import pytest
from matplotlib.image import imread

from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.profile.memory_timeline import COLOURS, draw_memory_timeline
from cs336_systems.profiling.memory_history import CATEGORIES, reconstruct
from cs336_systems.training import TrainingCase
from tests.profiling.snapshots import EventLog, simulated_snapshot

GIB = 1024**3


def texts(figure):
    axes = figure.axes[0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    return [text.get_text() for text in axes.texts], legend


def test_a_step_is_drawn_with_its_phases_peak_and_categories(tmp_path, drawn):
    history = reconstruct(simulated_snapshot(TrainingCase.of(MODEL_SIZES["tiny"], batch_size=2), "step"))
    draw_memory_timeline(history, path := tmp_path / "folder" / "x.png", "tiny")
    assert imread(path).shape[0] > 500
    notes, legend = texts(drawn[0])
    peak = history.peak()
    assert [note.split("\n")[0] for note in notes[:3]] == ["forward", "backward", "optimizer"]
    assert notes[3] == f"peak {peak.n_bytes / 1024**2:.2f} MiB"
    shown = {entry.split("\n")[0]: entry.split("\n")[1] for entry in legend}
    assert list(shown) == ["temporaries", "activations", "gradients", "optimizer state", "parameters", "other"]
    assert shown["activations"].startswith(f"{peak.by_category['activations'] / 1024**2:.2f} MiB (")
    assert drawn[0].axes[0].get_ylabel() == "memory alive (bytes asked for), MiB"


@pytest.mark.parametrize(("n_bytes", "label"), [(5, "KiB"), (2**20, "MiB"), (GIB // 9, "GiB"), (80 * GIB, "GiB")])
def test_the_unit_fits_the_peak(tmp_path, drawn, n_bytes, label):
    log = EventLog()
    log.alloc(7, n_bytes)
    log.free(7)
    draw_memory_timeline(reconstruct(log.snapshot()), tmp_path / "x.png", "one block")
    assert drawn[0].axes[0].get_ylabel() == f"memory alive (bytes asked for), {label}"


def test_the_stack_is_as_high_as_the_peak(tmp_path, drawn):
    log = EventLog()
    log.exists(1, 3 * GIB)
    log.alloc(2, 2 * GIB)
    log.free(2)
    draw_memory_timeline(reconstruct(log.snapshot([[1, "parameters", "w"]])), tmp_path / "x.png", "two blocks")
    tops = [patch.get_data() for patch in drawn[0].axes[0].patches]
    assert [data.values.tolist() for data in tops] == [[3, 3, 3], [3, 5, 3]]
    assert [legend.split("\n")[0] for legend in texts(drawn[0])[1]] == ["temporaries", "parameters"]


def test_every_category_has_a_colour_of_its_own():
    assert set(COLOURS) == set(CATEGORIES)
    assert len(set(COLOURS.values())) == len(CATEGORIES)
