"""Move a run's rows and digests to where documents are rendered from: checked first, shown, then all or nothing.

``scripts/measure_*.sh FOLDER PART...`` write a folder for each part below FOLDER. Its CSVs of rows belong into
``profiles/results/<machine>/<part>/``, appended to those that are there (the newest run of a cell is what documents
show); its pages, pictures and other CSVs, and the rows of a profile, into ``profiles/digests/<machine>/<part>/``; the
log of a training run, ``FOLDER/<name>/log.jsonl``, to ``profiles/runs/<machine>/<name>/``. Raw recordings, checkpoints,
and figures that are drawn from rows or logs, stay.

    moves = plan(Path("results/run7"), Path("profiles"), "h200", replace=False)
    for move in moves: print(move)
    carry_out(moves, Path("profiles"))          # refuses if one of them does
"""

import csv
import gzip
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from cs336_systems.answers.evidence import problems_of
from cs336_systems.answers.sums import seal
from cs336_systems.answers.training_runs import FOLDER as RUNS
from cs336_systems.answers.training_runs import problems_of_run
from cs336_systems.harness.record import read_rows, unsaid
from cs336_systems.pretraining.run_log import LOG
from cs336_systems.pretraining.run_reader import read_run
from cs336_systems.pretraining.run_records import Device

LARGEST = 2**20
"""Bytes of a committed file; rows above are compressed, pages and pictures refused."""

_DIGESTS = (".md", ".csv", ".png")


@dataclass(frozen=True)
class Move:
    """One file of a run: what will be done with it, or why it cannot be."""

    source: Path
    target: Path
    what: str
    content: bytes = b""
    refused: bool = False

    def __str__(self) -> str:
        return f"{'refused: ' if self.refused else ''}{self.source} -> {self.target}: {self.what}"


def plan(run: Path, profiles: Path, machine: str, *, replace: bool) -> list[Move]:
    """What adopting a run's folder would do, file by file.

    Args:
        run: the folder that a measuring recipe was given.
        profiles: the folder of ``results`` and ``digests``.
        machine: whose rows these are, as its folder is called: part of the GPU's name, or cpu.
        replace: overwrite what is there instead of refusing.

    Raises:
        ValueError: the folder holds no part with rows or digests.
    """
    moves = []
    for folder in sorted(path for path in run.iterdir() if path.is_dir()) if run.is_dir() else []:
        if (log := folder / LOG).exists():
            moves.append(_log(log, profiles / RUNS / machine / folder.name / LOG, machine, replace))
            continue
        names = {path.stem for path in folder.glob("*.csv") if _holds_rows(path)}
        for path in sorted(folder.iterdir()):
            drawn = path.suffix == ".png" and any(path.stem.startswith(name) for name in names)
            if path.suffix not in _DIGESTS or drawn:
                continue
            kind = "results" if path.stem in names and path.stem != "profile_model" else "digests"
            target = profiles / kind / machine / folder.name / path.name
            moves.append(_rows(path, target, machine, replace) if path.stem in names else _page(path, target, replace))
    if not moves:
        raise ValueError(f"{run} holds no folder of a part with rows, pages or pictures, and no log")
    return moves


