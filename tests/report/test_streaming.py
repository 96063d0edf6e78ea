"""The picture of a plan under memory caps."""

from pathlib import Path

import pandas as pd
import pytest

from cs336_systems.config import ModelConfig
from cs336_systems.costs.rates import Rates
from cs336_systems.hardware import MIB
from cs336_systems.report.figures import save
from cs336_systems.report.timeline import streaming_figure, timeline_rows
from cs336_systems.streaming.choose import Caps, ChosenPlan, choose


@pytest.fixture(scope="module")
def choice() -> ChosenPlan:
    config = ModelConfig("small", 64, 192, 4, 4, vocab_size=256, context_length=128)
    rates = Rates(1e11, 1e11, 1e11, 1e10, link_alone=3e8, link_out_both=2.5e8)
    return choose(config, 64, Caps(2 * MIB, 3 * MIB, 0, 0), rates, least_chunk=32, tokens_per_step=384, effort=1)


@pytest.mark.slow
def test_picture(choice: ChosenPlan, tmp_path: Path) -> None:
    timeline_rows(choice.schedule.operations, choice.times).to_csv(tmp_path / "lanes.csv", index=False)
    figure = streaming_figure(pd.read_csv(tmp_path / "lanes.csv"), "three lanes")
    labels = [label.get_text().partition("\n")[0] for label in figure.axes[0].get_yticklabels()]
    assert labels == ["to the device", "kernels", "to the host"]
    assert save(figure, tmp_path / "lanes.png")
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"forward", "backward"} <= legend
