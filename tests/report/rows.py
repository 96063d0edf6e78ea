"""Hand-made rows of ``benchmark_model``, for tests of what is made from them."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from cs336_systems.experiments.model import ModelCell
from cs336_systems.harness.record import Metric, Row, parse_samples, schema_columns
from cs336_systems.harness.sweep import Outcome, cell_columns, make_rows, outcome_rows

CELL = ModelCell(size="tiny", batch_size=1, context_length=128, warmup=1, steps=3)
SETTINGS = {name: getattr(CELL, name) for name in cell_columns(ModelCell)}

PROVENANCE = dict.fromkeys(("gpu", "driver", "cuda", "argv"), "")
PROVENANCE |= {"host": "a CPU, 2 cores", "torch": "2.11.0", "triton": "3.6.0"}


def ms(name: str, *samples: float) -> Metric:
    """A timed metric."""
    return Metric(name, "ms", samples)


def rate(name: str, value: float) -> Metric:
    """A metric that follows from another."""
    return Metric(name, "", [value], derived=True)


def make_cell(
    *metrics: Metric, status: str = "ok", message: str = "", variant: str = "eager", **values: object
) -> list[Row]:
    """The rows of one outcome; ``values`` overrides settings, provenance or the timestamp."""
    shared: Row = {"schema_version": 1, "benchmark": "benchmark_model", "variant": variant, **SETTINGS, **PROVENANCE}
    shared |= {"status": status, "message": message, "timestamp": "2026-01-01T00:00:00+00:00"} | values
    return [shared | metric.statistics() for metric in metrics] or [shared]


def rows_of(
    cells: Iterable[Any], measured: Iterable[Mapping[str, float] | Iterable[Metric] | None], **where: object
) -> pd.DataFrame:
    """The rows of a question's cells that one command has measured: metrics, values by their names, or None of a cell
    that ran out of memory."""
    outcomes, where = [], {"gpu": "", "host": "h", "argv": "a", "commit": "c"} | where
    for cell, found in zip(cells, measured, strict=True):
        named = found.items() if isinstance(found, Mapping) else ()
        metrics = [Metric(name, "", [value]) for name, value in named] or list(found or ())
        outcomes.append(Outcome(cell, "oom" if found is None else "ok", metrics=metrics))
        outcomes[-1].rows = make_rows("benchmark", outcomes[-1], {"provenance": where})
    return outcome_rows(outcomes)


def make_frame(*cells: list[Row]) -> pd.DataFrame:
    """The cells' rows as ``read_rows`` would return them."""
    frame = pd.DataFrame([row for cell in cells for row in cell])
    return parse_samples(frame.reindex(columns=schema_columns(SETTINGS)))


def ceiling() -> list[Row]:
    """Rows of the machine's ceilings."""
    blank = {"size": "", "batch_size": 0, "context_length": 0, "mode": "", "compile": "", "optimizer": ""}
    blank |= {"accumulate": 0, "cuda_graph": ""}
    return make_cell(Metric("matmul_ceiling", "TFLOP/s", [777.0]), variant="ceiling", warmup=0, steps=0, **blank)
