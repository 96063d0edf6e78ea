"""Memory by arithmetic and from digests; checkpointing predicted where it is not measured."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.memory import (
    KeptByBlock,
    RanOut,
    checkpoint_table,
    peak_of,
    peaks_table,
    ran_out,
    residuals_table,
    segments_table,
)
from cs336_systems.answers.rendering import PENDING
from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.report.tables import digits
from tests.report.rows import make_cell, make_frame, ms


def test_the_largest_tensors_of_a_block():
    lines = residuals_table(2048).frame
    assert lines.loc[0, "tensor"] == "probabilities"
    assert lines.loc[0, "MiB"] == "2,048"
    assert len(lines) == 5


def test_checkpointing_is_predicted_and_says_what_is_not_measured():
    cell = {"size": "2.7b", "batch_size": 4, "context_length": 2048, "dtype": "autocast-bf16", "checkpoint": "none"}
    found = checkpoint_table(make_frame(make_cell(ms("peak_memory", 136.0), ms("step", 9.0, 9.0), **cell)))
    assert found.caption == "size 2.7b, batch 4, context 2048, dtype autocast-bf16; medians of 2 whole steps."
    lines = found.frame.set_index("checkpoint")
    assert lines.loc["none", "measured peak GiB"] == "136"
    assert set(lines["measured peak GiB"].drop("none")) == {PENDING}
    config = MODEL_SIZES["2.7b"].at_context(2048)
    extra = hardware_flops(config, 4, 2048, "step", checkpoint="full") / hardware_flops(config, 4, 2048, "step") - 1
    assert lines.loc["full", "more FLOPs %"] == f"{100 * extra:.1f}"


def test_segments_are_predicted_where_no_row_has_them():
    cell = {"size": "2.7b", "batch_size": 4, "context_length": 2048, "dtype": "autocast-bf16"}
    rows = make_frame(
        make_cell(ms("peak_memory", 59.4), ms("step", 1242.0), **cell, checkpoint="full"),
        make_cell(status="oom", **cell, checkpoint="every-8"),
    )
    measured = segments_table(rows, "autocast-bf16").frame.set_index("k")
    assert list(measured["measured peak GiB"]) == ["59.4", PENDING, PENDING, "oom"]
    predicted = segments_table(rows, "fp32").frame.set_index("k")
    assert set(predicted["step ms"]) == {PENDING}
    assert list(predicted["at"]) == [f"block {i}, attention backward" for i in (0, 1, 3, 7)]
    peak = peak_of("step", "fp32", 2048, "every-2")
    assert predicted.loc[2, "predicted peak GiB"] == digits(peak.n_bytes / 2**30)
    assert sum(float(predicted.loc[2, f"{part} GiB"]) for part in peak.parts) == pytest.approx(61.3, abs=0.1)


def test_arithmetic_needs_no_rows():
    assert KeptByBlock(512).input_mib == 4 * 512 * 2560 * 4 / 2**20
    assert KeptByBlock(2048).n_bytes[0] == 4 * 32 * 2048**2 * 4


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
    watched = make_frame(make_cell(ms("peak_gib", 136.0), **(large | {"context_length": 2048})))
    write("digests/h200/memory", watched.assign(profiler="memory"), "profile_model.csv")
    page = tmp_path / "digests" / "h200" / "memory" / "memory-2.7b-b4-c2048-fp32-step.md"
    page.write_text("**Out of memory.** The pass ended early")
    committed = Committed(tmp_path, "h200")
    steps, pages = committed.rows("grid", "context-512", "memory-256"), committed.digests("memory", "page")
    found = peaks_table(steps.frame(), committed.rows("memory").frame(), pages.frame())
    assert found.caption == "size 2.7b, batch 4; peak GiB: measured, in brackets predicted."
    lines = found.frame.set_index("context")
    assert lines.loc[128, "step fp32"].startswith("51.3 (51.")
    assert lines.loc[2048, "step fp32"].startswith("out of memory at 136 (")
    assert lines.loc[256, "forward autocast-bf16"].startswith("19.2 (19.")
    assert lines.loc[256, "forward fp32"].startswith(PENDING)


def test_what_the_allocator_said_when_it_ran_out_is_quoted():
    said = "asked for 32.00 GiB of 139.80 GiB, 96.50 GiB in tensors and 31.91 GiB in free pieces too small"
    rows = make_frame(make_cell(status="oom", message=said), make_cell(status="predicted-oom", message="peak 300 GiB"))
    assert ran_out(rows) == RanOut(asked=32.0, device=139.8, in_tensors=96.5, in_pieces=31.91)
    with pytest.raises(NotMeasured):
        ran_out(rows[1:])
