"""The evidence behind documents: rows that prove themselves, sealed files, and how a run's files join them.

**Evidence.** A row's commit must be one that the checked-out one descends from, without changes; its numbers agree with
its samples and with each other (``agreement.py``); the lines of a log are as far apart as its steps and evaluations
took.

**Seals.** ``profiles/SHA256SUMS`` lists every committed file that cannot be made again from others, as ``sha256sum``
writes it: rows, recordings, logs of runs, figures, the runs of GPU tests, and what others published. Adopting a run and
drawing a figure seal what they write; ``report.py --seal`` seals the two CSV files that are kept by hand.

**Adopting.** ``scripts/measure_*.sh FOLDER PART...`` write a folder for each part below FOLDER. Its CSVs of rows belong
into ``profiles/results/<machine>/<part>/``, appended to those that are there (documents show a cell's newest run); its
pictures and other CSVs, and the rows of a profile, into ``profiles/digests/<machine>/<part>/``; the log of a training
run, ``FOLDER/<name>/log.jsonl``, into ``profiles/runs/<machine>/<name>/``. Raw recordings, checkpoints, and figures
that are drawn from rows or logs, stay.

    for problem in problems(root, commits=history(root)): print(problem)
    moves = plan(Path("results/run7"), Path("profiles"), "h200")
    carry_out(moves, Path("profiles"))          # refuses if one of them does
"""

import gzip
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from cs336_systems.answers.agreement import contradictions, where
from cs336_systems.harness.record import read_rows, unsaid
from cs336_systems.pretraining.run_log import LOG, Run, read_run
from cs336_systems.pretraining.run_records import Device, Evaluation, LoggedStep, Session

RUNS, TEST_RUNS, SUMS = "runs", "gpu_tests.csv", "SHA256SUMS"
"""Names in ``profiles/``: training runs, the last runs of the tests that need a GPU, and the seals."""

BY_HAND = (TEST_RUNS, *(f"../cs336_systems/answers/{name}.csv" for name in ("llmq", "ml_dataflow", "outside")))
"""Sealed files that people edit, as ``profiles/`` sees them."""

SEALED = ("results", "digests", RUNS, "figures")
"""Folders of ``profiles/`` whose files are listed."""

LARGEST = 2**20
"""The most bytes of a committed file; larger files of rows are compressed, larger pictures rejected."""

PROVENANCE = ("commit", "argv", "timestamp", "torch")
"""Columns that every row must fill, in addition to the GPU, or to the host for rows measured on a CPU."""

_ABBREVIATED = re.compile(r"\b[0-9a-f]{7,40}\b")

UNKNOWN = ("", "unknown", "nan")
"""Values of provenance columns that mean unknown."""


def history(root: Path) -> frozenset[str] | None:
    """Return HEAD and all its ancestors; None if ``root`` is not the top of a git checkout with full history."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return os.fsdecode(subprocess.run(command, capture_output=True, check=True).stdout).splitlines()

    try:
        top, shallow = git("rev-parse", "--show-toplevel", "--is-shallow-repository")
        whole = Path(top).resolve() == root.resolve() and shallow == "false"
        return frozenset(git("rev-list", "HEAD")) if whole else None
    except (OSError, subprocess.CalledProcessError):
        return None


def problems(
    profiles: Path,
    commits: Set[str] | None,
    rendered: Collection[str] = (),
    read: Callable[[Path], pd.DataFrame] = read_rows,
) -> list[str]:
    """Return a sentence for each problem of committed rows, logs and sealed files.

    Args:
        commits: full hashes of the history; with None commits are not checked.
        rendered: files below sealed folders that are compared with their templates instead of a hash.
        read: ``read_rows``, or a cached version.
    """
    digested = (profiles / "digests").rglob("profile_model.csv")
    found = []
    for path in sorted([*(profiles / "results").rglob("*.csv*"), *digested, *(profiles / RUNS).rglob(LOG)]):
        try:
            own = run_problems(read_run(path), commits) if path.name == LOG else row_problems(read(path), commits)
        except (OSError, ValueError) as error:
            own = [str(error)]
        found += [f"{path.relative_to(profiles).as_posix()}: {problem}" for problem in own]
    return [*found, *_test_run_problems(profiles, commits), *broken_seals(profiles, rendered)]


def _test_run_problems(profiles: Path, commits: Set[str] | None) -> list[str]:
    """Return a sentence for each commit named in ``gpu_tests.csv`` that is not in the history."""
    path = profiles / TEST_RUNS
    if commits is None or not path.exists():
        return []
    found = []
    for line, said in enumerate(pd.read_csv(path, dtype=str)["commit"], start=2):
        unknown = [name for name in _ABBREVIATED.findall(said) if not any(each.startswith(name) for each in commits)]
        found += [f"{TEST_RUNS}, line {line}: commit {name} is not in the history" for name in unknown]
    return found


def row_problems(rows: pd.DataFrame, commits: Set[str] | None) -> list[str]:
    """Return a sentence, with a line of the file, for each problem of rows' provenance and numbers."""
    dirty = rows["dirty"].astype(str) != "False"
    commit = rows["commit"].astype(str)
    unknown = ~commit.isin([*(commit if commits is None else commits), *UNKNOWN])
    changed = "are of a checkout with uncommitted changes: no commit says what was measured"
    strange = f"are of commits that are not in the history, here {commit[unknown].iloc[:1].sum()}"
    said = (where(dirty, changed), where(unknown, strange))
    return [*_missing_provenance(rows), *filter(None, said), *contradictions(rows)]


