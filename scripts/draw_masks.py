"""Draw the attention masks of FlexAttention, and the scores that are left when empty blocks are skipped.

    uv run scripts/draw_masks.py                  # -> results/attention_masks.png
    uv run scripts/draw_masks.py --length 2048 --out elsewhere/

Each picture's title gives the share of scores that are seen and the share of blocks that are skipped.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from cs336_systems.report.command_line import complain, exit_with


@dataclass(frozen=True)
class Options:
    """Draw the attention masks."""

    length: int = 1024
    """Keys; a multiple of 128 that is at least 512."""
    out: Path = Path("results")
    """Folder to which attention_masks.png is written."""


def main(arguments: list[str] | None = None) -> int:
    """Draw and write; 2 for a length or a folder that will not do."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    from cs336_systems.experiments.attention_figures import masks_figure  # torch and matplotlib come with it
    from cs336_systems.report.figures import save

    path = options.out / "attention_masks.png"
    try:
        save(masks_figure(options.length), path)
    except (ValueError, OSError) as error:
        return complain("draw_masks", error)
    print(f"drew {path}")
    return 0


if __name__ == "__main__":
    exit_with("draw_masks", main)
