"""A training run on the console: tables before the first step, then a line for each, and how far it is on a terminal.

    [T] step   0 [  0.1%] | time  1869 ms | norm  4.3155 | loss  3.2826 | tps  35,065 | sol 42.9%
    [V] step  50 [  5.0%] | time  1103 ms | loss  3.1190
    [C] step  50 [  5.0%] | stall   210 ms | written  4102 ms | 2.76 GiB

T is a step; V an evaluation and C a checkpoint after so many steps, for which training waited as long as it stalled;
tps are tokens per second of all ranks, sol is their share of the speed of light. A sink of the run's log, which hands
it every record; piped, lines are plain, and each is out at once.
"""

import math

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cs336_systems.hardware import GIB
from cs336_systems.pretraining.run_records import (
    Checkpoint,
    End,
    Evaluation,
    Light,
    Message,
    Options,
    Outlier,
    Record,
    Step,
)
from cs336_systems.report.run_tables import record_table
from cs336_systems.report.tables import WIDEST, Table


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
        columns = (TextColumn("{task.fields[where]}"), BarColumn(None), TimeElapsedColumn(), TimeRemainingColumn())
        idle = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=idle, expand=True)
        self._task = self._progress.add_task("", where="")

    def write(self, record: Record) -> None:
        """Show what people want to see of it."""
        if isinstance(record, Options):
            self._n_steps = record.n_steps
            self._progress.update(self._task, total=record.n_steps, completed=record.first_step)
        elif isinstance(record, Light):
            self._seconds_per_token = record.seconds_per_token
        elif isinstance(record, Step):
            self._advance(record.step + 1)
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
            case Step():
                finite = math.isfinite(record.loss) and math.isfinite(record.norm)
                shown = record.step % self._every == 0 or not finite
                return (self._step(record), "" if finite else "bold red") if shown else None
            case Evaluation():
                time = f"time {_ms(record.seconds)} ms"
                return f"[V] {self._place(record.step, record.step)} | {time} | loss {record.loss:7.4f}", "green"
            case Checkpoint():
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

    def _step(self, record: Step) -> str:
        rate = record.tokens / record.seconds
        parts = [
            f"[T] {self._place(record.step, record.step + 1)}",
            f"time {_ms(record.seconds)} ms",
            f"norm {record.norm:7.4f}",
            f"loss {record.loss:7.4f}",
            f"tps {rate:7,.0f}",
        ]
        if self._seconds_per_token is not None:
            parts.append(f"sol {100 * rate * self._seconds_per_token:4.1f}%")
        return " | ".join(parts)

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
