"""What recipes of quantized products cost in loss, against the speed that they gain, as PNG."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.experiments.learning.table import LEARNING_TABLE, off_percent, speedup
from cs336_systems.report.figures import OKABE_ITO, dress
from cs336_systems.report.results import Line

GOAL_PERCENT = 0.5
"""How far from the loss of stored products a recipe may be."""
_SMOOTHED_SHARE = 0.1
"""Of a run's steps, over which the mean goes."""


def loss_figure(rows: pd.DataFrame) -> Figure | None:
    """By how many percent held-out loss is above that of stored products, over speed: dots for seeds, bars for means.

    Beside it the same of training's loss over the steps, a line for each seed. None without a recipe beside stored
    products.
    """
    lines = {line.settings["recipe"]: line for line in LEARNING_TABLE.lines(rows[rows["status"] == "ok"])}
    stored = lines.pop("stored", None)
    found = {str(recipe): line for recipe, line in lines.items() if len(off_percent(line))}
    if stored is None or not found:
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    beside, over_steps = figure.subplots(1, 2)
    beside.plot([1], [0], "+", color="#000000", markersize=12)
    beside.annotate("stored", (1, 0), xytext=(8, 6), textcoords="offset points", fontsize=9)
    expected = _losses(stored)
    for (recipe, line), colour in zip(found.items(), OKABE_ITO, strict=False):
        off, times = off_percent(line), speedup(line)
        assert times is not None
        beside.plot([times] * len(off), off, linestyle="", marker="o", color=colour, alpha=0.5)
        beside.plot([times], [off.mean()], linestyle="", marker="_", markersize=18, markeredgewidth=2.5, color=colour)
        beside.annotate(
            recipe, (times, off.mean()), xytext=(10, 6), textcoords="offset points", fontsize=9, color=colour
        )
        for seed, losses in _losses(line).items():
            if seed in expected:
                window = max(1, round(_SMOOTHED_SHARE * len(losses)))
                own, other = (each.rolling(window).mean() for each in (losses, expected[seed]))
                over_steps.plot(100 * (own / other - 1), color=colour, linewidth=1.1)
    for axes in (beside, over_steps):
        axes.axhspan(-GOAL_PERCENT, GOAL_PERCENT, color="#000000", alpha=0.06, linewidth=0)
        dress(axes)
    beside.set_xlabel("times as fast as stored products, whole steps")
    beside.set_ylabel("held-out loss above that of stored products, %")
    beside.set_title(f"dots: seeds; bars: means; grey: ±{GOAL_PERCENT:g} %", fontsize=10)
    beside.margins(0.35, 0.15)
    over_steps.set_xlabel("step")
    over_steps.set_ylabel("training's loss above that of stored products, %")
    over_steps.set_title(f"a line for each seed, means over {_SMOOTHED_SHARE:.0%} of the steps", fontsize=10)
    shape = stored.settings
    figure.suptitle(f"{shape['size']} on {shape.get('gpu', shape['device'])}", fontsize=11)
    return figure


def _losses(line: Line) -> dict[int, pd.Series]:
    """Of training's steps, by seed."""
    own = line.run[line.run["metric"] == "loss"].drop_duplicates("seed", keep="last")
    return {seed: pd.Series(samples) for seed, samples in zip(own["seed"], own["samples"], strict=True)}
