"""From cells to what is printed, drawn and kept; how failures end is the driver's."""

import json
from pathlib import Path

import pytest

from cs336_systems.experiments.leaks.findings import Findings, findings_figure, leak_experiment, where
from cs336_systems.experiments.options import RunOptions
from cs336_systems.harness.record import read_rows
from cs336_systems.report.figures import save
from cs336_systems.report.tables import Table
from tests.harness.cells import Cell, measure


def run(*whats, out=None, drawing=True):
    def analyse(rows):
        if rows.empty:
            return Findings([], {"value": None})
        tables = [Table("caption", rows[["metric", "unit"]])]
        return Findings(
            tables, {"value": rows["median"].iloc[0]}, (lambda axes: axes.plot([1, 2])) if drawing else None
        )

    experiment = leak_experiment(
        "experiment",
        Cell,
        lambda options: [Cell(what) for what in whats],
        measure,
        analyse,
        expected_s=lambda cell: 1.0,
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


def test_without_out_nothing_is_written_and_without_drawing_no_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("ok") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["csv"] is None
    assert list(tmp_path.iterdir()) == []
    assert run("ok", out=tmp_path, drawing=False) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figure"] is None


@pytest.mark.parametrize(("what", "code"), [("unsupported", 0), ("MemoryError", 0), ("exception", 1)])
def test_a_failed_cell_is_a_row_and_an_error_the_exit_code(what, code, tmp_path, capsys):
    assert run(what, "ok", out=tmp_path) == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["ok"], found["value"]) == (1, 2.0)
    assert len(read_rows(tmp_path / "experiment.csv")) == 3


def test_the_figure_has_what_was_drawn_and_what_its_points_share(tmp_path):
    findings = Findings([], {}, lambda axes: axes.plot([1, 2], [3, 5]), "a title", (3.0, 2.0))
    figure = findings_figure(findings)
    assert save(figure, tmp_path / "figure.png")
    (axes,) = figure.axes
    assert list(axes.lines[0].get_ydata()) == [3, 5]
    assert (axes.get_title(loc="left"), tuple(figure.get_size_inches())) == ("a title", (3.0, 2.0))
    assert (tmp_path / "figure.png").exists()


def test_nothing_measured_still_ends_in_json(capsys):
    assert run("unsupported") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["value"] is None


def test_an_unusable_folder_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run("ok", out=tmp_path / "file") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "experiment.png").mkdir()
    assert run("ok", out=tmp_path) == 2
    assert "experiment.png" in capsys.readouterr().err
