"""Who updates which parameters, and how the results travel: flat buffers, buckets, and whole tensors with owners.

Parameters move into flat buffers once, at construction (``param.data`` becomes a view), so that a collective sends many
tensors without copying any. A *bucket* is what is updated and sent together: while its collectives run, the next one
is updated. Two layouts serve ``ShardedOptimizer``:

    owned       (here) each parameter has one owner, each buffer the parameters of one owner. A bucket is one buffer of
                every owner: all of them update theirs at the same time, then each broadcasts.
    scattered   (scattered.py) buffers are cut into equal shards, one per rank, wherever the cut falls. A bucket is one
                buffer: its gradients are reduce-scattered, each rank updates its slices, the shards are all-gathered.

Parameters are laid out in runs (``neighbours.py``): those that are multiplied as one matrix stay one, whose rows one
buffer holds, in the default form for one owner. Every rank must lay out the same runs in the same order: the
collectives follow from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.costs.sharding import BucketPlan, greedy_partition, plan_buckets
from cs336_systems.distributed.neighbours import neighbours, starts_in

Runs = list[list[Tensor]]


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements ``start`` to ``stop`` of a parameter, in memory order, which ``rank`` updates.

    ``tensor`` is what that rank's optimizer sees: the parameter, or a one-dimensional view of it; None elsewhere.
    """

    rank: int
    start: int
    stop: int
    tensor: Tensor | None


class ParameterBucket(Protocol):
    """Parameters that are updated and sent together."""

    @property
    def parameters(self) -> list[Tensor]:
        """All of them, whoever updates them."""

    def prepare(self) -> list[Tensor]:
        """What this rank has to update, gradients in place."""

    def send(self) -> list[dist.Work]:
        """Start telling the other ranks, without waiting."""


@dataclass
class BucketLayout:
    """Buckets in the order in which every rank runs them, and where each parameter's pieces are."""

    buckets: list[ParameterBucket]
    pieces: dict[Tensor, list[Piece]]


def in_memory_order(flat: Tensor, like: Tensor) -> Tensor:
    """A view of the first elements of ``flat`` with the shape and memory format of ``like``."""
    return flat.as_strided(like.shape, torch.empty_like(like.detach(), device="meta").stride())


def check_dense(parameter: Tensor, name: str) -> None:
    """Raise ValueError if a parameter has a gradient that is sparse."""
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} must be dense to be sharded, got layout {parameter.grad.layout}")


class FlatBuffer:
    """Parameters of one dtype and device as views of one flat tensor, in which each run begins where ``plan`` says."""

    def __init__(self, runs: Sequence[Sequence[Tensor]], plan: BucketPlan) -> None:
        self.parameters = [parameter for run in runs for parameter in run]
        first = self.parameters[0]
        itemsize = first.element_size()
        self.flat = torch.zeros(plan.n_bytes // itemsize, dtype=first.dtype, device=first.device)
        self._offsets: list[int] = []
        self._views: dict[Tensor, Tensor] = {}
        for run, offset in zip(runs, plan.offsets, strict=True):
            begin = offset // itemsize
            # Each run with a storage of its own on the same memory, for ``torch.save`` writes whole storages.
            rows = torch.from_dlpack(self.flat[begin : begin + sum(parameter.numel() for parameter in run)])
            for parameter, start in zip(run, starts_in(run), strict=True):
                self._offsets.append(begin + start)
                self._views[parameter] = in_memory_order(rows[start:], parameter)
        self.hold()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """``flat``, which is as long as this buffer, seen as one tensor like each parameter."""
        return [in_memory_order(flat[o:], p) for o, p in zip(self._offsets, self.parameters, strict=True)]

    def cuts(self, world_size: int) -> list[list[tuple[int, int, int]]]:
        """For each parameter its (rank, start, stop), in elements, when the buffer is cut in equal shards."""
        sizes = [parameter.numel() for parameter in self.parameters]
        plan = BucketPlan(tuple(range(len(sizes))), tuple(self._offsets), self.flat.numel())
        return plan.pieces(sizes, world_size)

    def holds(self, parameter: Tensor) -> bool:
        """Whether one of the parameters is a view of the buffer, not moved by another optimizer or by hand."""
        return parameter.data_ptr() == self._views[parameter].data_ptr()

    def hold(self) -> None:
        """Make every parameter a view of the buffer again, if somebody gave it other memory.

        Raises:
            ValueError: a parameter has been moved to another device or dtype.
        """
        for parameter, view in self._views.items():
            if self.holds(parameter):
                continue
            if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                raise ValueError(
                    f"a parameter moved from {view.dtype} on {view.device} to {parameter.dtype} on {parameter.device} "
                    "after its sharded optimizer was made; make the optimizer last"
                )
            view.copy_(parameter.detach())
            parameter.data = view

    @property
    def trainable(self) -> bool:
        """Whether a step can change anything in it: the same answer on every rank."""
        return any(_is_trainable(parameter) for parameter in self.parameters)


def _is_trainable(parameter: Tensor) -> bool:
    return parameter.requires_grad or parameter.grad is not None


def runs_of(parameters: Sequence[Tensor]) -> Runs:
    """The parameters in runs, none of which is frozen in part: what is frozen now has runs of its own."""
    return neighbours(parameters, alike=lambda parameter: parameter.requires_grad)


def flat_buffers(runs: Iterable[Sequence[Tensor]], bucket_bytes: int, shards: int) -> list[FlatBuffer]:
    """Flat buffers over runs in order; dtypes, devices, and what is frozen now, have buffers of their own.

    Buffers are in the order of their last runs, so those whose parameters become ready early come early.
    """
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[tuple[int, Sequence[Tensor]]]] = {}
    for position, run in enumerate(runs):
        kind = (run[0].dtype, run[0].device, run[0].requires_grad)
        kinds.setdefault(kind, []).append((position, run))
    planned = [
        ([members[i] for i in plan.members], plan)
        for members in kinds.values()
        for plan in plan_buckets([_n_bytes(run) for _, run in members], bucket_bytes, shards)
    ]
    planned.sort(key=lambda entry: entry[0][-1][0])
    return [FlatBuffer([run for _, run in members], plan) for members, plan in planned]


