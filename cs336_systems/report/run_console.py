"""A training run on the console: tables before the first step, then a line for each, and how far it is on a terminal.

    [T] step  0 [  1.0%] | time 1869 ms | norm 4.3155 | loss 3.2826 | lr 3.0e-06 | tps 35,065 | sol 42.9% | left 0:03:05
    [V] step 50 [ 50.0%] | time  1103 ms | loss 3.1190
    [C] step 50 [ 50.0%] | stall   210 ms | written  4102 ms | 2.76 GiB

T is a step; V an evaluation and C a checkpoint after so many steps, for which training waited as long as it stalled;
lr is the learning rate, tps are tokens per second of all ranks, sol is their share of the speed of light, and left is
the time that the steps still to be made take at the median of the last hundred, without evaluations. A sink of the
run's log, which hands it every record; piped, lines are plain, and each is out at once.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cs336_systems.hardware import GIB
from cs336_systems.pretraining.run_records import (
    Data,
    Device,
    End,
    Evaluation,
    Light,
    LoggedCheckpoint,
    LoggedStep,
    Memory,
    Message,
    Model,
    Outlier,
    Record,
    Session,
)
from cs336_systems.report.tables import WIDEST, Table, digits

_UNKNOWN = "–"
_WHAT = ("what", "value")


class RunConsole:
    """Shows records as they come.

    Args:
        every: of so many steps one is shown; evaluations and what is out of the ordinary always are.
        console: by default stdout.

    Raises:
        ValueError: ``every`` is not positive.
    """

    def __init__(self, every: int = 1, console: Console | None = None) -> None:
        if every < 1:
            raise ValueError(f"a line can be shown every step or more rarely, got every {every}")
        self._every = every
        self._console = console or Console()
        self._n_steps = 1
        self._in_lines = False
        """Whether what was shown last was a line, from which a table stands apart."""
        self._seconds_per_token: float | None = None
        self._recent: deque[float] = deque(maxlen=100)
        """Seconds of the last steps."""
        columns = (TextColumn("{task.fields[where]}"), BarColumn(None), TimeElapsedColumn(), TimeRemainingColumn())
        idle = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=idle, expand=True)
        self._task = self._progress.add_task("", where="")

    def write(self, record: Record) -> None:
        """Show what people want to see of it."""
        if isinstance(record, Session):
            self._n_steps = record.n_steps
            self._progress.update(self._task, total=record.n_steps, completed=record.first_step)
        elif isinstance(record, Light):
            self._seconds_per_token = record.seconds_per_token
        elif isinstance(record, LoggedStep):
            self._advance(record.step + 1)
            self._recent.append(record.seconds)
        if (table := record_table(record)) is not None:
            self._show(table)
        elif (line := self._line(record)) is not None:
            self._say(*line)
            self._in_lines = True

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def _advance(self, steps: int) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=steps, where=f"{steps:,} of {self._n_steps:,} steps")

    def _line(self, record: Record) -> tuple[str, str] | None:
        """The record's line and its style; None if it has none."""
        match record:
            case LoggedStep():
                finite = math.isfinite(record.loss) and math.isfinite(record.norm)
                shown = record.step % self._every == 0 or not finite
                return (self._step(record), "" if finite else "bold red") if shown else None
            case Evaluation():
                time = f"time {_ms(record.seconds)} ms"
                return f"[V] {self._place(record.step, record.step)} | {time} | loss {record.loss:7.4f}", "green"
            case LoggedCheckpoint():
                long = record.waited_seconds >= 1e-3
                before = f" for the one before {_ms(record.waited_seconds)} ms |" if long else ""
                waited = f"stall {_ms(record.stall_seconds)} ms |{before} written {_ms(record.seconds)} ms"
                of_gib = record.n_bytes / GIB
                size = f"{of_gib:.2f} GiB" if of_gib >= 1 else f"{1024 * of_gib:.1f} MiB"
                return f"[C] {self._place(record.step, record.step)} | {waited} | {size}", "cyan"
            case Outlier():
                if not math.isfinite(record.value):
                    return None  # its step says so
                value = f"{record.quantity} {record.value:.4f}"
                return f"step {record.step}: {value} is an outlier, z {record.z:.1f}", "yellow"
            case Message():
                style = {"info": "", "warning": "yellow", "error": "bold red"}[record.level]
                return record.text if record.level == "info" else f"{record.level}: {record.text}", style
            case End():
                return f"{record.reason}, after {record.step:,} of {self._n_steps:,} steps", "bold"
        return None

    def _step(self, record: LoggedStep) -> str:
        rate = record.tokens / record.seconds
        parts = [
            f"[T] {self._place(record.step, record.step + 1)}",
            f"time {_ms(record.seconds)} ms",
            f"norm {record.norm:7.4f}",
            f"loss {record.loss:7.4f}",
            f"lr {record.learning_rate:.1e}",
            f"tps {rate:7,.0f}",
        ]
        if self._seconds_per_token is not None:
            parts.append(f"sol {100 * rate * self._seconds_per_token:4.1f}%")
        left = (self._n_steps - record.step - 1) * statistics.median(self._recent)
        return " | ".join([*parts, f"left {timedelta(seconds=round(left))}"])

    def _place(self, step: int, made: int) -> str:
        return f"step {step:{len(str(self._n_steps))}d} [{100 * made / self._n_steps:5.1f}%]"

    def _say(self, line: str, style: str) -> None:
        if self._console.is_terminal:
            self._console.print(Text(line, style), soft_wrap=True)
        else:
            self._console.file.write(f"{line}\n")
            self._console.file.flush()

    def _show(self, table: Table) -> None:
        if self._in_lines:
            self._say("", "")
            self._in_lines = False
        terminal = self._console.is_terminal and not table.frame.empty
        if terminal:
            self._console.print(table.rich(self._console.width), "")
        else:
            self._say(f"{table.caption if table.frame.empty else table.markdown(WIDEST)}\n", "")


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:5.0f}" if ms >= 100 else f"{ms:5.1f}"


