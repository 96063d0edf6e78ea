"""The records of a training run: each one a line of JSON.

    {"kind": "options", "schema": 1, "at": 1767225600.12, "first_step": 0, "n_steps": 1000, "options": {...}, ...}
    {"kind": "step", "at": 1767225609.80, "step": 0, "seconds": 1.869, "tokens": 524288, "loss": 3.2826, ...}

The classes below are the schema: a line holds ``kind``, ``at`` (when it was said, in seconds since 1970 UTC) and the
fields of its class; an ``options`` line also ``schema``, the version of all this. Numbers that are not finite are the
strings "NaN", "Infinity" and "-Infinity", as JSON has none. Steps are counted from 0; evaluations and ends say how many
steps were made before them.

A session is what stands between two ``options`` lines: a run that resumes begins one, at its ``first_step``, and what
earlier sessions said of later steps no longer holds. A reader passes over kinds and fields that it does not know, so
the version goes up when something that is there changes its meaning or goes.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

SCHEMA = 1

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Anything that is said."""

    kind: ClassVar[str]
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Options(Record):
    """What the run, or the part of it that begins here, was asked for."""

    kind = "options"
    options: Mapping[str, Any]
    """Every option with its value, as JSON has them."""
    defaults: Mapping[str, Any]
    """What each would have been if nobody had asked."""
    n_steps: int
    """Of the whole run."""
    first_step: int = 0
    """That this session makes: 0, or where it resumes."""


@dataclass(frozen=True)
class Device(Record):
    """What the run runs on."""

    kind = "device"
    name: str
    count: int
    """Of such devices, one for each rank."""
    memory_bytes: int | None
    """Of one."""
    provenance: Mapping[str, Any]
    """Versions, host, commit and command line: ``harness.provenance.versions``."""


@dataclass(frozen=True)
class Model(Record):
    """What is trained."""

    kind = "model"
    name: str
    n_parameters: int
    context_length: int


@dataclass(frozen=True)
class Data(Record):
    """What is learned, and on what it is evaluated."""

    kind = "data"
    folder: str
    corpus: str
    tokenizer: str
    vocab_size: int
    train_tokens: int
    evaluation_tokens: int
    """0 if nothing is held out."""
    tokens_per_step: int


@dataclass(frozen=True)
class Memory(Record):
    """One device's memory by segment; said once predicted, and again when two steps have shown what is so."""

    kind = "memory"
    predicted_bytes: Mapping[str, int]
    """Segments at a step's peak, such as weights, gradients, m, v, activations, head and loss, in all, free."""
    actual_bytes: Mapping[str, int] = field(default_factory=dict)
    hint: str = ""
    """What to change, where much is free."""


@dataclass(frozen=True)
class Light(Record):
    """The speed of light: ``costs/speed_of_light.py``."""

    kind = "speed_of_light"
    parts: Mapping[str, Mapping[str, Any]]
    """By part of a step, the fields of ``LightPart``."""
    seconds_per_token: float | None
    """On all devices together; None where a peak is unknown."""


@dataclass(frozen=True)
class Step(Record):
    """One step of the optimizer."""

    kind = "step"
    step: int
    seconds: float
    """From the end of the step before it to its own, evaluations and saves left out."""
    tokens: int
    """Learned in it, by all ranks."""
    loss: float
    """Mean per token, before the update."""
    norm: float
    """Of the whole gradient, before it is clipped."""
    learning_rate: float
    around_seconds: float = 0.0
    """Of all seconds, those in which the device was not yet or no longer at the step itself: loader, log, what the host
    came too late with. Clipping is the step's."""


@dataclass(frozen=True)
class Evaluation(Record):
    """The loss on held-out tokens."""

    kind = "evaluation"
    step: int
    """Steps made before it."""
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Checkpoint(Record):
    """One that has been written; said when that is known, steps after it may be said before."""

    kind = "checkpoint"
    step: int
    """Steps made before it."""
    n_bytes: int
    """Of the first rank's part."""
    stall_seconds: float
    """That training waited for it."""
    seconds: float
    """Until it was written."""
    waited_seconds: float = 0.0
    """Of the stall, until the checkpoint before was written."""


