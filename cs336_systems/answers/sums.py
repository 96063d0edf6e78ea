"""SHA-256 of every committed file that cannot be made again from others: rows, digests, logs of runs, figures.

``profiles/SHA256SUMS`` holds them, a line per file as ``sha256sum`` writes it (``cd profiles && sha256sum -c
SHA256SUMS``). What writes such a file seals it: adopting a run its rows and digests, rendering the figures it drew. An
edit by hand, a replaced picture, a file too many or too few is then named.

    seal(Path("profiles"), [Path("profiles/figures/h200_grid.png")])
    broken_seals(Path("profiles"), rendered=["digests/h200/README.md"])
"""

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path

NAME = "SHA256SUMS"
SEALED = ("results", "digests", "runs", "figures")
"""Folders of ``profiles/`` whose files are listed."""


def seal(profiles: Path, paths: Iterable[Path]) -> None:
    """List files as they are now; one that is gone is listed no longer."""
    sums = _listed(profiles)
    for path in paths:
        name = path.relative_to(profiles).as_posix()
        sums.pop(name, None)
        if path.exists():
            sums[name] = _sum(path)
    (profiles / NAME).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))


def broken_seals(profiles: Path, rendered: Collection[str] = ()) -> list[str]:
    """One sentence for each file that is not as listed, not listed, or missing.

    Args:
        rendered: files among them that are rendered from templates, and compared with those instead.
    """
    sums = _listed(profiles)
    files = {path for folder in SEALED for path in (profiles / folder).rglob("*") if path.is_file()}
    there = {path.relative_to(profiles).as_posix(): path for path in files} if files else {}
    found = [f"{name} is listed in {NAME} and missing" for name in sums.keys() - there.keys()]
    for name in there.keys() - set(rendered):
        if name not in sums:
            found.append(f"{name} is not listed in {NAME}: scripts/report.py --adopt lists what it moves")
        elif sums[name] != _sum(there[name]):
            found.append(f"{name} was changed since it was adopted or drawn: its SHA-256 is not that of {NAME}")
    return sorted(found)


def _listed(profiles: Path) -> dict[str, str]:
    path = profiles / NAME
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