def record_table(record: Record) -> Table | None:
    """The table of a record that is said before the first step; None of any other."""
    match record:
        case Session():
            return _options(record)
        case Device():
            memory = (
                [] if record.memory_bytes is None else [("memory of each, GiB", f"{record.memory_bytes / GIB:.1f}")]
            )
            known = {name: value for name, value in record.provenance.items() if value not in ("", 0, None)}
            said = [(name, str(value)) for name, value in known.items() if name != "argv"]  # the options say it
            return _table(f"Device: {record.name}", _WHAT, [("devices", str(record.count)), *memory, *said])
        case Model():
            lines = [("parameters", f"{record.n_parameters:,}"), ("context", f"{record.context_length:,}")]
            return _table(f"Model: {record.name}", _WHAT, lines)
        case Data():
            lines = [
                ("corpus", record.corpus),
                ("tokenizer", f"{record.tokenizer}, vocabulary {record.vocab_size:,}"),
                ("tokens to train on", f"{record.train_tokens:,}"),
                ("tokens held out", f"{record.evaluation_tokens:,}"),
                ("tokens per step", f"{record.tokens_per_step:,}"),
                ("steps per epoch", f"{record.train_tokens / record.tokens_per_step:,.1f}"),
            ]
            return _table(f"Data: {record.folder}", _WHAT, lines)
        case Memory():
            return _memory(record)
        case Light():
            return _light(record)
    return None


def _options(record: Session) -> Table:
    changed = {name: value for name, value in record.options.items() if value != record.defaults.get(name)}
    lines = [(name, str(value), str(record.defaults.get(name, _UNKNOWN))) for name, value in changed.items()]
    caption = "Options that are not the defaults" if lines else "All options are the defaults"
    if record.options.get("device") == "cpu":
        caption += " of a CPU"  # which are smaller
    if record.first_step:
        caption += f"; resumed after {record.first_step:,} of {record.n_steps:,} steps"
    return _table(caption, ("option", "value", "default"), lines)


def _memory(record: Memory) -> Table:
    caption = "Memory of one device" + (", predicted and actual" if record.actual_bytes else ", predicted")
    caption += f". {record.hint}" if record.hint else ""
    if record.predicted_bytes.get("gradients") == 0:
        caption += ". At the peak there are no gradients yet: activations make room for them"
    segments = {**record.predicted_bytes, **record.actual_bytes}
    small = segments.get("in all", max(segments.values(), default=GIB)) < GIB
    unit, of_unit = ("MiB", 2**20) if small else ("GiB", GIB)

    def shown(n_bytes: int | None) -> str:
        return _UNKNOWN if n_bytes is None else f"{n_bytes / of_unit:,.2f}"

    lines = []
    for segment in segments:
        predicted, actual = record.predicted_bytes.get(segment), record.actual_bytes.get(segment)
        off = f"{100 * (actual / predicted - 1):+.1f}" if predicted and actual is not None else _UNKNOWN
        lines.append((segment, shown(predicted), shown(actual), off))
    columns = ("segment", f"predicted {unit}", f"actual {unit}", "off by %")
    known = 4 if record.actual_bytes else 2
    return _table(caption, columns[:known], [line[:known] for line in lines])


def _light(record: Light) -> Table:
    bound, parts = record.seconds_per_token, record.parts
    flops = {name: part["flops_per_token"] for name, part in parts.items()} | {"all": 0}
    flops["all"] = sum(flops.values())
    seconds = {name: part["seconds_per_token"] for name, part in parts.items()} | {"all": bound}
    lines = []
    for name, each in seconds.items():
        pace = _UNKNOWN if each is None else digits(each * 1e9)
        share = _UNKNOWN if each is None or not bound else f"{100 * each / bound:.1f}"
        lines.append((name, parts[name]["dtype"] if name in parts else "", digits(flops[name] / 1e9), pace, share))
    columns = ("part", "dtype", "GFLOP/token", "ns/token", "% of the time")
    if not bound:
        return _table("Speed of light: the device's peak is not known", columns[:3], [line[:3] for line in lines])
    return _table(f"Speed of light: {1 / bound:,.0f} tokens/s", columns, lines)


def _table(caption: str, columns: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption, pd.DataFrame(lines, columns=list(columns)))
