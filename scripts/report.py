"""Render README.md, writeup.md and the pages in profiles/ from their templates and the committed rows.

    uv run scripts/report.py                      # rewrite documents that are stale, draw the figures
    uv run scripts/report.py --check              # write nothing; list what is stale, unknown or unproven, exit code 1
    uv run scripts/report.py --adopt results/run7 # move a run's rows and digests into profiles/ first
    uv run scripts/report.py --seal               # list what is kept by hand as it is now, then render

Templates are in cs336_systems/answers/pages; cs336_systems/answers/rendering.py describes how they quote numbers and
tables, and which numbers their text may hold. Rows must match the statistics of their samples and name a commit of the
history, and measured files must be as listed in profiles/SHA256SUMS (evidence.py); figures must name the hash of the
rows they draw (figures.py).
"""

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.report.command_line import cli, complain, exit_with

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """Render README.md, writeup.md and the pages in profiles/ from their templates and the committed rows."""

    check: bool = False
    """Write nothing; list every stale line, every unknown name and what was changed by hand, with exit code 1."""
    adopt: Path | None = None
    """Folder that a measuring recipe wrote: check its rows and digests, move them into profiles/, then render."""
    machine: str = "h200"
    """With --adopt, the machine of the rows: a folder of profiles/results, part of the GPU's name or cpu."""
    seal: bool = False
    """List the CSV files that are kept by hand (what others published, gpu_tests.csv) as they are now, then render."""


def main(arguments: list[str] | None = None) -> int:
    """Adopt if asked to; then render, or compare."""
    options = cli(Options, arguments, __doc__)
    if (options.adopt or options.seal) and options.check:
        return complain("report", "--check writes nothing, so it cannot go with --adopt or --seal")
    from cs336_systems.answers.evidence import BY_HAND, seal
    from cs336_systems.answers.report import adopt, render  # --help and bad input answer without torch and pandas

    if options.seal:
        seal(ROOT / "profiles", [ROOT / "profiles" / name for name in BY_HAND])
    if options.adopt and (failed := adopt(options.adopt, ROOT / "profiles", options.machine)):
        return failed
    return render(ROOT, check=options.check)


if __name__ == "__main__":
    exit_with("report", main)
