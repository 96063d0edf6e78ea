"""How many times as fast one precision is as another, phase by phase, against model size, as PNG."""

import pandas as pd
from matplotlib.figure import Figure

from cs336_systems.harness.runs import newest
from cs336_systems.report.figures import OKABE_ITO, dress

_STYLES = {"forward": ("o", "-"), "backward": ("s", "--"), "optimizer": ("^", ":"), "step": ("D", "-.")}


def speedups_figure(rows: pd.DataFrame, slow: str = "fp32", fast: str = "autocast-bf16") -> Figure | None:
    """A line per phase, sizes in the order of the rows.

    Args:
        rows: of ``benchmark_model.py``, of one setting but for size and dtype.
    """
    rows = newest(rows[(rows["mode"] == "step") & (rows["compile"] == "off")], ["size", "dtype"])
    rows = rows[rows["status"] == "ok"]
    times = rows.pivot_table(index="size", columns=["dtype", "metric"], values="median", sort=False)
    if slow not in times or fast not in times:
        return None
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, (phase, (marker, dashes)) in enumerate(_STYLES.items()):
        ratio = (times[slow][phase] / times[fast][phase]).dropna()
        label = "whole step" if phase == "step" else phase
        axes.plot(ratio.index, ratio, marker=marker, ls=dashes, color=OKABE_ITO[i], label=label)
    axes.axhline(1, color="0.6", lw=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("model size")
    axes.set_ylabel(f"time in {slow} / time in {fast}")
    first = rows.iloc[0]
    axes.set_title(f"{first['gpu']}: batch {first['batch_size']}, context {first['context_length']}", fontsize=10)
    dress(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure
