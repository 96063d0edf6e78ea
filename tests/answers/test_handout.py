"""Answers to the handout: memory by arithmetic, time by kernel from digests, rounding."""

import pandas as pd
import pytest
import torch

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.handout import (
    KeptByBlock,
    accumulated,
    checkpoint_table,
    classes_table,
    kernel_share,
    memory_errors_table,
    ran_out,
    residuals_table,
    stage_times,
    stages_table,
    sums_table,
    top_kernel,
    toy_table,
)
from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.precision import cuda_autocast, pretended_cuda
from tests.report.rows import make_cell, make_frame, ms

CELL = {"size": "small", "context_length": 512, "dtype": "fp32", "batch_size": 4}


def test_arithmetic_needs_no_rows():
    assert KeptByBlock(512).input_mib == 4 * 512 * 2560 * 4 / 2**20
    assert KeptByBlock(2048).n_bytes[0] == 4 * 32 * 2048**2 * 4
    lines = residuals_table(2048).frame
    assert (lines.loc[0, "tensor"], lines.loc[0, "MiB"], len(lines)) == ("probabilities", "2,048", 5)


def test_checkpointing_stands_beside_its_prediction():
    cell = {"size": "2.7b", "batch_size": 4, "context_length": 2048, "dtype": "fp32"}
    rows = make_frame(
        make_cell(
            ms("peak_memory", 59.4), ms("predicted_peak_memory", 57.7), ms("step", 1.0), **cell, checkpoint="full"
        ),
        make_cell(status="oom", **cell, checkpoint="every-8"),
    )
    lines = checkpoint_table(rows).frame.set_index("checkpoint")
    assert list(lines["measured peak GiB"]) == ["59.4", "oom"]
    assert list(lines["predicted peak GiB"]) == ["57.7", "oom"]


def test_errors_of_predicted_peaks():
    cells = [
        make_cell(
            ms("peak_memory", 10.0), ms("predicted_peak_memory", 10.0 + error), size="small", context_length=context
        )
        for context, error in ((128, 0.1), (256, -0.3))
    ]
    line = memory_errors_table(make_frame(*cells)).frame.iloc[0]
    assert (line["cells"], line["mean error %"]) == (2, "-1.0") and line["worst error %"].startswith("-3.0 (")


def test_rounding_and_dtypes_of_the_handout():
    assert len(sums_table().frame) == 4 and accumulated("bf16", "bf16", 1000) == "4"
    dtypes = toy_table().frame.set_index("tensor")["fp16"]
    assert (dtypes["parameters"], dtypes["logits"], dtypes["loss"]) == ("float32", "float16", "float32")
    with pretended_cuda(), cuda_autocast(torch.float16):
        narrow = torch.nn.functional.linear(torch.randn(2, 3), torch.randn(4, 3))
    assert narrow.dtype == torch.float16 and not torch.is_autocast_enabled("cuda")


def test_what_the_allocator_said_when_it_ran_out_is_quoted():
    said = "asked for 32.00 GiB of 139.80 GiB, 96.50 GiB in tensors and 31.91 GiB in free pieces too small"
    rows = make_frame(make_cell(status="oom", message=said), make_cell(status="predicted-oom", message="peak 300 GiB"))
    assert ran_out(rows) == {"asked": 32.0, "device": 139.8, "in_tensors": 96.5, "in_pieces": 31.91}
    with pytest.raises(NotMeasured):
        ran_out(rows[1:])


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


def test_the_leader_may_be_no_product():
    copy = pd.DataFrame([("inference forward", "bf16_copy", "copy or cast", 182, 7.0, 48.0)])
    copy.columns = ["passes", "name", "kernel_class", "count", "total_ms", "share_percent"]
    found = top_kernel(pd.concat([kernels(), copy.assign(**CELL)]), "inference forward", "small", 512)
    assert found == {"name": "bf16_copy", "percent": 48.0, "runs": 182}


def test_shares_by_class_add_up():
    lines = classes_table(kernels()).frame.set_index("pass")
    assert lines.loc["inference forward", "matmul %"] == "78.9"
    assert lines.loc["forward + backward", "matmul %"] == "100.0"


def test_casts_are_told_from_softmax_and_from_products():
    old = pd.DataFrame({"range": ["scores matmul", "softmax", "values matmul"], "summed_ms": [0.12, 0.8, 0.42]})
    new = old.assign(copies_ms=[0.02, 0.41, 0.2], **CELL | {"context_length": 1024})
    found = stages_table(pd.concat([old.assign(**CELL), new])).frame.set_index("context")
    casts = ["its casts ms", "their copies and casts ms", "without copies"]
    assert list(found.loc[512, casts]) == ["–", "–", "–"]
    assert list(found.loc[1024, casts]) == ["0.410", "0.220", "0.821"]
    assert list(found["matmuls / softmax: time"]) == ["0.68", "0.68"]
    assert stage_times(new).ratio_without_copies == pytest.approx(0.32 / 0.39)
    with pytest.raises(NotMeasured, match="softmax"):
        stage_times(new[new["range"] != "softmax"])
    assert found.loc[512, "FLOPs"] == f"{4 * MODEL_SIZES['small'].d_head / 5:.1f}"


def test_digests_are_found_by_their_rows(tmp_path):
    folder = tmp_path / "digests" / "h200" / "nsys"
    folder.mkdir(parents=True)
    cell = {"profiler": "nsys", "device": "cuda", "mode": "forward"} | CELL
    make_frame(make_cell(ms("busy", 5.0))).assign(samples="", **cell).to_csv(folder / "profile_model.csv", index=False)
    kernels().to_csv(folder / "small-b4-c512-fp32-nsys-kernels.csv", index=False)
    found = Committed(tmp_path, "h200").digests("nsys", "kernels").frame()
    assert kernel_share(found, "inference forward", "small", 512) == pytest.approx(6 / 7.6)
    with pytest.raises(NotMeasured):
        top_kernel(found, "full step", "small", 512)
