"""Tokens per second of training by size and trainer, as PNG."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training.table import fastest
from cs336_systems.report.figures import OKABE_ITO, dress

_OURS, _PEERS, _QUOTED = OKABE_ITO[0], OKABE_ITO[4], "0.7"


def rates_figure(rows: pd.DataFrame, others: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """A panel for each size, with a bar for the fastest run of each way and recipe: thousands of tokens per second.

    Args:
        others: tokens per second by size that were not measured here, by who says so; in grey.
    """
    best = fastest(rows)
    if best.empty:
        return None
    best = best.assign(quantized=best["recipe"] != "stored").sort_values("quantized", kind="stable")
    names = best["how"].str.cat(best["recipe"].map(lambda recipe: "" if recipe == "stored" else f", {recipe}"))
    measured = {
        str(name): dict(zip(own["size"], own["tokens_per_s"], strict=True))
        for name, own in best.groupby(names, sort=False)
    }
    ways: dict[str, Mapping[str, float]] = measured | dict(others)
    colours = [(_OURS if name.startswith("ours") else _PEERS) if name in measured else _QUOTED for name in ways]
    sizes = [size for size in MODEL_SIZES if any(size in rates for rates in ways.values())]
    figure = Figure(figsize=(2 + 2.2 * len(sizes), 1.2 + 0.3 * len(ways)), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0], sizes, strict=True):
        thousands = [rates[size] / 1000 if size in rates else 0.0 for rates in ways.values()]
        bars = axes.barh(list(ways), thousands, color=colours, height=0.7)
        axes.bar_label(bars, [f"{rate:.3g}" if rate else "" for rate in thousands], padding=3, fontsize=8)
        axes.set_xlim(right=1.25 * max(thousands))
        axes.set_title(size, fontsize=10)
        axes.set_xlabel("1,000 tokens/s", fontsize=9)
        axes.tick_params(labelsize=9)
        dress(axes)
        axes.set_axisbelow(True)
    figure.axes[0].invert_yaxis()
    first = best.iloc[0]
    where = f"one {first['gpu'] or first['device']}"
    figure.suptitle(
        f"Training on {where}: parameters in {first['dtype']}, sequences of {first['context_length']:,}", fontsize=11
    )
    return figure
