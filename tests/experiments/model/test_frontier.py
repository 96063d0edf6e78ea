"""The picture of peak memory against time: which rows become points, lines and names, and when nothing is drawn."""

import pytest

from cs336_systems.experiments.model_figures import frontier_figure
from cs336_systems.report.figures import save
from tests.report.rows import ceiling, make_cell, make_frame, ms, rate


def measured(policy: str, step_ms: float, peak_gib: float, **settings: object) -> list:
    """A cell that ran; its predicted peak is a tenth higher."""
    peaks = rate("peak_memory", peak_gib), rate("predicted_peak_memory", 1.1 * peak_gib)
    return make_cell(ms("step", step_ms), *peaks, checkpoint=policy, **settings)


SWEEP = (
    *(measured("none", 100.0, 80.0), measured("first-8", 110.0, 60.0), measured("full", 130.0, 30.0)),
    *(measured("every-4", 131.0, 36.0), measured("every-2", 130.5, 33.0)),
    *(measured("recursive", 180.0, 29.0), measured("keep-matmuls", 135.0, 50.0)),
)


def drawn(*cells):
    """The axes of the cells' figure."""
    return frontier_figure(make_frame(*cells)).axes


def points(axes) -> list[list[tuple[float, float]]]:
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]


def test_a_png_is_drawn(tmp_path):
    path = tmp_path / "frontier.png"
    assert save(frontier_figure(make_frame(*SWEEP, ceiling())), path) is True
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_policy_is_a_named_point_and_lines_go_by_number():
    (axes,) = drawn(*SWEEP)
    assert sorted(text.get_text() for text in axes.texts) == sorted(row[0]["checkpoint"] for row in SWEEP)
    lines = points(axes)
    assert [(130.0, 30.0), (130.5, 33.0), (131.0, 36.0)] in lines, "full, every-2, every-4"
    assert [(100.0, 80.0), (110.0, 60.0), (130.0, 30.0)] in lines, "none, first-8, full"
    assert [(180.0, pytest.approx(1.1 * 29.0)), (135.0, pytest.approx(55.0))] in lines, "predictions of the others"


def test_the_frontier_leaves_out_what_is_slower_and_larger():
    (axes,) = drawn(*SWEEP)
    assert points(axes)[0] == [(100.0, 80.0), (110.0, 60.0), (130.0, 30.0), (180.0, 29.0)]


def test_what_did_not_run_is_named_with_its_status():
    (axes,) = drawn(*SWEEP, make_cell(status="oom", message="no room", checkpoint="every-32"))
    assert "every-32: oom" in axes.get_title()
    assert "every-32" not in [text.get_text() for text in axes.texts]


def test_repeats_are_one_point_and_models_are_panels():
    repeats = [measured("none", 120.0, 80.0, repeat=1), measured("none", 140.0, 80.0, repeat=2)]
    axes, other = drawn(*SWEEP, *repeats, *(measured(p, 9.0, 9.0, size="xl") for p in ("none", "full")))
    assert (120.0, 80.0) in [point for line in points(axes) for point in line]
    assert "tiny step" in axes.get_title()
    assert "xl step" in other.get_title()


@pytest.mark.parametrize(
    "rows",
    [
        [ceiling()],
        [measured("none", 1.0, 1.0)],
        [measured("full", 1.0, 1.0), measured("none", 1.0, 1.0, size="xl")],
        [make_cell(status="oom", message="no room"), make_cell(status="oom", message="no room", checkpoint="full")],
    ],
    ids=["only ceilings", "one policy", "two models, one policy each", "only failures"],
)
def test_without_several_policies_of_one_model_nothing_is_written(tmp_path, rows):
    path = tmp_path / "frontier.png"
    assert save(frontier_figure(make_frame(*rows)), path) is False
    assert not path.exists()
