"""Answers to the handout: memory by arithmetic, time by kernel from digests, rounding."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.handout import (
    accumulated,
    attention_work,
    kept_by_block,
    largest_table,
    ran_out,
    residuals_table,
    sums_table,
    toy_table,
)
from cs336_systems.config import MODEL_SIZES
from tests.report.rows import make_cell, make_frame, ms

CELL = {"size": "small", "context_length": 512, "dtype": "fp32", "batch_size": 4}


def test_arithmetic_needs_no_rows():
    assert kept_by_block(2048)[0].n_bytes == 4 * 32 * 2048**2 * 4
    lines = residuals_table(2048).frame
    assert (lines.loc[0, "tensor"], lines.loc[0, "MiB"], len(lines)) == ("probabilities", "2,048", 5)
    assert attention_work("flops", "small", 512) == pytest.approx(4 * MODEL_SIZES["small"].d_head / 5)


def test_the_largest_allocations_of_each_cell_are_named_by_line_or_by_parameter():
    lines = [("before", 100.0, "w", ""), ("forward", 300.0, "", "ops.py:1"), ("forward", 200.0, "", "ops.py:2")]
    frame = pd.DataFrame(lines, columns=["phase", "mib", "what", "source"]).assign(made=1, at_peak=0, category="x")
    both = pd.concat([frame.assign(**CELL), frame.assign(**CELL | {"context_length": 128, "mib": 7.0})])
    found = largest_table(both, most=2).frame
    assert list(found["context"]) == [128, 128, 512, 512]
    assert list(found["source"]) == ["w", "ops.py:1", "ops.py:1", "ops.py:2"]
    assert list(found["MiB each"]) == ["7.00", "7.00", "300", "200"]


def test_rounding_and_dtypes_of_the_handout():
    assert len(sums_table().frame) == 4 and accumulated("bf16", "bf16", 1000) == "4"
    dtypes = toy_table().frame.set_index("tensor")["fp16"]
    assert (dtypes["parameters"], dtypes["logits"], dtypes["loss"]) == ("float32", "float16", "float32")


def test_what_the_allocator_said_when_it_ran_out_is_quoted():
    said = "asked for 32.00 GiB of 139.80 GiB, 96.50 GiB in tensors and 31.91 GiB in free pieces too small"
    rows = make_frame(make_cell(status="oom", message=said), make_cell(status="predicted-oom", message="peak 300 GiB"))
    assert ran_out(rows) == {"asked": 32.0, "device": 139.8, "in_tensors": 96.5, "in_pieces": 31.91}
    with pytest.raises(NotMeasured):
        ran_out(rows[1:])


def test_digests_are_found_by_their_rows(tmp_path):
    folder = tmp_path / "digests" / "h200" / "nsys"
    folder.mkdir(parents=True)
    cell = {"profiler": "nsys", "device": "cuda", "mode": "forward"} | CELL
    make_frame(make_cell(ms("busy", 5.0))).assign(samples="", **cell).to_csv(folder / "profile_model.csv", index=False)
    lines = [("gemm", "matmul", 60, 6.0), ("softmax", "softmax", 12, 1.5), ("gemm_nt", "matmul", 3, 0.5)]
    kernels = pd.DataFrame(lines, columns=["name", "kernel_class", "count", "total_ms"])
    kernels.to_csv(folder / "small-b4-c512-fp32-nsys-kernels.csv", index=False)
    found = Committed(tmp_path, "h200").digests("nsys", "kernels")
    assert found.where(size="small", kernel_class="matmul").sum("total_ms") == 6.5
    assert found.most("total_ms")["count"] == 60
    with pytest.raises(NotMeasured):
        found.where(size="large").most("total_ms")
