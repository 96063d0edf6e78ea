"""A run's log as pandas frames, also while it is still being written.

    run = read_run(Path("runs/first/log.jsonl"))
    run.steps[["step", "loss", "tokens_per_s", "speed_of_light"]]

What stands after the last line's end is torn: a line that is being written at this moment, or one that a kill cut off.
It is left out and told. Of steps that a resumed run made again, what was said last holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from cs336_systems.pretraining.run_records import (
    HEAD,
    Evaluation,
    GpuState,
    Light,
    Options,
    Outlier,
    Quantization,
    Record,
    Step,
    from_line,
)

Kind = TypeVar("Kind", bound=Record)
_DTYPES: dict[Any, str] = {int: "int64", float: "float64", float | None: "float64"}


@dataclass(frozen=True)
class Run:
    """What a log says, in the order in which it was said.

    Attributes:
        records: that hold; what a resumed run overtook is not among them.
        n_bytes: of the whole lines.
        torn: bytes after them.
    """

    path: Path
    records: tuple[Record, ...]
    n_bytes: int
    torn: int

    def all(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """Every record of a kind."""
        return tuple(record for record in self.records if isinstance(record, kind))

    def last(self, kind: type[Kind]) -> Kind | None:
        """The newest record of a kind, None if there is none."""
        return next((record for record in reversed(self.records) if isinstance(record, kind)), None)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One line per step: the fields of ``Step``, tokens_seen, tokens_per_s, speed_of_light (a share, or NaN)."""
        steps, light = frame(self.all(Step), Step), self.last(Light)
        bound = light.seconds_per_token if light else None
        steps["tokens_seen"] = steps["tokens"].cumsum()
        steps["tokens_per_s"] = steps["tokens"] / steps["seconds"]
        steps["speed_of_light"] = steps["tokens_per_s"] * (float("nan") if bound is None else bound)
        return steps

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One line per evaluation; of two after the same step, as where a run resumed, the later."""
        return frame(self.all(Evaluation), Evaluation).drop_duplicates("step", keep="last", ignore_index=True)

    @cached_property
    def gpu(self) -> pd.DataFrame:
        """One line per reading."""
        return frame(self.all(GpuState), GpuState)

    @cached_property
    def quantization(self) -> pd.DataFrame:
        """One line per step that was looked at, tensor and block: absmax, underflow and saturation, as shares."""
        columns = ["block", "absmax", "underflow", "saturation"]
        said = [
            pd.DataFrame({name: found[name] for name in columns}, dtype=float).assign(step=record.step, tensor=tensor)
            for record in self.all(Quantization)
            for tensor, found in record.tensors.items()
        ]
        found = pd.concat(said, ignore_index=True) if said else pd.DataFrame(columns=columns, dtype=float)
        return found.reindex(columns=["step", "tensor", *columns]).astype({"step": "int64", "block": "int64"})

    @cached_property
    def outliers(self) -> pd.DataFrame:
        """One line per outlier."""
        return frame(self.all(Outlier), Outlier)


def read_run(path: Path) -> Run:
    """Read a log; one that is empty, as its run has only just begun, is a run that has said nothing.

    Raises:
        ValueError: it is no log of a run, or of another version; the line is named.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    if not (content.startswith(HEAD) or HEAD.startswith(content)):
        raise ValueError(f"{path} is no log of a training run")
    *lines, torn = content.split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = from_line(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if isinstance(record, Options):
            records = [one for one in records if not _overtaken(one, record.first_step)]
        if record is not None:
            records.append(record)
    return Run(path, tuple(records), len(content) - len(torn), len(torn))


def frame(records: Iterable[Record], kind: type[Record]) -> pd.DataFrame:
    """A line for each record; columns are the kind's fields, with their types also where there is no line."""
    said = list(records)
    return pd.DataFrame(
        {
            one.name: pd.Series([getattr(record, one.name) for record in said], dtype=_DTYPES.get(one.type, "str"))
            for one in fields(kind)
        }
    )


def _overtaken(record: Record, first_step: int) -> bool:
    """Whether it is of a step that a run resumed at ``first_step`` makes again."""
    if isinstance(record, Step | GpuState | Quantization | Outlier):
        return record.step >= first_step
    return isinstance(record, Evaluation) and record.step > first_step
