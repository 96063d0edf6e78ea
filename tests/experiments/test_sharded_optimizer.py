"""The sharded optimizer's benchmark: bytes of a real, tiny measurement are those predicted."""

import pytest

from cs336_systems.distributed.process_group import Rank
from cs336_systems.experiments.sharded_optimizer import measure
from cs336_systems.harness.record import Metric
from tests.benchmarks.commands import cells_of
from tests.distributed.checks import on_ranks
from tests.experiments.test_fully_sharded import TINY


def measure_all(rank: Rank, cells: list) -> list[list[Metric]]:
    return [measure(cell, rank) for cell in cells]


@pytest.mark.slow
def test_measured_bytes_are_the_predicted_ones():
    """Within the 3 % asked for; on a CPU the sums are exact, and step counters are what is left over."""
    cells = cells_of("sharded_optimizer", *TINY, "--repeat", "2")
    for metrics in on_ranks(measure_all, 2, cells)[0]:
        found = {metric.name: metric.samples[0] for metric in metrics}
        for measured, predicted in (
            ("initialised_parameters", "predicted_parameters"),
            ("before_step_gradients", "predicted_gradients"),
            ("after_step_optimizer_state", "predicted_optimizer_state"),
        ):
            assert found[measured] == pytest.approx(found[predicted], rel=2e-3)
        assert found["initialised_optimizer_state"] == found["after_forward_gradients"] == 0
