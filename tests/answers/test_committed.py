"""Committed rows: found by part, and absent aloud."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from tests.report.rows import make_cell, make_frame, ms

WHERE = {"gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "argv": "benchmark_model.py", "dirty": False}


def write(frame: pd.DataFrame, path) -> None:
    path.parent.mkdir(parents=True)
    frame.assign(samples="").to_csv(path, index=False)


@pytest.fixture
def profiles(tmp_path):
    rows = make_frame(make_cell(ms("step", 1.0), **WHERE), make_cell(ms("step", 2.0), **WHERE))
    write(rows, tmp_path / "results" / "h200" / "grid" / "benchmark_model.csv")
    write(rows, tmp_path / "results" / "h200" / "again" / "benchmark_model.csv")
    return tmp_path


def test_a_part_that_is_missing_is_not_measured(profiles):
    committed = Committed(profiles, "h200")
    with pytest.raises(NotMeasured, match="the rows of `results/h200/ddp` are missing"):
        committed.rows("ddp").number("step")
    with pytest.raises(NotMeasured):
        committed.digests("nsys", "kernels").frame()


@pytest.fixture
def asked(tmp_path):
    """Small was measured twice, in two repeats each; xl under two policies, at other numbers of warm-up steps."""
    cells = [
        make_cell(ms("step", time), ms("mfu", 50.0), size="small", repeat=repeat, **(WHERE | {"argv": argv}))
        for argv, times in (("first", (9.0, 9.0)), ("second", (1.0, 3.0)))
        for repeat, time in enumerate(times)
    ]
    for policy, warmup in (("10.0", 5), ("9", 1)):
        cells.append(make_cell(ms("step", 7.0, 9.0), size="xl", checkpoint=policy, warmup=warmup, **WHERE))
    cells.append(make_cell(status="oom", message="no", size="10b", checkpoint="", **WHERE))
    write(make_frame(*cells), tmp_path / "results" / "h200" / "grid" / "benchmark_model.csv")
    return Committed(tmp_path, "h200").rows("grid")


def test_a_number_is_the_median_over_repeats_of_the_newest_run_and_of_one_cell(asked):
    assert asked.where(size="small").number("step") == 2.0
    assert asked.where(size="small").number("step + mfu") == 52.0
    assert asked.where(size="xl", checkpoint=9).number("step", "std") == pytest.approx(2**0.5)
    with pytest.raises(ValueError, match="several cells, which differ in checkpoint$"):
        asked.where(size="xl").number("step")
    for wrong, named in ((asked.where(rung="naive"), "rung"), (asked.where(size="small"), "guess")):
        with pytest.raises(ValueError, match=named):
            wrong.number("step" if named == "rung" else named)
    for size in ("2.7b", "10b"):
        with pytest.raises(NotMeasured):
            asked.where(size=size).number("step")


def test_settings_are_compared_as_numbers_or_as_text_and_rows_ordered_by_size_and_number(asked):
    assert len(asked.where(checkpoint=[9, 10]).frame()) == len(asked.where(checkpoint=["", 10]).frame()) == 2
    assert set(asked.where(size=["xl", "10b"]).frame()["size"]) == {"xl", "10b"}
    assert list(asked.by("size").frame()["size"].unique()) == ["small", "xl", "10b"]
    assert list(asked.where(size="xl").by("checkpoint").frame()["checkpoint"]) == ["9", "10.0"]


def test_a_part_of_several_files_wants_one_named(profiles):
    folder = profiles / "results" / "h200" / "grid"
    (folder / "other.csv").write_bytes((folder / "benchmark_model.csv").read_bytes())
    committed = Committed(profiles, "h200")
    with pytest.raises(ValueError, match="name one: benchmark_model.csv, other.csv"):
        committed.rows("grid").frame()
    assert len(committed.rows("grid/other").frame()) == 2
    assert len(committed.rows("grid/other", "again").frame()) == 4


def test_a_question_names_its_settings_in_order_and_others_by_name(asked):
    step = asked.asked("size", "checkpoint")
    assert step("step", "xl", 9) == step("step", "xl", checkpoint="9") == 8.0
    for wrong in (lambda: step("step", "xl", 9, 1), lambda: step("step", "xl", size="small")):
        with pytest.raises(TypeError):
            wrong()


def test_every_row_of_some_metrics_and_the_lines_of_a_recording(asked, tmp_path):
    assert asked.where(size="small").values("step") == [9.0, 9.0, 1.0, 3.0]
    assert asked.where(size="xl").values("step", statistic="deviation") == pytest.approx([2**0.5 / 8] * 2)
    (tmp_path / "digests").mkdir()
    (tmp_path / "digests/links.csv").write_text("beside,tflops\nnothing,4\nnothing,6\ncopies,1\n")
    recorded = Committed(tmp_path, "h200").recorded("links", beside="nothing")
    assert recorded.mean("tflops") == 5.0
    with pytest.raises(NotMeasured):
        recorded.where(beside="heat").mean("tflops")
