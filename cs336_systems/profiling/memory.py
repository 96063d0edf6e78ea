"""The purpose of each block of memory in one pass of a training step: the CUDA allocator's own log, replayed.

    profile = profile_memory(case, mode="step", path=Path("profiles/raw/step.pickle"))
    profile.history.peak().by_category

PyTorch's caching allocator can log every block that it hands out and takes back, with the Python stack that asked for
it. The step runs twice before, so that optimizer state, workspaces and compiled code exist and the pass is one of many.
Then each phase is marked in the log by an allocation of one byte whose metadata names the phase, so that boundaries
stand in the log itself and no clocks are compared. Labels are addresses of tensors whose role is known; gradients are
labelled as they are accumulated (mode ``backward`` drops them before it ends). The snapshot is PyTorch's own
dictionary, which pytorch.org/memory_viz draws.

``reconstruct`` replays the log. A block that is freed or still alive without having been handed out in the log existed
before it. Each allocation gets one category, by the first rule that applies:

    labelled         its address carries a label: parameters, gradients, optimizer state, other (inputs, tables)
    other            it existed before the log began and has no label (cuBLAS workspaces, the last loss)
    activations      handed out in the phase ``forward`` and alive when ``backward`` begins: what autograd keeps; where
                     memory ran out before that, what was alive then
    temporaries      everything else, the tensors that checkpointing recomputes in backward included

A label names an address, and addresses are used again: it belongs to the last allocation there, for a gradient the last
one of the phase ``backward`` (gradients live until they are cleared).

Events are counted, not timed: the host makes allocations ahead of the device. Bytes are those asked for;
``max_memory_allocated`` counts the allocator's blocks, which are rounded up. Autograd's thread has no Python stack, so
allocations of an eager backward name no line.

A pass that runs out of memory is a result, too: its history ends where memory did. Limits: CUDA only; one device; the
log is a ring of ``MAX_ENTRIES``, and a pass that does not fit into it is an error.
"""

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cs336_systems.case import TrainingCase
from cs336_systems.harness.clock import synchronize
from cs336_systems.profiling.residuals import storage_address
from cs336_systems.training import TrainStep, assemble, random_batch

PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)

BEFORE = "before"
"""Phase of what existed when the log began."""

MARK = "phase:"
"""Start of the metadata of an allocation that marks the beginning of a phase."""

MAX_ENTRIES = 200_000
"""Events that the log holds. A step of 2.7b logs about 20,000; an event with its stack takes about a kilobyte."""

_KNOWN_FOLDERS = re.compile(r".*(?:^|/)((?:cs336_systems/|site-packages/|dist-packages/|torchinductor_\w+/).*)")
"""The last known folder of a path decides whose code it is: a clone may have any name, also that of this package, and
may hold a virtual environment."""


class Label(NamedTuple):
    """The role of the tensor whose storage begins at ``address``."""

    address: int
    category: str
    name: str


@dataclass
class Allocation:
    """One block, from the event that made it to the event that freed it (or to the end of the log)."""

    address: int
    n_bytes: int
    start: int = 0
    end: int = -1
    phase: str = BEFORE
    category: str = OTHER
    name: str = "existed before"
    source: str = "no Python stack"
    """The innermost place in this project that asked for it, else the innermost place at all."""


@dataclass(frozen=True)
class Phase:
    """Events ``start`` to ``end`` (excluded) of the log."""

    name: str
    start: int
    end: int


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

    def live_bytes(self) -> dict[str, np.ndarray]:
        """Bytes alive after each event, (n_events + 1,) int64 per category."""
        changes = {category: np.zeros(self.n_events + 2, dtype=np.int64) for category in CATEGORIES}
        for allocation in self.allocations:
            changes[allocation.category][allocation.start] += allocation.n_bytes
            changes[allocation.category][allocation.end] -= allocation.n_bytes
        return {category: np.cumsum(change[:-1]) for category, change in changes.items()}

    def peak(self) -> Moment:
        """The first moment at which the most bytes are alive."""
        live = self.live_bytes()
        event = int(np.argmax(np.sum(list(live.values()), axis=0)))
        by_category = {category: int(alive[event]) for category, alive in live.items()}
        return Moment(event, sum(by_category.values()), by_category)


@dataclass(frozen=True)
class MemoryProfile:
    """The findings of one watched pass."""

    case: TrainingCase
    mode: str
    history: MemoryHistory
    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated`` of the watched pass."""
    out_of_memory: str = ""
    """The allocator's sentence if the pass ran out of memory."""

    @property
    def rounding_bytes(self) -> int:
        """The allocator's rounding at the peak: blocks less what was asked for."""
        return self.peak_allocated_bytes - self.history.peak().n_bytes


