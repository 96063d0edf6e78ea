"""The figures of the calculators are drawn, with both limits where the arithmetic puts them."""

from pathlib import Path

import pytest

from cs336_systems.costs.parallelism.failures import Job
from cs336_systems.costs.parallelism.forms import DEVICES
from cs336_systems.costs.parallelism.pipeline import SCHEDULES, simulate
from cs336_systems.costs.parallelism.scaling import Workload
from cs336_systems.experiments.parallelism.figures import goodput_figure, pipelines_figure, scaling_figure
from cs336_systems.report.figures import save

PNG = b"\x89PNG"


@pytest.mark.parametrize("sequence_length", [4, 8192])
def test_scaling_is_drawn_with_limits_inside_and_outside(tmp_path: Path, sequence_length):
    path = tmp_path / "figures" / "scaling.png"
    save(scaling_figure(Workload(70_000_000_000, 2**22, sequence_length), DEVICES["h100"], 1024), path)
    assert path.read_bytes().startswith(PNG)


def test_goodput_is_drawn(tmp_path: Path):
    save(goodput_figure([("rare", Job(1e6, 60.0, 300.0)), ("often", Job(600.0, 60.0))]), tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").read_bytes().startswith(PNG)


def test_pipelines_are_drawn(tmp_path: Path):
    timelines = [simulate(name, 2, 4, chunks=2 if name == "interleaved" else 1) for name in SCHEDULES]
    save(pipelines_figure(timelines), tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(PNG)
