"""One pass of a training step with the allocator watched: its snapshot, its history, its peak.

The step is run twice before, so that optimizer state, workspaces and compiled code exist and the pass is one of many;
the second of these is also the reference for what watching changes. Then each phase is marked in the allocator's log,
gradients are labelled as they are accumulated (mode ``backward`` drops them before it ends), and every autograd node
writes its name into the log when it starts, because backward runs on a thread without a Python stack.

    profile = profile_memory(case, mode="step", path=Path("profiles/raw/step.pickle"))
    profile.history.peak().by_category

A pass that runs out of memory is a result, too: its history ends where memory did. Limits: CUDA only; one device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.case import TrainingCase
from cs336_systems.harness.clock import synchronize
from cs336_systems.profiling import memory_history, memory_snapshot
from cs336_systems.profiling.graph import graph_nodes, storage_address
from cs336_systems.profiling.memory_history import GRADIENTS, OPTIMIZER_STATE, OTHER, PARAMETERS
from cs336_systems.profiling.memory_snapshot import MAX_ENTRIES, Label, annotate
from cs336_systems.training import TrainStep, assemble, random_batch


@dataclass(frozen=True)
class MemoryProfile:
    """What one watched pass showed."""

    case: TrainingCase
    mode: str
    history: memory_history.MemoryHistory
    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated`` of the watched pass."""
    unwatched_peak_bytes: int
    """The same of the pass before it, unwatched; 0 if that ran out of memory."""
    unwatched_requested_bytes: int
    """What that pass had asked for at its peak: unlike the allocator's blocks, which depend on what is cached, the same
    in every pass; 0 likewise."""
    peak_reserved_bytes: int
    """``torch.cuda.max_memory_reserved``: what the process held of the device."""
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
    unwatched_peak = unwatched_requested = 0
    out_of_memory = ""
    try:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            for phase in phases.values():
                phase()
        synchronize(device)
        unwatched_peak = torch.cuda.max_memory_allocated(device)
        unwatched_requested = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    except torch.OutOfMemoryError:
        step.optimizer.zero_grad(set_to_none=True)
        phases = step.phases(mode, token_ids, targets)

    torch.cuda.reset_peak_memory_stats(device)
    gradients: list[Label] = []
    log = memory_snapshot.recording(device, max_entries)
    with log, _labelled_gradients(step, gradients), _named_nodes(step) as name_nodes:
        try:
            for name, phase in phases.items():
                memory_snapshot.mark_phase(name, device)
                if name == "backward":
                    name_nodes()
                phase()
            synchronize(device)
        except torch.OutOfMemoryError as error:
            out_of_memory = str(error)
        peak = torch.cuda.max_memory_allocated(device)
        labels = [*state_labels(step, token_ids=token_ids, targets=targets), *gradients]
        snapshot = memory_snapshot.take_snapshot(labels)
    memory_snapshot.write_snapshot(path, snapshot)
    index = torch.cuda.current_device() if device.index is None else device.index
    history = memory_history.reconstruct(snapshot, index)
    if [phase.name for phase in history.phases] != list(phases)[: len(history.phases)] or not history.phases:
        raise ValueError(f"the log of {max_entries} events lost the beginning of the pass: raise max_entries")
    return MemoryProfile(
        case,
        mode,
        history,
        peak_allocated_bytes=peak,
        unwatched_peak_bytes=unwatched_peak,
        unwatched_requested_bytes=unwatched_requested,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
        path=path,
        out_of_memory=out_of_memory,
    )


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
def _labelled_gradients(step: TrainStep, labels: list[Label]) -> Iterator[None]:
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
def _named_nodes(step: TrainStep) -> Iterator[Callable[[], None]]:
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
        step.loss_of = loss_of  # type: ignore[method-assign]