def run_problems(run: Run, commits: Set[str] | None) -> list[str]:
    """Return a sentence for each problem of a run's log: a torn line, no device, an unknown commit, wrong times."""
    devices = run.all(Device)
    found = [] if devices else ["says nothing of its device"]
    if run.torn:
        found.append("its last line is not whole")
    for provenance in (device.provenance for device in devices):
        commit = str(provenance.get("commit", ""))
        if provenance.get("dirty", True) is not False:
            found.append("is of a checkout with uncommitted changes: no commit says what ran")
        if commit in UNKNOWN or (commits is not None and commit not in commits):
            found.append(f"is of commit {commit or 'unknown'}, which is not in the history")
    return [*found, *_stamps(run)]


def _stamps(run: Run) -> list[str]:
    """Return a sentence if a log's time stamps contradict the durations of its steps and evaluations.

    Together they may differ by twice the longest duration and 1 %.
    """
    apart = took = longest = 0.0
    before: LoggedStep | Evaluation | None = None
    for record in run.records:
        if isinstance(record, Session):
            before = None
        elif isinstance(record, LoggedStep | Evaluation):
            if before is not None:
                apart, took = apart + record.at - before.at, took + record.seconds
            before, longest = record, max(longest, record.seconds)
    if abs(apart - took) <= 2 * longest + 0.01 * apart:
        return []
    return [f"its lines are {apart:.1f} s apart, and its steps and evaluations took {took:.1f} s"]


def _missing_provenance(rows: pd.DataFrame) -> list[str]:
    """Return a sentence for each column of provenance that some rows leave empty."""
    device = rows["device"] if "device" in rows else pd.Series("cuda", index=rows.index)
    columns = {name: rows[name] for name in PROVENANCE} | {
        "gpu": rows["gpu"].where(device != "cpu", "a CPU"),
        "host": rows["host"].where(device == "cpu", "a GPU"),
    }
    said = (where(values.astype(str).isin(UNKNOWN), f"do not say their {name}") for name, values in columns.items())
    return list(filter(None, said))


def seal(profiles: Path, paths: Iterable[Path]) -> None:
    """Record the files' hashes as they are now; remove those of files that no longer exist."""
    sums = _listed(profiles)
    for path in paths:
        name = Path(os.path.relpath(path, profiles)).as_posix()
        sums.pop(name, None)
        if path.exists():
            sums[name] = _sum(path)
    (profiles / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)), encoding="utf-8")


def broken_seals(profiles: Path, rendered: Collection[str] = ()) -> list[str]:
    """Return a sentence for each sealed file that was changed, is not listed, or is missing.

    Args:
        rendered: files that are compared with their templates instead.
    """
    sums = _listed(profiles)
    files = {path for folder in SEALED for path in (profiles / folder).rglob("*") if path.is_file()}
    there = {path.relative_to(profiles).as_posix(): path for path in files}
    there |= {name: profiles / name for name in BY_HAND if (profiles / name).exists()}
    found = [f"{name} is listed in {SUMS} and missing" for name in sums.keys() - there.keys()]
    for name in there.keys() - set(rendered):
        if name not in sums:
            found.append(f"{name} is not listed in {SUMS}: scripts/report.py --adopt or --seal lists it")
        elif sums[name] != _sum(there[name]):
            found.append(f"{name} was changed since it was sealed: its SHA-256 is not that of {SUMS}")
    return sorted(found)


def _listed(profiles: Path) -> dict[str, str]:
    path = profiles / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Move:
    """The adoption of one file of a run, or the reason why it is refused."""

    source: Path
    target: Path
    what: str
    content: bytes = b""
    refused: bool = False

    def __str__(self) -> str:
        return f"{'refused: ' if self.refused else ''}{self.source} -> {self.target}: {self.what}"


