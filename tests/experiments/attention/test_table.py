"""Tables and figures of attention, from rows made by hand."""

import pandas as pd
import pytest

from cs336_systems.config import ATTENTIONS
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


def row(impl, metric, median, *, status="ok", message="", repeat=0, **settings):
    shape = {"batch_size": 1, "heads": 2, "d_head": 64, "length": 1024, "causal": True, "mask": ""}
    own = {
        "gpu": "a GPU",
        "device": "cuda",
        "grid": "flash",
        "dtype": "bf16",
        **shape,
        "impl": impl,
        "clock": "harness",
    }
    outcome = {"status": status, "message": message, "metric": metric, "median": median}
    return own | settings | outcome | {"argv": "a command", "repeat": repeat}


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
    rows = [
        r
        for i in range(9)
        for n in (128, 4096)
        for r in cell(f"impl {i}", n, kept=n * n / 1e9 if i < 4 else n / 1e6, length=n)
    ]
    older = [r for n in (128, 4096) for r in cell("impl 0", 7.0, kept=7.0, length=n)]
    figure = scaling_figure(pd.DataFrame(older + rows))
    times, memory = figure.axes
    impls = [line for line in times.lines if line.get_label().startswith("impl")]
    assert [line.get_label() for line in impls] == [f"impl {i}" for i in range(9)]
    assert all((list(line.get_xdata()), list(line.get_ydata())) == ([128, 4096], [384, 12288]) for line in impls)
    assert len({(line.get_color(), line.get_marker()) for line in impls}) == len(impls) == len(ATTENTIONS)
    assert list(memory.lines[0].get_ydata()) == pytest.approx([1024 * n * n / 1e9 for n in (128, 4096)])
    assert [text.get_text() for text in memory.texts] == ["∝ length²", "∝ length"]
    assert figure.get_suptitle() == "Attention on a GPU: batch 1, 2 heads, d 64, bf16, causal"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"impl {i}" for i in range(9)]
    with pytest.raises(ValueError, match="takes one shape, got"):
        scaling_figure(pd.DataFrame(rows + cell("flash", 1.0, d_head=128)))
    path = tmp_path / "figure.png"
    assert save(scaling_figure(pd.DataFrame(rows)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not save(scaling_figure(pd.DataFrame([row("flash", "", None, status="oom")])), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_guide_is_drawn_below_what_it_explains_and_only_there():
    rows = [r for n in (256, 1024, 4096) for r in cell("materialised", 1.0, kept=n * n / 1e9, length=n)]
    (axes,) = scaling_figure(pd.DataFrame(rows)).axes[1:]
    assert [text.get_text() for text in axes.texts] == ["∝ length²"]
    measured, guide = axes.lines
    assert guide.get_ydata()[-1] < measured.get_ydata()[-1]
    assert guide.get_ydata()[0] < 1024 * guide.get_xdata()[0] ** 2 / 1e9
    linear = [r for n in (256, 1024, 4096) for r in cell("tiled", 1.0, kept=n / 1e9, length=n)]
    assert [text.get_text() for text in scaling_figure(pd.DataFrame(linear)).axes[1].texts] == ["∝ length"]


def test_lengths_that_memory_ended_stand_above_what_ran():
    ran = [r for impl in ("eager", "compiled") for n in (256, 1024) for r in cell(impl, n, length=n, kept=n / 1e6)]
    ended = [
        row("eager", "", None, status="oom", length=4096),
        row("eager", "", None, status="predicted-oom", length=8192),
        row("compiled", "", None, status="predicted-oom", length=8192),
        row("elsewhere", "", None, status="unsupported", length=16_384),
    ]
    figure = scaling_figure(pd.DataFrame(ran + ended))
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "1,024", "4,096", "8,192"]
        lines = {line.get_label(): line for line in axes.lines}
        edge = {name: line for name, line in lines.items() if name.startswith("_") and len(line.get_xdata())}
        assert {name: list(line.get_xdata()) for name, line in edge.items() if "oom" in name} == {
            "_eager oom": [4096],
            "_eager predicted-oom": [8192],
            "_compiled predicted-oom": [8192],
        }
        assert edge["_eager oom"].get_color() == lines["eager"].get_color()
        highest = max(lines[impl].get_window_extent().y1 for impl in ("eager", "compiled"))
        assert min(line.get_window_extent().y0 for name, line in edge.items() if "oom" in name) > highest
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["eager", "compiled", "ran out of memory", "not run: would not fit"]


def test_clocks_are_lines_of_their_own_and_never_compared():
    slow = [r for impl in ("flash", "peer") for r in cell(impl, 100.0, clock="do-bench")]
    rows = pd.DataFrame(cell("flash", 2.0) + cell("peer", 3.0) + slow)
    frame = ATTENTION.of(rows).frame
    assert list(frame["clock"]) == ["harness", "harness", "do-bench", "do-bench"]
    assert list(frame["both ms"]) == ["6.00", "9.00", "300", "300"]
    assert list(comparison_table(rows).frame["peer / flash"]) == ["1.50"] * 3
    assert list(length_tables(rows, "both")[0].frame["flash"]) == ["6.00"]
    assert time_of(rows, "both", "flash") == 6.0
    assert list(scaling_figure(rows).axes[0].lines[0].get_ydata()) == [6.0]
