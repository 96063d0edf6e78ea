"""Predictions of this suite's own rows that were made before the rows, with the commit of each prediction.

Some rows hold their own prediction, which the code of their commit computed before the step ran: rows under memory caps
the tokens/s of their simulation, rows of the trainer and of meshes their peak memory. ``WRITTEN`` are predictions of
steps in the log (LOG.md) before their rows. All other rows were predicted after they were measured (``own_steps.py``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from cs336_systems.answers.own_steps import PARTS, RESULTS, committed_rows
from cs336_systems.report.tables import Table


@dataclass(frozen=True)
class Written:
    """A prediction in the log: the commit that wrote it there, and the first row that was measured later."""

    commit: str
    said: str
    """Words of the log that hold the prediction."""
    part: str
    metric: str
    value: float
    row: dict[str, Any]
    """Columns that tell the row from others."""


def _trained(said: str, value: float, size: str, recipe: str, commit: str = "48be617c", **row: Any) -> Written:
    return Written(commit, said, "h100/training", "tokens_per_s", value, {"size": size, "recipe": recipe, **row})


def _stages(said: str, value: float, variant: str, accumulate: int, commit: str = "c612ea82") -> Written:
    row = {"variant": variant, "accumulate": accumulate}
    return Written(commit, said, "h200/mesh-pipeline", "step", value, row)


def _alone(said: str, value: float, length: int) -> Written:
    row = {"variant": "alone", "context_length": length}
    return Written("daeb3493", said, "h200/mesh-short", "step", value, row)


def _graphed(value: float, length: int) -> Written:
    row = {"variant": "tensor-2-graph", "context_length": length}
    return Written("a0734668", "70, 110 and 201 ms", "h200/mesh-short", "step", value, row)


WRITTEN = (
    _alone("| 1,024 | 114, 101 |", 101, 1024),
    _alone("| 2,048 | 194, 179 |", 179, 2048),
    _alone("| 4,096 | 365, 347 |", 347, 4096),
    *(_graphed(70, 1024), _graphed(110, 2048), _graphed(201, 4096)),
    _stages("One GPU: 1359 ms with four", 1359, "alone", 4),
    _stages("gpipe 875", 875, "gpipe-2", 4),
    _stages("1f1b 835", 835, "1f1b-2", 4),
    _stages("interleaved 776", 776, "interleaved-2", 4),
    _stages("zb-h1 754", 754, "zb-h1-2", 4),
    _stages("zbv 712", 712, "zbv-2", 4),
    _stages("eight 1585, 1492", 1492, "1f1b-2", 8),
    _stages("1412, 1364", 1364, "zbv-2", 8),
    *(
        _stages(f"{name} {value}", value, f"{name}-2-copies-of-stages", 4, "ee3e245e")
        for name, value in {"gpipe": 826, "interleaved": 735, "zb-h1": 725, "dualpipev": 690}.items()
    ),
    Written("0da24be2", "1574 to 1540 ms", "h200/mesh-pipeline-added", "step", 1540, {"variant": "1f1b-2"}),
    _trained("0.5B bf16 159.5k", 159_500, "qwen2.5-0.5b", "stored"),
    _trained("e4m3 185.5k", 185_500, "qwen2.5-0.5b", "e4m3"),
    _trained("1.5B bf16 60.3k", 60_300, "qwen2.5-1.5b", "stored"),
    _trained("e4m3 at batch 32 79k", 79_000, "qwen2.5-1.5b", "e4m3"),
    _trained("e4m3 19.4k", 19_400, "qwen2.5-7b", "e4m3", batch_size=4),
    _trained("3B e4m3 42.5k", 42_500, "qwen2.5-3b", "e4m3", "5e68b827"),
    _trained("bf16 31.0k", 31_000, "qwen2.5-3b", "stored", "5e68b827"),
    _trained("7B e4m3 21.8k", 21_800, "qwen2.5-7b", "e4m3", "5e68b827", batch_size=8),
)


class Before(NamedTuple):
    """A prediction that was made before its row."""

    part: str
    row: str
    metric: str
    predicted: float
    predicted_by: str
    measured: float
    measured_by: str
    timestamp: str

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


@cache
def predicted_before() -> tuple[Before, ...]:
    """All predictions of steps and peaks that were made before the committed rows of H100s and H200s."""
    asked = (
        (_parts("streaming*"), "benchmark_streaming", "simulated_tokens_per_s", "tokens_per_s"),
        (PARTS, "benchmark_training", "predicted_peak_memory", "peak_memory"),
        (_parts("mesh-*"), "benchmark_parallelism", "predicted_peak", "peak_memory"),
    )
    own = [row for parts, *what in asked for part in parts for row in _in_rows(part, *what)]
    return (*_in_the_log(), *own)


def _parts(pattern: str) -> list[str]:
    return sorted(f"h200/{path.name}" for path in (RESULTS / "h200").glob(pattern))


def _in_the_log() -> Iterator[Before]:
    for each in WRITTEN:
        benchmark = "benchmark_training" if "training" in each.part else "benchmark_parallelism"
        rows = committed_rows(each.part, benchmark)
        rows = rows[rows["metric"] == each.metric]
        for name, value in each.row.items():
            rows = rows[rows[name] == value]
        row = rows.sort_values("timestamp").to_dict("records")[0]  # later ones could have been known
        told = " ".join(map(str, each.row.values()))
        made = each.part, told, each.metric, each.value, each.commit
        yield Before(*made, row["median"], row["commit"][:8], row["timestamp"])


def _in_rows(part: str, benchmark: str, predicted: str, measured: str) -> Iterator[Before]:
    """Yields the predictions that rows of a part hold; rows of one cell share timestamp and variant."""
    rows = committed_rows(part, benchmark)
    both = rows[rows["metric"].isin([predicted, measured])]
    for _, cell in both.groupby(["timestamp", "variant"], sort=False):
        found = cell.groupby("metric")["median"].first()
        if len(found) == 2:
            row = cell.iloc[0]
            names = ("size", "recipe", "context_length", "device_gib", "host_gib", "batch_size", "accumulate")
            told = " ".join(f"{row[name]}" for name in ("variant", *names) if name in row and row[name] == row[name])
            commit = row["commit"][:8]
            yield Before(part, told, measured, found[predicted], commit, found[measured], commit, row["timestamp"])


def before_table() -> Table:
    """Every prediction that was made before its row, and its error."""
    lines = []
    for each in predicted_before():
        values = (f"{each.predicted:.5g}", each.predicted_by, f"{each.measured:.5g}", each.measured_by)
        lines.append((each.part, each.row, each.metric, *values, f"{100 * each.error:+.1f}"))
    columns = ("rows", "row", "metric", "predicted", "by commit", "measured", "at commit", "error %")
    return Table.of("Predictions that were made before their rows", columns, lines)


def before_summary(metric: str) -> tuple[int, float]:
    """(number of predictions of a metric, the error in percent that nine of ten stay below)."""
    import numpy as np

    errors = [abs(each.error) for each in predicted_before() if each.metric == metric]
    return len(errors), 100 * float(np.quantile(errors, 0.9))
