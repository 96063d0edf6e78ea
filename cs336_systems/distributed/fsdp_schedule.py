"""When FSDP gathers, frees and reduces: the order in which a module's units run, and what follows from it.

Forward and backward are one list of runs, walked to its end and back:

    forward   run i    gather its groups (unless they were gathered ahead), start the gathers of the next ``prefetch``
                       runs, wait for its own, run, free
    backward  run i    the gradient has reached an output of it: free the groups that only later runs used, gather its
                       own and those of the ``prefetch`` runs before it, start the reductions of the freed ones, wait

What comes next in forward is read off the previous forward; in backward, off this one. So the first forward gathers
nothing ahead. Once the last run has begun nothing is freed, since backward starts there. A group that several runs use
stays between the first and the last of them, in either direction: a tied embedding is gathered once.

That everything after run i is finished when the gradient reaches run i's output is a property of autograd's engine: of
the nodes that are ready it takes the one made last, and ``AccumulateGrad`` before any other. Should a gradient come
later all the same, the end of backward reduces it; a reduction adds to what is there. Which collectives run, and in
which order, follows from the order of the units alone, never from which parameters received a gradient, so that ranks
agree on it even where they disagree on that.

Limits: activation checkpointing must be non-reentrant. When a segment of several units runs
again, those that backward's look-ahead has not reached are gathered for it, one by one, and again for their backward.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed.fsdp_parameters import Reduction, ReplicatedParameters, ShardedGroup, ShardedParameter
from cs336_systems.distributed.fsdp_units import Unit


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


def _inside_backward() -> bool:
    """Whether autograd is running on this thread: a unit called now recomputes what its backward needs."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """Runs units with their weights whole, and leaves averaged gradients on the shards.

    Args:
        prefetch: how many runs ahead groups are gathered.
    """

    def __init__(self, groups: list[ShardedGroup], replicated: ReplicatedParameters, prefetch: int) -> None:
        self.groups = groups
        self.replicated = replicated
        self.prefetch = prefetch
        self.synchronize = True
        """Whether backward reduces gradients or sets them aside."""
        self._order: list[Unit] = []
        """Units as the previous forward ran them."""
        self._last_use: dict[ShardedGroup, int] = {}
        self._running: list[Unit] = []
        self._on_course = False
        """Whether this forward has followed ``_order`` so far."""
        self._newest: Callable[[], _Run | None] = lambda: None
        self._runs: dict[ShardedGroup, weakref.WeakSet[_Run]] = {}
        """Runs that backward has yet to come to; they live as long as their graph, whose hooks hold them."""
        self._n_runs = 0
        self._first_run = 0
        self._gathered: dict[ShardedGroup, None] = {}
        self._task = -1
        self._touched: dict[ShardedGroup, None] = {}
        """Groups whose gradients the present backward is producing."""
        self._reduction: Reduction | None = None
        self._missing: list[ShardedParameter] = []
        self._set_aside: dict[ShardedGroup, None] = {}
        """Groups with gradients of backward passes that were not synchronized."""
        self._unfinished = False
        """Whether there may be gradients that no ``finish`` has averaged; the same on every rank."""

    # forward

    def begin_forward(self) -> None:
        """Start a new list of runs with the optimizer's latest values."""
        if _inside_backward():
            return
        self._free(group for group in self._gathered if not group.users)
        self.replicated.refresh()
        self._running = []
        self._on_course = bool(self._order)
        self._first_run = self._n_runs
        self._unfinished |= torch.is_grad_enabled()

    def end_forward(self) -> None:
        """Remember the order; without a backward to come, free what is still there."""
        if _inside_backward():
            return
        backward_follows = self._n_runs > self._first_run
        if not (backward_follows and self._on_course):
            self._free(self._gathered)
        self._order = self._running
        self._last_use = {group: i for i, unit in enumerate(self._order) for group in unit.groups}

    def forward(self, unit: Unit, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's own code with its weights whole."""
        recomputing = _inside_backward()
        held = set(self._gathered) if recomputing else set()
        position, started = len(self._running), self._n_runs
        self._gather(unit.groups)
        if not recomputing:
            self._running.append(unit)
            self._on_course &= self._order[position : position + 1] == [unit]
            if self._on_course:
                for ahead in self._order[position + 1 : position + 1 + self.prefetch]:
                    self._gather(ahead.groups)
        for group in unit.groups:
            group.wait()
            group.users += 1
        unit.show_working()
        returned = False
        try:
            output = call(*args, **kwargs)
            for group in unit.groups:
                group.check_in_place()
            returned = True
        finally:
            unit.show_kept()
            for group in unit.groups:
                group.users -= 1
            unused = [group for group in unit.groups if not group.users and group not in held]
            if returned and not recomputing:
                self._record(unit, started, output)
                unused = [group for group in unused if not self._needed_after(position, group)]
            self._free(unused)
        return output

    def _needed_after(self, position: int, group: ShardedGroup) -> bool:
        """Whether the group is used again so soon after this run that it stays."""
        if not self._on_course:
            return False
        last_has_begun = len(self._running) == len(self._order)
        return self._last_use[group] > position or (last_has_begun and self._n_runs > self._first_run)

    def _record(self, unit: Unit, started: int, output: Any) -> None:
        """Have the unit's backward announced, if there will be one."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not (outputs and torch.is_grad_enabled()):
            return
        run = _Run(unit, started, self._n_runs, self._first_run, self._newest() if self._n_runs else None)
        self._newest = weakref.ref(run)
        self._n_runs += 1
        for group in unit.groups:
            self._runs.setdefault(group, weakref.WeakSet()).add(run)
        register_multi_grad_hook(outputs, lambda _: self._before_backward(run), mode="any")

    # backward

    @torch.no_grad()
    def _before_backward(self, run: _Run) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._after_backward)
        ahead = list(islice(_back_from(run.previous), self.prefetch))
        window = {group for each in (run, *ahead) for group in each.unit.groups}
        self._free(
            group
            for group in self._gathered
            if group not in window and not group.users and not self._used(group, run.first, run.number)
        )
        for each in (run, *ahead):
            self._gather(each.unit.groups)
        finished = [
            group for group in self._touched if group not in run.unit.groups and not self._used(group, 0, run.number)
        ]
        for group in finished:
            self._reduce(group)
        for group in run.unit.groups:
            self._touched[group] = None
            group.wait()

    @torch.no_grad()
    def _after_backward(self) -> None:
        """The end of a backward pass: whatever is still to be reduced or freed."""
        self._task = -1
        self._free(group for group in self._gathered if not group.users)
        for group in [*self._touched, *(group for group in self.groups if group.has_gradients)]:
            if group in self._touched or group.has_gradients:
                self._reduce(group)
        self.replicated.collect()
        self._runs.clear()
        self._n_runs, self._first_run = 0, 0
        self._unfinished = True

    def _reduce(self, group: ShardedGroup) -> None:
        """Start the group's reduction once the one before is done, so that no more than two groups wait whole."""
        self._touched.pop(group, None)
        if not group.trainable:
            return
        if not self.synchronize:
            group.accumulate()
            self._set_aside[group] = None
            return
        self._finish_reduction()
        self._set_aside.pop(group, None)
        self._reduction = group.reduce()

    def _finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.finish()
            self._missing += self._reduction.missing
            self._reduction = None

    @torch.no_grad()
    def finish(self, device: torch.device) -> None:
        """Wait for the reductions, and average the gradients of the replicated parameters.

        A parameter that no rank has used keeps no gradient, as on one device. Only a rank that lacks a gradient has to
        look at the counts, and so to wait for the device.
        """
        if not (self._unfinished and self.synchronize):
            return
        self._unfinished = False
        for group in list(self._set_aside):
            self._reduce(group)
        self._finish_reduction()
        sharded = [parameter for group in self.groups for parameter in group.trainable]
        counts = self.replicated.all_reduce(device, sharded)
        if self._missing:
            used = {parameter for parameter, count in zip(sharded, counts.tolist(), strict=True) if count}
            for parameter in self._missing:
                if parameter not in used:
                    parameter.kept.grad = None
        for parameter in sharded:
            parameter.has_gradient = False
        self._missing.clear()

    # groups

    def _used(self, group: ShardedGroup, first: int, last: int) -> bool:
        """Whether one of the runs first..last uses the group, or takes place inside one that does."""
        return any(run.started <= last and first <= run.number for run in self._runs.get(group, ()))

    def _gather(self, groups: list[ShardedGroup]) -> None:
        for group in groups:
            group.gather()
            self._gathered[group] = None

    def _free(self, groups: Iterable[ShardedGroup]) -> None:
        for group in list(groups):
            group.release()
            self._gathered.pop(group, None)


def _back_from(run: _Run | None) -> Iterator[_Run]:
    while run is not None:
        yield run
        run = run.previous
