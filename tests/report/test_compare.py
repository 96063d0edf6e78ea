"""The table of a comparison: which rows are put side by side, and the verdicts on samples whose truth is known."""

import numpy as np
import pytest

from cs336_systems.report.compare import compare, ratio_interval, verdict
from tests.report.rows import ceiling, make_cell, make_frame, ms


def test_one_line_per_shared_phase_and_one_process_a_side_decides_nothing():
    old = make_frame(ceiling(), make_cell(ms("forward", 2.0, 2.0), ms("step", 4.0, 4.0), ms("warmup_step", 9.0)))
    new = make_frame(ceiling(), make_cell(ms("forward", 1.0, 1.0), ms("step", 5.0, 5.0), ms("warmup_step", 8.0)))
    table = compare(new, old)
    columns = ("size", "metric", "old ms", "new ms", "new / old", "processes", "95 % interval", "verdict")
    assert table.frame[[*columns]].to_numpy().tolist() == [
        ["tiny", "forward", "2.000", "1.000", "0.500", "1, 1", "0.500–0.500", "unclear"],
        ["tiny", "step", "4.000", "5.000", "1.250", "1, 1", "1.250–1.250", "unclear"],
    ]
    assert "timings in the new rows only: 0; timings in the old rows only: 0" in table.caption
    assert "--repeat 3" in table.markdown()


def test_other_numbers_of_steps_are_compared_but_neither_other_warm_ups_nor_failures():
    step, longer = make_cell(ms("step", 1.0)), make_cell(ms("step", 1.0), steps=9)
    assert len(compare(make_frame(step), make_frame(longer)).frame) == 1
    assert compare(make_frame(step), make_frame(make_cell(ms("step", 1.0), warmup=4))).frame.empty
    table = compare(make_frame(make_cell(status="oom", message="no room")), make_frame(step))
    assert table.frame.empty
    assert "timings in the old rows only: 1" in table.caption
    assert table.caption.startswith("no timing is in both; ") and next(iter(table.frame)) == "metric"
    assert all((table.markdown(), table.latex(), table.csv(), table.rich(80)))


def test_repeats_of_the_newest_run_are_processes_of_one_cell():
    later = {"timestamp": "2026-01-02T00:00:00+00:00"}
    runs = [make_cell(ms("step", value), repeat=i, **later) for i, value in enumerate((9.0, 2.0, 4.0))]
    old = make_frame(make_cell(ms("step", 100.0)), *runs)
    three = make_frame(*(make_cell(ms("step", 1.0), repeat=i) for i in range(3)))
    line = compare(three, old).frame.iloc[0]
    assert (line["old ms"], line["processes"], line["verdict"]) == ("4.000", "3, 3", "faster")
    failed = make_frame(make_cell(ms("step", 9.0)), make_cell(status="oom", message="no room", **later))
    assert compare(three, failed).frame.empty


def test_a_loaded_machine_is_said():
    busy, idle = ({"state_before": f'{{"load_1min": {load}}}'} for load in (7.5, 1.9))
    one = make_cell(ms("step", 1.0))
    assert "new rows: the machine was loaded, 7.5 processes on 2 cores" in (
        compare(make_frame(make_cell(ms("step", 1.0), **busy)), make_frame(one)).caption
    )
    assert "loaded" not in compare(make_frame(make_cell(ms("step", 1.0), **idle)), make_frame(one)).caption


def noisy(centre: float, noise: float, count: int, seed: int) -> list[float]:
    """Samples around ``centre`` with a relative standard deviation of ``noise``."""
    return list(centre * (1 + noise * np.random.default_rng(seed).standard_normal(count)))


def processes(centre: float, count: int, seed: int, between: float = 0.003) -> list[list[float]]:
    """Processes whose own centres differ by ``between``, each with ten samples that differ by far less."""
    return [noisy(c, 0.001, 10, seed + i) for i, c in enumerate(noisy(centre, between, count, seed))]


def the_verdict(new: list[list[float]], old: list[list[float]]) -> str:
    _, low, high = ratio_interval(new, old)
    return verdict(low, high)


def test_three_processes_a_side_decide_two_percent():
    for ratio, word in ((0.90, "faster"), (1.10, "slower"), (1.0, "same"), (1.003, "same")):
        assert the_verdict(processes(10 * ratio, 3, 0), processes(10, 3, 100)) == word


def test_two_draws_of_one_machine_do_not_differ():
    """Processes that differ by five percent, samples within one by a tenth: what fools a bootstrap of samples."""
    draws = [[processes(10, 4, seed + side, between=0.05) for side in (0, 10_000)] for seed in range(50)]
    verdicts = [the_verdict(*sides) for sides in draws]
    assert sum(word in ("faster", "slower") for word in verdicts) <= 8
    assert "same" not in verdicts


def test_an_interval_is_exact_for_constants_and_the_same_each_time():
    assert ratio_interval([[3.0] * 5] * 3, [[4.0] * 7] * 3) == (0.75, 0.75, 0.75)
    new, old = processes(10, 3, 0), processes(10, 3, 1)
    assert ratio_interval(new, old) == ratio_interval(new, old)
    with pytest.raises(ValueError, match="samples on both sides"):
        ratio_interval([[1.0]], [[]])
