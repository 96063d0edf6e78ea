"""A training run on the console: some lines before the first step, one line per step, on a terminal a progress bar.

    [T] step  0 [  1.0%] | time 1869 ms | norm 4.3155 | loss 3.2826 | lr 3.0e-06 | tps 35,065 | sol 42.9% | left 0:03:05
    [V] step 50 [ 50.0%] | time  1103 ms | loss 3.1190
    [C] step 50 [ 50.0%] | stall   210 ms | written  4102 ms | 2.76 GiB

T is a training step. V is an evaluation and C a checkpoint after so many steps; stall is how long training waited for
the checkpoint. R reports changes of the replicas and dropped steps. lr is the learning rate, tps tokens per second of
all ranks, and sol their share of the speed of light. left is the estimated time of the remaining steps, at the median
of the last hundred, without evaluations. The console is a sink of the run's log, which passes it every record. If
stdout is no terminal, lines are plain, and each is flushed at once.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cs336_systems.declared import as_typed
from cs336_systems.hardware import GIB
from cs336_systems.pretraining.run_records import (
    Data,
    Device,
    Dropped,
    End,
    Evaluation,
    Light,
    LoggedCheckpoint,
    LoggedStep,
    Membership,
    Memory,
    Message,
    Model,
    Record,
    Session,
)
from cs336_systems.report.tables import Table

_VERSIONS = ("torch", "driver", "commit")
"""Keys of ``harness.provenance.versions`` that the line about the device shows."""


class RunConsole:
    """Prints records as they are written.

    Args:
        every: print every n-th step; evaluations, other records and steps that are not finite are always printed.
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
        self._seconds_per_token: float | None = None
        self._recent: deque[float] = deque(maxlen=100)
        """Seconds of the last steps."""
        columns = (TextColumn("{task.fields[where]}"), BarColumn(None), TimeElapsedColumn(), TimeRemainingColumn())
        idle = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=idle, expand=True)
        self._task = self._progress.add_task("", where="")

    def write(self, record: Record) -> None:
        """Print the record's lines, and update the progress bar."""
        if isinstance(record, Session):
            self._n_steps = record.n_steps
            self._progress.update(self._task, total=record.n_steps, completed=record.first_step)
        elif isinstance(record, Light):
            self._seconds_per_token = record.seconds_per_token
        elif isinstance(record, LoggedStep):
            self._advance(record.step + 1)
            self._recent.append(record.seconds)
        for line in _beginning(record):
            self._say(line, "")
        if (line_of_its_own := self._line(record)) is not None:
            self._say(*line_of_its_own)

    def close(self) -> None:
        """Remove the progress bar."""
        self._progress.stop()

    def _advance(self, steps: int) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=steps, where=f"{steps:,} of {self._n_steps:,} steps")

    def _line(self, record: Record) -> tuple[str, str] | None:
        """Return the record's line and its style, or None if it has no line."""
        match record:
            case LoggedStep():
                finite = math.isfinite(record.loss) and math.isfinite(record.norm)
                shown = record.step % self._every == 0 or not finite
                return (self._step(record), "" if finite else "bold red") if shown else None
            case Evaluation():
                time = f"time {_ms(record.seconds)} ms"
                line = f"[V] {self._place(record.step, record.step)} | {time} | loss {record.loss:7.4f}"
                for source, found in record.by_source.items():
                    line += f" | {source} {found['loss']:.4f} at {found['epochs']:.2f} epochs"
                return line, "green"
            case LoggedCheckpoint():
                long = record.waited_seconds >= 1e-3
                before = f" for the one before {_ms(record.waited_seconds)} ms |" if long else ""
                waited = f"stall {_ms(record.stall_seconds)} ms |{before} written {_ms(record.seconds)} ms"
                of_gib = record.n_bytes / GIB
                size = f"{of_gib:.2f} GiB" if of_gib >= 1 else f"{1024 * of_gib:.1f} MiB"
                return f"[C] {self._place(record.step, record.step)} | {waited} | {size}", "cyan"
            case Membership():
                there = f"there: {', '.join(record.there)}"
                healed = f", state taken over in {record.healed_seconds:.2f} s" if record.healed_seconds else ""
                died = [f"{name} (is back)" if name in record.there else name for name in record.gone]
                gone = f"; died: {', '.join(died)}" if died else ""
                first, end = record.lost
                lost = (
                    f", its part of sequences {first:,} to {end - 1:,} is lost" if record.gone and first < end else ""
                )
                return f"[R] {self._place(record.step, record.step)} | {there}{healed}{gone}{lost}", "magenta"
            case Dropped():
                hand = "dealt again" if record.again else "not learned"
                of = f"sequences {record.sequences[0]:,} to {record.sequences[1] - 1:,} are {hand}"
                return f"[R] {self._place(record.step, record.step)} | dropped: {record.reason}; {of}", "yellow"
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


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:5.0f}" if ms >= 100 else f"{ms:5.1f}"


