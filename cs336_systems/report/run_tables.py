"""What a training run says before its first step, as tables: options, device, model, data, memory, speed of light."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from cs336_systems.hardware import GIB
from cs336_systems.pretraining.run_records import Data, Device, Light, Memory, Model, Options, Record
from cs336_systems.report.tables import Table, digits

_UNKNOWN = "–"
_MIB = 2**20


def record_table(record: Record) -> Table | None:
    """The table of a record; None of a kind that is no table."""
    make = _TABLES.get(type(record))
    return make(record) if make else None


def _options(record: Options) -> Table:
    changed = {name: value for name, value in record.options.items() if value != record.defaults.get(name)}
    lines = [(name, str(value), str(record.defaults.get(name, _UNKNOWN))) for name, value in changed.items()]
    caption = "Options that are not the defaults" if lines else "All options are the defaults"
    if record.options.get("device") == "cpu":
        caption += " of a CPU"  # which are smaller
    if record.first_step:
        caption += f"; resumed after {record.first_step:,} of {record.n_steps:,} steps"
    return _table(caption, ("option", "value", "default"), lines)


def _device(record: Device) -> Table:
    memory = [] if record.memory_bytes is None else [("memory of each, GiB", f"{record.memory_bytes / GIB:.1f}")]
    told = {name: value for name, value in record.provenance.items() if name != "argv"}  # the options say it
    said = [(name, str(value)) for name, value in told.items() if value not in ("", 0, None)]
    lines = [("devices", str(record.count)), *memory, *said]
    return _table(f"Device: {record.name}", ("what", "value"), lines)


def _model(record: Model) -> Table:
    lines = [("parameters", f"{record.n_parameters:,}"), ("context", f"{record.context_length:,}")]
    return _table(f"Model: {record.name}", ("what", "value"), lines)


def _data(record: Data) -> Table:
    lines = [
        ("corpus", record.corpus),
        ("tokenizer", f"{record.tokenizer}, vocabulary {record.vocab_size:,}"),
        ("tokens to train on", f"{record.train_tokens:,}"),
        ("tokens held out", f"{record.evaluation_tokens:,}"),
        ("tokens per step", f"{record.tokens_per_step:,}"),
        ("steps per epoch", f"{record.train_tokens / record.tokens_per_step:,.1f}"),
    ]
    return _table(f"Data: {record.folder}", ("what", "value"), lines)


def _memory(record: Memory) -> Table:
    caption = "Memory of one device" + (", predicted and actual" if record.actual_bytes else ", predicted")
    caption += f". {record.hint}" if record.hint else ""
    segments = {**record.predicted_bytes, **record.actual_bytes}
    small = segments.get("in all", max(segments.values(), default=GIB)) < GIB
    unit, of_unit = ("MiB", _MIB) if small else ("GiB", GIB)
    lines = []
    for segment in segments:
        predicted, actual = record.predicted_bytes.get(segment), record.actual_bytes.get(segment)
        off = f"{100 * (actual / predicted - 1):+.1f}" if predicted and actual is not None else _UNKNOWN
        lines.append((segment, _in(of_unit, predicted), _in(of_unit, actual), off))
    if not record.actual_bytes:
        return _table(caption, ("segment", f"predicted {unit}"), [line[:2] for line in lines])
    return _table(caption, ("segment", f"predicted {unit}", f"actual {unit}", "off by %"), lines)


def _light(record: Light) -> Table:
    bound = record.seconds_per_token
    lines = []
    for name, part in record.parts.items():
        seconds = part["seconds_per_token"]
        lines.append((name, part["dtype"], digits(part["flops_per_token"] / 1e9), *_pace(seconds, bound)))
    total = sum(part["flops_per_token"] for part in record.parts.values())
    lines.append(("all", "", digits(total / 1e9), *_pace(bound, bound)))
    columns = ("part", "dtype", "GFLOP/token", "ns/token", "% of the time")
    if not bound:
        return _table("Speed of light: the device's peak is not known", columns[:3], [line[:3] for line in lines])
    return _table(f"Speed of light: {1 / bound:,.0f} tokens/s", columns, lines)


def _pace(seconds: float | None, bound: float | None) -> tuple[str, str]:
    return (
        _UNKNOWN if seconds is None else digits(seconds * 1e9),
        _UNKNOWN if seconds is None or bound is None else f"{100 * seconds / bound:.1f}",
    )


def _in(unit: int, n_bytes: int | None) -> str:
    return _UNKNOWN if n_bytes is None else f"{n_bytes / unit:,.2f}"


def _table(caption: str, columns: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption, pd.DataFrame(lines, columns=list(columns)))


_TABLES: dict[type[Record], Callable[[Any], Table]] = {
    Options: _options,
    Device: _device,
    Model: _model,
    Data: _data,
    Memory: _memory,
    Light: _light,
}