def carry_out(moves: list[Move], profiles: Path) -> None:
    """Write every file, each at once or not at all, and its hash.

    Raises:
        ValueError: one of the moves is refused; nothing is written then.
        OSError: a file cannot be written; those before it are.
    """
    if any(move.refused for move in moves):
        raise ValueError("nothing was moved, as something is refused")
    for move in moves:
        if not move.content:
            continue
        move.target.parent.mkdir(parents=True, exist_ok=True)
        beside = move.target.with_name(f".{move.target.name}.new")
        try:
            with beside.open("wb") as file:
                file.write(move.content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(move.target)
        finally:
            beside.unlink(missing_ok=True)
        plain = move.target.with_suffix("") if move.target.suffix == ".gz" else move.target
        if plain != move.target:
            plain.unlink(missing_ok=True)
        seal(profiles, {plain, move.target})


def _holds_rows(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline().startswith(b"schema_version,")


def _rows(source: Path, target: Path, machine: str, replace: bool) -> Move:
    compressed = target.with_suffix(".csv.gz")
    there = compressed if compressed.exists() else target
    try:
        if problem := _unfit(read_rows(source), machine):
            raise ValueError(problem)
        lines, old = _lines(source), _lines(there) if there.exists() and not replace else []
        old = _in_columns(lines[0], old) if old else old
        added = _newer(lines, old) if old else lines
    except ValueError as error:
        return Move(source, there, str(error), refused=True)
    if not added:
        return Move(source, there, "all there already")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*old, *added])
    content = text.getvalue().encode()
    what = f"{len(added)} of {len(lines) - 1} rows appended" if old else f"{len(lines) - 1} rows"
    if there == compressed or len(content) > LARGEST:
        return Move(source, compressed, f"{what}, compressed", gzip.compress(content, mtime=0))
    return Move(source, target, what, content)


def _lines(path: Path) -> list[list[str]]:
    """Of a CSV, compressed or not; the header first."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.reader(io.StringIO(data.decode(), newline="")))


def _in_columns(columns: list[str], old: list[list[str]]) -> list[list[str]]:
    """The old lines in the columns of newer ones, in their order, where all they lack could not be said then."""
    lacking, defaults = [name for name in columns if name not in old[0]], unsaid(old[0])
    if not set(lacking) <= defaults.keys() or {*columns} - {*lacking} != {*old[0]}:
        return old
    rows = (defaults | dict(zip(old[0], line, strict=True)) for line in old[1:])
    return [columns, *([row[name] for name in columns] for row in rows)]


def _newer(lines: list[list[str]], old: list[list[str]]) -> list[list[str]]:
    """The lines that are not among the old ones.

    Raises:
        ValueError: other columns; or lines that are no newer: changed by hand, or of a run before the committed one,
            which would pass for the newest.
    """
    if lines[0] != old[0]:
        raise ValueError("other columns than the committed rows have")
    known, time = {tuple(line) for line in old}, lines[0].index("timestamp")
    added = [line for line in lines if tuple(line) not in known]
    newest = max((line[time] for line in old[1:]), default="")
    if any(line[time] <= newest for line in added):
        raise ValueError(f"differs from committed rows and is no newer than they are ({newest})")
    return added


def _page(source: Path, target: Path, replace: bool) -> Move:
    content = source.read_bytes()
    if len(content) > LARGEST:
        return Move(source, target, f"{len(content) / 2**20:.1f} MiB are too large to commit", refused=True)
    if not target.exists():
        return Move(source, target, "new", content)
    if target.read_bytes() == content:
        return Move(source, target, "there already")
    if not replace:
        return Move(source, target, "differs from the committed one", refused=True)
    return Move(source, target, "replaces the committed one", content)


def _log(source: Path, target: Path, machine: str, replace: bool) -> Move:
    try:
        run = read_run(source)
        problems = problems_of_run(run, commits=None)
        problems += [
            f"a run on {device.name}, not on {machine}"
            for device in run.all(Device)
            if machine.lower() not in device.name.lower()
        ]
    except ValueError as error:
        problems = [str(error)]
    return Move(source, target, problems[0], refused=True) if problems else _page(source, target, replace)


def _unfit(rows: pd.DataFrame, machine: str) -> str:
    """Why rows cannot be committed; empty if they can."""
    if rows.empty:
        return "no rows"
    if problems := problems_of(rows, commits=None):
        return problems[0]
    device = rows["device"] if "device" in rows else pd.Series("cuda", index=rows.index)
    measured_on = rows["gpu"].where(device != "cpu", "cpu").astype(str)
    foreign = measured_on[~measured_on.str.lower().str.contains(machine.lower(), regex=False)]
    return "" if foreign.empty else f"rows of {foreign.iloc[0]}, not of {machine}"
