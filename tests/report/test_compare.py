"""The table of a comparison: which rows are put side by side, and what is said beside them."""

from pathlib import Path

from cs336_systems.harness.record import read_rows
from cs336_systems.report.compare import compare
from tests.report.rows import ceiling, make_cell, make_frame, ms

RESULTS = Path(__file__).resolve().parents[2] / "profiles" / "results" / "h200"


def test_repeats_of_one_cell_in_the_committed_rows_do_not_differ():
    """Eager cells of two parts that were measured minutes apart by the same code."""
    new, old = (read_rows(RESULTS / part / "benchmark_model.csv") for part in ("context-512", "grid"))
    verdicts = compare(new, old).frame["verdict"]
    assert len(verdicts) >= 30
    assert set(verdicts) == {"unclear"}


def test_one_line_per_shared_phase():
    old = make_frame(ceiling(), make_cell(ms("forward", 2.0, 2.0), ms("step", 4.0, 4.0), ms("warmup_step", 9.0)))
    new = make_frame(ceiling(), make_cell(ms("forward", 1.0, 1.0), ms("step", 5.0, 5.0), ms("warmup_step", 8.0)))
    table = compare(new, old)
    assert table.frame.to_dict("records") == [
        {
            "size": "tiny",
            "metric": "forward",
            "old ms": "2.000",
            "new ms": "1.000",
            "new / old": "0.500",
            "processes": "1, 1",
            "95 % interval": "0.417–0.600",
            "verdict": "faster",
        },
        {
            "size": "tiny",
            "metric": "step",
            "old ms": "4.000",
            "new ms": "5.000",
            "new / old": "1.250",
            "processes": "1, 1",
            "95 % interval": "1.042–1.500",
            "verdict": "slower",
        },
    ]
    assert "device cpu" in table.caption
    assert "timings in the new rows only: 0; timings in the old rows only: 0" in table.caption
    assert "verdict" in table.markdown()


def test_other_numbers_of_steps_are_compared_but_not_other_warm_ups():
    step, other = make_cell(ms("step", 1.0)), make_cell(ms("step", 1.0), steps=9)
    assert len(compare(make_frame(step), make_frame(other)).frame) == 1
    assert compare(make_frame(step), make_frame(make_cell(ms("step", 1.0), warmup=4))).frame.empty


def test_repeats_are_processes_of_one_cell():
    old = make_frame(*(make_cell(ms("step", value), repeat=i) for i, value in enumerate((9.0, 2.0, 4.0))))
    line = compare(make_frame(make_cell(ms("step", 2.0))), old).frame.iloc[0]
    assert (line["old ms"], line["processes"], line["verdict"]) == ("4.000", "3, 1", "unclear")


def test_a_failed_cell_is_never_a_ratio():
    new = make_frame(make_cell(status="oom", message="no room"))
    table = compare(new, make_frame(make_cell(ms("step", 1.0))))
    assert table.frame.empty
    assert "timings in the old rows only: 1" in table.caption
    assert all((table.markdown(), table.latex(), table.csv(), table.rich(80)))


def test_only_the_newest_run_of_a_cell_counts():
    later = {"timestamp": "2026-01-02T00:00:00+00:00"}
    old = make_frame(make_cell(ms("step", 9.0)), make_cell(ms("step", 2.0), **later))
    line = compare(make_frame(make_cell(ms("step", 2.0))), old).frame.iloc[0]
    assert (line["old ms"], line["processes"], line["new / old"]) == ("2.000", "1, 1", "1.000")
    failed = make_frame(make_cell(ms("step", 9.0)), make_cell(status="oom", message="no room", **later))
    assert compare(make_frame(make_cell(ms("step", 2.0))), failed).frame.empty


def test_one_process_a_side_is_not_faster_where_steps_of_one_process_differ_as_much():
    """The same commit measured twice on a busy machine."""
    old = make_frame(make_cell(ms("step", *(10.0 + i for i in range(10))), ms("forward", 5.0, 5.0)))
    new = make_frame(make_cell(ms("step", *(9.0 + i / 10 for i in range(10))), ms("forward", 2.0, 2.0)))
    table = compare(new, old)
    assert dict(zip(table.frame["metric"], table.frame["verdict"], strict=True)) == {
        "step": "unclear",
        "forward": "faster",
    }
    assert "step 66 %, forward 20 %" in table.notes["verdict"]
    assert "step 66 %" in table.markdown()


def test_a_loaded_machine_is_said():
    busy, idle = ({"state_before": f'{{"load_1min": {load}}}'} for load in (7.5, 1.9))
    one = make_cell(ms("step", 1.0))
    assert "new rows: the machine was loaded, 7.5 processes on 2 cores" in (
        compare(make_frame(make_cell(ms("step", 1.0), **busy)), make_frame(one)).caption
    )
    assert "loaded" not in compare(make_frame(make_cell(ms("step", 1.0), **idle)), make_frame(one)).caption
