"""Ratios and verdicts on samples whose truth is known."""

import numpy as np
import pytest

from cs336_systems.report.compare import PROCESS_NOISE, ratio_interval, shown_noise, verdict


def noisy(centre: float, noise: float, count: int, seed: int) -> list[float]:
    """Samples around ``centre`` with a relative standard deviation of ``noise``."""
    return list(centre * (1 + noise * np.random.default_rng(seed).standard_normal(count)))


def processes(centre: float, count: int, seed: int, between: float = 0.003) -> list[list[float]]:
    """Processes whose own centres differ by ``between``, each with ten samples that differ by far less."""
    return [noisy(c, 0.001, 10, seed + i) for i, c in enumerate(noisy(centre, between, count, seed))]


def the_verdict(new: list[list[float]], old: list[list[float]], **how: float) -> str:
    _, low, high = ratio_interval(new, old, **how)
    return verdict(low, high)


def test_three_processes_a_side_decide_two_percent_and_one_decides_large_differences_only():
    for ratio, word in ((0.90, "faster"), (1.10, "slower"), (1.0, "same"), (1.003, "same")):
        for seed in range(3):
            assert the_verdict(processes(10 * ratio, 3, seed), processes(10, 3, seed + 100)) == word
    for ratio, word in ((0.75, "faster"), (1.3, "slower"), (1.0, "unclear"), (0.9, "unclear")):
        assert the_verdict(processes(10 * ratio, 1, 0), processes(10, 1, 100)) == word
    assert the_verdict([[0.7] * 5], [[1.0] * 5], noise=0.5) == "unclear", "this machine has shown larger differences"
    assert the_verdict([[0.7] * 5] * 3, [[1.0] * 5] * 3, noise=0.5) == "faster"


def test_two_draws_of_one_machine_do_not_differ():
    """Processes that differ by five percent, samples within one by a tenth: what fools a bootstrap of samples."""
    draws = [[processes(10, 4, seed + side, between=0.05) for side in (0, 10_000)] for seed in range(100)]
    verdicts = [the_verdict(*sides) for sides in draws]
    assert sum(word in ("faster", "slower") for word in verdicts) <= 15
    assert "same" not in verdicts


def test_an_interval_is_exact_for_constants_and_the_same_each_time():
    assert ratio_interval([[3.0] * 5] * 3, [[4.0] * 7] * 3) == (0.75, 0.75, 0.75)
    new, old = processes(10, 3, 0), processes(10, 3, 1)
    assert ratio_interval(new, old) == ratio_interval(new, old) != ratio_interval(new, old, seed=1)
    for without in (([], [[1.0]]), ([[1.0, 2.0]], []), ([[1.0]], [[]])):
        with pytest.raises(ValueError, match="samples on both sides"):
            ratio_interval(*without)
    limits = {(0.98, 1.02): "same", (0.90, 0.979): "faster", (1.021, 1.5): "slower"}
    unclear = dict.fromkeys([(0.90, 0.98), (1.02, 1.5), (0.5, 2.0)], "unclear")
    for interval, word in (limits | unclear).items():
        assert verdict(*interval) == word


def test_noise_is_what_the_machine_has_shown_and_no_less_than_what_others_have():
    assert shown_noise([[[1.0, 1.0], [1.1, 1.1]]]) == PROCESS_NOISE
    assert shown_noise([[[1.0, 1.0], [1.5, 1.5]], [[3.0]]]) == pytest.approx(0.5), "between two processes"
    assert shown_noise([[list(np.linspace(1, 2, 11))]]) == pytest.approx(1.9 / 1.1 - 1), "between the steps of one"
