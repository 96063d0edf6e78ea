"""Options of ``benchmark_harness.py``, and its subjects. Imports no torch."""

from dataclasses import dataclass

from cs336_systems.experiments.options import RunOptions

KERNELS = ("matmul 1024 bf16", "matmul 4096 bf16", "matmul 8192 bf16", "copy 256 MiB", "add 256 KiB")
COMMAND = "benchmark_model.py --size small --mode step"


@dataclass(frozen=True)
class Options(RunOptions):
    """What does measuring itself cost?"""

    timeout: float = 600.0
    rounds: int = 10
    """Alternating rounds per kernel; each yields one ratio."""


@dataclass(frozen=True)
class HarnessCell:
    """One kernel to time with both clocks, or the command."""

    device: str
    subject: str
    rounds: int
    seed: int

    @property
    def variant(self) -> str:
        return "command" if self.subject == COMMAND else "kernel"

    def __str__(self) -> str:
        return self.subject


def make_cells(options: Options) -> list[HarnessCell]:
    """Every kernel, and the command."""
    return [HarnessCell(options.device, subject, options.rounds, options.seed) for subject in (*KERNELS, COMMAND)]
