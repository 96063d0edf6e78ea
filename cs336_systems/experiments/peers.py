"""Several implementations of one subject, compared: kernels, attention, blocks, fp8 and kinds of data.

A cell is one implementation (its *way*) of a subject; the cell without its way and turn is the subject. Ways of a
subject are interleaved in one process, on the same inputs, every second turn in reverse order, as a GPU at its power
limit slows while a command runs. A table (``report.results.ResultTable``) tells each way's time over that of a named
peer, turn by turn: ``line.repeats_over("step", line.peer(how="compiled"))``. Importing this module imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cs336_systems.case import Unsupported
from cs336_systems.declared import option
from cs336_systems.experiments.options import RunOptions

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from cs336_systems.harness.record import Metric


@dataclass(frozen=True)
class PeerRun(RunOptions):
    """The options of a benchmark of several implementations besides those of its cell."""

    repeat: int = option(
        1,
        "How often all ways are measured at each shape, in one process, every second time in reverse order.",
        sign="positive",
    )


class Peer:
    """A frozen dataclass of columns that is one implementation of a subject."""

    WAY: ClassVar[str] = "how"
    """The field that names the implementation."""

    @property
    def variant(self) -> str:
        return getattr(self, self.WAY)

    @property
    def subject(self) -> Any:
        """The cell without what is interleaved."""
        cell: Any = self
        turn = {"repeat": 0} if hasattr(self, "repeat") else {}
        return replace(cell, **{self.WAY: ""}, **turn)


def interleaved(cells: Iterable[Any], repeat: int) -> list[Any]:
    """All ways of each subject one after the other, ``repeat`` times, every second time in reverse order."""
    ways: dict[Any, list[Any]] = {}
    for cell in cells:
        ways.setdefault(cell.subject, []).append(cell)
    return [
        replace(cell, repeat=turn)
        for group in ways.values()
        for turn in range(repeat)
        for cell in group[:: -1 if turn % 2 else 1]
    ]


def installed(module: str, distribution: str) -> ModuleType:
    """The module of another library.

    Raises:
        Unsupported: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(f"{distribution} is not there ({error}): uv sync, or pip install {distribution}") from error


def relative_error(got: Tensor, exact: Tensor) -> float:
    """The Frobenius norm of the difference from an exact result over the result's own; computed in fp64."""
    exact = exact.to(got.device)
    return ((got.detach().double() - exact).norm() / exact.norm()).item()


def error_metric(name: str, error: float) -> Metric:
    from cs336_systems.harness.record import Metric

    return Metric(f"error_{name}", "relative", [error])
