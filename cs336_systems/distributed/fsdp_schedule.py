"""When FSDP gathers, frees and reduces: the order in which a module's units run, and what follows from it.

Forward and backward are one list of runs, walked to its end and back:

    forward   run i    gather its groups (unless they were gathered ahead), start the gathers of the next ``prefetch``
                       runs, wait for its own, run, free
    backward  run i    the gradient has reached an output of it: free the groups that only later runs used, gather its
                       own and those of the ``prefetch`` runs before it, start the reductions of the freed ones, wait

A group that several runs use stays between the first and the last of them, in either direction: a tied embedding is
gathered once. Each class below holds what lives equally long: one forward, the runs of a graph, one backward, the
gradients of a step.

Limits: activation checkpointing must be non-reentrant. When a segment of several units runs again, those that
backward's look-ahead has not reached are gathered for it, one by one, and again for their backward.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed.fsdp_parameters import (
    GroupState,
    Reduction,
    ReplicatedParameters,
    ShardedGroup,
    ShardedParameter,
)
from cs336_systems.distributed.fsdp_units import Unit

_NO_TASK = -1
"""What autograd says where no backward runs on this thread."""


class _Forward:
    """One forward: the units that it has run, beside those of the previous one, which it is expected to run.

    The first forward expects nothing, and so gathers nothing ahead.
    """

    def __init__(self, expected: list[Unit]) -> None:
        self.units: list[Unit] = []
        self._expected = expected
        self.as_expected = bool(expected)
        self._last_use = {group: i for i, unit in enumerate(expected) for group in unit.groups}

    def begin(self, unit: Unit, prefetch: int) -> list[Unit]:
        """Note that a unit begins; the next ones, as far as they can be told."""
        position = len(self.units)
        self.units.append(unit)
        self.as_expected &= self._expected[position : position + 1] == [unit]
        return self._expected[position + 1 : position + 1 + prefetch] if self.as_expected else []

    def keeps(self, group: ShardedGroup, position: int, backward_follows: bool) -> bool:
        """Whether the group is used again so soon after the unit at the position that it stays."""
        if not self.as_expected:
            return False
        # Backward starts at the last run, so once that has begun nothing is freed.
        last_has_begun = len(self.units) == len(self._expected)
        return self._last_use[group] > position or (last_has_begun and backward_follows)


@dataclass(eq=False)
class _Run:
    """One call of a unit in a forward that backward will come back to."""

    unit: Unit
    started: int
    """How many runs had ended when this one began: a unit inside a unit ends, and begins its backward, on its own."""
    number: int
    """How many had ended before this one did, since the last backward."""
    first: int
    """Number of the first run of the same forward."""
    previous: "_Run | None"


class _Runs:
    """The runs that backward has yet to come to: of all forwards since the last backward.

    References are weak. A run lives as long as its graph, whose hooks hold it: one that is dropped needs no weights.
    """

    def __init__(self) -> None:
        self.n = 0
        self.first = 0
        """Number of the first run of the latest forward."""
        self._newest: Callable[[], _Run | None] = lambda: None
        self._of_group: dict[ShardedGroup, weakref.WeakSet[_Run]] = {}

    def add(self, unit: Unit, started: int) -> _Run:
        run = _Run(unit, started, self.n, self.first, self._newest())
        self.n += 1
        self._newest = weakref.ref(run)
        for group in unit.groups:
            self._of_group.setdefault(group, weakref.WeakSet()).add(run)
        return run

    def use(self, group: ShardedGroup, first: int, last: int) -> bool:
        """Whether one of the runs first..last uses the group, or takes place inside one that does."""
        return any(run.started <= last and first <= run.number for run in self._of_group.get(group, ()))


@dataclass
class _Backward:
    """One backward pass."""

    task: int = _NO_TASK
    """Autograd's number of it."""
    producing: dict[ShardedGroup, None] = field(default_factory=dict)
    """Groups whose gradients it is making, in the order in which it came to them."""


@dataclass
class _Gradients:
    """The gradients of a step on their way through backward passes to ``finish``."""

    unfinished: bool = False
    """Whether there may be some that no ``finish`` has averaged; the same on every rank."""
    accumulated: dict[ShardedGroup, None] = field(default_factory=dict)
    """Groups with gradients of backward passes that were not synchronized."""
    reduction: Reduction | None = None
    """The one that is under way."""
    missing: list[ShardedParameter] = field(default_factory=list)
    """Parameters whose gradient is zeros unless another rank has one."""


def _inside_backward() -> bool:
    """Whether autograd is running on this thread: a unit called now recomputes what its backward needs."""
    return torch._C._current_graph_task_id() != _NO_TASK


