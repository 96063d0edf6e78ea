"""One pass of a training step with the CUDA allocator watched: its snapshot, its history, its peak.

    profile = profile_memory(case, mode="step", path=Path("profiles/raw/step.pickle"))
    profile.history.peak().by_category

The step runs twice before, so that optimizer state, workspaces and compiled code exist and the pass is one of many; the
second of these passes is also the reference for what watching changes. Then each phase is marked in the allocator's log
by an allocation of one byte, so that boundaries stand in the log itself and no clocks are compared. Gradients are
labelled as they are accumulated (mode ``backward`` drops them before it ends), and every autograd node writes its name
into the log when it starts, because backward runs on a thread without a Python stack.

A pass that runs out of memory is a result, too: its history ends where memory did. Limits: CUDA only; one device; the
log is a ring of ``max_entries``, and a pass that does not fit into it is an error.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.case import TrainingCase
from cs336_systems.harness.clock import synchronize
from cs336_systems.profiling.memory_history import (
    GRADIENTS,
    MARK,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    Label,
    MemoryHistory,
    reconstruct,
)
from cs336_systems.profiling.residuals import graph_nodes, storage_address
from cs336_systems.training import TrainStep, assemble, random_batch

MAX_ENTRIES = 200_000
"""Events that the log holds. A step of 2.7b logs about 20,000; an event with its stack takes about a kilobyte."""


@dataclass(frozen=True)
class MemoryProfile:
    """The findings of one watched pass."""

    case: TrainingCase
    mode: str
    history: MemoryHistory
    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated`` of the watched pass."""
    unwatched_requested_bytes: int
    """Bytes asked for at the peak of the unwatched pass, or 0 if it ran out of memory. They are the same in every pass,
    where the allocator's blocks depend on what is cached."""
    path: Path
    """The snapshot."""
    out_of_memory: str = ""
    """The allocator's sentence if the pass ran out of memory."""

    @property
    def rounding_bytes(self) -> int:
        """The allocator's rounding at the peak: blocks less what was asked for."""
        return self.peak_allocated_bytes - self.history.peak().n_bytes


def profile_memory(case: TrainingCase, mode: str, path: Path, *, max_entries: int = MAX_ENTRIES) -> MemoryProfile:
    """Run one watched pass of ``mode`` on random tokens and write its snapshot.

    Raises:
        ValueError: the device is not CUDA, the mode or something in the case is unknown, or ``max_entries`` were too
            few for the pass.
        OSError: the snapshot cannot be written.
    """
    device = torch.device(case.device)
    if device.type != "cuda":
        raise ValueError(f"a memory timeline needs CUDA's allocator, which {case.device!r} does not have")
    step = assemble(case)
    token_ids, targets = random_batch(case)
    phases = step.phases(mode, token_ids, targets)
    unwatched_requested, out_of_memory = 0, ""
    try:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            for phase in phases.values():
                phase()
        synchronize(device)
        unwatched_requested = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    except torch.OutOfMemoryError:
        step.optimizer.zero_grad(set_to_none=True)
        phases = step.phases(mode, token_ids, targets)

    torch.cuda.reset_peak_memory_stats(device)
    gradients: list[Label] = []
    with recording(max_entries), labelled_gradients(step, gradients), named_nodes(step) as name_nodes:
        try:
            for name, phase in phases.items():
                synchronize(device)
                annotate(MARK + name)
                torch.empty(1, dtype=torch.uint8, device=device)
                annotate("")
                if name == "backward":
                    name_nodes()
                phase()
            synchronize(device)
        except torch.OutOfMemoryError as error:
            out_of_memory = str(error)
        peak = torch.cuda.max_memory_allocated(device)
        labels = [*state_labels(step, token_ids=token_ids, targets=targets), *gradients]
        snapshot = {**torch.cuda.memory._snapshot(), "labels": [list(astuple(label)) for label in labels]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(snapshot, protocol=4))  # the latest that pytorch.org/memory_viz loads
    history = reconstruct(snapshot, torch.cuda.current_device() if device.index is None else device.index)
    if [phase.name for phase in history.phases] != list(phases)[: len(history.phases)] or not history.phases:
        raise ValueError(f"the log of {max_entries} events lost the beginning of the pass: raise max_entries")
    return MemoryProfile(
        case,
        mode,
        history,
        peak_allocated_bytes=peak,
        unwatched_requested_bytes=unwatched_requested,
        path=path,
        out_of_memory=out_of_memory,
    )


@contextmanager
def recording(max_entries: int = MAX_ENTRIES) -> Iterator[None]:
    """Log the allocator's events inside, each with its Python stack; what was logged before is forgotten."""
    torch.cuda.memory._record_memory_history("all", "alloc", "python", max_entries, clear_history=True)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)
        annotate("")


def annotate(text: str) -> None:
    """Attach ``text`` to whatever this thread allocates from now on; backward runs on a thread of its own."""
    torch.cuda.memory._set_memory_metadata(text)


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


@contextmanager
def named_nodes(step: TrainStep) -> Iterator[Callable[[], None]]:
    """Yield a function that lets every node of the last loss's graph annotate the log when backward reaches it."""
    loss_of, losses = step.loss_of, list[Tensor]()

    def keeping_loss(token_ids: Tensor, targets: Tensor) -> Tensor:
        losses[:] = [loss_of(token_ids, targets)]
        return losses[0]

    def name_nodes() -> None:
        for node in graph_nodes(losses.pop()):
            if node.next_functions:  # not where gradients are accumulated: a hook there could cost a copy
                name = node.name()
                node.register_prehook(lambda gradients, name=name: annotate(name))

    step.loss_of = keeping_loss  # type: ignore[method-assign]
    try:
        yield name_nodes
    finally:
        del vars(step)["loss_of"]  # the method again; set to it, the step would refer to itself and outlive its use
