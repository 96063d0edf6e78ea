"""Attention's tables for the written answers, from hand-made rows."""

import pandas as pd
import pytest

from cs336_systems.answers.attention import (
    flash_speedups,
    flash_table,
    handout_attention,
    materialised_table,
)
from cs336_systems.answers.committed import Committed
from cs336_systems.answers.rendering import Pages
from cs336_systems.answers.vocabulary import vocabulary
from cs336_systems.harness.record import Metric, parse_samples, schema_columns

COLUMNS = ("device", "grid", "impl", "dtype", "d_head", "length", "batch_size", "heads", "causal", "mask")


def rows(clock="harness", **times):
    """A cell for every implementation and length, ``both`` in ms; None is a cell that ran out of memory."""
    cells = []
    for impl, by_length in times.items():
        for length, ms in by_length.items():
            cell = {"schema_version": 1, "gpu": "NVIDIA H200", "impl": impl.replace("_", "-"), "dtype": "bf16"}
            cell |= {
                "device": "cuda",
                "d_head": 64,
                "length": length,
                "batch_size": 1,
                "heads": 1,
                "causal": True,
                "clock": clock,
                "status": "ok",
            }
            cell |= {"commit": "abc", "argv": "x", "torch": "2.11", "timestamp": "now"}
            if ms is None:
                cells.append(cell | {"status": "oom"})
                continue
            passes = {"forward": ms / 4, "backward": ms / 2, "both": ms}
            rates = {f"{name}_tflops": 1.0 for name in passes}
            for metric, value in (passes | rates | {"peak_memory": 1.0}).items():
                cells.append(cell | Metric(metric, "ms", [value]).statistics())
    return parse_samples(pd.DataFrame(cells))


def test_two_implementations_stand_side_by_side():
    lines = flash_table(rows(reference={128: 1.0, 256: None}, flash={128: 0.5, 256: 1.0})).frame
    assert list(lines["both ratio"]) == ["2.00", "–"]
    assert lines.loc[1, "both reference"] == "oom"


def test_do_bench_stands_beside_the_harness_where_it_was_asked():
    measured = {"reference": {128: 1.0, 256: 2.0}, "flash": {128: 0.5, 256: 1.0}}
    table = flash_table(pd.concat([rows(**measured), rows("do-bench", reference={128: 8.0}, flash={128: 0.25})]))
    assert list(table.frame["both reference"]) == ["1.00 (8.00)", "2.00"]
    assert list(table.frame["both flash"]) == ["0.500 (0.250)", "1.00"]
    assert list(table.frame["both ratio"]) == ["2.00", "2.00"]
    assert "in parentheses: by triton.testing.do_bench" in table.caption
    assert table.caption.endswith("1 to 1 passes.")
    assert "do_bench" not in flash_table(rows(**measured)).caption


def test_kernels_for_hopper_stand_beside_the_portable_ones_where_they_ran():
    measured = {"reference": {128: 1.0, 256: 2.0}, "flash": {128: 0.5, 256: 1.0}, "sdpa_cudnn": {128: 0.2}}
    lines = flash_table(rows(**measured, hopper={256: 0.25})).frame
    assert list(lines["both hopper"]) == ["not measured", "0.250"]
    assert not {"both hopper", "both sdpa-cudnn"} & {*flash_table(rows(**measured)).frame}


def test_materialised_attention_says_how_a_cell_ended():
    lines = materialised_table(rows(reference={128: 1.0, 256: None})).frame
    assert list(lines["status"]) == ["ok", "oom"]
    assert lines.loc[1, "forward ms"] == "–"


def test_repeats_are_pooled():
    times = (1.0, 4.0, 2.0)
    turns = [rows(reference={128: ms}, flash={128: ms / 2}).assign(repeat=i) for i, ms in enumerate(times)]
    measured = pd.concat(turns, ignore_index=True)
    assert list(materialised_table(measured).frame["forward ms"]) == ["0.500"]
    table = flash_table(measured)
    assert list(table.frame["both reference"]) == ["2.00"] and "medians of 3 passes" in table.caption
    assert flash_speedups(measured) == [2.0]


@pytest.fixture
def committed(tmp_path):
    path = tmp_path / "results" / "h200" / "attention-flash-bf16" / "benchmark_attention.csv"
    path.parent.mkdir(parents=True)
    measured = rows(reference={128: 1.0, 256: 1.0, 512: 4.0}, flash={128: 0.9, 256: 1.1, 512: 1.0})
    measured.reindex(columns=schema_columns(COLUMNS)).to_csv(path, index=False)
    return Committed(tmp_path, "h200")


def test_numbers(committed):
    flash = committed.rows("attention-flash-bf16", d_head=64)
    assert flash.where(impl="flash", length=256).number("both") == pytest.approx(1.1)
    assert max(flash_speedups(flash.frame())) == pytest.approx(4.0)
    assert 4 * handout_attention(65_536).n_scores == 8 * 65_536**2 * 4


def test_templates_render(committed):
    text = '# T\n{{ flash_table(rows("attention-flash-bf16")) }}\n{{ account_table(handout_attention(65_536), 4) }}'
    rendered = Pages({"page.md": text}, vocabulary(committed)).render("page.md")
    assert "batch 1, dtype bf16, causal True; ms, medians of 1 passes; ratio: reference over flash." in rendered
    assert " 4.00 |" in rendered
    assert "length 65,536" in rendered