@dataclass(frozen=True)
class GpuState(Record):
    """What NVML says of the first rank's GPU; None where it says nothing."""

    kind = "gpu"
    step: int
    """That was last queued."""
    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: str
    """Reasons that hold the clock down, separated by commas."""
    memory_used_bytes: float | None
    """By all processes."""


@dataclass(frozen=True)
class Quantization(Record):
    """What quantization to fp8 did in a step to what the products of blocks read, on the first rank."""

    kind = "quantization"
    step: int
    tensors: Mapping[str, Mapping[str, Sequence[float]]]
    """By tensor, such as normed1, dqkv, qkv weight: block, the numbers of the blocks; and of each of these absmax, the
    largest magnitude; underflow, the share of elements that became zero and were not; saturation, the share of those
    that were cut off."""


@dataclass(frozen=True)
class Outlier(Record):
    """A loss or a norm that is far from those just before it."""

    kind = "outlier"
    step: int
    quantity: Literal["loss", "norm"]
    value: float
    z: float
    """Standard deviations from the mean of the steps before; the value itself where that is not finite."""


@dataclass(frozen=True)
class Message(Record):
    """A sentence for people."""

    kind = "message"
    text: str
    level: Level = "info"


@dataclass(frozen=True)
class End(Record):
    """The session's last line; a session without one was killed."""

    kind = "end"
    step: int
    """Steps made, those of earlier sessions included."""
    reason: str
    """Such as done, interrupted, walltime, failed."""


_ALL = (
    *(Options, Device, Model, Data, Memory, Light, Step, Evaluation, Checkpoint, GpuState, Quantization, Outlier),
    *(Message, End),
)
KINDS: dict[str, type[Record]] = {record.kind: record for record in _ALL}

_FIELDS = {kind: {one.name: one.type in (float, float | None) for one in fields(kind)} for kind in KINDS.values()}
"""By kind the names, ``at`` first, and whether each is a float."""

HEAD = b'{"kind": "options", "schema": '
"""How every log begins."""


def to_line(record: Record) -> bytes:
    """The record's line, its end included.

    Raises:
        TypeError: it holds what JSON does not, such as a tensor.
    """
    head: dict[str, Any] = {"kind": record.kind} | ({"schema": SCHEMA} if isinstance(record, Options) else {})
    named = {name: getattr(record, name) for name in _FIELDS[type(record)]}
    return json.dumps(_spelled(head | named), allow_nan=False, default=_as_json).encode() + b"\n"


def from_line(line: bytes) -> Record | None:
    """The record of a line; None of a kind that this version does not know.

    Raises:
        ValueError: it is no line of a log, or of another version.
    """
    try:
        said = json.loads(line)
        kind = said["kind"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("it is no line of a run's log") from None
    if kind == Options.kind and said.get("schema") != SCHEMA:
        raise ValueError(f"it is of schema {said.get('schema')}, and this version reads {SCHEMA}")
    if kind not in KINDS:
        return None
    known = _FIELDS[KINDS[kind]]
    try:
        values: dict[str, Any] = {
            name: _as_float(said[name]) if known[name] else said[name] for name in known.keys() & said.keys()
        }
        return KINDS[kind](**values)
    except (TypeError, ValueError):
        raise ValueError(f"it is no whole line of kind {kind!r}") from None


def changed_options(before: Options, now: Options) -> str:
    """Of two sessions of a run, in words: ``--chunk 64 (32), --matmul-dtype e4m3 (same)``; "" if there are none. Where
    the run lies, and how long it may take, do not count.
    """
    read = from_line(to_line(now))
    assert isinstance(read, Options)
    return ", ".join(
        f"--{name.replace('_', '-')} {value} ({before.options[name]})"
        for name, value in read.options.items()
        if before.options.get(name, value) != value and name not in ("out", "walltime")
    )


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _spelled(value: Any) -> Any:
    """The same with words for floats that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelled(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(one) for one in value]
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a log has numbers and words, got {type(value).__name__}: {value!r:.60}")
