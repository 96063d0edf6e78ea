"""Tables and quoted numbers of whole models, from hand-made rows."""

import pytest

from cs336_systems.answers.committed import Committed
from cs336_systems.answers.models import compiled_table, mixed_precision_table, peak_ratio, phases_table, terms
from tests.report.rows import make_cell, make_frame, ms

STEP = {"size": "small", "context_length": 512, "batch_size": 4, "gpu": "NVIDIA H200"}


def step(size="small", scale=1.0, **values):
    times = (ms("forward", 2.0 * scale, 2.2 * scale), ms("backward", 4.2 * scale, 4.2 * scale))
    return make_cell(*times, ms("optimizer", 1.0, 1.0), ms("step", 7.3 * scale), **(STEP | {"size": size} | values))


def rows():
    failed = make_cell(status="predicted-oom", message="needs 192 GiB", **(STEP | {"size": "10b"}))
    sizes = ("small", "medium", "large", "xl", "2.7b")
    cells = [step(size, dtype=dtype, scale=s) for size in sizes for dtype, s in (("fp32", 2.0), ("autocast-bf16", 0.5))]
    return make_frame(*cells, failed)


def test_phases_have_means_and_deviations_and_failures_their_reason():
    lines = phases_table(rows()).frame.set_index("size")
    assert lines.loc["small", "forward ms"] == "4.20 ± 0.28"
    assert lines.loc["small", "backward / forward"] == "2.00"
    assert lines.loc["10b", "status"] == "predicted-oom: needs 192 GiB"
    assert lines.loc["10b", "forward ms"] == "–"


def test_mixed_precision_has_ratios():
    lines = mixed_precision_table(rows()).frame.set_index("size")
    assert lines.loc["xl", "forward ratio"] == lines.loc["xl", "backward ratio"] == "4.0"
    assert lines.loc["10b", "step ratio"] == "–"


def test_compiled_blocks_stand_beside_eager_ones():
    lines = compiled_table(make_frame(step(compile="off", scale=3.0), step(compile="on", variant="compiled"))).frame
    assert lines.loc[0, "forward ratio"] == lines.loc[0, "forward + backward ratio"] == "3.00"


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "results" / "h200" / "context-512" / "benchmark_model.csv"
    path.parent.mkdir(parents=True)
    rows().assign(samples="").to_csv(path, index=False)
    return Committed(tmp_path, "h200")


def test_quoted_numbers_are_those_of_the_rows(committed):
    found = terms(committed)
    assert found["model"].value("forward", "xl", "fp32") == pytest.approx(4.2)
    assert found["statistic"].value("forward", "xl", "fp32", "mean") == pytest.approx(4.2)
    assert found["passes"].value("xl", "autocast-bf16") == pytest.approx(3.15)
    assert found["backward-over-forward"].value("least", "fp32") == pytest.approx(2.0)
    assert found["deviation"].value("most", "fp32") == pytest.approx(0.2 * 2**0.5 / 4.2)
    assert found["backward-over-forward"].form == ".2f"


def test_the_ratio_of_peaks_is_the_datasheets():
    assert peak_ratio("bf16", "fp32") == pytest.approx(989.4 / 66.9, rel=0.01)
    with pytest.raises(KeyError):
        peak_ratio("fp3", "fp32")
