"""The sharded optimizer's benchmark: its grid, what it refuses, and tables and figure of a real, tiny measurement."""

from dataclasses import asdict

import pandas as pd
import pytest

from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.spawn import spawn
from cs336_systems.experiments.sharded_optimizer import MEMORY, SHARDINGS, TIMES, measure, memory_figure
from cs336_systems.harness.record import Metric, parse_samples
from cs336_systems.report.figures import save
from tests.benchmarks.commands import cells_of

TINY = ["--size", "tiny", "--context-length", "16", "--steps", "2", "--warmup", "0"]


def measure_all(rank: Rank, cells: list) -> list[list[Metric]]:
    return [measure(cell, rank) for cell in cells]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """Two repeats of all four ways on two ranks, as a CSV would hold them, and one that failed."""
    cells = cells_of("sharded_optimizer", *TINY, "--repeat", "2")
    measured = spawn(measure_all, 2, cells, timeout_s=60)[0]
    where = {"gpu": "", "host": "a CPU", "status": "ok", "message": ""}
    lines = [
        asdict(cell) | where | metric.statistics()
        for cell, metrics in zip(cells, measured, strict=True)
        for metric in metrics
    ]
    failed = asdict(cells[0]) | where | {"size": "small", "status": "oom", "message": "too large", "metric": ""}
    return parse_samples(pd.DataFrame([*lines, failed]))


def test_repeats_are_outermost_and_ways_innermost():
    cells = cells_of("sharded_optimizer", *TINY, "--repeat", "2", "--batch-size", "1", "2")
    assert [cell.repeat for cell in cells] == [0] * 8 + [1] * 8
    assert [cell.sharding for cell in cells[:4]] == list(SHARDINGS)
    assert [cell.sharding for cell in cells[8:12]] == list(SHARDINGS)[::-1]
    assert {cell.world_size for cell in cells} == {2}


@pytest.mark.slow
def test_measured_bytes_are_the_predicted_ones(rows):
    """Within the 3 % asked for; on a CPU the sums are exact, and step counters are what is left over."""
    for _, cell in rows[rows["status"] == "ok"].groupby(["sharding", "repeat"]):
        medians = cell.set_index("metric")["median"]
        for measured, predicted in (
            ("initialised_parameters", "predicted_parameters"),
            ("before_step_gradients", "predicted_gradients"),
            ("after_step_optimizer_state", "predicted_optimizer_state"),
        ):
            assert medians[measured] == pytest.approx(medians[predicted], rel=2e-3)
        assert medians["initialised_optimizer_state"] == 0
        assert medians["after_forward_gradients"] == 0


def test_tables(rows):
    times, memory = TIMES.of(rows), MEMORY.of(rows)
    for table in (times, memory):
        assert list(table.frame["how"]) == [*SHARDINGS, "replicated"]
        assert table.frame["status"].iloc[-1] == "oom: too large"
        assert "ranks 2" in table.caption
    assert times.frame["ratio to replicated"].iloc[0] == "1.000"
    assert times.frame["ratio to replicated"].iloc[-1] == "–"
    assert "activations GiB" not in memory.frame  # a CPU does not say


def test_figure(rows, tmp_path):
    figure = memory_figure(rows)
    assert [axes.get_title() for axes in figure.axes] == ["initialised", "after forward", "before step", "after step"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(SHARDINGS[::-1])
    for axes, state in zip(figure.axes, (0, 1, 1, 1), strict=True):
        widths = {bar.get_facecolor(): bar.get_width() for bars in axes.containers for bar in bars.patches[-1:]}
        drawn = sorted(width for width in widths.values() if width)
        assert len(drawn) >= 1 + state, "parameters, and the optimizer's state once there is one"
    assert "Memory of one rank of 2: tiny" in figure.subfigs[0].get_suptitle()
    assert save(memory_figure(rows), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert not save(memory_figure(rows[rows["status"] != "ok"]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