class Schedule:
    """Runs units with their parameters unsharded, and leaves averaged gradients on the shards.

    Args:
        prefetch: how many runs ahead groups are gathered.
    """

    def __init__(self, groups: list[ShardedGroup], replicated: ReplicatedParameters, prefetch: int) -> None:
        self.groups = groups
        self.replicated = replicated
        self.prefetch = prefetch
        self.synchronize = True
        """Whether backward reduces gradients or accumulates them."""
        self._order: list[Unit] = []
        """Units as the last complete forward ran them."""
        self._forward = _Forward(self._order)
        self._runs = _Runs()
        self._backward = _Backward()
        self._gradients = _Gradients()

    # forward

    def begin_forward(self) -> None:
        """Start a new list of runs."""
        if _inside_backward():
            return
        self._free_idle()
        self._forward = _Forward(self._order)
        self._runs.first = self._runs.n
        self._gradients.unfinished |= torch.is_grad_enabled()

    def end_forward(self) -> None:
        """Remember the order; without a backward to come, free what is still there."""
        if _inside_backward():
            return
        if not (self._forward.as_expected and self._backward_follows):
            for group in self._gathered():
                group.free()
        self._order = self._forward.units

    def forward(self, unit: Unit, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's own code with its parameters unsharded."""
        unit.check_slots()
        recomputing = _inside_backward()
        # What backward has gathered ahead is the unit's own backward's, which frees it.
        stays = {group for group in unit.groups if group.state is not GroupState.SHARDED} if recomputing else set()
        position, started = len(self._forward.units), self._runs.n
        ahead = [] if recomputing else self._forward.begin(unit, self.prefetch)
        for each in (unit, *ahead):
            for group in each.groups:
                group.gather()
        for group in unit.groups:
            group.wait()
            group.users += 1
        if not recomputing:
            self.replicated.refresh(parameter for *_, parameter in unit.param_slots)
        unit.to_unsharded()
        returned = False
        try:
            output = call(*args, **kwargs)
            for group in unit.groups:
                group.check_in_place()
            returned = True
        finally:
            unit.to_sharded()
            for group in unit.groups:
                group.users -= 1
            if returned and not recomputing:
                self._record(unit, started, output)
                follows = self._backward_follows
                stays = {group for group in unit.groups if self._forward.keeps(group, position, follows)}
            for group in unit.groups:
                if not group.users and group not in stays:
                    group.free()
        return output

    @property
    def _backward_follows(self) -> bool:
        """Whether backward may come back to the latest forward."""
        return self._runs.n > self._runs.first

    def _record(self, unit: Unit, started: int, output: Any) -> None:
        """Have the unit's backward announced, if there will be one."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and torch.is_grad_enabled():
            run = self._runs.add(unit, started)
            register_multi_grad_hook(outputs, lambda _: self._before_backward(run), mode="any")

    # backward

    @torch.no_grad()
    def _before_backward(self, run: _Run) -> None:
        """The gradient has reached an output of the run.

        Everything after the run is finished then: of the nodes that are ready, autograd's engine takes the one made
        last, and ``AccumulateGrad`` before any other.
        """
        task = torch._C._current_graph_task_id()
        if task != self._backward.task:
            self._backward.task = task
            Variable._execution_engine.queue_callback(self._after_backward)
        window = [run]
        while len(window) <= self.prefetch and (previous := window[-1].previous) is not None:
            window.append(previous)
        needed = {group for each in window for group in each.unit.groups}
        for group in self._gathered():
            if group not in needed and not group.users and not self._runs.use(group, run.first, run.number):
                group.free()
        for each in window:
            for group in each.unit.groups:
                group.gather()
        # Which groups are reduced, and in which order, follows from the order of the runs alone, never from which
        # parameters received a gradient: ranks may differ in that, and their collectives must not.
        for group in list(self._backward.producing):
            if group not in run.unit.groups and not self._runs.use(group, 0, run.number):
                self._reduce(group)
        for group in run.unit.groups:
            self._backward.producing[group] = None
            group.wait()

    @torch.no_grad()
    def _after_backward(self) -> None:
        """The end of a backward pass: whatever is still to be reduced or freed."""
        self._backward.task = _NO_TASK
        self._free_idle()
        for group in list(self._backward.producing):
            self._reduce(group)
        for group in self.groups:
            if group.has_gradients:  # it came after its group was reduced: a reduction adds to what is there
                self._reduce(group)
        self.replicated.collect()
        self._runs = _Runs()
        self._gradients.unfinished = True

    def _reduce(self, group: ShardedGroup) -> None:
        """Start the group's reduction, or accumulate its gradients if this pass is not to be synchronized."""
        self._backward.producing.pop(group, None)
        if not group.trainable:
            return
        if not self.synchronize:
            group.accumulate()
            self._gradients.accumulated[group] = None
            return
        # Only one is under way: with the group that backward fills, no more than two have whole gradients in memory.
        self._finish_reduction()
        self._gradients.accumulated.pop(group, None)
        self._gradients.reduction = group.reduce()

    def _finish_reduction(self) -> None:
        if self._gradients.reduction is not None:
            self._gradients.reduction.finish()
            self._gradients.missing += self._gradients.reduction.missing
            self._gradients.reduction = None

    @torch.no_grad()
    def finish(self, device: torch.device) -> None:
        """Wait for the reductions, and average the gradients of the replicated parameters.

        A parameter that no rank has used keeps no gradient, as on one device.
        """
        if not (self._gradients.unfinished and self.synchronize):
            return
        self._gradients.unfinished = False
        for group in list(self._gradients.accumulated):
            self._reduce(group)
        self._finish_reduction()
        sharded = [parameter for group in self.groups for parameter in group.trainable]
        # The last message of a step, and sent even where nothing is replicated: it also counts who has a gradient.
        counts = self.replicated.all_reduce(device, sharded)
        if self._gradients.missing:  # only then does the host look at the counts, and so wait for the device
            used = {parameter for parameter, count in zip(sharded, counts.tolist(), strict=True) if count}
            for parameter in self._gradients.missing:
                if parameter in used:
                    parameter.run_hooks()
                else:
                    parameter.sharded_param.grad = None
        for parameter in sharded:
            parameter.has_gradient = False
        self._gradients.missing.clear()

    # groups

    def _gathered(self) -> list[ShardedGroup]:
        return [group for group in self.groups if group.state is not GroupState.SHARDED]

    def _free_idle(self) -> None:
        for group in self._gathered():
            if not group.users:
                group.free()
