"""All figures share this: how axes look, how files are written, and colours that colour-blind readers tell apart."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito 2008."""

PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
"""The format of ticks on a logarithmic axis: no powers of ten."""
WITH_COMMAS = FuncFormatter(lambda value, _: f"{value:,g}")


def dress(axes: Axes) -> None:
    """A pale grid behind the data, and no frame above and to the right of it."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def curves_figure(rows: pd.DataFrame, x: str, line: str) -> Figure:
    """Medians against the column ``x`` on logarithmic axes, a curve for each value of the column ``line``."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for (name, own), colour in zip(rows.groupby(line, sort=False), OKABE_ITO, strict=False):
        medians = own.groupby(x)["median"].median()
        axes.plot(medians.index, medians, "o-", color=colour, markersize=4, label=str(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)
    dress(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def save(figure: Figure | None, path: Path, **said: str) -> bool:
    """Write a figure as PNG, in a folder that need not be there yet; returns whether there was one.

    An earlier picture stays until the new one is whole.

    Args:
        said: text that the file says about itself, by keyword (PNG's text chunks).

    Raises:
        OSError: the file cannot be written.
    """
    if figure is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
                figure.savefig(Path(folder) / path.name, dpi=150, metadata=said)
                (Path(folder) / path.name).replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    return figure is not None
