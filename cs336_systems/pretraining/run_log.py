"""The log of a training run: written record by record, and read as pandas frames, also while it is being written.

    with RunLog(LogFile(folder / LOG), RunConsole()) as log:
        log.write(Session(options, defaults, n_steps=1000))
    run = read_run(folder / LOG)
    run.steps[["step", "loss", "tokens_per_s", "speed_of_light"]]

A run that resumes appends to its log. Only the first rank has a log, and one process at a time writes it: the file is
locked, if its file system supports locks. Every line is written in one piece, so the file always consists of whole
lines and at most one incomplete line at its end, which is being written, or was cut off by a kill or a full disk.
Readers skip it, and a resumed run removes it. For steps that a resumed run repeated, the later records are used.

If a sink cannot write (its disk is full), this is reported to the others, and training goes on; only that sink lacks
the records. If it cannot write the options, with which a session begins, the session is refused: later records would be
read as an earlier session's.
"""

import fcntl
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import pandas as pd

from cs336_systems.pretraining.run_records import (
    HEAD,
    Evaluation,
    GpuState,
    Level,
    Light,
    LoggedStep,
    Message,
    Record,
    Session,
    from_line,
    to_line,
)

LOG = "log.jsonl"
"""A run's log in its folder."""
WANDB_ID = "wandb_id.txt"
"""In a run's folder: its id at Weights & Biases."""

Kind = TypeVar("Kind", bound=Record)
_DTYPES: dict[Any, str] = {int: "int64", float: "float64", float | None: "float64"}


class Sink(Protocol):
    """Takes every record; OSError if it cannot take this one. The base class has nothing to close."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None:
        return None


class LogFile:
    """The file of JSON lines, a new one or the end of one that is there.

    Raises:
        ValueError: the file that is there is no log, of another version, or written by another process now.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._descriptor = path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._lock()
            os.ftruncate(self._descriptor, read_run(path).n_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, record: Record) -> None:
        """Append the record's whole line, or nothing.

        Raises TypeError if it holds a value that JSON does not have, such as a tensor; OSError if it cannot be written.
        """
        line, start = to_line(record), os.fstat(self._descriptor).st_size
        assert start or isinstance(record, Session), f"a log begins with options, not with {record}"
        try:
            while line:  # a disk takes some of a line before it says that it is full
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            os.ftruncate(self._descriptor, start)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self._path} is being written by another process") from None
        except OSError:  # of a file system that has no locks
            pass


class RunLog:
    """Passes each record to every sink."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self._failing: list[Sink] = []

    def write(self, record: Record) -> None:
        """Pass on the record now; OSError if a sink cannot take the options."""
        self._hand(record, self._sinks)

    def say(self, text: str, level: Level = "info") -> None:
        self.write(Message(text, level))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hand(self, record: Record, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            try:
                sink.write(record)
            except OSError as error:
                if isinstance(record, Session):
                    raise
                if sink not in self._failing:
                    self._failing.append(sink)
                    fault = f"{type(sink).__name__} cannot be written and will lack lines: {error.strerror or error}"
                    self._hand(Message(fault, "error"), [other for other in self._sinks if other is not sink])
            else:
                if sink in self._failing:
                    self._failing.remove(sink)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record to plot, by names such as ``train/loss``; most kinds have none."""
    drawn = {
        LoggedStep: ("train", ("loss", "norm", "learning_rate", "seconds")),
        Evaluation: ("evaluation", ("loss",)),
        GpuState: ("gpu", ("sm_mhz", "power_w", "temperature_c", "memory_used_bytes")),
    }
    group, names = drawn.get(type(record), ("", ()))
    values = {f"{group}/{name}": value for name in names if (value := getattr(record, name)) is not None}
    return values | ({"train/tokens_per_s": record.tokens / record.seconds} if isinstance(record, LoggedStep) else {})


class TensorBoard:
    """Event files in the run's folder; events of earlier sessions from ``first_step`` on are taken back.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("drawing with TensorBoard needs it: uv sync --extra tensorboard") from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, vars(record)["step"], record.at)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project, by the name of its folder; continued if the folder's run is.

    Raises:
        ValueError: the client is not installed, or nobody is logged in.
    """

    def __init__(self, folder: Path, project: str, *, resume: bool = False) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("drawing with Weights & Biases needs its client: uv sync --extra wandb") from None
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / WANDB_ID
        run_id = known.read_text(encoding="utf-8").strip() if resume and known.exists() else uuid.uuid4().hex
        try:
            self._run = wandb.init(project=project, name=folder.name, dir=str(folder), id=run_id, resume="allow")
        except wandb.Error as error:
            raise ValueError(f"Weights & Biases: {error}") from None
        known.write_text(run_id + "\n", encoding="utf-8")
        self._run.define_metric("*", step_metric="step")  # a later record may be of an earlier step

    def write(self, record: Record) -> None:
        if isinstance(record, Session):
            self._run.config.update(dict(record.options), allow_val_change=True)
        elif values := scalars(record):
            self._run.log({"step": vars(record)["step"]} | values)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class Run:
    """The records of a log, in order, without those that a resumed run replaced; bytes of and after its lines."""

    path: Path
    records: tuple[Record, ...]
    n_bytes: int
    torn: int

    def all(self, kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(record for record in self.records if isinstance(record, kind))

    def last(self, kind: type[Kind]) -> Kind | None:
        """The newest record of a kind, None if there is none."""
        return next((record for record in reversed(self.records) if isinstance(record, kind)), None)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One line per step: the fields of ``LoggedStep``, tokens_seen, tokens_per_s, speed_of_light (or NaN)."""
        steps, light = _frame(self.all(LoggedStep), LoggedStep), self.last(Light)
        bound = light.seconds_per_token if light else None
        steps["tokens_seen"] = steps["tokens"].cumsum()
        steps["tokens_per_s"] = steps["tokens"] / steps["seconds"]
        steps["speed_of_light"] = steps["tokens_per_s"] * (float("nan") if bound is None else bound)
        return steps

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One line per evaluation; of two after the same step, as where a run resumed, the later."""
        return _frame(self.all(Evaluation), Evaluation).drop_duplicates("step", keep="last", ignore_index=True)

    @cached_property
    def gpu(self) -> pd.DataFrame:
        """One line per ``GpuState``."""
        return _frame(self.all(GpuState), GpuState)


def read_run(path: Path) -> Run:
    """Read a log; an empty one is a run that has only just begun.

    Raises ValueError if it is no log of a run, or of another version; the line is named; OSError if it cannot be read.
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
        if isinstance(record, Session):
            records = [one for one in records if not _overtaken(one, record.first_step)]
        if record is not None:
            records.append(record)
    return Run(path, tuple(records), len(content) - len(torn), len(torn))


def _overtaken(record: Record, first_step: int) -> bool:
    """Whether it is of a step that a run resumed at ``first_step`` makes a second time."""
    if isinstance(record, LoggedStep | GpuState):
        return record.step >= first_step
    return isinstance(record, Evaluation) and record.step > first_step


def _frame(records: Iterable[Record], kind: type[Record]) -> pd.DataFrame:
    """A line for each record; columns are the kind's fields, with their types also where there is no line."""
    said = list(records)
    columns = {
        one.name: pd.Series([getattr(record, one.name) for record in said], dtype=_DTYPES.get(one.type, "str"))
        for one in fields(kind)
    }
    return pd.DataFrame(columns)