def reconstruct(snapshot: dict[str, Any], labels: Sequence[Label], device_index: int = 0) -> MemoryHistory:
    """Replay the events that a snapshot of torch's allocator holds for one device."""
    done: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    marks: list[tuple[str, int]] = []
    n_events, forward_ends = 0, None
    for event in snapshot["device_traces"][device_index]:
        action = event["action"]
        if action == "alloc":
            n_events += 1
            metadata = event.get("user_metadata", "")
            if metadata.startswith(MARK):
                marks.append((metadata.removeprefix(MARK), n_events))
            phase, source = marks[-1][0] if marks else BEFORE, _source(event.get("frames", ()))
            made = Allocation(event["addr"], event["size"], n_events, -1, phase, TEMPORARIES, "", source)
            alive[made.address] = made
        elif action == "free_requested":  # by its owner; that the device is done with it, too, is another event
            n_events += 1
            freed = alive.pop(event["addr"], None) or Allocation(event["addr"], event["size"])
            freed.end = n_events
            done.append(freed)
        elif action == "oom" and forward_ends is None:
            forward_ends = n_events
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment["device"] == device_index and block["state"] == "active_allocated":
                alive.setdefault(address, Allocation(address, block["requested_size"]))
            address += block["size"]
    for allocation in alive.values():
        allocation.end = n_events + 1
        done.append(allocation)
    phases = [Phase(name, start, end) for (name, start), (_, end) in pairwise([*marks, ("end", n_events + 1)])]

    forward_ends = {phase.name: phase.start for phase in phases}.get("backward", forward_ends)
    for allocation in done:
        if allocation.phase == "forward" and forward_ends is not None and allocation.end > forward_ends:
            allocation.category = ACTIVATIONS
    done.sort(key=lambda allocation: allocation.start)
    last = {(each.address, False): each for each in done}
    last |= {(each.address, True): each for each in done if each.phase == "backward"}
    for address, category, name in labels:
        if (found := last.get((address, category == GRADIENTS))) is not None:
            found.category, found.name = category, name
    return MemoryHistory(done, phases, n_events)


def _source(frames: Sequence[dict[str, Any]]) -> str:
    """``Allocation.source`` of the frames of an event, innermost first."""
    places = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames]
    return next(iter([*filter(None, map(own_place, places)), *places]), "no Python stack")


def own_place(place: str) -> str:
    """The place ``file:line function`` below this package, ``model/ops.py:29 linear``; nothing if it lies elsewhere."""
    known = _KNOWN_FOLDERS.fullmatch(place)
    return known[1].removeprefix("cs336_systems/") if known and known[1].startswith("cs336_systems/") else ""


def profile_memory(case: TrainingCase, mode: str, path: Path) -> MemoryProfile:
    """Run one watched pass of ``mode`` on random tokens and write its snapshot to ``path``.

    Raises:
        ValueError: the device is not CUDA, the mode or something in the case is unknown, or the pass did not fit into
            the log.
        OSError: the snapshot cannot be written.
    """
    device = torch.device(case.device)
    if device.type != "cuda":
        raise ValueError(f"a memory timeline needs CUDA's allocator, which {case.device!r} does not have")
    step = assemble(case)
    token_ids, targets = random_batch(case)
    phases, out_of_memory = step.phases(mode, token_ids, targets), ""
    try:
        for phase in [*phases.values()] * 2:
            phase()
        synchronize(device)
    except torch.OutOfMemoryError:
        step.optimizer.zero_grad(set_to_none=True)
        phases = step.phases(mode, token_ids, targets)

    torch.cuda.reset_peak_memory_stats(device)
    gradients: list[Label] = []
    torch.cuda.memory._record_memory_history("all", "alloc", "python", MAX_ENTRIES, clear_history=True)
    try:
        with labelled_gradients(step, gradients):
            for name, phase in phases.items():
                synchronize(device)
                torch.cuda.memory._set_memory_metadata(MARK + name)
                torch.empty(1, dtype=torch.uint8, device=device)
                torch.cuda.memory._set_memory_metadata("")
                phase()
            synchronize(device)
    except torch.OutOfMemoryError as error:
        out_of_memory = str(error)
    finally:
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
    peak = torch.cuda.max_memory_allocated(device)
    labels = [*state_labels(step, token_ids=token_ids, targets=targets), *gradients]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(snapshot, protocol=4))  # the latest that pytorch.org/memory_viz loads
    history = reconstruct(snapshot, labels, torch.cuda.current_device() if device.index is None else device.index)
    if [phase.name for phase in history.phases] != list(phases)[: len(history.phases)] or not history.phases:
        raise ValueError(f"the log of {MAX_ENTRIES} events lost the beginning of the pass: profile a smaller case")
    return MemoryProfile(case, mode, history, peak, out_of_memory)


def state_labels(step: TrainStep, **inputs: Tensor) -> list[Label]:
    """Labels of what outlives a pass: parameters, buffers, optimizer state, and ``inputs`` by their names."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in step.model.named_parameters()}
    labels = [Label(storage_address(parameter), PARAMETERS, name) for parameter, name in names.items()]
    labels += [Label(storage_address(buffer), OTHER, name) for name, buffer in step.model.named_buffers()]
    labels += [Label(storage_address(tensor), OTHER, name) for name, tensor in inputs.items()]
    for parameter, state in step.optimizer.state.items():
        labels += [
            Label(storage_address(tensor), OPTIMIZER_STATE, f"{key} of {names[parameter]}")
            for key, tensor in state.items()
            if isinstance(tensor, Tensor)
        ]
    return labels


@contextmanager
def labelled_gradients(step: TrainStep, labels: list[Label]) -> Iterator[None]:
    """Append a label for every gradient that is accumulated inside."""
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: labels.append(
                Label(storage_address(parameter.grad), GRADIENTS, f"gradient of {name}")
            )
        )
        for name, parameter in step.model.named_parameters()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
