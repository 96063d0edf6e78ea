"""Figures of a step benchmark: time and utilisation against context length or model size, as PNG.

Legible in print: units on the axes, the Okabe-Ito colours that colour-blind readers can tell apart, a marker per dtype,
and the settings that all points share in the title. Drawn without pyplot, so importing this touches no display.
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from cs336_systems.config import MODES
from cs336_systems.report.tables import CEILING

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_STYLES = {
    ("fp32", "off"): ("o", "-"),
    ("autocast-bf16", "off"): ("s", "--"),
    ("bf16", "off"): ("^", ":"),
    ("tf32", "off"): ("D", "-."),
    ("autocast-fp16", "off"): ("v", "-."),
}
_FIXED = ("device", "batch_size", "optimizer", "warmup", "mode")


def draw_step_figure(rows: pd.DataFrame, path: Path) -> bool:
    """Whole-step time (left) and share of the limit (right) of ``benchmark_model`` rows; returns whether it drew.

    The x axis is context length if several were measured, else model size. Where the rows hold several modes, the
    largest is drawn; where they hold several batch sizes, optimizers or warm-ups, the one with the most points.
    """
    rows = rows[(rows["status"] == "ok") & (rows["variant"] != CEILING)]
    rows = _one_setting(rows)
    if rows.empty:
        return False
    by_context = rows["context_length"].nunique() > 1
    share = "mfu" if (rows["metric"] == "mfu").any() else "matmul_ceiling_share"
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    time_axes, share_axes = figure.subplots(1, 2)
    _draw(time_axes, rows[rows["metric"] == "step"], by_context)
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    time_axes.set_ylabel("whole pass, ms (median; bar: p10 to p90)")
    _draw(share_axes, rows[rows["metric"] == share], by_context)
    share_axes.set_ylim(bottom=0)
    convention = "datasheet peak (MFU, causal FLOPs)" if share == "mfu" else "measured matmul ceiling (causal FLOPs)"
    share_axes.set_ylabel(f"% of {convention}")
    handles, labels = time_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    first = rows.iloc[0]
    where = first["gpu"] or first["host"]
    figure.suptitle(f"{first['mode']} on {where}: batch {first['batch_size']}, AdamW {first['optimizer']}", fontsize=11)
    figure.savefig(path, dpi=150)
    return True


def _one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one value of each fixed setting."""
    if rows.empty:
        return rows
    mode = max(rows["mode"].unique(), key=MODES.index)
    rows = rows[rows["mode"] == mode]
    for column in _FIXED:
        rows = rows[rows[column] == rows[column].mode().iloc[0]]
    return rows.drop_duplicates(["size", "context_length", "dtype", "compile", "metric"], keep="last")


def _draw(axes: Axes, rows: pd.DataFrame, by_context: bool) -> None:
    """One line per size, dtype and compilation against context length, or per dtype and compilation against size."""
    sizes = list(dict.fromkeys(rows["size"]))
    dtypes = list(dict.fromkeys(zip(rows["dtype"], rows["compile"], strict=True)))
    for (dtype, compiled), of_dtype in rows.groupby(["dtype", "compile"], sort=False):
        marker, dash = _STYLES.get((dtype, compiled), ("P", (0, (1, 1))))
        label = dtype if compiled == "off" else f"{dtype}, compiled"
        if by_context:
            for size, line in of_dtype.groupby("size", sort=False):
                colour = OKABE_ITO[sizes.index(size) % len(OKABE_ITO)]
                _line(axes, line.sort_values("context_length"), "context_length", f"{size}, {label}", colour, marker, dash)
        else:
            colour = OKABE_ITO[dtypes.index((dtype, compiled)) % len(OKABE_ITO)]
            _line(axes, of_dtype, "size", label, colour, marker, dash)
    if by_context:
        contexts = sorted(rows["context_length"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context}" for context in contexts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("context length, tokens")
    else:
        axes.set_xlabel("model size")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, rows: pd.DataFrame, x: str, label: str, colour: str, marker: str, dash: object) -> None:
    bars = [rows["median"] - rows["p10"].astype(float), rows["p90"].astype(float) - rows["median"]]
    axes.errorbar(
        rows[x], rows["median"], yerr=bars, label=label, color=colour, marker=marker, linestyle=dash, capsize=2, ms=5, lw=1.5
    )
