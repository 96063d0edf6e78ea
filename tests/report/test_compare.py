"""Comparisons on samples whose truth is known."""

import numpy as np
import pytest

from cs336_systems.report.compare import compare, ratio_interval, verdict
from tests.report.rows import ceiling, make_cell, make_frame, ms


def noisy(centre: float, noise: float, count: int, seed: int) -> list[float]:
    """Samples around ``centre`` with a relative standard deviation of ``noise``."""
    return list(centre * (1 + noise * np.random.default_rng(seed).standard_normal(count)))


def the_verdict(new: list[float], old: list[float]) -> str:
    _, low, high = ratio_interval(new, old)
    return verdict(low, high)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("ratio", "word"), [(0.90, "faster"), (1.10, "slower"), (1.0, "same"), (1.005, "same")])
def test_clear_cases(ratio, word, seed):
    assert the_verdict(noisy(10 * ratio, 0.01, 50, seed), noisy(10, 0.01, 50, seed + 100)) == word


@pytest.mark.parametrize("seed", range(5))
def test_few_noisy_samples_are_unclear(seed):
    assert the_verdict(noisy(10, 0.2, 4, seed), noisy(10, 0.2, 4, seed + 100)) == "unclear"


def test_a_difference_as_large_as_the_margin_is_unclear():
    assert the_verdict(noisy(9.8, 0.02, 20, 0), noisy(10, 0.02, 20, 1)) == "unclear"


def test_two_draws_of_one_distribution_do_not_differ():
    verdicts = [the_verdict(noisy(10, 0.05, 20, seed), noisy(10, 0.05, 20, seed + 10_000)) for seed in range(100)]
    assert sum(word in ("faster", "slower") for word in verdicts) <= 2


def test_the_interval_holds_the_truth_as_often_as_it_says():
    held = 0
    for seed in range(100):
        _, low, high = ratio_interval(noisy(9, 0.05, 20, seed), noisy(10, 0.05, 20, seed + 10_000))
        held += low <= 0.9 <= high
    assert 88 <= held < 100


def test_ratio_of_constants_is_exact():
    assert ratio_interval([3.0] * 5, [4.0] * 7) == (0.75, 0.75, 0.75)


def test_the_bootstrap_is_deterministic():
    new, old = noisy(10, 0.1, 10, 0), noisy(10, 0.1, 10, 1)
    assert ratio_interval(new, old) == ratio_interval(new, old)
    assert ratio_interval(new, old, seed=1) != ratio_interval(new, old)


@pytest.mark.parametrize(
    ("new", "old", "counts"), [([], [1.0], "0 new and 1 old"), ([1.0, 2.0], [], "2 new and 0 old")]
)
def test_a_side_without_samples_is_refused(new, old, counts):
    with pytest.raises(ValueError, match=counts):
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
            "95 % interval": "0.500–0.500",
            "verdict": "faster",
        },
        {
            "size": "tiny",
            "metric": "step",
            "old ms": "4.000",
            "new ms": "5.000",
            "new / old": "1.250",
            "95 % interval": "1.250–1.250",
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


def test_other_numbers_of_steps_and_warm_ups_are_compared():
    assert (
        len(
            compare(
                make_frame(make_cell(ms("step", 1.0), steps=9, warmup=4)), make_frame(make_cell(ms("step", 2.0)))
            ).frame
        )
        == 1
    )


def test_the_newest_rows_win():
    old = make_frame(make_cell(ms("step", 9.0)), make_cell(ms("step", 2.0)))
    assert compare(make_frame(make_cell(ms("step", 2.0))), old).frame["verdict"].tolist() == ["same"]


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
