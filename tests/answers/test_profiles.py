"""Digests of several profiles as one table."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.profiles import (
    classes_table,
    forward_table,
    kernel_share,
    other_kernels_table,
    stage_times,
    stages_table,
    top_kernel,
    top_kernels_table,
)
from cs336_systems.config import MODEL_SIZES
from tests.report.rows import make_cell, make_frame, ms

CELL = {"size": "small", "context_length": 512, "dtype": "fp32", "batch_size": 4}


def kernels():
    lines = [
        ("inference forward", "gemm", "matmul", 60, 6.0),
        ("inference forward", "softmax", "softmax", 12, 1.5),
        ("inference forward", "tiny", "elementwise", 3, 0.1),
        ("forward + backward", "gemm", "matmul", 60, 6.0),
        ("forward + backward", "gemm_nt", "matmul", 48, 7.0),
    ]
    frame = pd.DataFrame(lines, columns=["passes", "name", "kernel_class", "count", "total_ms"]).assign(**CELL)
    whole = frame.groupby("passes")["total_ms"].transform("sum")
    return frame.assign(share_percent=100 * frame["total_ms"] / whole)


def test_the_leading_kernel_of_each_pass():
    lines = top_kernels_table(kernels()).frame
    assert list(lines["kernel"]) == ["gemm", "gemm_nt"]
    assert list(lines["share %"]) == ["78.9", "53.8"]


def test_the_leader_may_be_no_product():
    copy = pd.DataFrame([("inference forward", "bf16_copy", "copy or cast", 182, 7.0, 48.0)])
    copy.columns = ["passes", "name", "kernel_class", "count", "total_ms", "share_percent"]
    found = top_kernel(pd.concat([kernels(), copy.assign(**CELL)]), "inference forward", "small", 512)
    assert (found.name, found.kernel_class, found.runs) == ("bf16_copy", "copy or cast", 182)
    assert found.share == pytest.approx(0.48)


def test_forward_shows_the_newest_run_of_a_cell():
    names = ("unprofiled_forward", "recorded_forward", "busy", "operations")
    runs = [
        make_cell(*(ms(name, time) for name in names), argv=argv, **CELL)
        for argv, time in (("older", 9.0), ("newer", 2.0))
    ]
    assert list(forward_table(make_frame(*runs)).frame["harness ms"]) == ["2.00"]


def test_shares_by_class_add_up():
    lines = classes_table(kernels()).frame.set_index("pass")
    assert lines.loc["inference forward", "matmul %"] == "78.9"
    assert lines.loc["forward + backward", "matmul %"] == "100.0"


def test_other_kernels_are_those_that_matter():
    assert list(other_kernels_table(kernels()).frame["kernel"]) == ["softmax"]


def test_stages_have_times_and_work():
    ranges = pd.DataFrame(
        {"range": ["scores matmul", "softmax", "values matmul"], "summed_ms": [1.0, 0.5, 1.0], "mode": "forward"}
    ).assign(**CELL)
    line = stages_table(ranges).frame.iloc[0]
    assert line["products / softmax: time"] == "4.00"
    assert line["FLOPs"] == f"{4 * MODEL_SIZES['small'].d_head / 5:.1f}"
    assert not any("casts" in column for column in line.index), "the digest does not tell them apart"


def test_casts_are_told_from_softmax_and_from_products():
    old = pd.DataFrame({"range": ["scores matmul", "softmax", "values matmul"], "summed_ms": [0.12, 0.8, 0.42]})
    new = old.assign(copies_ms=[0.02, 0.41, 0.2], **CELL | {"context_length": 1024})
    found = stages_table(pd.concat([old.assign(**CELL), new])).frame.set_index("context")
    casts = ["its casts ms", "their copies and casts ms", "without copies"]
    assert list(found.loc[512, casts]) == ["–", "–", "–"]
    assert list(found.loc[1024, casts]) == ["0.410", "0.220", "0.82"]
    assert list(found["products / softmax: time"]) == ["0.68", "0.68"]
    assert stage_times(new).ratio_without_copies == pytest.approx(0.32 / 0.39)
    with pytest.raises(NotMeasured, match="softmax"):
        stage_times(new[new["range"] != "softmax"])


def test_digests_are_found_by_their_rows(tmp_path):
    folder = tmp_path / "digests" / "h200" / "nsys"
    folder.mkdir(parents=True)
    cell = {"profiler": "nsys", "device": "cuda", "mode": "forward"} | CELL
    rows = make_frame(make_cell(ms("unprofiled_forward", 10.0), ms("recorded_forward", 12.0), ms("busy", 5.0)))
    operations = make_frame(make_cell(ms("operations", 600.0)))
    frame = pd.concat([rows, operations]).assign(samples="", **cell)
    frame.to_csv(folder / "profile_model.csv", index=False)
    kernels().to_csv(folder / "small-b4-c512-fp32-nsys-kernels.csv", index=False)
    committed = Committed(tmp_path, "h200")
    forward = forward_table(committed.rows("nsys", mode="forward").frame())
    assert forward.caption == "batch 4; forward without gradients."
    assert forward.frame.loc[0, "busy / harness"] == "0.500"
    found = committed.digests("nsys", "kernels").frame()
    assert kernel_share(found, "inference forward", "small", 512) == pytest.approx(6 / 7.6)
    assert top_kernel(found, "forward + backward", "small", 512).runs == 48
    assert committed.rows("nsys", size="small", context_length=512).number("busy") == 5
