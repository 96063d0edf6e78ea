"""Comparisons on samples whose truth is known."""

from pathlib import Path

import numpy as np
import pytest

from cs336_systems.report.compare import compare, ratio_interval, verdict
from cs336_systems.report.tables import read_model_rows
from tests.report.rows import ceiling, make_cell, make_frame, ms

RESULTS = Path(__file__).resolve().parents[2] / "profiles" / "results" / "h200"


def noisy(centre: float, noise: float, count: int, seed: int) -> list[float]:
    """Samples around ``centre`` with a relative standard deviation of ``noise``."""
    return list(centre * (1 + noise * np.random.default_rng(seed).standard_normal(count)))


def processes(centre: float, count: int, seed: int, between: float = 0.003) -> list[list[float]]:
    """Processes whose own centres differ by ``between``, each with ten samples that differ by far less."""
    return [noisy(c, 0.001, 10, seed + i) for i, c in enumerate(noisy(centre, between, count, seed))]


def the_verdict(new: list[list[float]], old: list[list[float]]) -> str:
    _, low, high = ratio_interval(new, old)
    return verdict(low, high)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ratio", "word"), [(0.90, "faster"), (1.10, "slower"), (1.0, "same"), (1.003, "same")])
def test_clear_cases(ratio, word, seed):
    assert the_verdict(processes(10 * ratio, 3, seed), processes(10, 3, seed + 100)) == word


@pytest.mark.parametrize(("ratio", "word"), [(0.75, "faster"), (1.3, "slower"), (1.0, "unclear"), (0.9, "unclear")])
def test_one_process_a_side_decides_large_differences_only(ratio, word):
    assert the_verdict(processes(10 * ratio, 1, 0), processes(10, 1, 100)) == word


def test_two_draws_of_one_machine_do_not_differ():
    """Processes that differ by five percent, samples within one by a tenth: what fools a bootstrap of samples."""
    verdicts = [
        the_verdict(processes(10, 4, seed, between=0.05), processes(10, 4, seed + 10_000, between=0.05))
        for seed in range(100)
    ]
    assert sum(word in ("faster", "slower") for word in verdicts) <= 15
    assert "same" not in verdicts


def test_repeats_of_one_cell_in_the_committed_rows_do_not_differ():
    """Eager cells of two parts that were measured minutes apart by the same code."""
    new, old = (read_model_rows(RESULTS / part / "benchmark_model.csv") for part in ("context-512", "grid"))
    verdicts = compare(new, old).frame["verdict"]
    assert len(verdicts) >= 30
    assert set(verdicts) == {"unclear"}


def test_ratio_of_constants_is_exact_with_enough_processes():
    assert ratio_interval([[3.0] * 5] * 3, [[4.0] * 7] * 3) == (0.75, 0.75, 0.75)


def test_the_bootstrap_is_deterministic():
    new, old = processes(10, 3, 0), processes(10, 3, 1)
    assert ratio_interval(new, old) == ratio_interval(new, old)
    assert ratio_interval(new, old, seed=1) != ratio_interval(new, old)


@pytest.mark.parametrize(("new", "old"), [([], [[1.0]]), ([[1.0, 2.0]], []), ([[1.0]], [[]])])
def test_a_side_without_samples_is_refused(new, old):
    with pytest.raises(ValueError, match="samples on both sides"):
        ratio_interval(new, old)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.98, 1.02, "same"),
        (0.90, 0.979, "faster"),
        (0.90, 0.98, "unclear"),
        (1.021, 1.5, "slower"),
        (1.02, 1.5, "unclear"),
        (0.5, 2.0, "unclear"),
    ],
)
def test_verdicts_of_intervals(low, high, word):
    assert verdict(low, high) == word


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


def test_cells_of_one_side_are_counted_and_settings_are_not_mixed():
    old = make_frame(make_cell(ms("step", 1.0)), make_cell(ms("step", 1.0), size="small"))
    new = make_frame(
        make_cell(ms("step", 1.0)),
        make_cell(ms("step", 1.0), dtype="bf16"),
        make_cell(ms("step", 1.0), batch_size=2),
        make_cell(ms("step", 1.0), context_length=256),
    )
    table = compare(new, old)
    assert len(table.frame) == 1
    assert "timings in the new rows only: 3; timings in the old rows only: 1" in table.caption


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
    assert all((table.markdown(), table.latex(), table.csv(), table.rich()))


def test_differences_of_machine_and_versions_are_noted():
    step = ms("step", 1.0)
    table = compare(make_frame(make_cell(step, torch="2.12.0", gpu="B200")), make_frame(make_cell(step, gpu="H200")))
    assert "torch: 2.11.0 -> 2.12.0" in table.caption
    assert "gpu: H200 -> B200" in table.caption
    assert "triton" not in table.caption
