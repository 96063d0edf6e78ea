"""Options of the two commands on precision. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, Self

from cs336_systems.report.command_line import Format


@dataclass(frozen=True)
class SumOptions:
    """What a sum of equal terms comes to in low precision."""

    terms: tuple[int, ...] = (1000, 10_000)
    """Numbers of terms."""
    term: float = 0.01
    """Value of each term."""
    format: Format = "auto"
    """Format of the table: auto draws it on a terminal and writes Markdown elsewhere."""


@dataclass(frozen=True)
class AutocastOptions:
    """Which dtype has each tensor of a model under autocast?"""

    device: Literal["cpu", "cuda"] = "cuda"
    """Where to run."""
    format: Format = "auto"
    """Format of the tables: auto draws them on a terminal and writes Markdown elsewhere."""

    @classmethod
    def default(cls, device: str) -> Self:
        return cls(device="cuda" if device == "cuda" else "cpu")
