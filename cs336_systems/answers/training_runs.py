"""Committed training runs in documents: lines of their console, and where they ended.

``profiles/runs/<machine>/<name>/log.jsonl`` is a run's log as ``scripts/train.py`` wrote it.
"""

import io
from collections.abc import Collection, Set
from pathlib import Path

from rich.console import Console

from cs336_systems.answers.evidence import UNKNOWN
from cs336_systems.pretraining.run_log import LOG
from cs336_systems.pretraining.run_reader import Run, read_run
from cs336_systems.pretraining.run_records import KINDS, Device, End, Evaluation, Light, Options, Record, Step
from cs336_systems.report.run_console import RunConsole

FOLDER = "runs"
"""Of ``profiles/``."""


def console_lines(run: Run, steps: Collection[int]) -> str:
    """The console's lines of some steps and the evaluations after as many, and the end's; ``...`` where some are left
    out."""
    file = io.StringIO()
    console = RunConsole(console=Console(file=file))
    for record in (*run.all(Options), *run.all(Light)):
        console.write(record)
    file.truncate(file.seek(0))  # their tables
    left_out = False
    for record in run.records:
        if not isinstance(record, Step | Evaluation | End):
            continue
        if not isinstance(record, End) and record.step not in steps:
            left_out = True
            continue
        if left_out:
            file.write("...\n")
        left_out = False
        console.write(record)
    return file.getvalue().rstrip("\n")


def last_record(run: Run, kind: str) -> Record:
    """The newest record of a kind, by the name that the log has for it.

    Raises:
        ValueError: the log has none.
    """
    found = run.last(KINDS[kind])
    if found is None:
        raise ValueError(f"{run.path} has no record of kind {kind!r}")
    return found


def best_evaluation(run: Run) -> Evaluation:
    """The one with the least loss, of a run that has one."""
    return min(run.all(Evaluation), key=lambda evaluation: evaluation.loss)


def run_problems(profiles: Path, commits: Set[str] | None) -> list[str]:
    """One sentence for each committed log that does not prove where it comes from.

    Args:
        commits: full hashes of the history; None leaves them unchecked.
    """
    found = []
    for path in sorted((profiles / FOLDER).rglob(LOG)):
        try:
            problems = problems_of_run(read_run(path), commits)
        except (OSError, ValueError) as error:
            problems = [str(error)]
        found += [f"{path.relative_to(profiles).as_posix()}: {problem}" for problem in problems]
    return found


def problems_of_run(run: Run, commits: Set[str] | None) -> list[str]:
    """The same of one run: a log that is torn, a device or a commit that is not told, uncommitted changes."""
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
    return found
