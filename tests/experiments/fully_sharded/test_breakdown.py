"""Where a recorded step's time goes, beside the least of each part: from made-up rows."""

import pandas as pd
import pytest

from cs336_systems.experiments.fully_sharded.breakdown import breakdown_figure, breakdown_table, recorded_lines
from cs336_systems.harness.record import Metric, parse_samples

PARTS = {"forward_products": 800.0, "forward_attention": 500.0, "backward_products": 1250.0, "backward_idle": 2.0}


def rows(**settings) -> pd.DataFrame:
    plain = {"gpu": "NVIDIA H200", "size": "leaderboard-8b", "batch_size": 1, "context_length": 32_768, "dtype": "bf16"}
    plain |= {"fsdp": "ours", "world_size": 2, "keep": "products", "repeat": 0, "status": "ok", "message": ""}
    metrics = [Metric("step", "ms", [4300.0]), *(Metric(name, "ms", [ms, ms + 2]) for name, ms in PARTS.items())]
    return parse_samples(pd.DataFrame([plain | settings | metric.statistics() for metric in metrics]))


def test_every_part_stands_beside_its_bound():
    (line,) = recorded_lines(rows())
    frame = breakdown_table(line).frame.set_index("kind")
    assert list(frame.index) == ["products", "attention", "elementwise", "optimizer", "communication", "idle", "all"]
    assert frame.loc["products", ["forward ms", "forward least"]].tolist() == ["801.0", "579.4"]
    assert frame.loc["products", "above least"] == "561.0"  # 801 + 1,251 less 579.4 and 911.5, unrounded
    assert frame.loc["all", "step ms"] == f"{sum(PARTS.values()) + 4:,.1f}"
    assert frame.loc["optimizer", "optimizer least"] == "11.8"
    figure = breakdown_figure(rows())
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["forward: products", "forward: attention", "backward: products", "backward: idle"]


@pytest.mark.parametrize("unknown", [{"gpu": ""}, {"keep": "autograd"}, {"dtype": "bf16-compute"}])
def test_what_has_no_bounds_is_shown_without(unknown):
    (line,) = recorded_lines(rows(**unknown))
    frame = breakdown_table(line).frame.set_index("kind")
    assert frame.loc["products", ["forward ms", "forward least", "above least"]].tolist() == ["801.0", "–", "–"]
    assert breakdown_figure(rows(**unknown)) is None


def test_steps_that_were_not_recorded_have_none():
    unrecorded = rows()[rows()["metric"] == "step"]
    assert recorded_lines(unrecorded) == []
    assert breakdown_figure(unrecorded) is None
