"""What the lecture's experiments share: knees and crossings of known curves, and rows as they are printed and drawn."""

import json
import random
from pathlib import Path

import pytest

from cs336_systems.experiments.findings import Findings, crossing, findings_figure, fit_knee, leak_experiment, where
from cs336_systems.experiments.options import RunOptions
from cs336_systems.harness.record import read_rows
from cs336_systems.report.tables import Table
from tests.harness.cells import Cell, measure

XS = [1.0, 2, 4, 8, 16, 32, 64, 128]


def run(*whats, out=None):
    def analyse(rows):
        if rows.empty:
            return Findings([], {"value": None})
        tables = [Table("caption", rows[["metric", "unit"]])]
        return Findings(tables, {"value": rows["median"].iloc[0]}, lambda axes: axes.plot([1, 2]))

    cells = [Cell(what) for what in whats]
    experiment = leak_experiment(
        "experiment", Cell, RunOptions, lambda options: cells, measure, analyse, expected_s=lambda cell: 1.0
    )
    return experiment.run(RunOptions(device="cpu", out=out, format="markdown", timeout=60))


def test_rows_table_figure_and_json(tmp_path, capsys):
    assert run("ok", "ok", out=tmp_path) == 0
    out = capsys.readouterr().out.strip().splitlines()
    assert out[0] == "caption" and out[2].startswith("|")
    found = json.loads(out[-1])
    assert (found["benchmark"], found["ok"], found["asked"], found["value"]) == ("experiment", 2, 2, 2.0)
    assert Path(found["figure"]) == tmp_path / "experiment.png" and Path(found["figure"]).exists()
    rows = read_rows(Path(found["csv"]))
    assert len(rows) == 4 and where(rows) == rows["host"].iloc[0] != ""


def test_failures_are_rows_and_their_codes(tmp_path, capsys):
    for what, code in (("unsupported", 0), ("exception", 1)):
        assert run(what, "ok", out=tmp_path / what) == code
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (found["ok"], found["value"]) == (1, 2.0)
        assert len(read_rows(tmp_path / what / "experiment.csv")) == 3
    assert run("unsupported") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["value"] is None
    (tmp_path / "experiment.png").mkdir()
    assert run("ok", out=tmp_path) == 2
    assert "experiment.png" in capsys.readouterr().err


def test_the_figure_has_what_was_drawn_and_its_title():
    figure = findings_figure(Findings([], {}, lambda axes: axes.plot([1, 2], [3, 5]), "a title", (3.0, 2.0)))
    (axes,) = figure.axes
    assert list(axes.lines[0].get_ydata()) == [3, 5]
    assert (axes.get_title(loc="left"), tuple(figure.get_size_inches())) == ("a title", (3.0, 2.0))


@pytest.mark.parametrize("knee", [5.0, 10.0, 20.0, 40.0])
@pytest.mark.parametrize("fixed", [0.0, 0.5])
def test_the_knee_of_a_roofline_is_found_whatever_its_corner(knee, fixed):
    """Points around the knee are slower than either resource alone, which must not enter the rates."""
    ys = [fixed + max(3.0, 3.0 * x / knee) * (1.2 if knee / 3 < x < 3 * knee and 1 < x < 128 else 1) for x in XS]
    found = fit_knee(XS[::-1], ys[::-1], fixed)
    assert (found.flat, found.slope, found.position) == pytest.approx((3.0, 3.0 / knee, knee))
    assert (found.at(1), found.at(2 * knee)) == pytest.approx((fixed + 3.0, fixed + 6.0))


def test_noise_and_an_unmeasured_cost_move_the_knee_little():
    draw = random.Random(0)
    ys = [max(3.0, 3.0 * x / 20) * draw.uniform(0.95, 1.05) for x in XS]
    assert fit_knee(XS, ys).position == pytest.approx(20, rel=0.2)
    found = fit_knee(XS, [0.5 + max(3.0, 3.0 * x / 20) for x in XS])
    assert found.flat == pytest.approx(3.5) and 3.0 / 20 < found.slope < 1.1 * 3.0 / 20


@pytest.mark.parametrize(
    ("xs", "ys", "fixed"),
    [
        ([1, 2, 3], [1, 1, 2], 0.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], 0.0),
        ([1, 2, 2, 4], [1, 1, 2, 4], 0.0),
        ([1, 2, 3, 4], [1, 0, 2, 4], 0.0),
        ([1, 2, 3, 4], [1, float("nan"), 2, 4], 0.0),
        ([0, 2, 3, 4], [1, 1, 2, 4], 0.0),
        ([1, 2, 3, 4], [1, 1, 2, 2.9], 0.0),
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
    ],
)
def test_what_has_no_knee_is_refused(xs, ys, fixed):
    with pytest.raises(ValueError, match="knee"):
        fit_knee(xs, ys, fixed)


def test_a_crossing_lies_between_its_points_on_logarithmic_axes():
    assert crossing([1, 10, 100], [1, 1, 100], 10) == pytest.approx(10**1.5)
    assert crossing([1, 4, 16], [1, 4, 16], [8, 8, 8]) == pytest.approx(8)
    assert crossing([1, 4, 16], [1, 2, 4], [4, 2, 1]) == pytest.approx(4)
    assert crossing([1, 2, 4], [1, 2, 3], 5) is None
    assert crossing([1, 2, 4], [6, 7, 8], 5) == 1
    assert crossing([1, 2, 4, 8], [6, 1, 1, 10], 5) > 4  # an early outlier is no crossing
    for xs, ys in (([], []), ([1, 2], [0, 1])):
        with pytest.raises(ValueError):
            crossing(xs, ys, 1)
