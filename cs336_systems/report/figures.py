"""Functions shared by all figures: lines over a swept column, the style of axes, and writing files.

    figure, axes = lines(rows, x="length", colour="impl", panel="metric", log="xy")
    axes["both"].set_ylabel("ms")

Colour-blind readers can distinguish the colours.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito 2008."""

WITH_COMMAS = FuncFormatter(lambda value, _: f"{value:,g}")
"""The format of ticks on a logarithmic axis: no powers of ten."""

_COLOURS = (*OKABE_ITO, "#999999", "#882255")
_SHAPES = tuple(zip("osD^vPX*h", ("-", "--", ":", "-.", "-", "--", ":", "-.", "-"), strict=True))
"""Pairs of marker and dash, one for each value of a column."""
_MOST_TICKS = 6
"""The most upright tick labels on an x axis; more are rotated."""


def panels(n: int, most: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``n`` panels of ``width`` x ``height`` inches, at most ``most`` per row.

    Args:
        shared: as for ``Figure.subplots``, such as ``sharey=True``.
    """
    columns = min(n, most)
    rows = ceil(n / columns)
    figure = Figure(figsize=(width * columns + 1.5, height * rows + 0.6), layout="constrained")
    slots = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in slots[n:]:
        axes.set_visible(False)
    for axes in slots[:n]:
        dress(axes)
        axes.set_axisbelow(True)
    return figure, slots[:n]


def lines(
    rows: pd.DataFrame,
    *,
    x: str,
    colour: str,
    style: str = "",
    panel: str = "",
    y: str = "median",
    log: str = "",
    spread: bool = False,
    also: Iterable[Line2D] = (),
    width: float = 4.7,
    height: float = 3.9,
    most: int = 3,
    **shared: Any,
) -> tuple[Figure, dict[Any, Axes]]:
    """Draw a point for each row, in a panel for each value of ``panel``, with a line per pair of colour and style.

    Values get colours, markers and panels in the order of their first appearance. The legend is beside the panels. The
    caller sets titles and axis labels.

    Args:
        rows: in the order in which a line joins its points.
        x, y: the columns of coordinates. Words in ``x`` are spaced equally, in the order of the panel's rows.
        colour, style: the columns that choose a line's colour, and its marker and dash; without ``style`` every colour
            has its own marker.
        panel: the column that chooses the panel; without it there is one panel, called "".
        log: the axes that are logarithmic, "x", "y" or "xy".
        spread: whether error bars reach from the column p10 to the column p90.
        also: further entries of the legend.
        width, height, most, shared: as for ``panels``.

    Returns:
        The figure, and the axes by the value of ``panel``.
    """
    names = list(dict.fromkeys(rows[panel])) if panel else [""]
    figure, found = panels(len(names), most, width, height, **shared)
    colours, shapes = _told_apart(rows[colour], _COLOURS), _told_apart(rows[style or colour], _SHAPES)

    def drawn(value: Any, hue: str, dashed: bool = True) -> dict[str, Any]:
        marker, dash = shapes[value]
        return {"color": hue, "marker": marker, "linestyle": dash if dashed else "-", "markersize": 5, "linewidth": 1.5}

    for name, axes in zip(names, found, strict=True):
        own = rows[rows[panel] == name] if panel else rows
        for (hue, shape), line in own.groupby([own[colour], own[style or colour]], sort=False):
            at, level = _places(line[x], own[x]), line[y].astype(float)
            bars = [level - line["p10"].astype(float), line["p90"].astype(float) - level] if spread else None
            looks = drawn(shape, colours[hue], bool(style))
            axes.errorbar(at, level, yerr=bars, capsize=2, label=str(hue), **looks)
        _scale(axes, own[x], log)
    if style:
        entries = [Line2D([], [], color=hue, label=str(value)) for value, hue in colours.items()]
        entries += [Line2D([], [], label=str(value), **drawn(value, "grey")) for value in shapes]
    else:
        entries = [Line2D([], [], label=str(value), **drawn(value, hue, False)) for value, hue in colours.items()]
    figure.legend(handles=[*entries, *also], loc="outside right center", frameon=False, fontsize=9)
    return figure, dict(zip(names, found, strict=True))


def _told_apart(values: Iterable[Any], looks: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(dict.fromkeys(values), cycle(looks), strict=False))


def _places(values: pd.Series, of_panel: pd.Series) -> pd.Series:
    """Return numbers unchanged, and words as their index among the panel's words."""
    if pd.api.types.is_numeric_dtype(of_panel):
        return values
    return values.map({word: place for place, word in enumerate(dict.fromkeys(of_panel))})


def _scale(axes: Axes, values: pd.Series, log: str) -> None:
    """Make axes logarithmic; a logarithmic x axis, and one of words, has a tick at each value."""
    if "y" in log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(WITH_COMMAS)
        axes.yaxis.set_minor_formatter(NullFormatter())
    words = not pd.api.types.is_numeric_dtype(values)
    if "x" in log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if words or "x" in log:
        ticks = list(dict.fromkeys(values)) if words else sorted(values.unique())
        labels = ticks if words else [f"{tick:,g}" for tick in ticks]
        turned: dict[str, Any] = {"rotation": 45, "ha": "right", "fontsize": 8} if len(ticks) > _MOST_TICKS else {}
        axes.set_xticks(range(len(ticks)) if words else ticks, labels, **turned)


def dress(axes: Axes) -> None:
    """Add a pale grid, and remove the top and right spines."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def check_png(path: Path) -> None:
    """Raise ValueError unless the path ends in ``.png``."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"a picture must end in .png, got {path}")


def save(figure: Figure | None, path: Path, **said: str) -> bool:
    """Write a figure as PNG, creating its folder; return False, and write nothing, if the figure is None.

    An existing file is replaced only when the new one is complete.

    Args:
        said: text chunks of the PNG, by keyword.

    Raises:
        ValueError: the path does not end in ``.png``.
        OSError: the file cannot be written.
    """
    check_png(path)
    if figure is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
                figure.savefig(Path(folder) / path.name, dpi=150, metadata=said)
                (Path(folder) / path.name).replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    return figure is not None
