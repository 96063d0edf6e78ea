"""Attention's tables for the written answers, from hand-made rows."""

import pandas as pd
import pytest

from cs336_systems.answers.attention import blocks, flash_table, materialised_table, terms
from cs336_systems.answers.committed import Committed
from cs336_systems.harness.record import Metric, schema_columns

COLUMNS = ("device", "grid", "impl", "dtype", "d_head", "length", "batch_size", "heads", "causal", "mask")


def rows(**times):
    """A cell for every implementation and length, ``both`` in ms; None is a cell that ran out of memory."""
    cells = []
    for impl, by_length in times.items():
        for length, ms in by_length.items():
            cell = {"schema_version": 1, "gpu": "NVIDIA H200", "impl": impl.replace("_", "-"), "dtype": "bf16"}
            cell |= {"device": "cuda", "d_head": 64, "length": length, "batch_size": 1, "heads": 1, "status": "ok"}
            cell |= {"commit": "abc", "argv": "x", "torch": "2.11", "timestamp": "now"}
            if ms is None:
                cells.append(cell | {"status": "oom"})
                continue
            passes = {"forward": ms / 4, "backward": ms / 2, "both": ms}
            rates = {f"{name}_tflops": 1.0 for name in passes}
            for metric, value in (passes | rates | {"peak_memory": 1.0}).items():
                cells.append(cell | Metric(metric, "ms", [value]).statistics())
    return pd.DataFrame(cells)


def test_two_implementations_stand_side_by_side():
    lines = flash_table(rows(reference={128: 1.0, 256: None}, flash={128: 0.5, 256: 1.0})).frame
    assert list(lines["both ratio"]) == ["2.00", "–"]
    assert lines.loc[1, "both reference"] == "oom"


def test_materialised_attention_says_how_a_cell_ended():
    lines = materialised_table(rows(reference={128: 1.0, 256: None})).frame
    assert list(lines["status"]) == ["ok", "oom"]
    assert lines.loc[1, "forward ms"] == "–"


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "results" / "h200" / "attention-flash-bf16" / "benchmark_attention.csv"
    path.parent.mkdir(parents=True)
    measured = rows(reference={128: 1.0, 256: 1.0, 512: 4.0}, flash={128: 0.9, 256: 1.1, 512: 1.0})
    measured.reindex(columns=schema_columns(COLUMNS)).to_csv(path, index=False)
    return Committed(tmp_path, "h200")


def test_quoted_numbers(committed):
    found = terms(committed)
    assert found["attention"].value("flash-bf16", "both", "flash", "64", "256") == pytest.approx(1.1)
    assert found["flash-wins-from"].value("bf16", "64") == 512
    assert found["flash-speedup"].value("bf16", "most") == pytest.approx(4.0)
    assert found["attention-account"].value("scores") == 8 * 65_536**2 * 4 / 2**30


def test_blocks_render(committed):
    assert " 4.00 |" in blocks(committed)["flash-bf16"]()
    assert "512" in blocks(committed)["attention-account"]()
