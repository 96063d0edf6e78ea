"""The rows of ``benchmark_model.py`` as a table: phases and the whole step, rates, memory predicted and measured."""

import pandas as pd

from cs336_systems.case import TrainingCase
from cs336_systems.experiments.model.cells import CEILING
from cs336_systems.experiments.options import RECIPE
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread
from cs336_systems.report.tables import Table

SETTINGS = (
    *("device", "size", "batch_size", "context_length", "dtype", "attention", "compile", "checkpoint", "optimizer"),
    *("kernels", "keep", *RECIPE, "master", "offload", "accumulate", "cuda_graph", "mode", "warmup", "steps"),
)
"""Columns that tell one cell of a model benchmark from another."""


def _over_compiled(line: Line) -> Spread | None:
    """The step's ratio to that of the compiled reference model, turn by turn, where blocks are written out."""
    if line.settings.get("keep", "autograd") == "autograd":
        return None
    reference = {name: getattr(TrainingCase, name) for name in ("kernels", "keep", *RECIPE) if name in line.settings}
    return line.repeats_over("step", line.peer(**reference, compile="on"))


STEPS = ResultTable(
    settings=("gpu", *SETTINGS),
    columns=(
        Column("forward ms", "forward", spread=True),
        Column("backward ms", "backward", spread=True),
        Column("optimizer ms", "optimizer", spread=True),
        Column(
            "total ms",
            "step",
            spread=True,
            rank=MAIN,
            note="in each step the phases add up to it; their medians need not",
        ),
        Column(
            *("/ compiled", _over_compiled, ".3f"),
            optional=True,
            note="total over the compiled reference model's, of several turns median and range",
        ),
        Column("tokens/s", "tokens_per_s"),
        Column("TFLOP/s", "model_tflops", rank=3),
        Column("MFU %", "mfu", ".1f"),
        Column("light %", "light", ".1f", rank=2, note="of products at their dtypes' peaks", optional=True),
        Column("% of ceiling", "matmul_ceiling_share", ".1f", rank=2),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak_memory", rank=2),
    ),
)


def step_table(rows: pd.DataFrame) -> Table:
    """One line per cell.

    Args:
        rows: of ``benchmark_model.py``, as ``read_rows`` returns them or as collected in memory.
    """
    return STEPS.of(rows[rows["variant"] != CEILING])
