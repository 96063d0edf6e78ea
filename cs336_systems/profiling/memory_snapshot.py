"""The CUDA allocator's own history of a piece of work: recorded, marked with phases, written, and read back.

PyTorch's caching allocator can log every block that it hands out and takes back, with the Python stack that asked for
it. What is written is PyTorch's own snapshot, so pytorch.org/memory_viz draws it; ``memory_history.py`` reads the same
dictionary.

Two things are added to PyTorch's. Marks: a phase starts with an allocation of one byte whose metadata names the phase
(``mark_phase``), so that boundaries stand in the log itself, exact, and no clocks are compared. Labels: the addresses
of tensors whose role is known (parameters, gradients, optimizer state), under the key ``labels``, which the viewer
does not look at.

    with recording(device):
        mark_phase("forward", device)
        ...
        snapshot = take_snapshot(labels)
    write_snapshot(path, snapshot)
    snapshot = read_snapshot(path)

A pickle can run code when it is loaded, and snapshots are passed around. ``read_snapshot`` builds nothing but
dictionaries, lists, strings and numbers; a file that asks for anything else is refused.

Limits: the log is a ring of ``max_entries``; what fell out of it is reported as an error, not drawn.
"""

import gzip
import pickle
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

MAX_ENTRIES = 200_000
"""A step of 2.7b logs about 20,000 events; an entry with its stack takes about a kilobyte."""

SNAPSHOTS = (".pickle", ".pickle.gz")
"""How snapshots' files end; PyTorch's viewer wants them as they are written, not compressed."""

MARK = "phase:"
"""Start of the metadata of a marking allocation."""

Snapshot = dict[str, Any]
"""``device_traces`` (a list of events per device) and ``segments`` as PyTorch documents them, and our ``labels``."""

_KNOWN_ACTIONS = {
    *("alloc", "free_requested", "free_completed", "free", "oom", "snapshot"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
}

_READ_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError),
    *(OverflowError, MemoryError, RecursionError, gzip.BadGzipFile, zlib.error),
)
"""What the unpickler raises for bytes that are no pickle, or half of one, compressed or not."""

_GZIP = b"\x1f\x8b"
"""How its files begin; a pickle of protocol 2 or later begins with 0x80."""


@dataclass(frozen=True)
class Label:
    """The role of the tensor whose storage begins at ``address``."""

    address: int
    category: str
    name: str


@contextmanager
def recording(device: torch.device, max_entries: int = MAX_ENTRIES) -> Iterator[None]:
    """Log the allocator's events inside, each with its Python stack; what was logged before is forgotten.

    Raises:
        ValueError: ``device`` is not a CUDA device, or ``max_entries`` is not positive.
    """
    if device.type != "cuda":
        raise ValueError(f"the allocator's history is recorded on CUDA devices, not on {str(device)!r}")
    if max_entries < 1:
        raise ValueError(f"max_entries must be positive, got {max_entries}")
    torch.cuda.memory._record_memory_history("all", "alloc", "python", max_entries, clear_history=True)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)
        annotate("")


def annotate(text: str) -> None:
    """Attach ``text`` to whatever this thread allocates from now on; backward runs on a thread of its own."""
    torch.cuda.memory._set_memory_metadata(text)


def mark_phase(name: str, device: torch.device) -> None:
    """Wait for the device, then begin phase ``name`` in the log."""
    torch.cuda.synchronize(device)
    annotate(MARK + name)
    torch.empty(1, dtype=torch.uint8, device=device)
    annotate("")


def take_snapshot(labels: Iterable[Label] = ()) -> Snapshot:
    """PyTorch's snapshot of all devices, with the labels."""
    return {**torch.cuda.memory._snapshot(), "labels": [list(astuple(label)) for label in labels]}


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a pickle that PyTorch's viewer and ``read_snapshot`` load.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot from a file, ours or anybody's, compressed by gzip or not; nothing in the file is executed.

    Raises:
        ValueError: the file is empty, torn, no pickle, asks for objects, or is not a memory snapshot.
        OSError: the file cannot be read.
    """
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty: not a memory snapshot")
    with path.open("rb") as file:
        try:
            compressed = file.peek(2)[:2] == _GZIP
            snapshot = _PlainUnpickler(gzip.GzipFile(fileobj=file) if compressed else file).load()
        except _READ_ERRORS as error:
            reason = str(error).strip() or type(error).__name__
            raise ValueError(f"{path} cannot be read as a memory snapshot: {reason}") from error
    try:
        check_snapshot(snapshot)
    except ValueError as error:
        raise ValueError(f"{path} is not a memory snapshot: {error}") from error
    return snapshot


def check_snapshot(snapshot: Any) -> None:
    """Raise ValueError unless ``snapshot`` has the parts that are read here, with the types that they must have."""
    if not isinstance(snapshot, dict):
        raise ValueError(f"it holds a {type(snapshot).__name__}, not a dictionary")
    for key in ("device_traces", "segments"):
        if not isinstance(snapshot.get(key), list):
            raise ValueError(f"it has no list {key!r}")
    for trace in snapshot["device_traces"]:
        if not isinstance(trace, list):
            raise ValueError(f"a device's trace is a {type(trace).__name__}, not a list")
        for event in trace:
            _check_event(event)
    for segment in snapshot["segments"]:
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise ValueError("a segment has no list of blocks")
        _check_integers("segment", segment, ("address",))
        for block in segment["blocks"]:
            _check_integers("block", block, ("size",), optional="requested_size")
    for label in snapshot.get("labels", []):
        if not (isinstance(label, list) and [type(value) for value in label] == [int, str, str]):
            raise ValueError(f"a label is {str(label)[:60]!r}, not an address, a category and a name")


def _check_event(event: Any) -> None:
    if not isinstance(event, dict) or event.get("action") not in _KNOWN_ACTIONS:
        found = event.get("action") if isinstance(event, dict) else event
        raise ValueError(f"an event's action is {str(found)[:60]!r}, known are {', '.join(sorted(_KNOWN_ACTIONS))}")
    keys = ("size",) if event["action"] in ("oom", "snapshot") else ("addr", "size")
    _check_integers("event", event, keys, optional="time_us")
    if not isinstance(metadata := event.get("user_metadata", ""), str):
        raise ValueError(f"the metadata of an event is {str(metadata)[:60]!r}, not a string")
    frames = event.get("frames", [])
    if not (isinstance(frames, list) and all(isinstance(frame, dict) for frame in frames)):
        raise ValueError(f"the frames of an event are {str(frames)[:60]!r}, not a list of dictionaries")


def _check_integers(what: str, holder: Any, keys: tuple[str, ...], optional: str = "") -> None:
    holder = holder if isinstance(holder, dict) else {}
    for key in (*keys, *({optional} & holder.keys())):
        value = holder.get(key)
        if type(value) is not int or value < 0:
            raise ValueError(f"the {key!r} of one {what} is {str(value)[:60]!r}, not a whole number")


class _PlainUnpickler(pickle.Unpickler):
    """Builds builtin containers, strings and numbers; refuses every class, function and external reference."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot holds only plain data")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")
