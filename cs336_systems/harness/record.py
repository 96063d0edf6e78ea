"""A measurement is a row: one schema for every benchmark, appended to CSV the moment a cell is done.

One row holds one metric of one cell: what was asked for (the cell's own columns), how it ended (``status``), the
statistics and raw samples of the metric, and where it ran. A cell that failed is a single row without a metric: never a
zero, never a gap. Metrics that follow from another's samples (tokens/s from step times) leave ``samples`` empty.

    rows = RowFile(folder / "benchmark_model.csv", cell_columns)   # checks the file before anything is run
    rows.append(outcome_rows)                                      # written and fsynced, or not at all
    frame = read_rows(folder / "benchmark_model.csv")
"""

import csv
import fcntl
import gzip
import io
import json
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from cs336_systems.case import TrainingCase
from cs336_systems.ranks import PIPELINE, Parallel

SCHEMA_VERSION = 1

_LEADING = ("schema_version", "benchmark", "variant")
STATISTICS = ("median", "mean", "std", "p10", "p90", "n")
RESULT = ("status", "message", "metric", "unit", *STATISTICS, "samples")
"""Columns of an outcome and of one of its metrics, with the statistics of its samples."""
_PROVENANCE = (
    *("gpu", "gpu_count", "driver", "cuda", "host", "python", "torch", "triton", "nccl", "commit", "dirty", "argv"),
    *("seed", "timestamp", "state_before", "state_after"),
)

_TEXT = {*_LEADING, *RESULT, *_PROVENANCE} - {*STATISTICS, "schema_version", "gpu_count", "dirty", "seed"}
"""Columns that are text even where all of it looks like numbers, as a commit 1e10000 and CUDA 13.0 do."""

DEFAULTS: dict[str, Any] = asdict(TrainingCase())
"""Settings of rows that were measured before a training case could say them."""

EARLIER: dict[str, dict[str, Any]] = {
    "schema_version": {"nccl": ""},
    "context_length": DEFAULTS,
    "d_head": {"clock": "harness", "repeat": 0, "kv_heads": 0},
    "ddp": {"max_ctas": Parallel.max_ctas},
    "host_gib": {"ranks": 1, "recipe": "stored"},
    "tensor_by": {name: getattr(Parallel, name) for name in ("replicas", *PIPELINE)},
    "profiler": {"repeat": 0},
    "kills": {"ranks_per_replica": 1, "zero": 0},
    "total_batch_tokens": {"recipe": "stored", "library": "", "gather_by": Parallel.gather_by, "apart": "off"}
    | {"conversations": "off", "lora_rank": 0, "matmul_kernels": "library", "offload": "none"}
    | {"tensor": 1, "context": 1},
    "prefetch": {"update": Parallel.update, "gather_by": Parallel.gather_by, "do_bench": "off", "losses": 0},
}
"""Columns that older rows lack, with the values that hold for those rows, by a column that rows must have for it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """Samples of one quantity. ``derived`` marks a quantity computed from another metric's samples."""

    name: str
    unit: str
    samples: Sequence[float]
    derived: bool = False

    def statistics(self) -> Row:
        """The schema's columns of this metric; ``std`` is the sample standard deviation, empty for one sample.

        Raises:
            ValueError: no samples, or one that is not finite.
        """
        values = np.asarray(self.samples, dtype=np.float64)
        if values.size == 0 or not np.isfinite(values).all():
            raise ValueError(f"metric {self.name} needs finite samples, got {list(self.samples)}")
        p10, median, p90 = np.percentile(values, (10, 50, 90))
        return {
            "metric": self.name,
            "unit": self.unit,
            "median": _short(median),
            "mean": _short(values.mean()),
            "std": _short(values.std(ddof=1)) if values.size > 1 else "",
            "p10": _short(p10),
            "p90": _short(p90),
            "n": values.size,
            "samples": "" if self.derived else json.dumps([_short(value) for value in values]),
        }


def _short(value: float) -> float:
    """Seven significant digits: more than any clock resolves."""
    return float(f"{value:.7g}")


def schema_columns(cell_columns: Iterable[str]) -> list[str]:
    """The header of a benchmark's CSV."""
    return [*_LEADING, *cell_columns, *RESULT, *_PROVENANCE]


