"""The table of settings by hand beside what train.py chooses."""

from pathlib import Path

import pytest

from cs336_systems.answers.choices import choice_table, chosen_is_fastest
from cs336_systems.harness.record import read_rows

ROWS = Path(__file__).parents[2] / "profiles/results/h200/choice/benchmark_training.csv"


@pytest.fixture
def rows():
    rows = read_rows(ROWS)
    return rows[rows["size"] == "qwen2.5-1.5b"].copy()


def test_each_setting_has_its_share_of_the_fastest_and_one_is_chosen(rows):
    frame = choice_table(rows).frame
    assert len(frame) == 6 and list(frame["chosen"]).count("yes") == 1
    assert "100.0" in set(frame["of the fastest %"])
    assert chosen_is_fastest(rows) == (1, 1)


def test_a_choice_that_is_slower_than_another_setting_does_not_count(rows):
    slow = (rows["batch_size"] == 32) & (rows["keep"] == "all") & (rows["metric"] == "tokens_per_s")
    for column in ("median", "mean", "p10", "p90"):
        rows.loc[slow, column] = 1000.0
    rows.loc[slow, "samples"] = rows.loc[slow, "samples"].map(lambda samples: [1000.0] * len(samples))
    assert chosen_is_fastest(rows) == (0, 1)


def test_a_setting_that_ran_out_of_memory_is_told(rows):
    failed = (rows["batch_size"] == 16) & (rows["keep"] == "products")
    rows = rows[~failed | (rows["metric"] == "step")]
    rows.loc[failed & (rows["metric"] == "step"), ["status", "metric"]] = "oom", ""
    frame = choice_table(rows).frame
    assert list(frame["tokens/s"]).count("out of memory") == 1
