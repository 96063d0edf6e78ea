"""Figures of the documents: what each drew, from which rows."""

import shutil

import pytest
from matplotlib.figure import Figure

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.figures import draw, figures, stale_figures
from cs336_systems.harness.record import DEFAULTS
from tests.report.rows import make_cell, make_frame, ms


@pytest.fixture
def saved(monkeypatch):
    """Every figure that is saved, by file name."""
    found = {}
    save = Figure.savefig

    def noted(figure, path, **options):
        found[path.name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    return found


def write(tmp_path, part, name, *cells):
    path = tmp_path / "results" / "h200" / part / name
    path.parent.mkdir(parents=True)
    make_frame(*cells).assign(samples="").to_csv(path, index=False)
    return Committed(tmp_path, "h200")


def test_the_grid_is_drawn_from_its_rows(tmp_path, saved):
    cells = [
        make_cell(ms("step", time), ms("mfu", 50.0), size="small", context_length=context, gpu="NVIDIA H200")
        for context, time in ((128, 10.0), (256, 20.0))
    ]
    found = figures(write(tmp_path, "grid", "benchmark_model.csv", *cells))
    found["h200_grid.png"].write(tmp_path / "h200_grid.png")
    drawn = saved["h200_grid.png"].axes[0].get_lines()[0]
    assert list(drawn.get_xdata()) == [128, 256]
    assert list(drawn.get_ydata()) == [10.0, 20.0]
    with pytest.raises(NotMeasured):
        found["h200_checkpointing.png"].write(tmp_path / "x.png")


@pytest.mark.slow
def test_what_has_rows_or_needs_none_is_drawn_and_says_from_what(tmp_path, monkeypatch):
    cell = make_cell(ms("step", 10.0), ms("mfu", 50.0), size="small", gpu="NVIDIA H200")
    committed = write(tmp_path, "grid", "benchmark_model.csv", cell)
    names = ("h200_grid.png", "pipeline_schedules.png", "h200_checkpointing.png")
    known = {name: drawing for name, drawing in figures(committed).items() if name in names}
    monkeypatch.setattr("cs336_systems.answers.figures.figures", lambda committed: known)
    figure = tmp_path / "figures" / "h200_grid.png"
    assert draw(committed, tmp_path) == ["h200_checkpointing.png"]
    assert {path.name for path in figure.parent.iterdir()} == {*names[:2]}
    assert stale_figures(committed, tmp_path) == []
    shutil.copy(tmp_path / "figures" / "pipeline_schedules.png", figure)
    (drawn_from_others,) = stale_figures(committed, tmp_path)
    assert drawn_from_others.startswith("figures/h200_grid.png was drawn from other rows")
    figure.unlink()
    figure.with_name("other.png").write_text("no picture")
    gone, unknown = stale_figures(committed, tmp_path)
    assert gone.startswith("figures/h200_grid.png is missing") and unknown == "figures/other.png: nothing draws it"


def test_a_setting_that_no_training_case_had_when_it_was_measured_changes_no_figures_source(tmp_path, monkeypatch):
    cell = make_cell(ms("step", 10.0), ms("mfu", 50.0), size="small", gpu="NVIDIA H200")
    path = write(tmp_path, "grid", "benchmark_model.csv", cell)
    before = figures(path)["h200_grid.png"].source()
    monkeypatch.setitem(DEFAULTS, "new_setting", 3)
    after = Committed(tmp_path, "h200")
    assert "new_setting" in after.rows("grid").frame()
    assert figures(after)["h200_grid.png"].source() == before
