"""The figure of speedups is drawn from rows of two precisions, and not from one."""

from cs336_systems.experiments.model.speedups import draw_speedups
from tests.report.rows import make_cell, make_frame, ms


def cell(size, dtype, scale):
    times = (ms("forward", scale), ms("backward", 2 * scale), ms("optimizer", 1.0), ms("step", 3 * scale + 1))
    return make_cell(*times, size=size, dtype=dtype, gpu="NVIDIA H200")


def test_two_precisions_make_a_figure(tmp_path):
    cells = [cell(size, dtype, s) for size in ("small", "xl") for dtype, s in (("fp32", 4.0), ("autocast-bf16", 1.0))]
    assert draw_speedups(make_frame(*cells), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert not draw_speedups(make_frame(cells[0]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
