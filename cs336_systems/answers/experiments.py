"""Blocks, figures and quoted numbers of the experiments on leaking abstractions: what their own analyses say of rows.

An experiment's ``analyse`` lives in its script, above this package, and is handed in. It reads nothing but rows, so
that a document shows what a rerun would print.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from cs336_systems.answers.committed import Committed
from cs336_systems.answers.quotes import Term
from cs336_systems.experiments.leaks.findings import Findings, draw_figure

Analyses = Mapping[str, Callable[[pd.DataFrame], Findings]]
PART = "leaks"


def blocks(committed: Committed, analyses: Analyses) -> dict[str, Callable[[], str]]:
    """The tables of each experiment, as one block."""

    def tables(name: str) -> Callable[[], str]:
        return lambda: "\n\n".join(table.markdown() for table in _findings(committed, analyses, name).tables)

    return {f"leak-{name.replace('_', '-')}": tables(name) for name in analyses}


def terms(committed: Committed, analyses: Analyses) -> dict[str, Term]:
    """``leak``: a main figure of an experiment, by the keys that lead to it; a key's spaces are dashes."""

    def leak(name: str, *keys: str) -> float:
        found = _findings(committed, analyses, name).figures
        for key in keys:
            found = found[key if key in found else key.replace("-", " ")]
        return float(found)  # type: ignore[arg-type]

    return {"leak": Term(leak)}


def figures(committed: Committed, analyses: Analyses, folder: Path) -> dict[Path, Callable[[Path], object]]:
    """What to call with a figure's path; raises ``NotMeasured`` where the rows are missing."""

    def drawing(name: str) -> Callable[[Path], object]:
        return lambda path: draw_figure(_findings(committed, analyses, name), path)

    return {folder / f"h200_leak_{name}.png": drawing(name) for name in analyses}


def _findings(committed: Committed, analyses: Analyses, name: str) -> Findings:
    rows = committed.rows(PART, name)
    return analyses[name](rows[rows["status"] == "ok"])
