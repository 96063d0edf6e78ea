"""Experiments in documents: their own analyses over committed rows."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.experiments import blocks, figures, terms
from cs336_systems.answers.quotes import evaluate
from cs336_systems.experiments.leaks.findings import Findings
from cs336_systems.report.tables import Table
from tests.report.rows import make_cell, make_frame, ms


def analyse(rows: pd.DataFrame) -> Findings:
    median = float(rows["median"].sum())
    tables = [Table("One.", pd.DataFrame({"ms": [median]})), Table("Two.", pd.DataFrame({"ms": [0.0]}))]
    return Findings(tables, {"knee": {"measured product": median}}, lambda axes: axes.plot([0, 1], [0, median]), "T")


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "results" / "h200" / "leaks" / "roofline_knee.csv"
    path.parent.mkdir(parents=True)
    failed = make_cell(status="error", message="no", gpu="NVIDIA H200")
    make_frame(make_cell(ms("time", 46.0), gpu="NVIDIA H200"), failed).assign(samples="").to_csv(path, index=False)
    return Committed(tmp_path, "h200")


def test_tables_figures_and_numbers_are_the_analyses_own(committed, tmp_path):
    analyses = {"roofline_knee": analyse}
    text = blocks(committed, analyses)["leak-roofline-knee"]()
    assert text.index("One.") < text.index("Two.")
    assert evaluate("leak roofline_knee knee measured-product", terms(committed, analyses)) == "46.0"
    with pytest.raises(ValueError, match="cannot be computed"):
        evaluate("leak roofline_knee knee guess", terms(committed, analyses))
    for path, draw in figures(committed, analyses, tmp_path).items():
        draw(path)
        assert path.stat().st_size > 5000


def test_rows_that_are_missing_are_not_measured(committed):
    with pytest.raises(NotMeasured):
        blocks(committed, {"matmul_data": analyse})["leak-matmul-data"]()
