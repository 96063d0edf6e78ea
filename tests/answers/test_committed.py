"""Committed rows: found by part, absent aloud, and asked where they come from."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured, missing_provenance, visible
from tests.report.rows import make_cell, make_frame, ms

WHERE = {"gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "argv": "benchmark_model.py", "dirty": False}


def write(frame: pd.DataFrame, path) -> None:
    path.parent.mkdir(parents=True)
    frame.assign(samples="").to_csv(path, index=False)


@pytest.fixture
def profiles(tmp_path):
    rows = make_frame(make_cell(ms("step", 1.0), **WHERE), make_cell(ms("step", 2.0), **WHERE))
    write(rows, tmp_path / "results" / "h200" / "grid" / "benchmark_model.csv")
    write(rows.assign(commit=["abc", ""]), tmp_path / "results" / "h200" / "lost" / "benchmark_model.csv")
    return tmp_path


def test_rows_are_read_by_part(profiles):
    committed = Committed(profiles, "h200")
    assert list(committed.rows("grid")["median"]) == [1.0, 2.0]
    assert committed.rows("grid") is committed.rows("grid")
    assert committed.problems == []


def test_problems_of_another_machines_rows_are_told_with_the_others(profiles):
    committed = Committed(profiles, "h200")
    (profiles / "results" / "cpu").mkdir()
    (profiles / "results" / "h200" / "lost").rename(profiles / "results" / "cpu" / "lost")
    assert len(committed.beside("cpu").rows("lost")) == 2
    assert len(committed.problems) == 1


def test_rows_that_do_not_say_where_they_come_from_are_named(profiles):
    committed = Committed(profiles, "h200")
    committed.rows("lost")
    expected = "results/h200/lost/benchmark_model.csv, line 3: 1 of 2 rows do not say their commit"
    assert [problem.partition("/")[2] for problem in committed.problems] == [expected]


@pytest.mark.parametrize("column", ["gpu", "commit", "argv", "timestamp", "torch"])
def test_every_column_of_provenance_is_asked_for(column):
    rows = make_frame(make_cell(ms("step", 1.0), **WHERE))
    assert missing_provenance(rows) == []
    assert missing_provenance(rows.assign(**{column: ""})) == [f"line 2: 1 of 1 rows do not say their {column}"]


def test_a_cpus_rows_name_their_host_instead():
    rows = make_frame(make_cell(ms("step", 1.0), **(WHERE | {"gpu": "", "device": "cpu"})))
    assert missing_provenance(rows) == []
    assert missing_provenance(rows.assign(host="")) == ["line 2: 1 of 1 rows do not say their host"]


def test_a_part_that_is_missing_is_a_sentence_in_the_document(profiles):
    committed = Committed(profiles, "h200")
    with pytest.raises(NotMeasured):
        committed.rows("ddp", "benchmark_ddp")
    text = visible(lambda: str(committed.rows("ddp", "benchmark_ddp")))()
    assert text.startswith("**Not measured yet:** the rows of `")
    assert text.endswith("results/h200/ddp/benchmark_ddp.csv` are missing.")
    with pytest.raises(NotMeasured):
        committed.digest("nsys", "page.md")
