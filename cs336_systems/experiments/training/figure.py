"""Tokens per second of training by size, whoever wrote it, as PNG."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training.table import fastest
from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress

_WIDTH = 0.8
"""Of a size's bars together, where sizes are 1 apart."""


def rates_figure(rows: pd.DataFrame, others: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """A group of bars for each size, the fastest run of each way, in tokens per second on a logarithmic axis.

    Args:
        others: tokens per second by size that were not measured here, by who says so.
    """
    best = fastest(rows)
    if best.empty:
        return None
    sizes = [size for size in MODEL_SIZES if (best["size"] == size).any()]
    measured = {str(how): dict(zip(own["size"], own["tokens_per_s"], strict=True)) for how, own in best.groupby("how")}
    bars: dict[str, Mapping[str, float]] = measured | dict(others)
    figure = Figure(figsize=(3.4 + 1.4 * len(sizes), 4.2), layout="constrained")
    axes = figure.subplots()
    width = _WIDTH / len(bars)
    for number, (name, rates) in enumerate(bars.items()):
        places = [i + (number + 0.5) * width - _WIDTH / 2 for i, size in enumerate(sizes) if size in rates]
        shown = [rates[size] for size in sizes if size in rates]
        colour = OKABE_ITO[number % len(OKABE_ITO)] if name in measured else "0.7"
        drawn = axes.bar(places, shown, width, label=name, color=colour)
        axes.bar_label(drawn, [_short(height) for height in shown], fontsize=7, padding=1)
    axes.set_yscale("log")
    heights = [rates[size] for rates in bars.values() for size in sizes if size in rates]
    axes.set_ylim(min(heights) / 3, 1.4 * max(heights))
    axes.yaxis.set_major_formatter(WITH_COMMAS)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylabel("tokens per second")
    dress(axes)
    figure.legend(loc="outside lower center", ncols=len(bars), frameon=False, fontsize=8)
    first = best.iloc[0]
    where = f"one {first['gpu'] or first['device']}"
    axes.set_title(f"Training on {where}: {first['dtype']}, sequences of {first['context_length']:,}", fontsize=10)
    return figure


def _short(rate: float) -> str:
    return f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.3g}"
