"""The time line: it draws, and what it draws can be told apart."""

import itertools

import pytest

from cs336_systems.profiling.traces.kernels import CLASSES
from cs336_systems.profiling.traces.tables import TraceError
from cs336_systems.report.timeline import CLASS_COLOURS, draw_timeline
from tests.experiments.profile.profiles import golden_profile


def test_every_class_has_a_colour_of_its_own():
    assert set(CLASS_COLOURS) == set(CLASSES)
    assert len(set(CLASS_COLOURS.values())) == len(CLASSES)


def luminance(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_large_classes_differ_in_print():
    """Matmul beside the kinds of kernels that lie next to it, also without colours."""
    for other in ("elementwise", "reduction", "copy or cast"):
        assert abs(luminance(CLASS_COLOURS["matmul"]) - luminance(CLASS_COLOURS[other])) > 0.15


def test_each_step_is_drawn(tmp_path):
    trace = golden_profile().trace
    for step in range(2):
        draw_timeline(trace, ["forward", "backward", "optimizer"], "a title", tmp_path / f"{step}.png", step)
    pictures = [(tmp_path / f"{step}.png").read_bytes() for step in range(2)]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert all(a != b for a, b in itertools.pairwise(pictures))
    with pytest.raises(IndexError):
        draw_timeline(trace, [], "a title", tmp_path / "no.png", 2)


def test_a_trace_without_steps_is_refused(tmp_path):
    trace = golden_profile().trace
    bare = type(trace)(trace.ops, trace.ranges[trace.ranges["name"] != "step"], trace.source)
    with pytest.raises(TraceError, match="no range 'step'"):
        draw_timeline(bare, [], "a title", tmp_path / "no.png")
