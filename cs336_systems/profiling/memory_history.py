"""The purpose of each block of memory: the CUDA allocator's own log, replayed.

    history = reconstruct({**torch.cuda.memory._snapshot(), "labels": labels})
    history.peak().by_category

PyTorch's caching allocator can log every block that it hands out and takes back, with the Python stack that asked for
it (``memory_profile.py`` records such a log). A snapshot is PyTorch's own dictionary, so pytorch.org/memory_viz draws
it. It holds two additions. Marks: a phase begins with an allocation of one byte whose metadata names the phase. Labels:
the addresses of tensors whose role is known stand under the key ``labels``, which the viewer ignores.

``reconstruct`` replays the events of one device. A block that is freed or still alive without having been handed out in
the log existed before it. Each allocation gets one category, by the first rule that applies:

    labelled         its address carries a label: parameters, gradients, optimizer state, other (inputs, tables)
    other            it existed before the log began and has no label (cuBLAS workspaces, the last loss)
    activations      handed out in the phase ``forward`` and alive when ``backward`` begins: what autograd keeps; where
                     memory ran out before that, what was alive then
    temporaries      everything else, the tensors that checkpointing recomputes in backward included

A label names an address, and addresses are used again: it belongs to the last allocation there, for a gradient the last
one of the phase ``backward`` (gradients live until they are cleared).

Events are counted, not timed: allocations are made by the host, which runs ahead of the device, so their times say
little; the phases' durations are taken between marks, at which the host waited for the device. Bytes are those asked
for; ``max_memory_allocated`` counts the allocator's blocks, which are rounded up.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)

BEFORE = "before"
"""Phase of what existed when the log began."""

MARK = "phase:"
"""Start of the metadata of an allocation that marks the beginning of a phase."""

Snapshot = dict[str, Any]
"""``device_traces`` (a list of events per device) and ``segments`` as PyTorch documents them, and our ``labels``."""


_KNOWN_FOLDERS = re.compile(r".*(?:^|/)((?:cs336_systems/|site-packages/|dist-packages/|torchinductor_\w+/).*)")
"""The last known folder of a path decides whose code it is: a clone may have any name, also that of this package, and
may hold a virtual environment."""


def own_place(place: str) -> str:
    """The place ``file:line function`` below this package, ``model/ops.py:29 linear``; nothing if it lies elsewhere."""
    known = _KNOWN_FOLDERS.fullmatch(place)
    return known[1].removeprefix("cs336_systems/") if known and known[1].startswith("cs336_systems/") else ""


@dataclass(frozen=True)
class Label:
    """The role of the tensor whose storage begins at ``address``."""

    address: int
    category: str
    name: str


@dataclass
class Allocation:
    """One block, from the event that made it to the event that freed it (or to the end of the log)."""

    address: int
    n_bytes: int
    start: int
    end: int = -1
    phase: str = BEFORE
    category: str = TEMPORARIES
    name: str = ""
    operation: str = ""
    """The autograd node that was running on the thread that allocated it, where that is known."""
    stack: tuple[str, ...] = ()
    """``file:line function``, innermost first."""

    @property
    def source(self) -> str:
        """The innermost place in this project, else the autograd node, else the innermost place at all."""
        own = list(filter(None, map(own_place, self.stack)))
        if own and self.operation:
            return f"{own[0]} ({self.operation})"
        return next(iter([*own, *filter(None, [self.operation]), *self.stack]), "no Python stack")


@dataclass(frozen=True)
class Phase:
    """Events ``start`` to ``end`` (excluded) of the log, and what they took by the host's clock, in ms."""

    name: str
    start: int
    end: int
    ms: float


@dataclass(frozen=True)
class Moment:
    """The state after one event: total bytes alive, and bytes alive by category."""

    event: int
    n_bytes: int
    by_category: dict[str, int]


@dataclass
class MemoryHistory:
    """Every allocation of one device in a log of ``n_events`` allocations and frees; event 0 is before the first."""

    allocations: list[Allocation]
    phases: list[Phase]
    n_events: int
    out_of_memory: int | None = None
    """The event after which memory ran out for the first time."""

    def live_bytes(self) -> dict[str, np.ndarray]:
        """Bytes alive after each event, (n_events + 1,) int64 per category."""
        changes = {category: np.zeros(self.n_events + 2, dtype=np.int64) for category in CATEGORIES}
        for allocation in self.allocations:
            changes[allocation.category][allocation.start] += allocation.n_bytes
            changes[allocation.category][allocation.end] -= allocation.n_bytes
        return {category: np.cumsum(change[:-1]) for category, change in changes.items()}

    def moment(self, event: int) -> Moment:
        """The state after ``event``."""
        by_category = dict.fromkeys(CATEGORIES, 0)
        for allocation in self.alive_at(event):
            by_category[allocation.category] += allocation.n_bytes
        return Moment(event, sum(by_category.values()), by_category)

    def peak(self) -> Moment:
        """The first moment at which the most bytes are alive."""
        total = np.sum(list(self.live_bytes().values()), axis=0)
        return self.moment(int(np.argmax(total)))

    def alive_at(self, event: int) -> list[Allocation]:
        """Allocations alive after ``event``, the largest first."""
        alive = [allocation for allocation in self.allocations if allocation.start <= event < allocation.end]
        return sorted(alive, key=lambda allocation: -allocation.n_bytes)


