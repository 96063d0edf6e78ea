"""Blocks and quoted numbers of several GPUs: predicted without rows, measured with them."""

import pandas as pd
import pytest

from cs336_systems.answers.committed import Committed, NotMeasured, visible
from cs336_systems.answers.distributed import blocks, figures, terms
from cs336_systems.answers.quotes import PENDING, evaluate
from cs336_systems.config import MODEL_SIZES
from cs336_systems.harness.record import Metric, schema_columns

GIB = 2**30
XL = 4 * MODEL_SIZES["xl"].n_parameters


@pytest.fixture
def empty(tmp_path):
    return Committed(tmp_path, "h200")


def test_without_rows_every_block_says_so(empty, tmp_path):
    for name, block in blocks(empty).items():
        assert visible(block)().startswith("**Not measured yet:** "), name
    for path, draw in figures(empty, tmp_path).items():
        with pytest.raises(NotMeasured):
            draw(path)


def test_without_rows_measured_numbers_are_pending_and_predicted_ones_are_there(empty):
    found = terms(empty)
    for spec in ("ddp exposed naive", "sharded step owned", "fsdp state ours", "collective busbw all_reduce 2 1"):
        assert evaluate(spec, found) == PENDING
    assert found["parameter-gib"].value() == pytest.approx(XL / GIB)
    assert found["predicted-exposed"].value("naive") == pytest.approx(1e3 * XL / 450e9)
    assert found["link-gib"].value("owned") == pytest.approx(2 * XL / GIB)
    assert found["link-gib"].value("scattered") == pytest.approx(XL / GIB)
    assert found["fsdp-states"].value() == pytest.approx(2 * XL / GIB, rel=1e-3)
    assert found["states-gib"].value("xl") == pytest.approx(4 * XL / GIB)


def test_measured_numbers_are_those_of_the_rows(tmp_path):
    cell = {"size": "xl", "world_size": 2, "dtype": "fp32", "compile": "off", "communication_dtype": "same"}
    cell |= {"ddp": "bucketed", "gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "argv": "x", "torch": "2.11"}
    cell |= {"schema_version": 1, "benchmark": "benchmark_ddp", "status": "ok", "timestamp": "now"}
    rows = [cell | {"bucket_size_mb": mb} | Metric("step", "ms", [ms]).statistics() for mb, ms in ((1, 7.0), (25, 6.0))]
    path = tmp_path / "results" / "h200" / "ddp" / "benchmark_ddp.csv"
    path.parent.mkdir(parents=True)
    columns = schema_columns(
        [*("size", "world_size", "dtype", "compile"), "communication_dtype", "ddp", "bucket_size_mb"]
    )
    pd.DataFrame(rows).reindex(columns=[*columns, "device"]).to_csv(path, index=False)
    found = terms(Committed(tmp_path, "h200"))
    assert evaluate("ddp step bucketed fp32 25", found) == "6.00"
    assert evaluate("ddp step naive", found) == PENDING


def test_the_ladder_and_the_buckets_are_the_handouts_setting(tmp_path):
    cell = {"size": "xl", "world_size": 2, "dtype": "fp32", "compile": "off", "communication_dtype": "same"}
    cell |= {"gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "argv": "x", "torch": "2.11", "status": "ok"}
    cell |= {"schema_version": 1, "benchmark": "benchmark_ddp", "timestamp": "now"}
    kinds = [("naive", "", 2), ("bucketed", 100, 2), ("bucketed", 25, 2), ("bucketed", 25, 4)]
    metrics = [Metric(name, "ms", [5.0]) for name in ("step", "exposed", "tokens_per_s")]
    rows = [
        cell | {"ddp": rung, "bucket_size_mb": mb, "world_size": ranks} | metric.statistics()
        for rung, mb, ranks in kinds
        for metric in metrics
    ]
    path = tmp_path / "results" / "h200" / "ddp" / "benchmark_ddp.csv"
    path.parent.mkdir(parents=True)
    settings = ("device", "size", "world_size", "dtype", "compile", "communication_dtype", "ddp", "bucket_size_mb")
    pd.DataFrame(rows).reindex(columns=schema_columns(settings)).to_csv(path, index=False)
    found = blocks(Committed(tmp_path, "h200"))
    lines = {name: [line for line in found[name]().splitlines() if " xl " in line] for name in ("ddp", "ddp-all")}
    assert (len(lines["ddp"]), len(lines["ddp-all"])) == (2, 4)
    buckets = [line for line in found["ddp-buckets"]().splitlines() if " xl " in line]
    assert [" 25 " in line for line in buckets] == [True, False]
