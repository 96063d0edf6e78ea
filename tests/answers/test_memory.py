"""Memory by arithmetic and from digests; checkpointing predicted where it is not measured."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.memory import blocks, checkpoint_table, peaks_table, residuals_table, terms
from cs336_systems.answers.quotes import PENDING
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.flops import hardware_flops
from tests.report.rows import make_cell, make_frame, ms


def test_the_largest_tensors_of_a_block():
    lines = residuals_table(2048).frame
    assert lines.loc[0, "tensor"] == "probabilities"
    assert lines.loc[0, "MiB"] == "2,048"
    assert len(lines) == 5


def test_checkpointing_is_predicted_and_says_that_it_is_not_measured(tmp_path):
    committed = Committed(tmp_path, "h200")
    lines = checkpoint_table(committed).frame.set_index("checkpoint")
    assert set(lines["measured peak GiB"]) == {PENDING}
    config = MODEL_SIZES["2.7b"].at_context(2048)
    extra = hardware_flops(config, 4, 2048, "step", checkpoint="full") / hardware_flops(config, 4, 2048, "step") - 1
    assert lines.loc["full", "more FLOPs %"] == f"{100 * extra:.1f}"
    with pytest.raises(NotMeasured):
        blocks(committed)["checkpointing-figure"]()
    with pytest.raises(NotMeasured):
        terms(committed)["checkpointed"].value("step", "full")


def test_arithmetic_terms_need_no_rows(tmp_path):
    found = terms(Committed(tmp_path, "h200"))
    assert found["residual-mib"].value("512") == 4 * 512 * 2560 * 4 / 2**20
    assert found["block-gradients-mib"].value() == pytest.approx(400.02, abs=0.01)
    assert found["recomputed"].value("full") == 1.0
    assert found["recomputed"].value("recursive") == 5 / 2
    assert found["best-segment"].value("2048") < 1


def test_peaks_are_measured_where_a_row_says_so(tmp_path):
    def write(part: str, frame: pd.DataFrame, name: str) -> None:
        path = tmp_path / part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.assign(samples="").to_csv(path, index=False)

    large = {"size": "2.7b", "batch_size": 4, "gpu": "NVIDIA H200", "context_length": 128}
    write("results/h200/grid", make_frame(make_cell(ms("peak_memory", 51.3), **large)), "benchmark_model.csv")
    empty = make_frame(make_cell(ms("peak_memory", 1.0), **(large | {"size": "small"})))
    write("results/h200/context-512", empty, "benchmark_model.csv")
    forward = large | {"context_length": 256, "mode": "forward", "dtype": "autocast-bf16"}
    write("results/h200/memory-256", make_frame(make_cell(ms("peak_memory", 19.2), **forward)), "benchmark_model.csv")
    watched = large | {"context_length": 2048}
    write("digests/h200/memory", make_frame(make_cell(ms("peak_gib", 136.0), **watched)), "profile_model.csv")
    page = tmp_path / "digests" / "h200" / "memory" / "memory-2.7b-b4-c2048-fp32-step.md"
    page.write_text("**Out of memory.** The pass ended early")
    lines = peaks_table(Committed(tmp_path, "h200")).frame.set_index("context")
    assert lines.loc[128, "step fp32"].startswith("51.3 (51.")
    assert lines.loc[2048, "step fp32"].startswith("out of memory at 136 (")
    assert lines.loc[256, "forward autocast-bf16"].startswith("19.2 (19.")
    assert lines.loc[256, "forward fp32"].startswith(PENDING)