class RowFile:
    """An append-only CSV of rows; safe against other schemas, torn lines, full disks, interruption and other writers.

    Raises:
        ValueError: the file exists and has another schema, or ends in a torn line.
        OSError: the folder or file cannot be created or written.
    """

    def __init__(self, path: Path, cell_columns: Iterable[str]) -> None:
        self.path = path
        self.columns = schema_columns(cell_columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        with self._locked() as descriptor:
            if os.fstat(descriptor).st_size == 0:
                _append(descriptor, [self.columns])
            else:
                _check_file(path, self.columns)

    def append(self, rows: Iterable[Row]) -> None:
        """Write the rows and flush them to the disk; if that fails, none of them remains in the file.

        Raises:
            OSError: the disk is full or the file has become unwritable; earlier rows are untouched.
        """
        with self._locked() as descriptor:
            _append(descriptor, [[row.get(column, "") for column in self.columns] for row in rows])

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file's descriptor, which no other process writes to meanwhile."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            with _without_interruption():
                with suppress(OSError):  # of a file system that has no locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield descriptor
        finally:
            os.close(descriptor)


def _append(descriptor: int, lines: Iterable[Sequence[Any]]) -> None:
    """Write the lines and flush them to the disk, or leave the file as it was."""
    data = b"".join(_line(values) for values in lines)
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


def _line(values: Sequence[Any]) -> bytes:
    """One line of CSV, in which "?" stands for the bytes of a file's name that are no text.

    CPython before 3.11.9 and 3.12.3 quotes a carriage return only where it belongs to the line's terminator.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(values)
    return text.getvalue().removesuffix("\r\n").encode(errors="replace") + b"\n"


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Hold Ctrl-C back until what is inside is done: half a row is worth nothing."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _opened(path: Path) -> BinaryIO:
    """A CSV, or one compressed with gzip once it was complete, as some committed ones are."""
    return io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path.open("rb")


def _check_file(path: Path, columns: Sequence[str] | None = None) -> None:
    """Raise ValueError unless ``path`` is a whole CSV of this schema version (and of ``columns``, if given)."""
    with _opened(path) as file:
        header = file.readline().decode(errors="replace").rstrip().split(",")
        version = file.readline(32).decode(errors="replace").split(",")[0]
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = size > 0 and file.read(1) != b"\n"
    if header[0] != "schema_version":
        raise ValueError(
            f"{path} is not a CSV of this suite: its first column is {header[0][:40]!r}, not schema_version"
        )
    if torn:
        raise ValueError(f"{path} ends in a torn line; remove that line, every row before it is whole")
    if version and version != str(SCHEMA_VERSION):
        raise ValueError(f"{path} has schema version {version}, this suite writes and reads {SCHEMA_VERSION}")
    if columns is not None and header != list(columns):
        missing, foreign = sorted(set(columns) - set(header)), sorted(set(header) - set(columns))
        difference = f"missing {missing}, foreign {foreign}" if missing or foreign else "another order"
        raise ValueError(f"{path} has other columns than this benchmark's rows: {difference}")


def read_rows(path: Path, cell_columns: Iterable[str] = ()) -> pd.DataFrame:
    """The rows of a CSV, with ``samples`` as lists; what earlier rows could not say has its default.

    Raises:
        ValueError: not a CSV of this schema version, its last line is torn, or it lacks one of ``cell_columns``.
        OSError: the file cannot be read.
    """
    _check_file(path)
    try:
        text, blank = dict.fromkeys(_TEXT, str), {column: [""] for column in STATISTICS}
        frame = pd.read_csv(path, keep_default_na=False, na_values=blank, dtype=text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {str(error).strip()}") from error
    defaults = unsaid(frame.columns)
    for name in defaults.keys() - set(frame.columns):
        frame[name] = defaults[name]
    missing = [column for column in schema_columns(cell_columns) if column not in frame.columns]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}")
    return parse_samples(frame)


def unsaid(columns: Collection[str]) -> dict[str, Any]:
    """The settings that rows with these columns could not say, and their values then."""
    found: dict[str, Any] = {}
    for mark, settings in EARLIER.items():
        found |= settings if mark in columns else {}
    return found


def parse_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with ``samples`` as lists, empty where there are none, and empty strings in its text columns."""
    blank = [column for column in frame.columns if column not in STATISTICS and frame[column].isna().any()]
    frame = frame.astype(dict.fromkeys(blank, object)).fillna(dict.fromkeys(blank, ""))
    for column in STATISTICS:
        frame[column] = pd.to_numeric(frame[column], errors="coerce")
    frame["samples"] = [json.loads(text) if text else [] for text in frame["samples"]]
    return frame
