"""The records of a training run: each one a line of JSON.

    {"kind": "options", "schema": 1, "at": 1767225600.12, "first_step": 0, "n_steps": 1000, "options": {...}, ...}
    {"kind": "step", "at": 1767225609.80, "step": 0, "seconds": 1.869, "tokens": 524288, "loss": 3.2826, ...}

The classes below are the schema: a line holds ``kind``, ``at`` (when it was written, in seconds since 1970 UTC) and the
fields of its class; an ``options`` line also ``schema``, the version of all this. Numbers that are not finite are the
strings "NaN", "Infinity" and "-Infinity", as JSON has none. Steps are counted from 0; the ``step`` of evaluations,
checkpoints and ends is the number of steps made before them, in earlier sessions, too.

A session is the lines from one ``options`` line to the next. A resumed run begins a session at its ``first_step``,
which invalidates records of later steps in earlier sessions. Readers ignore unknown kinds and fields, so the version
increases only when an existing one changes its meaning. Logs written before 2026-11-27 may have two more kinds,
``outlier`` and ``quantization``.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from cs336_systems.declared import as_typed, flag

SCHEMA = 1

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of the log."""

    kind: ClassVar[str]
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Session(Record):
    """The first line of a session: all its options and the defaults, as JSON values, and the steps of the whole run."""

    kind = "options"
    options: Mapping[str, Any]
    defaults: Mapping[str, Any]
    n_steps: int
    first_step: int = 0


@dataclass(frozen=True)
class Device(Record):
    """The devices of the run, one for each rank; the memory of one; ``harness.provenance.versions``."""

    kind = "device"
    name: str
    count: int
    memory_bytes: int | None
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Model(Record):
    """The model that is trained."""

    kind = "model"
    name: str
    n_parameters: int
    context_length: int


@dataclass(frozen=True)
class Data(Record):
    """The tokens to train on, and the held-out tokens, 0 if there are none."""

    kind = "data"
    folder: str
    corpus: str
    tokenizer: str
    vocab_size: int
    train_tokens: int
    evaluation_tokens: int
    tokens_per_step: int
    steps_per_epoch: float | None = None
    """Steps per epoch of whole sequences; None in older logs."""


@dataclass(frozen=True)
class Memory(Record):
    """One device's bytes by segment, such as weights, gradients, m, v, activations, head and loss, in all, free.

    The prediction is written first. On a GPU or under memory limits a second record has the bytes used after two steps.
    """

    kind = "memory"
    predicted_bytes: Mapping[str, int]
    actual_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Light(Record):
    """The speed of light (``costs/speed_of_light.py``): the fields of ``LightPart`` by part of a step, and the bound
    for all devices together, None where a peak is unknown."""

    kind = "speed_of_light"
    parts: Mapping[str, Mapping[str, Any]]
    seconds_per_token: float | None


@dataclass(frozen=True)
class LoggedStep(Record):
    """One step of the optimizer: tokens of all ranks, the mean loss per token before the update, and the norm of the
    whole gradient before it is clipped.

    Attributes:
        seconds: from the end of the previous step to the end of this one, without evaluations and saves.
        around_seconds: the part of ``seconds`` outside the step itself: loader, log, a late host. Clipping belongs to
            the step.
    """

    kind = "step"
    step: int
    seconds: float
    tokens: int
    loss: float
    norm: float
    learning_rate: float
    around_seconds: float = 0.0


@dataclass(frozen=True)
class Evaluation(Record):
    """The loss on held-out tokens."""

    kind = "evaluation"
    step: int
    loss: float
    tokens: int
    seconds: float
    by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Loss and epochs so far of each source, if there are several; the total loss is their mean weighted by shares."""


@dataclass(frozen=True)
class TaskScores(Record):
    """Scores of lm-eval's tasks after ``step`` steps, by task, then by name."""

    kind = "tasks"
    step: int
    scores: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class LoggedCheckpoint(Record):
    """A checkpoint that has been written; later steps may be logged before it.

    Attributes:
        n_bytes: the size of the first rank's part.
        stall_seconds: the time for which training waited.
        seconds: the time until it was written.
        waited_seconds: the part of the stall spent waiting for the previous checkpoint.
    """

    kind = "checkpoint"
    step: int
    n_bytes: int
    stall_seconds: float
    seconds: float
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class Membership(Record):
    """The live replicas from a step on; replica k of n takes the k-th of n equal parts of a step's sequences.

    Attributes:
        there: the names of the live replicas, in the order of k.
        number: the k of the replica that writes this; -1 while it still fetches the others' state.
        sequence: the position of the step's first sequence in the endless order of ``loader.py``.
        waited_seconds: the time until the replicas had agreed, and this one had the others' state.
        healed_seconds: the time to fetch the state, under ``every-step`` while the others trained; 0 if none was
            fetched.
        gone: names of replicas that have died since the last record; they may be live again.
        lost: (first, last + 1) position of the sequences since the last average, of which the parts of dead replicas
            are in no weights; two equal numbers if nothing is lost.
        met_seconds: the part of ``waited_seconds`` until the lighthouse answered; 0 if the group did not change.
        connected_seconds: the next part, until the group was connected; the rest of it is for the state.
        exchanged_seconds: the time, after all these, of the group's first collective, which makes NCCL's connections.
    """

    kind = "replicas"
    step: int
    there: Sequence[str]
    number: int
    sequence: int
    waited_seconds: float
    healed_seconds: float
    gone: Sequence[str] = ()
    lost: Sequence[int] = (0, 0)
    met_seconds: float = 0.0
    connected_seconds: float = 0.0
    exchanged_seconds: float = 0.0


