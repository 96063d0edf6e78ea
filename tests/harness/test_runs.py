"""The run rule: of each cell the newest run counts, its repeats pooled, and rates fit the times beside them."""

import pytest

from cs336_systems.harness.runs import newest, newest_run, pooled
from tests.report.rows import make_cell, make_frame, ms, rate

LATER = {"timestamp": "2026-01-02T00:00:00+00:00"}


def steps(*cells) -> list[float]:
    """The step times of the newest run of the one cell."""
    run = newest_run(make_frame(*cells))
    return list(run[run["metric"] == "step"]["median"])


def measured(value: float, **values: object):
    return make_cell(ms("forward", value / 2), ms("step", value), **values)


def repeated(*values: float, **others: object):
    return [measured(value, repeat=i, **others) for i, value in enumerate(values)]


def test_repeats_of_one_command_are_one_run():
    assert steps(*repeated(1.0, 3.0, 9.0)) == [1.0, 3.0, 9.0]
    minutes = [{"timestamp": f"2026-01-01T00:0{i}:00+00:00"} for i in range(3)]
    assert steps(*(measured(1.0 + i, repeat=i, **minute) for i, minute in enumerate(minutes))) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("difference", [LATER, {"argv": "another"}, {"commit": "another"}, {}])
def test_what_was_appended_later_is_another_run(difference):
    assert steps(*repeated(1.0, 3.0), *repeated(5.0, 6.0, **difference)) == [5.0, 6.0]
    assert steps(measured(1.0), measured(5.0, **difference)) == [5.0]
    assert steps(*repeated(1.0, 3.0, 4.0), measured(5.0, **difference)) == [5.0], "ended early: no repeat is borrowed"


def test_a_failure_is_not_hidden_by_an_earlier_success_nor_a_success_by_an_earlier_failure():
    failed = make_cell(status="oom", message="no room", **LATER)
    run = newest_run(make_frame(measured(1.0), failed))
    assert list(run["status"]) == ["oom"]
    assert steps(failed, measured(2.0)) == [2.0]
    assert steps(
        measured(1.0, repeat=0), make_cell(status="error", message="?", repeat=1), measured(3.0, repeat=2)
    ) == [1.0, 3.0]


def test_pooled_is_the_median_of_medians_between_the_outermost_percentiles():
    cells = [make_cell(ms("step", *values), repeat=i) for i, values in enumerate([(1, 2, 3), (5, 6, 7), (2, 3, 40)])]
    (row,) = pooled(make_frame(*cells)).to_dict("records")
    assert (row["median"], row["p10"], row["p90"], row["n"]) == (3.0, pytest.approx(1.2), pytest.approx(32.6), 9)


def test_a_rate_is_the_amount_over_the_median_time():
    """64 tokens in 3 and 11 seconds: their rates' median is 13.6, what 7 seconds make is 9.1."""
    rates = rate("tokens_per_s", (64 / 3 + 64 / 11) / 2)
    rows = make_frame(make_cell(ms("step", 3000.0, 11000.0), rates))
    found = pooled(rows).set_index("metric")
    assert found.loc["tokens_per_s", "median"] == pytest.approx(64 / 7)
    assert found.loc["tokens_per_s", "p10"] == pytest.approx(64e3 / found.loc["step", "p90"])
    assert found.loc["tokens_per_s", "p90"] == pytest.approx(64e3 / found.loc["step", "p10"])
    twice = make_frame(
        *(make_cell(ms("step", t), rate("tokens_per_s", 64e3 / t), repeat=i) for i, t in ((0, 1e3), (1, 3e3)))
    )
    assert pooled(twice).set_index("metric").loc["tokens_per_s", "median"] == pytest.approx(32)


def test_newest_keeps_the_columns_and_one_row_per_metric_of_each_cell():
    rows = make_frame(*repeated(1.0, 3.0), measured(8.0, size="xl"), make_cell(status="oom", message="no", size="10b"))
    found = newest(rows, ["size"])
    assert list(zip(found["size"], found["metric"], found["median"].fillna(0), strict=True)) == [
        ("tiny", "forward", 1.0),
        ("tiny", "step", 2.0),
        ("xl", "forward", 4.0),
        ("xl", "step", 8.0),
        ("10b", "", 0.0),
    ]
    assert newest(rows.head(0), ["size"]).empty
