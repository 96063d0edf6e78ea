"""The figure of speedups is drawn from rows of two precisions, and not from one."""

from cs336_systems.experiments.model_figures import speedups_figure
from cs336_systems.report.figures import save
from tests.report.rows import make_cell, make_frame, ms


def cell(size, dtype, scale):
    times = (ms("forward", scale), ms("backward", 2 * scale), ms("optimizer", 1.0), ms("step", 3 * scale + 1))
    return make_cell(*times, size=size, dtype=dtype, gpu="NVIDIA H200")


def test_two_precisions_make_a_figure(tmp_path):
    cells = [cell(size, dtype, s) for size in ("small", "xl") for dtype, s in (("fp32", 4.0), ("autocast-bf16", 1.0))]
    older = cell("small", "fp32", 90.0)
    (axes,) = speedups_figure(make_frame(older, *cells)).axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines[:4]}
    both = ["small", "xl"]
    assert drawn == {
        "forward": (both, [4.0, 4.0]),
        "backward": (both, [4.0, 4.0]),
        "optimizer": (both, [1.0, 1.0]),
        "whole step": (both, [13 / 4, 13 / 4]),
    }
    assert axes.get_ylabel() == "time in fp32 / time in autocast-bf16"
    assert axes.get_title() == "NVIDIA H200: batch 1, context 128"
    assert save(speedups_figure(make_frame(*cells)), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert not save(speedups_figure(make_frame(cells[0])), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