def _n_bytes(run: Sequence[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in run)


def local_layout(parameters: Sequence[Tensor]) -> BucketLayout:
    """World size 1: everything is updated here, nothing travels, no memory moves."""
    pieces = {parameter: [Piece(0, 0, parameter.numel(), parameter)] for parameter in parameters}
    return BucketLayout([_LocalBucket(list(parameters))], pieces)


@dataclass
class _LocalBucket:
    parameters: list[Tensor]

    def prepare(self) -> list[Tensor]:
        return self.parameters

    def send(self) -> list[dist.Work]:
        return []


def owned_layout(runs: Runs, rank: int, world_size: int, bucket_bytes: int, loads: list[int]) -> BucketLayout:
    """Whole runs to owners, balanced by bytes; trainable ones first, as the others have no state.

    Args:
        loads: bytes of trainable parameters that each rank has already; what is added here is added there.
    """
    owners: dict[Tensor, int] = {}
    for trainable in (True, False):
        chosen = [run for run in runs if run[0].requires_grad is trainable]
        chosen_by = greedy_partition([_n_bytes(run) for run in chosen], world_size, loads if trainable else ())
        for run, owner in zip(chosen, chosen_by, strict=True):
            owners |= dict.fromkeys(run, owner)
    for parameter, owner in owners.items():
        loads[owner] += parameter.nbytes * parameter.requires_grad
    by_owner = [
        flat_buffers((run for run in runs if owners[run[0]] == owner), bucket_bytes, 1) for owner in range(world_size)
    ]
    buckets: list[ParameterBucket] = [
        _OwnedBucket([(owner, buffer) for owner, buffer in enumerate(buffers) if buffer is not None], rank)
        for buffers in zip_longest(*by_owner)
    ]
    pieces = {
        parameter: [Piece(owner, 0, parameter.numel(), parameter if owner == rank else None)]
        for parameter, owner in owners.items()
    }
    return BucketLayout(buckets, pieces)


@dataclass
class _OwnedBucket:
    """One buffer of every owner that still has one."""

    buffers: list[tuple[int, FlatBuffer]]
    rank: int

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for _, buffer in self.buffers for parameter in buffer.parameters]

    def prepare(self) -> list[Tensor]:
        for _, buffer in self.buffers:
            buffer.hold()
        return [parameter for owner, buffer in self.buffers if owner == self.rank for parameter in buffer.parameters]

    def send(self) -> list[dist.Work]:
        return [
            dist.broadcast(buffer.flat, src=owner, async_op=True) for owner, buffer in self.buffers if buffer.trainable
        ]
