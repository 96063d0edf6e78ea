"""The time line: every range and operation of a step is drawn where it was, and what is drawn can be told apart."""

import pytest
from matplotlib.colors import to_hex

from cs336_systems.profiling.ranges import STEP
from cs336_systems.profiling.traces.kernels import CLASSES, kernel_class
from cs336_systems.profiling.traces.queries import MS
from cs336_systems.profiling.traces.tables import TraceError
from cs336_systems.report.timeline import CLASS_COLOURS, draw_timeline
from tests.experiments.profiles import golden_profile

PHASES = ["forward", "backward", "optimizer"]


@pytest.fixture(scope="module")
def trace():
    return golden_profile().trace


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


def bars(axes):
    """(start, length, colour) of every bar, in ms."""
    found = []
    for collection in axes.collections:
        colours = [to_hex(colour).upper() for colour in collection.get_facecolors()]
        for i, path in enumerate(collection.get_paths()):
            (left, _), (right, _) = path.get_extents().get_points()
            found.append((left, right - left, colours[i % len(colours)]))
    return found


@pytest.mark.parametrize("step", [0, 1])
def test_each_operation_is_drawn_where_it_ran_in_the_colour_of_its_class(trace, tmp_path, drawn, step):
    draw_timeline(trace, PHASES, "a title", path := tmp_path / "step.png", step)
    assert path.exists()
    _, device = drawn[0].axes
    window = trace.instances(STEP).iloc[[step]]
    ops, zero = trace.operations(window), window["start"].iloc[0]
    expected = [
        ((start - zero) / MS, (end - start) / MS, CLASS_COLOURS[kernel_class(name)])
        for name, start, end in ops[["name", "start", "end"]].itertuples(index=False)
    ]
    found = [bar for bar in bars(device) if bar[2] in CLASS_COLOURS.values()]
    assert len(found) == len(expected) > 100
    for bar, operation in zip(sorted(found), sorted(expected), strict=True):
        assert bar[:2] == pytest.approx(operation[:2], abs=1e-6)
    assert sorted(colour for *_, colour in found) == sorted(colour for *_, colour in expected)
    assert device.get_xlim() == pytest.approx((0, (max(ops["end"].max(), window["end"].iloc[0]) - zero) / MS))
    legend = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert legend == [label for label in CLASSES if label in set(ops["name"].map(kernel_class))]


def test_the_last_step_is_drawn_with_its_ranges_and_phases(trace, tmp_path, drawn):
    draw_timeline(trace, PHASES, "a title", tmp_path / "last.png")
    host, device = drawn[0].axes
    window = trace.instances(STEP).iloc[[-1]]
    shown = trace.during(trace.ranges, window)
    shown = shown[shown["depth"] < 5]
    zero = window["start"].iloc[0]
    assert [bar[0] for bar in sorted(bars(host))] == pytest.approx(sorted((shown["start"] - zero) / MS), abs=1e-6)
    rows = [label.get_text() for label in host.get_yticklabels()]
    assert rows[:2] == ["caller's thread", "depth 1"] and "autograd's thread" in rows
    assert [label.get_text() for label in device.get_yticklabels()][:2] == ["phases", "GPU 0, stream 7"]
    assert {"forward", "backward"} <= {text.get_text() for text in host.texts} & {t.get_text() for t in device.texts}
    assert drawn[0].get_suptitle() == "a title"


def test_a_step_that_was_not_recorded_is_refused(trace, tmp_path):
    with pytest.raises(IndexError):
        draw_timeline(trace, [], "a title", tmp_path / "no.png", 2)


def test_a_trace_without_steps_is_refused(trace, tmp_path):
    bare = type(trace)(trace.ops, trace.ranges[trace.ranges["name"] != "step"], trace.source)
    with pytest.raises(TraceError, match="no range 'step'"):
        draw_timeline(bare, [], "a title", tmp_path / "no.png")
