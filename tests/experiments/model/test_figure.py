"""Figures are drawn from rows that are ok, and not at all without them."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from cs336_systems.experiments.model.figure import draw_step_figure
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
        for compiled in ("off", "on")
    ]


@pytest.mark.parametrize(
    "cells",
    [
        by_context(),
        by_size(),
        [measured(10.0, share="matmul_ceiling_share")],
        [measured(1.0, mode="forward"), measured(3.0, mode="step"), measured(9.0, batch_size=8), ceiling()],
        [*by_context(), make_cell(status="oom", message="no room", context_length=1024)],
    ],
    ids=["by context", "by size", "one point", "mixed settings", "with a failure"],
)
def test_a_png_is_drawn(tmp_path, cells):
    path = tmp_path / "figure.png"
    assert draw_step_figure(make_frame(*cells), path) is True
    image = path.read_bytes()
    assert image.startswith(PNG)
    width, height = (int.from_bytes(image[i : i + 4], "big") for i in (16, 20))
    assert width > height > 400
    assert 15_000 < len(image) < 500_000


@pytest.mark.parametrize(
    "cells",
    [[ceiling()], [make_cell(status="oom", message="no room"), make_cell(status="error", message="?", size="xl")]],
    ids=["only ceilings", "only failures"],
)
def test_without_a_measured_cell_nothing_is_written(tmp_path, cells):
    path = tmp_path / "figure.png"
    assert draw_step_figure(make_frame(*cells), path) is False
    assert not path.exists()


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws cells; returns per axes (time, share) the colour and the points of each line, and the legend's colours."""

    def draw(*cells):
        figures = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
        assert draw_step_figure(make_frame(*cells), tmp_path / "figure.png")
        (figure,) = figures
        lines = [
            [
                (to_hex(bars[0].get_color()), list(bars[0].get_xdata()), list(bars[0].get_ydata()))
                for bars in axes.containers
            ]
            for axes in figure.axes
        ]
        legend = {text.get_text(): to_hex(text_line.get_color()) for text, text_line in entries(figure.legends[0])}
        return *lines, legend

    def entries(legend):
        return zip(legend.get_texts(), legend.get_lines(), strict=True)

    return draw


def test_the_largest_mode_and_the_commonest_setting_are_drawn_the_newest_row_of_each_cell(drawn):
    times, shares, _ = drawn(
        measured(1.0, mode="forward", context_length=128),
        measured(2.0, context_length=256),
        measured(3.0, context_length=128),
        measured(4.0, context_length=256, batch_size=8),
        measured(5.0, context_length=256),
    )
    assert [line[1:] for line in times] == [([128, 256], [3.0, 5.0])]
    assert [line[1:] for line in shares] == [([128, 256], [40.0, 40.0])]


def test_colours_mean_the_same_in_both_halves_and_in_the_legend(drawn):
    """A dtype without a datasheet peak has no share; the others keep their colours."""
    without_share = make_cell(ms("step", 7.0), dtype="fp32")
    times, shares, legend = drawn(without_share, measured(3.0, dtype="bf16"), measured(4.0, dtype="autocast-bf16"))
    assert [(line[0], line[2]) for line in times] == [
        (legend["fp32"], [7.0]),
        (legend["bf16"], [3.0]),
        (legend["autocast-bf16"], [4.0]),
    ]
    assert [line[0] for line in shares] == [legend["bf16"], legend["autocast-bf16"]]
