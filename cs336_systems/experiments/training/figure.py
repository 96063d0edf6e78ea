"""Tokens per second of training by size and trainer, as PNG."""

import itertools
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training.table import fastest
from cs336_systems.report.figures import OKABE_ITO, WITH_COMMAS, dress


def rates_figure(rows: pd.DataFrame, others: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """A line for each way and recipe over sizes, its fastest runs, in tokens per second on a logarithmic axis.

    Args:
        others: tokens per second by size that were not measured here, by who says so; grey, their figures at the left.
    """
    best = fastest(rows)
    if best.empty:
        return None
    names = best["how"].str.cat(best["recipe"].map(lambda recipe: "" if recipe == "stored" else f", {recipe}"))
    measured = {
        str(name): dict(zip(own["size"], own["tokens_per_s"], strict=True))
        for name, own in best.groupby(names, sort=False)
    }
    ways: dict[str, Mapping[str, float]] = measured | dict(others)
    sizes = [size for size in MODEL_SIZES if any(size in rates for rates in ways.values())]
    figure = Figure(figsize=(3.4 + 1.4 * len(sizes), 4.2), layout="constrained")
    axes, dashed = figure.subplots(), itertools.cycle(("s--", "^:", "D-."))
    for number, (name, rates) in enumerate(ways.items()):
        places = [i for i, size in enumerate(sizes) if size in rates]
        shown = [rates[size] for size in sizes if size in rates]
        if name in measured:
            axes.plot(places, shown, "o-", label=name, color=OKABE_ITO[number % len(OKABE_ITO)])
        else:
            axes.plot(places, shown, next(dashed), label=name, color="0.5")
        offset, side = ((8, -3), "left") if name in measured else ((-8, -3), "right")
        for at in zip(places, shown, strict=True):
            axes.annotate(_short(at[1]), at, offset, textcoords="offset points", ha=side, fontsize=8)
    axes.set_yscale("log")
    axes.margins(0.15)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(WITH_COMMAS)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylabel("tokens per second")
    dress(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    first = best.iloc[0]
    where = f"one {first['gpu'] or first['device']}"
    axes.set_title(f"Training on {where}: {first['dtype']}, sequences of {first['context_length']:,}", fontsize=10)
    return figure


def _short(rate: float) -> str:
    return f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.3g}"
