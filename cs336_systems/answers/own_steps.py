"""This suite's own committed step times and memory peaks, compared with predictions.

They are rows of ``benchmark_training.py`` on H100s and H200s (``profiles/results``). ``costs/rates.py`` was fitted on
those of one H200; nothing was fitted on an H100 or on several GPUs, and no memory prediction was fitted. Rows with the
same settings and engine version count once, by the median of their medians. Rows with measured matmul kernels do not
count, because the rates do not cover these.

    for step in own_steps(): step.seconds_error, step.memory_error
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.config import Recipe, resolve_size
from cs336_systems.costs.parallelism.layout import Layout
from cs336_systems.costs.parallelism.rank_memory import rank_peak
from cs336_systems.costs.parallelism.seconds import step_seconds
from cs336_systems.costs.rates import Sustained, ours_on
from cs336_systems.experiments.fp8 import RECIPES
from cs336_systems.hardware import GIB, find_hardware

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path(__file__).resolve().parents[2] / "profiles/results"
PARTS = ("h200/training", "h200/training-2", "h200/training-4", "h100/training-2", "h100/training")
_SETTINGS = [
    *("gpu", "size", "context_length", "world_size", "zero", "recipe", "keep", "batch_size", "total_batch_tokens"),
    "engine",
]


@dataclass(frozen=True)
class OwnStep:
    """A step of this suite's trainer."""

    gpu: str
    size: str
    length: int
    layout: Layout
    recipe: Recipe
    step_s: float
    peak_gib: float | None
    sustained: Sustained
    """This suite's shares of the GPU's rates at the time of the measurement."""

    @property
    def group(self) -> str:
        """The GPU's name, and ``one`` or ``several``; rates were fitted on steps of one H200."""
        return f"{self.gpu.removeprefix('NVIDIA ').split()[0]}, {'one' if self.layout.n_ranks == 1 else 'several'}"

    @property
    def seconds_error(self) -> float:
        """The relative error of the predicted seconds: predicted / measured - 1."""
        hardware = find_hardware(self.gpu)
        assert hardware is not None
        how: dict[str, Any] = {"recipe": self.recipe, "sustained": self.sustained}
        found = step_seconds(resolve_size(self.size), self.length, self.layout, hardware, **how)
        return found.total / self.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the predicted peak: predicted / measured - 1; None if no peak was recorded."""
        if self.peak_gib is None:
            return None
        config = resolve_size(self.size)
        peak = rank_peak(config, self.length, self.layout, recipe=self.recipe, whole_gradients=True)
        return peak.n_bytes / GIB / self.peak_gib - 1


@cache
def own_steps(parts: tuple[str, ...] = PARTS) -> tuple[OwnStep, ...]:
    """Return this suite's steps in these parts, without independent ranks, offload or measured matmul kernels."""
    return tuple(_read(parts))


def committed_rows(part: str, benchmark: str = "benchmark_training") -> "pd.DataFrame":
    """Return the rows of successful cells of a committed part."""
    from cs336_systems.harness.record import read_rows  # imports pandas, for which --help should not wait

    rows = read_rows(RESULTS / part / f"{benchmark}.csv")
    return rows[rows["status"] == "ok"]


def _engine(gpu: str, moment: Any) -> Sustained:
    hardware = find_hardware(gpu)
    assert hardware is not None
    return ours_on(hardware, str(moment))


def _read(parts: tuple[str, ...]) -> Iterator[OwnStep]:
    for part in parts:
        rows = committed_rows(part)
        rows = rows[rows["how"] == "ours"]
        for name, plain in (("apart", "off"), ("matmul_kernels", "library"), ("offload", "none")):
            rows = rows[rows[name] == plain] if name in rows else rows
        engines: list[Any] = [_engine(*row) for row in rows[["gpu", "timestamp"]].itertuples(index=False)]
        rows = rows.assign(engine=engines)
        medians = rows.pivot_table(
            index=_SETTINGS, columns="metric", values="median", aggfunc="median", sort=False
        ).reset_index()
        for row in medians.to_dict("records"):
            ranks, zero = int(row["world_size"]), int(row["zero"]) if int(row["world_size"]) > 1 else 0
            layout = Layout.of_data(
                *(ranks, zero),
                keep=row["keep"],
                micro_batch=int(row["batch_size"]),
                n_micro_batches=int(row["total_batch_tokens"] / row["context_length"] / row["batch_size"] / ranks),
            )
            peak = row.get("peak_memory")
            yield OwnStep(
                *(row["gpu"], row["size"], int(row["context_length"]), layout, RECIPES[row["recipe"]]),
                row["step"] / 1000,
                None if peak is None or peak != peak else float(peak),
                row["engine"],
            )
