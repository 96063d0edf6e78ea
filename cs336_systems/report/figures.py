"""What all figures share: how they are written, and colours that colour-blind readers can tell apart."""

from pathlib import Path

from matplotlib.figure import Figure

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito 2008."""


def save(figure: Figure | None, path: Path) -> bool:
    """Write a figure as PNG; returns whether there was one."""
    if figure is None:
        return False
    figure.savefig(path, dpi=150)
    return True