def _beginning(record: Record) -> Iterator[str]:
    """Yield the lines of a record that precedes the first step; nothing for other records."""
    match record:
        case Session():
            changed = {name: value for name, value in record.options.items() if value != record.defaults.get(name)}
            defaults = "the defaults of a CPU" if record.options.get("device") == "cpu" else "the defaults"
            shown = ", ".join(as_typed(name, value) for name, value in changed.items())
            yield f"Options: {shown}; else {defaults}" if changed else f"All options are {defaults}"
            if record.first_step:
                yield f"Resumed after {record.first_step:,} of {record.n_steps:,} steps"
        case Device():
            memory = "" if record.memory_bytes is None else f", {record.memory_bytes / GIB:.1f} GiB each"
            versions = [f"{name} {record.provenance[name]:.12}" for name in _VERSIONS if record.provenance.get(name)]
            yield f"Device: {record.count} x {record.name}{memory}; {', '.join(versions)}"
        case Model():
            yield f"Model: {record.name}, {record.n_parameters:,} parameters, context {record.context_length:,}"
        case Data():
            learned = f"{record.train_tokens:,} tokens to learn, {record.evaluation_tokens:,} held out"
            steps = f"{record.tokens_per_step:,} a step"
            if record.steps_per_epoch is not None:
                steps += f", {record.steps_per_epoch:,.1f} steps an epoch"
            by = f"{record.tokenizer}, vocabulary {record.vocab_size:,}"
            yield f"Data: {record.folder} ({record.corpus}; {by}): {learned}; {steps}"
        case Memory():
            yield from _memory(record)
        case Light():
            yield _light(record)


def _memory(record: Memory) -> Iterator[str]:
    unit, of_unit = _unit({**record.predicted_bytes, **record.actual_bytes})
    for kind, segments in (("predicted", record.predicted_bytes), ("actual", record.actual_bytes)):
        if segments:
            parts = ", ".join(f"{name} {n_bytes / of_unit:,.2f}" for name, n_bytes in segments.items())
            yield f"Memory of one device, {kind}, {unit}: {parts}"
    if record.predicted_bytes.get("gradients") == 0 and not record.actual_bytes:
        yield f"At the predicted peak {_NO_GRADIENTS}"


_NO_GRADIENTS = "there are no gradients yet"


def _unit(segments: Mapping[str, int]) -> tuple[str, int]:
    """Return the unit for memory segments, MiB or GiB, and its bytes."""
    small = segments.get("in all", max(segments.values(), default=GIB)) < GIB
    return ("MiB", 2**20) if small else ("GiB", GIB)


def _light(record: Light) -> str:
    if not record.seconds_per_token:
        return "Speed of light: the device's peak is not known"
    shares = (
        f"{name} in {part['dtype']} {100 * part['seconds_per_token'] / record.seconds_per_token:.1f} %"
        for name, part in record.parts.items()
    )
    return f"Speed of light: {1 / record.seconds_per_token:,.0f} tokens/s, of which {', '.join(shares)} of the time"


def memory_table(predicted: Mapping[str, int]) -> Table:
    """Return a table of predicted memory by segment, for ``train.py --print-memory``."""
    unit, of_unit = _unit(predicted)
    lines = [(segment, f"{n_bytes / of_unit:,.2f}") for segment, n_bytes in predicted.items()]
    header = f"predicted {unit}"
    notes = {}
    if not any(name.startswith("in all") for name in predicted):
        notes[header] = "states alone, as the peak of these options is not predicted"
    elif predicted.get("gradients") == 0:
        notes[header] = f"at its peak, when {_NO_GRADIENTS}"
    return Table.of("Memory of one device, predicted", ("segment", header), lines, notes=notes)
