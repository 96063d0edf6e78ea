"""Tables and figures of attention, from rows made by hand."""

import pandas as pd
import pytest

from cs336_systems.costs.attention import AttentionWork
from cs336_systems.experiments.attention.figure import scaling_figure
from cs336_systems.experiments.attention.table import (
    ATTENTION,
    account_table,
    comparison_table,
    length_tables,
    tile_table,
    time_of,
)
from cs336_systems.report.figures import save


def row(impl, metric, median, *, length=1024, status="ok", message="", dtype="bf16", d_head=64, mask="", repeat=0):
    return {
        "gpu": "a GPU",
        "device": "cuda",
        "grid": "flash",
        "dtype": dtype,
        "batch_size": 1,
        "heads": 2,
        "d_head": d_head,
        "length": length,
        "causal": True,
        "mask": mask,
        "impl": impl,
        "status": status,
        "message": message,
        "metric": metric,
        "median": median,
        "argv": "a command",
        "repeat": repeat,
    }


def cell(impl, ms, *, kept=0.25, **values):
    metrics = {"forward": ms, "backward": 2 * ms, "both": 3 * ms, "kept_for_backward": kept, "peak_memory": 1.0}
    metrics |= {"predicted_peak_memory": 1.5, "error_o": 1e-3, "error_dq": 3e-3}
    metrics |= {f"{name}_tflops": 100.0 for name in ("forward", "backward", "both")}
    return [row(impl, name, value, **values) for name, value in metrics.items()]


def test_a_cell_is_a_line_and_a_failure_says_why():
    rows = pd.DataFrame([*cell("flash", 2.0), row("flex", "", None, status="oom", message="too much")])
    frame = ATTENTION.of(rows).frame
    assert list(frame["impl"]) == ["flash", "flex"]
    assert list(frame["both ms"]) == ["6.00", "–"]
    assert list(frame["largest error"]) == ["3.0e-03", "–"]
    assert list(frame["status"]) == ["ok", "oom: too much"]
    assert "mask GiB" not in frame.columns


def test_what_only_variants_have_is_shown_where_one_has_it():
    rows = pd.DataFrame([*cell("flex", 1.0, mask="causal"), row("flex", "mask_memory", 0.5, mask="causal")])
    assert list(ATTENTION.of(rows).frame["mask GiB"]) == ["0.500"]


def test_others_are_divided_by_ours():
    frame = comparison_table(pd.DataFrame(cell("flash", 2.0) + cell("peer", 3.0))).frame
    assert list(frame["pass"]) == ["forward", "backward", "both"]
    assert list(frame["flash ms"]) == ["2.00", "4.00", "6.00"]
    assert list(frame["peer / flash"]) == ["1.50"] * 3


def test_repeats_are_pooled_and_compared_with_their_neighbours():
    times = {"flash": (1.0, 2.0, 9.0), "peer": (3.0, 4.0, 9.0)}
    rows = pd.DataFrame([r for impl in times for i, ms in enumerate(times[impl]) for r in cell(impl, ms, repeat=i)])
    assert list(ATTENTION.of(rows).frame["forward ms"]) == ["2.00", "4.00"]
    frame = comparison_table(rows).frame
    assert list(frame["flash ms"]) == ["2.00", "4.00", "6.00"]
    assert list(frame["peer / flash"]) == ["2.00"] * 3
    again = pd.DataFrame(cell("flash", 4.0) + cell("peer", 5.0)).assign(argv="a later command")
    frame = comparison_table(pd.concat([rows, again])).frame
    assert list(frame["flash ms"]) == ["4.00", "8.00", "12.0"]
    assert list(frame["peer / flash"]) == ["1.25"] * 3
    with pytest.raises(ValueError, match="no row holds the metric 'forward' of 'other'"):
        time_of(rows, "forward", "other")


def test_lengths_are_lines_and_gaps_are_told_from_failures():
    rows = cell("flash", 2.0) + cell("flash", 4.0, length=2048)
    rows += [row("peer", "", None, status="unsupported", length=2048)]
    frame = length_tables(pd.DataFrame(rows), "both")[0].frame
    assert list(frame["length"]) == ["1,024", "2,048"]
    assert list(frame["flash"]) == ["6.00", "12.0"]
    assert list(frame["peer"]) == ["", "unsupported"]


def test_the_account_adds_up():
    work = AttentionWork(8, 1, 1, 4096, 4096, 16, causal=True)
    frame = account_table(work, 4).frame
    for column, compiled in (("eager", False), ("compiled", True)):
        parts = frame[column].astype(float)
        assert parts[1:4].sum() == pytest.approx(parts[4], rel=0.01)
        assert parts[4] == pytest.approx(work.materialised_bytes(4, compiled=compiled) / 2**30, rel=0.01)


def test_tiles_are_sorted_by_time():
    rows = pd.DataFrame([row("flash", f"tile dq {tile}", ms) for tile, ms in (("a", 2.0), ("b", 1.0), ("c", 4.0))])
    frame = tile_table(rows, most=2).frame
    assert list(frame["tile"]) == ["b", "a"]
    assert list(frame["of the fastest"]) == ["1.000", "2.000"]


def test_a_figure_of_one_shape(tmp_path):
    rows = [r for i in range(8) for n in (128, 4096) for r in cell(f"impl {i}", n, kept=n * n / 1e9, length=n)]
    older = [r for n in (128, 4096) for r in cell("impl 0", 7.0, kept=7.0, length=n)]
    figure = scaling_figure(pd.DataFrame(older + rows))
    times, memory = figure.axes
    impls = [line for line in times.lines if line.get_label().startswith("impl")]
    assert [line.get_label() for line in impls] == [f"impl {i}" for i in range(8)]
    assert all((list(line.get_xdata()), list(line.get_ydata())) == ([128, 4096], [384, 12288]) for line in impls)
    assert len({(line.get_color(), line.get_marker()) for line in impls}) == 8
    assert list(memory.lines[0].get_ydata()) == pytest.approx([1024 * n * n / 1e9 for n in (128, 4096)])
    assert [text.get_text() for text in memory.texts] == ["∝ length²", "∝ length"]
    assert figure.get_suptitle() == "Attention on a GPU: batch 1, 2 heads, d 64, bf16, causal"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"impl {i}" for i in range(8)]
    with pytest.raises(ValueError, match="takes one shape, got"):
        scaling_figure(pd.DataFrame(rows + cell("flash", 1.0, d_head=128)))
    path = tmp_path / "figure.png"
    assert save(scaling_figure(pd.DataFrame(rows)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not save(scaling_figure(pd.DataFrame([row("flash", "", None, status="oom")])), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