def plan(run: Path, profiles: Path, machine: str) -> list[Move]:
    """Plan the adoption of a run's files; a picture or log that differs from a committed one is refused.

    Args:
        run: the output folder of a measuring recipe.
        profiles: the folder of ``results`` and ``digests``.
        machine: the machine's folder name: part of the GPU's name, or cpu.

    Raises:
        ValueError: the folder holds no part with rows, digests or a log.
    """
    moves = []
    for folder in sorted(path for path in run.iterdir() if path.is_dir()) if run.is_dir() else []:
        if (log := folder / LOG).exists():
            moves.append(_move(log, profiles / RUNS / machine / folder.name / LOG, machine, _log))
            continue
        names = {path.stem for path in folder.glob("*.csv") if _holds_rows(path)}
        for path in sorted([*folder.glob("*.csv"), *folder.glob("*.png")]):
            if path.suffix == ".png" and any(path.stem.startswith(name) for name in names):
                continue  # drawn from the rows
            kind = "results" if path.stem in names and path.stem != "profile_model" else "digests"
            target = profiles / kind / machine / folder.name / path.name
            moves.append(_move(path, target, machine, _rows if path.stem in names else _digest))
    if not moves:
        raise ValueError(f"{run} holds no folder of a part with rows, pages or pictures, and no log")
    return moves


def carry_out(moves: list[Move], profiles: Path) -> None:
    """Write every file atomically, and its hash.

    Raises:
        ValueError: one of the moves is refused; then nothing is written.
        OSError: a file cannot be written; earlier files have been.
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


def _move(source: Path, target: Path, machine: str, kind: Callable[[Path, Path, str], Move]) -> Move:
    """Return the move that ``kind`` plans for a file; its ValueError becomes a refusal."""
    try:
        return kind(source, target, machine)
    except ValueError as error:
        return Move(source, target, str(error), refused=True)


def _rows(source: Path, target: Path, machine: str) -> Move:
    """Append rows to the committed ones.

    Raises:
        ValueError: the rows have problems, are of another machine or have other columns. Or some are not among the
            committed rows and are no newer: they were edited, or are of an earlier run that would count as the newest.
    """
    check = read_rows(source)
    device = check["device"] if "device" in check else pd.Series("cuda", index=check.index)
    foreign = _foreign(check["gpu"].where(device != "cpu", "cpu"), machine)
    if problems := ["no rows"] if check.empty else row_problems(check, commits=None) + foreign:
        raise ValueError(problems[0])
    compressed = target.with_suffix(".csv.gz")
    there = compressed if compressed.exists() else target
    rows = _as_text(source)
    old = _in_columns(_as_text(there), rows.columns) if there.exists() else rows.head(0)
    known = set(old.itertuples(index=False, name=None))
    added = rows[[line not in known for line in rows.itertuples(index=False, name=None)]]
    if added.empty:
        return Move(source, there, "all there already")
    newest = max(old["timestamp"], default="")
    if (added["timestamp"] <= newest).any():
        raise ValueError(f"differs from committed rows and is no newer than they are ({newest})")
    content = pd.concat([old, added]).to_csv(index=False, lineterminator="\n").encode()
    what = f"{len(added)} of {len(rows)} rows appended" if len(old) else f"{len(rows)} rows"
    if there == compressed or len(content) > LARGEST:
        return Move(source, compressed, f"{what}, compressed", gzip.compress(content, mtime=0))
    return Move(source, target, what, content)


def _as_text(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def _in_columns(old: pd.DataFrame, columns: pd.Index) -> pd.DataFrame:
    """Return committed rows with the columns of newer ones.

    Missing columns get the defaults of rows that were measured before the columns existed; columns that newer rows lack
    are dropped if empty.

    Raises:
        ValueError: the columns still differ.
    """
    defaults = unsaid(old.columns)
    unsaid_then = {name: defaults[name] for name in columns if name in defaults and name not in old}
    old = old.assign(**{name: "" if value is None else str(value) for name, value in unsaid_then.items()})
    old = old.drop(columns=[name for name in old if name not in columns and (old[name] == "").all()])
    if {*old} != {*columns}:
        raise ValueError("other columns than the committed rows have")
    return old[columns]


def _digest(source: Path, target: Path, machine: str = "") -> Move:
    """Copy a file; raises ValueError if it is too large or differs from the committed one."""
    content = source.read_bytes()
    if len(content) > LARGEST:
        raise ValueError(f"{len(content) / 2**20:.1f} MiB are too large to commit")
    if not target.exists():
        return Move(source, target, "new", content)
    if target.read_bytes() != content:
        raise ValueError("differs from the committed one: delete that first")
    return Move(source, target, "there already")


def _log(source: Path, target: Path, machine: str) -> Move:
    """Copy a run's log; raises ValueError if it has problems or is of another machine, and as ``_digest``."""
    run = read_run(source)
    names = pd.Series([device.name for device in run.all(Device)], dtype=str)
    if problems := run_problems(run, commits=None) + _foreign(names, machine):
        raise ValueError(problems[0])
    return _digest(source, target)


def _foreign(devices: pd.Series, machine: str) -> list[str]:
    """Return a sentence, in a list, if one of the devices is not of the machine."""
    foreign = devices[~devices.astype(str).str.lower().str.contains(machine.lower(), regex=False)]
    return [f"measured on {foreign.iloc[0]}, not on {machine}"] if len(foreign) else []
