"""The work of ``scripts/report.py``: adopt a run, render documents, draw figures, and report what lacks proof."""

import sys
from pathlib import Path

from cs336_systems.answers import evidence
from cs336_systems.answers.committed import Committed
from cs336_systems.answers.figures import draw, stale_figures
from cs336_systems.answers.rendering import (
    FOLDER,
    TABLES,
    CannotRender,
    Pages,
    documents,
    read_templates,
    stale_line,
    typed_numbers,
)
from cs336_systems.answers.vocabulary import vocabulary

MACHINE = "h200"
"""Whose rows documents show, unless a call names another."""


def adopt(run: Path, profiles: Path, machine: str) -> int:
    """Move a run's files and say so; the exit code."""
    try:
        moves = evidence.plan(run, profiles, machine)
        for move in moves:
            print(move)
        evidence.carry_out(moves, profiles)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def render(root: Path, *, check: bool) -> int:
    """Write the documents and tables below ``root`` that are not as rendered, or name the first such line of each."""
    committed, templates = Committed(root / "profiles", MACHINE), read_templates()
    pages = Pages(templates, vocabulary(committed))
    problems = [f"{FOLDER}/{sentence}" for sentence in typed_numbers(templates)]
    rendered = {}
    for name in documents(templates):
        try:
            rendered[name] = pages.render(name)
        except CannotRender as error:
            problems.append(str(error))
    stale = []
    for name, text in {**rendered, **pages.files}.items():
        path = root / name
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there != text:
            stale.append(f"{name}, {stale_line(there, text)}")
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    unlinked = {path.relative_to(root).as_posix() for path in (root / TABLES).glob("*")} - pages.files.keys()
    problems += [f"{name}: no page links it" for name in sorted(unlinked)]
    missing = [] if check else draw(committed, root / "profiles")
    problems += unproven(root, committed, list(rendered))
    for problem in problems:
        print(problem, file=sys.stderr)
    if check:
        for difference in stale:
            print(f"stale: {difference}", file=sys.stderr)
        if stale:
            print("run scripts/report.py", file=sys.stderr)
        return int(bool(stale or problems))
    print(f"{len(stale)} files rendered anew; drew the figures" + (f"; not measured: {missing}" if missing else ""))
    return int(bool(problems))


def unproven(root: Path, committed: Committed, names: list[str]) -> list[str]:
    """Everything that stands without proof: rows without evidence, files changed by hand, figures of other rows."""
    commits = evidence.history(root)
    if commits is None:
        print(f"commits are not checked: no history, as {root} is no whole git checkout", file=sys.stderr)
    profiles = root / "profiles"
    inside = [name.removeprefix("profiles/") for name in names]
    found = [*evidence.problems(profiles, commits, inside, committed.table), *stale_figures(committed, profiles)]
    return [f"profiles/{problem}" for problem in found]
