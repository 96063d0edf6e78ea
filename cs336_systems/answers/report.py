"""What ``scripts/report.py`` does: adopt a run, render documents, draw figures, and report what lacks proof."""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

from cs336_systems.answers.adopt import carry_out, plan
from cs336_systems.answers.committed import Committed
from cs336_systems.answers.evidence import gpu_test_problems, history, row_problems
from cs336_systems.answers.figures import draw, stale_figures
from cs336_systems.answers.prose import typed_numbers
from cs336_systems.answers.rendering import FOLDER, CannotRender, Pages, documents, read_templates, stale_lines
from cs336_systems.answers.sums import broken_seals
from cs336_systems.answers.training_runs import run_problems
from cs336_systems.answers.vocabulary import vocabulary

MACHINE = "h200"
"""Whose rows documents show, unless a call names another."""


def adopt(run: Path, profiles: Path, machine: str, replace: bool) -> int:
    """Move a run's files and say so; the exit code."""
    try:
        moves = plan(run, profiles, machine, replace=replace)
        for move in moves:
            print(move)
        carry_out(moves, profiles)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def render(root: Path, *, check: bool) -> int:
    """Write the documents below ``root`` that differ from their templates, or name the lines; the exit code."""
    committed = Committed(root / "profiles", MACHINE)
    templates = read_templates()
    pages = Pages(templates, vocabulary(committed))
    stale, problems = [], []
    for name in documents(templates):
        path = root / name
        try:
            rendered = pages.render(name)
        except CannotRender as error:
            problems += error.problems
            continue
        text = path.read_text() if path.exists() else ""
        if text == rendered:
            continue
        stale += [f"{name}, {difference}" for difference in stale_lines(text, rendered)]
        if not check:
            path.write_text(rendered)
    missing = [] if check else draw(committed, root / "profiles")
    problems += unproven(root, committed, templates)
    for problem in problems:
        print(problem, file=sys.stderr)
    if check:
        for difference in stale:
            print(f"stale: {difference}", file=sys.stderr)
        if stale:
            print("run scripts/report.py", file=sys.stderr)
        return int(bool(stale or problems))
    print(f"{len(stale)} lines rendered anew; drew the figures" + (f"; not measured: {missing}" if missing else ""))
    return int(bool(problems))


def unproven(root: Path, committed: Committed, templates: Mapping[str, str]) -> list[str]:
    """What stands without proof: numbers typed, rows without evidence, files changed by hand, figures of other rows."""
    commits = history(root)
    if commits is None:
        print(f"commits are not checked: no history, as {root} is no whole git checkout", file=sys.stderr)
    profiles = root / "profiles"
    inside = [Path(name) for name in documents(templates) if name.startswith("profiles/")]
    rendered = [path.relative_to("profiles").as_posix() for path in inside]
    recorded = [problems(profiles, commits) for problems in (row_problems, run_problems, gpu_test_problems)]
    found = [*itertools.chain(*recorded), *broken_seals(profiles, rendered), *stale_figures(committed, profiles)]
    typed = [f"{FOLDER}/{sentence}" for sentence in typed_numbers(templates)]
    return [*typed, *(f"profiles/{problem}" for problem in found)]
