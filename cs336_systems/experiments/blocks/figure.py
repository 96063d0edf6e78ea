"""Time of forward and backward against what a block keeps between them, as PNG."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.blocks.cells import REFERENCE_BLOCKS
from cs336_systems.experiments.blocks.table import BLOCK_TABLE
from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, dress

_SHAPE = ["gpu", "size", "batch_size", "context_length", "dtype"]
_COLUMNS = 3
_OURS, _THEIRS = OKABE_ITO[0], OKABE_ITO[1]


def kept_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each shape: milliseconds by block against GiB that it keeps, a point for each way, named.

    Of several attentions or depths at a shape, the one with the most ways is drawn.
    """
    cells = newest(rows, [name for name in BLOCK_TABLE.settings if name in rows])
    found = cells[(cells["status"] == "ok") & cells["metric"].isin(("step", "kept"))]
    index = [*_SHAPE, "attention", "layers", "how"]
    points = found.pivot_table(index=index, columns="metric", values="median", aggfunc="last", sort=False)
    if not {"step", "kept"} <= set(points.columns):
        return None
    points = points.dropna().reset_index()
    shapes = [_one_setting(own) for _, own in points.groupby(_SHAPE, sort=False)]
    if not shapes:
        return None
    columns = min(_COLUMNS, len(shapes))
    lines = -(-len(shapes) // columns)
    figure = Figure(figsize=(max(6, 4.2 * columns), 3.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    for axes in panels.flat[len(shapes) :]:
        axes.set_visible(False)
    for axes, own in zip(panels.flat, shapes, strict=False):
        ms = own["step"].astype(float) / own["layers"].astype(int)
        written_out = ~own["how"].isin(REFERENCE_BLOCKS)
        line = own[written_out].assign(ms=ms).sort_values("kept")
        axes.plot(line["kept"], line["ms"], color=_OURS, marker="o", markersize=5, linewidth=1.2)
        axes.plot(own["kept"][~written_out], ms[~written_out], color=_THEIRS, marker="*", markersize=9, linestyle="")
        for how, kept, height, ours in zip(own["how"], own["kept"], ms, written_out, strict=True):
            side = "right" if kept > 0.85 * own["kept"].max() else "left"
            above = 6 if side == "left" or not ours else -13  # what keeps most stands beside the reference
            axes.annotate(how, (kept, height), xytext=(0, above), textcoords="offset points", fontsize=8, ha=side)
        first = own.iloc[0]
        axes.set_title(f"{first['size']}, {first['batch_size']} x {first['context_length']:,} tokens", fontsize=10)
        axes.set_xlim(0, 1.12 * own["kept"].max())
        axes.set_ylim(0, 1.15 * ms.max())  # from zero, or a tie would look like a gap
        axes.set_xlabel("kept by a block for backward, GiB")
        axes.set_ylabel("forward and backward of a block, ms")
        dress(axes)
    first = shapes[0].iloc[0]
    figure.suptitle(f"Blocks on {first['gpu']}, {first['dtype']}: written out (dots), reference (star)", fontsize=11)
    return figure


def _one_setting(points: pd.DataFrame) -> pd.DataFrame:
    """Those of the attention and the depth with the most ways, the first of equals."""
    return max((own for _, own in points.groupby(["attention", "layers"], sort=False)), key=len)
