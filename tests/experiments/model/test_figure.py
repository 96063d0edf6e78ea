"""Figures are drawn from rows that are ok, and not at all without them."""

import pytest
from matplotlib.colors import to_hex

from cs336_systems.experiments.model_figures import step_figure
from cs336_systems.report.figures import save
from tests.report.rows import ceiling, make_cell, make_frame, ms, rate

PNG = b"\x89PNG\r\n\x1a\n"


def measured(milliseconds: float, share: str = "mfu", **settings: object):
    step = ms("step", 0.9 * milliseconds, milliseconds, 1.1 * milliseconds)
    return make_cell(step, rate(share, 40.0), **settings)


def by_context():
    return [
        measured(context / 10, context_length=context, size=size, dtype=dtype)
        for size in ("small", "medium")
        for dtype in ("fp32", "autocast-bf16")
        for context in (128, 256, 512)
    ]


def by_size():
    return [
        measured(10.0, size=size, compile=compiled, gpu="H200")
        for size in ("small", "medium", "2.7b")
        for compiled in ("off", "on", "whole-model")
    ]


@pytest.mark.parametrize(
    ("cells", "n_lines", "x", "legend"),
    [
        (by_context(), 4, [128, 256, 512], ["small", "medium", "fp32", "autocast-bf16"]),
        (
            by_size(),
            *(3, ["small", "medium", "2.7b"], ["fp32", "fp32, compiled", "fp32, whole model compiled"]),
        ),
        ([measured(10.0, share="matmul_ceiling_share")], 1, ["tiny"], ["fp32"]),
        (
            [measured(1.0, mode="forward"), measured(3.0, mode="step"), measured(9.0, batch_size=8), ceiling()],
            *(1, ["tiny"], ["fp32"]),
        ),
        (
            [*by_context(), make_cell(status="oom", message="no room", context_length=1024)],
            *(4, [128, 256, 512], ["small", "medium", "fp32", "autocast-bf16"]),
        ),
    ],
    ids=["by context", "by size", "one point", "mixed settings", "with a failure"],
)
def test_what_ran_is_drawn_in_both_halves_and_named(tmp_path, cells, n_lines, x, legend):
    path = tmp_path / "figure.png"
    assert save(step_figure(make_frame(*cells)), path) is True
    assert path.read_bytes().startswith(PNG)
    times, shares, entries = drawn(*cells)
    assert len(times) == len(shares) == n_lines
    assert all(line[1] == x for line in (*times, *shares))
    assert list(entries) == legend


def test_kinds_of_attention_are_not_mixed():
    flash = [measured(7.0, attention="flash", size=size) for size in ("small", "xl")]
    times, _, _ = drawn(measured(3.0, size="small"), *flash)
    assert [line[1:] for line in times] == [(["small", "xl"], [7.0, 7.0])]


def test_a_cell_that_failed_when_last_measured_has_no_point():
    again = make_cell(status="oom", message="no room", context_length=256, argv="a later command")
    times, _, _ = drawn(measured(2.0, context_length=128), measured(5.0, context_length=256), again)
    assert [line[1:] for line in times] == [(["tiny"], [2.0])]


@pytest.mark.parametrize(
    "cells",
    [[ceiling()], [make_cell(status="oom", message="no room"), make_cell(status="error", message="?", size="xl")]],
    ids=["only ceilings", "only failures"],
)
def test_without_a_measured_cell_nothing_is_written(tmp_path, cells):
    path = tmp_path / "figure.png"
    assert save(step_figure(make_frame(*cells)), path) is False
    assert not path.exists()


def drawn(*cells):
    """Per axes (time, share) the colour and the points of each line, and the legend's colours."""
    figure = step_figure(make_frame(*cells))
    lines = [
        [
            (to_hex(bars[0].get_color()), list(bars[0].get_xdata()), list(bars[0].get_ydata()))
            for bars in axes.containers
        ]
        for axes in figure.axes
    ]
    (legend,) = figure.legends
    entries = zip(legend.get_texts(), legend.get_lines(), strict=True)
    return *lines, {text.get_text(): to_hex(line.get_color()) for text, line in entries}


def test_the_largest_mode_and_the_commonest_setting_are_drawn_the_newest_row_of_each_cell():
    times, shares, _ = drawn(
        measured(1.0, mode="forward", context_length=128),
        measured(2.0, context_length=256),
        measured(3.0, context_length=128),
        measured(4.0, context_length=256, batch_size=8),
        measured(5.0, context_length=256),
    )
    assert [line[1:] for line in times] == [([128, 256], [3.0, 5.0])]
    assert [line[1:] for line in shares] == [([128, 256], [40.0, 40.0])]


def test_colours_mean_the_same_in_both_halves_and_in_the_legend():
    """A dtype without a datasheet peak has no share; the others keep their colours."""
    without_share = make_cell(ms("step", 7.0), dtype="fp32")
    times, shares, legend = drawn(without_share, measured(3.0, dtype="bf16"), measured(4.0, dtype="autocast-bf16"))
    assert [(line[0], line[2]) for line in times] == [
        (legend["fp32"], [7.0]),
        (legend["bf16"], [3.0]),
        (legend["autocast-bf16"], [4.0]),
    ]
    assert [line[0] for line in shares] == [legend["bf16"], legend["autocast-bf16"]]