def reconstruct(snapshot: Snapshot, device_index: int | None = None) -> MemoryHistory:
    """Replay the events that ``snapshot`` holds for one device, by default the first that allocated anything.

    Raises:
        ValueError: no allocations of that device, or events that contradict each other (a block handed
            out twice), which a log that lost its middle shows.
    """
    traces = snapshot["device_traces"]
    allocating = [i for i, trace in enumerate(traces) if any(event["action"] == "alloc" for event in trace)]
    index = next(iter(allocating), None) if device_index is None else device_index
    if index is None or index not in allocating:
        device = "any device" if index is None else f"device {index}"
        raise ValueError(f"the snapshot holds no allocations of {device}: record its history before the work")
    history = _replay(traces[index], _living_blocks(snapshot["segments"], index))
    _categorise(history, [Label(*label) for label in snapshot.get("labels", [])])
    return history


def _living_blocks(segments: Sequence[dict[str, Any]], device_index: int) -> dict[int, int]:
    """Bytes asked for of each block that was in use when the snapshot was taken, by address."""
    living = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment.get("device", 0) == device_index and block.get("state") == "active_allocated":
                living[address] = block.get("requested_size", block["size"])
            address += block["size"]
    return living


def _replay(trace: Sequence[dict[str, Any]], living_at_end: dict[int, int]) -> MemoryHistory:
    done: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    waiting: set[int] = set()
    """Freed by their owner, not yet by the device: their second event is not another free."""
    marks: list[tuple[str, int, int]] = []
    event_number, last_us = 0, 0
    out_of_memory: int | None = None
    for event in trace:
        action, last_us = event["action"], max(last_us, event.get("time_us", 0))
        if action == "alloc":
            address = event["addr"]
            if address in alive:
                raise ValueError(f"block {address:#x} is handed out twice without a free between: the log has a hole")
            event_number += 1
            metadata = event.get("user_metadata", "")
            if metadata.startswith(MARK):
                marks.append((metadata.removeprefix(MARK), event_number, event.get("time_us", 0)))
            alive[address] = Allocation(
                address,
                event["size"],
                event_number,
                phase=marks[-1][0] if marks else BEFORE,
                operation="" if metadata.startswith(MARK) else metadata,
                stack=tuple(
                    f"{frame.get('filename', '?')}:{frame.get('line', 0)} {frame.get('name', '?')}"
                    for frame in event.get("frames", ())
                ),
            )
        elif action in ("free_requested", "free_completed", "free"):
            address = event["addr"]
            if action == "free_completed" and address in waiting:
                waiting.remove(address)
                continue
            event_number += 1
            if action == "free_requested":
                waiting.add(address)
            allocation = alive.pop(address, None) or _existing(address, event["size"])
            allocation.end = event_number
            done.append(allocation)
        elif action == "oom" and out_of_memory is None:
            out_of_memory = event_number
    for address, n_bytes in living_at_end.items():
        alive.setdefault(address, _existing(address, n_bytes))
    for allocation in alive.values():
        allocation.end = event_number + 1
        done.append(allocation)
    marks.append(("end", event_number + 1, last_us))
    phases = [
        Phase(name, start, end, (until_us - time_us) / 1e3)
        for (name, start, time_us), (_, end, until_us) in pairwise(marks)
    ]
    return MemoryHistory(done, phases, event_number, out_of_memory)


def _existing(address: int, n_bytes: int) -> Allocation:
    return Allocation(address, n_bytes, start=0, category=OTHER, name="existed before")


def _categorise(history: MemoryHistory, labels: Sequence[Label]) -> None:
    backward = next((phase for phase in history.phases if phase.name == "backward"), None)
    forward_ends = backward.start if backward is not None else history.out_of_memory
    for allocation in history.allocations:
        if allocation.phase == "forward" and forward_ends is not None and allocation.end > forward_ends:
            allocation.category = ACTIVATIONS
    last: dict[tuple[int, bool], Allocation] = {}
    for allocation in sorted(history.allocations, key=lambda allocation: allocation.start):
        last[allocation.address, False] = allocation
        if allocation.phase == "backward":
            last[allocation.address, True] = allocation
    for label in labels:
        found = last.get((label.address, label.category == GRADIENTS and backward is not None))
        if found is not None:
            found.category, found.name = label.category, label.name
