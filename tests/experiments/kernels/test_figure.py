"""The picture of shares: a panel for each kernel and pass, a line for each way."""

import pandas as pd

from cs336_systems.experiments.kernels.figure import shares_figure
from cs336_systems.harness.record import Metric, parse_samples
from tests.report.rows import make_cell


def cell(kernel, how, width, *shares, rows=16_384):
    metrics = [
        Metric(f"{name}_copy_share", "% of copy", [share])
        for name, share in zip(("forward", "backward"), shares, strict=False)
    ]
    gpu = {"gpu": "NVIDIA H200", "device": "cuda", "dtype": "bf16"}
    return make_cell(*metrics, kernel=kernel, how=how, width=width, rows=rows, **gpu)


def frame(*cells):
    return parse_samples(pd.DataFrame([row for rows in cells for row in rows]))


def drawn(figure):
    """(title, line's points) of every panel that is seen."""
    return {
        axes.get_title(): [list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()[:-1]]
        for axes in figure.axes
        if axes.get_visible()
    }


def test_a_panel_for_each_kernel_and_pass_and_a_line_for_each_way():
    found = drawn(
        shares_figure(
            frame(
                cell("rms_norm", "ours", 4096, 93, 85),
                cell("rms_norm", "ours", 896, 60, 50),
                cell("rms_norm", "liger", 4096, 87, 40),
                cell("adamw", "ours", 4096, 94),
                cell("rms_norm", "ours", 4096, 95, 86, rows=4096),
                cell("linear_cross_entropy", "ours", 4096, 1),
            )
        )
    )
    assert list(found) == ["rms_norm\nforward", "rms_norm\nbackward", "adamw\nforward"]
    assert found["rms_norm\nforward"] == [[(0, 60), (1, 93)], [(1, 87)]]
    assert found["rms_norm\nbackward"] == [[(0, 50), (1, 85)], [(1, 40)]]
    assert found["adamw\nforward"] == [[(0, 94)]]


def test_without_shares_there_is_no_picture():
    assert shares_figure(frame(cell("linear_cross_entropy", "ours", 4096, 1))) is None