@dataclass(frozen=True)
class Joined(Record):
    """The times of a replica's start, until it requested its first quorum; from then on others wait for it.

    Attributes:
        started_seconds: from the start of its process until its ranks were connected: imports, device, communicators.
        prepared_seconds: from then until data, model and newest checkpoint were loaded.
        warmed_up_seconds: from then until it had run the warm-up step and the checksums that replicas compare.
    """

    kind = "joined"
    started_seconds: float
    prepared_seconds: float
    warmed_up_seconds: float


@dataclass(frozen=True)
class Healing(Record):
    """A step in which a replica fetched pieces of the others' state.

    Attributes:
        n_bytes: the bytes received and kept.
        n_bytes_left: the bytes still missing after the step; 0 if this rank has the whole state.
        gradients_seconds: from the beginning of the fetch until its own gradients were computed.
        averaged_seconds: from then until all gradients were averaged.
        paused_seconds: from then until the pieces in flight had arrived, for which the others wait.
    """

    kind = "healing"
    step: int
    n_bytes: int
    n_bytes_left: int
    gradients_seconds: float
    averaged_seconds: float
    paused_seconds: float


@dataclass(frozen=True)
class Dropped(Record):
    """A step of ``every-step``, or an average of ``diloco``, that was dropped, and why.

    Attributes:
        sequences: (first, last + 1) position of the replicas' sequences in the endless order.
        again: whether these sequences are used again.
        seconds: from the beginning of the step until it was dropped; 0 for an average.
    """

    kind = "dropped"
    step: int
    reason: str
    sequences: Sequence[int]
    again: bool
    seconds: float


@dataclass(frozen=True)
class GpuState(Record):
    """The state of the first rank's GPU when ``step`` was queued, from NVML; None for values that NVML does not have.

    ``throttle`` are the reasons for a reduced clock, separated by commas; memory is that of all processes."""

    kind = "gpu"
    step: int
    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: str
    memory_used_bytes: float | None


@dataclass(frozen=True)
class Message(Record):
    """A sentence for the reader of the log."""

    kind = "message"
    text: str
    level: Level = "info"


@dataclass(frozen=True)
class End(Record):
    """The session's last line, with a reason: done, no gain, interrupted, terminated, walltime or failed. A killed
    session has none."""

    kind = "end"
    step: int
    reason: str


KINDS: dict[str, type[Record]] = {each.kind: each for each in Record.__subclasses__()}

HEAD = b'{"kind": "options", "schema": '
"""The first bytes of every log."""


def to_line(record: Record) -> bytes:
    """Return the record's line with its newline; raises TypeError for a value that JSON cannot hold, as a tensor."""
    head: dict[str, Any] = {"kind": record.kind} | ({"schema": SCHEMA} if isinstance(record, Session) else {})
    named = {one.name: getattr(record, one.name) for one in fields(record)}
    return json.dumps(_spelled(head | named), allow_nan=False, default=_as_json).encode() + b"\n"


def from_line(line: bytes) -> Record | None:
    """Parse a line; return None for a kind that this version does not know.

    Raises:
        ValueError: the line is not of a log, or is of another version.
    """
    try:
        said = json.loads(line)
        kind = said["kind"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("it is no line of a run's log") from None
    if kind == Session.kind and said.get("schema") != SCHEMA:
        raise ValueError(f"it is of schema {said.get('schema')}, and this version reads {SCHEMA}")
    if kind not in KINDS:
        return None
    values = dict[str, Any]()
    try:
        for one in fields(KINDS[kind]):
            if (value := said.get(one.name)) is not None and one.type in (float, float | None):
                value = float(value)
            if one.name in said:
                values[one.name] = value
        return KINDS[kind](**values)
    except (TypeError, ValueError):
        raise ValueError(f"it is no whole line of kind {kind!r}") from None


def changed_options(before: Session, now: Session) -> str:
    """The options that differ between two sessions of a run, in words: ``--chunk 64 (32), --matmul-dtype e4m3 (same)``.
    The run's folder, where it resumes from and its walltime do not count.
    """
    read = from_line(to_line(now))
    assert isinstance(read, Session)
    changed = [name for name, value in read.options.items() if before.options.get(name, value) != value]
    shown = [name for name in changed if name not in ("out", "resume_from", "walltime")]
    then = {name: as_typed(name, before.options[name]).removeprefix(f"{flag(name)} ") for name in shown}
    return ", ".join(f"{as_typed(name, read.options[name])} ({then[name]})" for name in shown)


def _spelled(value: Any) -> Any:
    """Return a value with strings for floats that are not finite, and lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelled(one) for key, one in value.items()}
    return [_spelled(one) for one in value] if isinstance(value, list | tuple) else value


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a log has numbers and words, got {type(value).__name__}: {value!r:.60}")
