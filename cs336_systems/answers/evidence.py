"""What a row must prove before documents quote it: where it comes from, and that its statistics match its samples.

A row's statistics are computed from its samples once more. Derived metrics keep none: a rate's follow, but for its
amount of work, from those of its time in the same outcome, and one or two samples from the statistics themselves. The
commit must be one that the checked-out one descends from, without changes.

    commits = history(root)                  # None where git does not know it
    for problem in row_problems(root / "profiles", commits): print(problem)
"""

import re
import subprocess
from collections.abc import Set
from pathlib import Path

import numpy as np
import pandas as pd

from cs336_systems.harness.record import Metric, read_rows
from cs336_systems.harness.runs import RATES

PROVENANCE = ("commit", "argv", "timestamp", "torch")
"""What every row must say; besides the GPU, or the host of a row that a CPU measured."""

TEST_RUNS = "gpu_tests.csv"
"""Of ``profiles/``: the last runs of the tests that need a GPU, kept by hand."""

_ABBREVIATED = re.compile(r"\b[0-9a-f]{7,40}\b")

UNKNOWN = ("", "unknown", "nan")
"""What provenance says where it does not know."""

_STATISTICS = ("median", "mean", "std", "p10", "p90", "n")

_RESULT = ("status", "message", "metric", "unit", *_STATISTICS, "samples")

_TIMES = (
    RATES
    | {"matmul_tflops": "matmul"}
    | {f"{time}_{rate}": time for time in ("forward", "backward") for rate in ("bandwidth", "copy_share")}
)
"""Derived metrics that are an amount over a time, with the metric of that time."""

_BY_ROUND = ("exposed", "exposed_share")
"""Derived metrics of rounds, which rows do not tell apart."""

_ROUNDING = 4e-6
"""Of the largest sample: samples and statistics keep seven digits each."""


def history(root: Path) -> frozenset[str] | None:
    """Commits that the one checked out descends from, itself among them; None if ``root`` is no whole git checkout."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    try:
        top, shallow = git("rev-parse", "--show-toplevel", "--is-shallow-repository")
        whole = Path(top).resolve() == root.resolve() and shallow == "false"
        return frozenset(git("rev-list", "HEAD")) if whole else None
    except (OSError, subprocess.CalledProcessError):
        return None


def row_files(profiles: Path) -> list[Path]:
    """Every file of rows below ``profiles/``."""
    profiled = (profiles / "digests").rglob("profile_model.csv")
    return sorted([*(profiles / "results").rglob("*.csv"), *(profiles / "results").rglob("*.csv.gz"), *profiled])


def row_problems(profiles: Path, commits: Set[str] | None) -> list[str]:
    """One sentence for each file and column of committed rows that does not prove what it should.

    Args:
        commits: full hashes of the history; None leaves them unchecked.
    """
    found = []
    for path in row_files(profiles):
        name = path.relative_to(profiles).as_posix()
        try:
            found += [f"{name}, {problem}" for problem in problems_of(read_rows(path), commits)]
        except (OSError, ValueError) as error:
            found.append(f"{name}: {error}")
    return found


def gpu_test_problems(profiles: Path, commits: Set[str] | None) -> list[str]:
    """One sentence for each line of ``gpu_tests.csv`` that names a commit which is not in the history."""
    path = profiles / TEST_RUNS
    if commits is None or not path.exists():
        return []
    found = []
    for line, said in enumerate(pd.read_csv(path)["commit"], start=2):
        unknown = [name for name in _ABBREVIATED.findall(said) if not any(each.startswith(name) for each in commits)]
        found += [f"{TEST_RUNS}, line {line}: commit {name} is not in the history" for name in unknown]
    return found


def problems_of(rows: pd.DataFrame, commits: Set[str] | None) -> list[str]:
    """The same of rows that ``read_rows`` returned, by line of their file."""
    dirty = rows["dirty"].astype(str) != "False"
    commit = rows["commit"].astype(str)
    unknown = ~commit.isin([*(commit if commits is None else commits), *UNKNOWN])
    changed = "are of a checkout with uncommitted changes: no commit says what was measured"
    strange = f"are of commits that are not in the history, here {commit[unknown].iloc[:1].sum()}"
    said = (_where(dirty, changed), _where(unknown, strange))
    return [*missing_provenance(rows), *filter(None, said), *contradictions(rows)]


def missing_provenance(rows: pd.DataFrame) -> list[str]:
    """One sentence for each column of provenance that some rows leave empty."""
    device = rows["device"] if "device" in rows else pd.Series("cuda", index=rows.index)
    columns = {name: rows[name] for name in PROVENANCE} | {
        "gpu": rows["gpu"].where(device != "cpu", "a CPU"),
        "host": rows["host"].where(device == "cpu", "a GPU"),
    }
    said = (_where(values.astype(str).isin(UNKNOWN), f"do not say their {name}") for name, values in columns.items())
    return list(filter(None, said))


def contradictions(rows: pd.DataFrame) -> list[str]:
    """One sentence for each statistic that some rows' samples do not have, and for rows that nothing bears out."""
    samples = _samples(rows)
    borne_out = samples.map(len) > 0
    own, samples = rows[borne_out], samples[borne_out]
    unfounded = (rows["metric"] != "") & ~borne_out & ~rows["metric"].isin(_BY_ROUND)
    found = [_where(unfounded, "keep no samples, and follow from none")]
    if own.empty:
        return list(filter(None, found))
    expected = pd.DataFrame([Metric("", "", each).statistics() for each in samples], index=own.index)
    tolerance = _ROUNDING * samples.map(lambda each: np.abs(each).max())
    for name in _STATISTICS:
        right = pd.to_numeric(expected[name])
        wrong = ~((own[name] - right).abs() <= tolerance) & ~(own[name].isna() & right.isna())
        if wrong.any():
            first = int(np.argmax(wrong))
            values = f"{name} is {own[name].iloc[first]:g} and that of the samples {right.iloc[first]:g}"
            found.append(f"line {_line(own.index[first])}: in {wrong.sum()} of {len(rows)} rows, here {values}")
    return list(filter(None, found))


def _samples(rows: pd.DataFrame) -> pd.Series:
    """Of each row: its own, or those that it follows from, which are empty where there are none."""
    found = rows["samples"].copy()
    kept = found.map(len) > 0
    outcome = [name for name in rows if name not in _RESULT]
    timed = rows.loc[kept, [*outcome, "metric", "samples"]].drop_duplicates([*outcome, "metric"], keep="last")
    derived = rows[~kept & (rows["metric"] != "")]
    times = derived[outcome].assign(metric=derived["metric"].map(_TIMES)).merge(timed, "left", [*outcome, "metric"])
    statistics = derived[["median", "p10", "p90", "n"]].itertuples(name=None)
    for (row, median, p10, p90, n), of_time in zip(statistics, times["samples"], strict=True):
        if isinstance(of_time, list):
            rates = 1 / np.asarray(of_time)
            found[row] = list(rates * (median / np.median(rates)))
        elif n in (1, 2):  # percentiles of two lie a tenth of their distance inside
            found[row] = [median + sign * (n - 1) * (p90 - p10) / 1.6 for sign in (-1, 1)][: int(n)]
    return found


def _where(which: pd.Series, what: str) -> str:
    """A sentence for rows of which something holds; empty if there are none."""
    if not which.any():
        return ""
    return f"line {_line(which.index[int(np.argmax(which))])}: {which.sum()} of {len(which)} rows {what}"


def _line(position: int) -> int:
    """In a file whose first line is the header."""
    return position + 2
