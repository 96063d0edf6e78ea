"""What recipes of quantized products cost in loss, beside the speed that they give, as PNG."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.learning.table import LEARNING_TABLE, by_seed, off_percent, speedup
from cs336_systems.report.figures import OKABE_ITO, dress

GOAL_PERCENT = 0.5
"""How far from the loss of stored products a recipe may be."""


def loss_figure(rows: pd.DataFrame) -> Figure | None:
    """By how many percent held-out loss is above that of stored products, over speed: dots for seeds, bars for means.

    Beside it the loss of each step, as means over the seeds. None without a recipe beside stored products.
    """
    lines = LEARNING_TABLE.lines(rows[rows["status"] == "ok"])
    found = [line for line in lines if len(off_percent(line))]
    if len(found) < 2:
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    beside, curves = figure.subplots(1, 2)
    for line, colour in zip(found, OKABE_ITO, strict=False):
        recipe, off, times = str(line.settings["recipe"]), off_percent(line), speedup(line)
        assert times is not None
        beside.plot([times] * len(off), off, linestyle="", marker="o", color=colour, alpha=0.5)
        beside.plot([times], [off.mean()], linestyle="", marker="_", markersize=18, markeredgewidth=2.5, color=colour)
        beside.annotate(
            recipe, (times, off.mean()), xytext=(10, 6), textcoords="offset points", fontsize=9, color=colour
        )
        losses = pd.DataFrame(line.run[line.run["metric"] == "loss"]["samples"].tolist()).mean()
        curves.plot(losses, color=colour, linewidth=1.1, label=f"{recipe}, {len(by_seed(line, 'loss'))} seeds")
    beside.axhspan(-GOAL_PERCENT, GOAL_PERCENT, color="#000000", alpha=0.06, linewidth=0)
    beside.set_xlabel("times as fast as stored products, whole steps")
    beside.set_ylabel("held-out loss above stored products', %")
    beside.set_title(f"dots: seeds; bars: means; grey: ±{GOAL_PERCENT:g} %", fontsize=10)
    beside.margins(0.2, 0.15)
    curves.set_xlabel("step")
    curves.set_ylabel("loss, nats per token")
    curves.legend(frameon=False, fontsize=9)
    for axes in (beside, curves):
        dress(axes)
    shape = found[0].settings
    figure.suptitle(f"{shape['size']} on {shape.get('gpu', shape['device'])}", fontsize=11)
    return figure
