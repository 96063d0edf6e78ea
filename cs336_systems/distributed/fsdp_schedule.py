"""When FSDP gathers, frees and reduces: the order in which a module's units run, and what follows from it.

Forward and backward are one list of runs (``fsdp_units.py``), walked to its end and back:

    forward   run i    gather its groups (unless they were gathered ahead), start the gathers of the next ``prefetch``
                       runs, wait for its own, run, free
    backward  run i    when the gradient has reached an output of run i: free the groups that only later runs used, take
                           their gradients, gather the groups of run i and of the ``prefetch`` runs before it, send the
                           gradients, wait

    Backward walks the whole list. A run that this rank's gradient skips is still gathered and reduced in its turn, as
    other ranks may compute with it. A group that several runs use stays gathered from the first to the last of them, in
    either direction: a tied embedding is gathered once. All gradients of a backward are averaged when ``backward``
    returns; after an error, parameters keep the gradients that they had received in ``grad`` by then.

    Limits: no double backward, and no backward inside a backward, so no reentrant checkpoints. When a checkpointed
    segment of several units is recomputed, units that backward has not prefetched are gathered for it one by one, and
    gathered again for their backward: in a model with such segments, the losses of all ranks must use the same outputs.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed.fsdp_gradients import Gradients
from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup, ShardedParameter
from cs336_systems.distributed.fsdp_units import Backward, Elsewhere, Forward, Run, ShardedUnits, Unit
from cs336_systems.distributed.presence import Agreement

_NO_TASK = -1  # autograd's number of the running backward when none runs on this thread


def inside_backward() -> bool:
    """Whether autograd is running on this thread: a unit called now recomputes what its backward needs."""
    return torch._C._current_graph_task_id() != _NO_TASK


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, however containers and dataclasses are nested."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                yield from _tensors(getattr(leaf, each.name))


class GatherOrder:
    """Runs units with unsharded parameters, gathers ``prefetch`` units ahead, and averages gradients into shards."""

    def __init__(self, sharded: ShardedUnits, prefetch: int) -> None:
        self.groups = sharded.groups
        self.replicated = sharded.replicated
        self.prefetch = prefetch
        self._turns, self._quantized_rows = sharded.turns, sharded.quantized_rows
        self._agreement = Agreement(sharded.turns.group, sharded.turns.replicas)
        self._complete: dict[Hashable, Forward] = {}
        """For each part, the last forward that completed; its next forward is expected to call the same units."""
        self._forward = Forward()
        self._n_to_come = 0  # the number of forwards since the last backward that still may have a backward
        self._backward: Backward | None = None
        self._running: Unit | None = None
        self._n_tasks = 0
        self._reserved: dict[ShardedGroup, int] = {}
        """Groups of the first unit of an expected task, with the task's number, until the task reaches the unit."""
        self.gradients = Gradients(sharded.groups, sharded.replicated)
        slots = dict.fromkeys(slot for unit in sharded.units for slot in unit.param_slots)
        guards = {parameter: Elsewhere(parameter) for group in self.groups for parameter in group.parameters}
        self._guards = [(slot, guards[p]) for slot in slots if isinstance(p := slot.parameter, ShardedParameter)]
        ours = weakref.ref(self)

        def announce(_: Tensor) -> None:
            order = ours()  # Python cannot collect cycles through tensors' hooks
            if order is not None and inside_backward():  # not in deferred matmuls of a block's backward
                order._current_backward()

        for parameter in self.replicated.parameters:
            if not (parameter.unsharded_param.is_floating_point() or parameter.unsharded_param.is_complex()):
                continue
            requires_grad = parameter.unsharded_param.requires_grad
            parameter.unsharded_param.requires_grad_()  # hooks need it; a frozen parameter may be unfrozen later
            parameter.unsharded_param.register_post_accumulate_grad_hook(announce)
            parameter.unsharded_param.requires_grad_(requires_grad)

    # tasks of a pipeline

    def expect(self, part: Hashable, backward: bool, *, now: bool) -> None:
        """When a task begins, gather the first unit of the next task, and keep it until that task reaches it.

        Args:
            part: the part that the next task runs; None if that is neither forward nor backward.
            backward: whether the next task runs the part backward.
            now: gather at once, because the task that begins is neither forward nor backward. A forward or backward
                gathers when ranks have agreed that it begins.
        """
        self._n_tasks += 1
        previous = self._complete.get(part) if part is not None else None
        if previous is not None and previous.units and self.prefetch:
            runs = previous.runs
            unit = previous.units[0] if not backward else runs[-1].unit if runs else previous.units[-1]
            self._reserved |= dict.fromkeys(unit.groups, self._n_tasks + 1)
            if now:
                self._gather_reserved()

    def expect_nothing(self) -> None:
        """Drop the reserved groups, as the last task has failed or no task follows."""
        self._reserved.clear()
        if not inside_backward():
            self._free_idle()

    def _gather_reserved(self) -> None:
        for group in self._reserved:
            group.gather()

    def _reached(self, unit: Unit) -> None:
        """End the reservation of a unit that the running task has reached."""
        for group in unit.groups:
            if self._reserved.get(group) == self._n_tasks:
                del self._reserved[group]

    # forward

    @contextmanager
    def forward(self, part: Hashable = None) -> Iterator[None]:
        """Run the whole forward of the wrapped module, or of a part of it, in the body."""
        if inside_backward():
            yield
            return
        self.forget_failed_backward()
        self._agree("begins a forward", gathers=True)
        self._free_idle()
        self._turns.begin_reading()
        self._gather_reserved()
        self._forward = Forward(self._complete.get(part))
        returned = False
        try:
            for slot, guard in self._guards:
                slot.check()
                slot.rest(guard)
            yield
            returned = True
        finally:
            for slot, _ in self._guards:
                if slot.resting is not slot.parameter.sharded_param:
                    slot.rest(slot.parameter.sharded_param)
            if not returned:
                self._break_off_reading()
        self._agree("ends a forward")
        self._turns.end_reading()
        self._forward.n_inside = len(self._forward.units)
        if not (self._forward.as_expected and self._forward.runs):  # without a backward to come
            self._free_idle()
        self._complete[part] = self._forward

    def run(self, unit: Unit, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's own code with its parameters unsharded; RuntimeError while another unit is running."""
        for slot in unit.param_slots:
            slot.check()
        outer = self._running
        if outer is not None and outer.groups:
            raise RuntimeError(f"{unit.name} is called by {outer.name}: under FSDP no unit may call another")
        recomputing = inside_backward()
        if recomputing:
            self._current_backward()
            forward, ahead = Forward(), []
            # Groups that backward has prefetched are freed by the unit's own backward.
            stays = [group for group in unit.groups if group.state is not GroupState.SHARDED]
        else:
            self.forget_failed_backward()
            forward, stays = self._forward, []
            if forward.left()[:1] != [unit]:
                self._agree(f"calls {unit.name}", gathers=True)
                forward.as_expected = False
                self._free_idle()  # perhaps made from an older value
            forward.units.append(unit)
            ahead = forward.expected[len(forward.units) :][: self.prefetch] if forward.as_expected else []
        position, started = len(forward.units) - 1, len(forward.runs)
        for each in (unit, *ahead):
            for group in each.groups:
                group.gather()
        for group in unit.groups:
            group.wait()
        if not recomputing:
            self._reached(unit)
            self.replicated.refresh(slot.parameter for slot in unit.param_slots)
        self._running = unit
        unit.to_unsharded()
        returned = False
        try:
            output = call(*args, **kwargs)
            for group in unit.groups:
                group.check_in_place()
            returned = True
        finally:
            self._running = outer
            unit.to_sharded()
            if returned:
                self._record(None if recomputing else forward, unit, started, output)
                stays += [group for group in unit.groups if forward.keeps(group, position)]
            for group in unit.groups:
                if group not in stays and group not in self._reserved:
                    group.free()
        return output

    def _break_off_reading(self) -> None:
        """End reading after an error on this rank; others may still copy, and do not wait for this rank."""
        if self._turns.taken:
            self._turns.break_off()
            self._forward.as_expected = False

    def _agree(self, what: str, gathers: bool = False) -> None:
        """Check that all ranks are about to do the same; not needed before the call of an expected unit.

        Other ranks may be repeating the last forward to its end, and wait for this rank in every gather, so this rank
        first takes part in those. If the next action ``gathers`` and any rank's rows have changed, all requantize.
        """
        forward = self._forward
        if left := forward.left():
            what += f" before {left[0].name}"
            for position, unit in enumerate(left, len(forward.units)):
                for group in unit.groups:
                    group.gather()
                for group in unit.groups:
                    if not forward.keeps(group, position):
                        self._free(group)
            forward.as_expected = False
            self._free_idle()
        try:
            stale = self._agreement.check(what, gathers and self._quantized_rows.stale)
        except RuntimeError:
            self._n_to_come = 0  # after a disagreement all ranks start again from the same state
            self._break_off_reading()
            raise
        if stale:
            self._quantized_rows.renew()
            if self._turns.reading:
                self._turns.meet()

    def _record(self, forward: Forward | None, unit: Unit, started: int, output: Any) -> None:
        """Register a hook for the unit's backward, if there will be one; it raises if backward has run the unit."""
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not outputs or not torch.is_grad_enabled():
            return
        if forward is None:
            register_multi_grad_hook(outputs, partial(_refuse_backward_inside, unit.name), mode="any")
            return
        if forward is self._forward and not forward.runs:
            self._n_to_come += 1
            forward.serial = self._n_to_come
        run = forward.add_run(unit, started)
        register_multi_grad_hook(outputs, lambda _: self._before_backward(run), mode="any")

    # backward

    def _current_backward(self) -> Backward:
        """The backward pass that autograd is running; a callback at its end is queued."""
        if self._backward is None or self._backward.lives() is None:
            self.forget_failed_backward()
            end = partial(self._after_backward)
            self._backward = Backward(weakref.ref(end))
            Variable._execution_engine.queue_callback(end)  # autograd keeps it alive until the pass ends
            self._agree("begins a backward", gathers=True)
            self._turns.begin_reading()
            self._gather_reserved()
        return self._backward

    def _before_backward(self, run: Run) -> None:
        """Prepare the run's backward when the gradient has reached one of its outputs.

        The backward of all later runs has then finished: of the nodes that are ready, autograd's engine takes
        ``AccumulateGrad`` first, and otherwise the one made last.

        Raises:
            RuntimeError: this is a double backward (``create_graph=True``).
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{run.unit.name} is under FSDP, which frees weights after backward and so cannot compute gradients of "
                "gradients: call backward without create_graph=True"
            )
        with torch.no_grad():
            backward, forward = self._current_backward(), run.forward
            self._walk_out(besides=forward)
            if forward not in backward.walks:
                if self._n_to_come > 1:
                    self._agree(f"comes to the backward of its forward {forward.serial} of {self._n_to_come}")
                backward.walks[forward] = len(forward.runs)
            self._walk(forward, run.number)
            self._come_to(run)
            self._reached(run.unit)
            for group in run.unit.groups:
                group.wait()
            run.unit.to_unsharded()
            backward.open.append(run)

    def _walk_out(self, besides: Forward | None = None) -> None:
        """Walk all forwards that this backward has reached, except one, back to their beginning."""
        for forward in self._current_backward().walks:
            if forward is not besides:
                self._walk(forward, -1)

    def _walk(self, forward: Forward, number: int) -> None:
        """Visit the runs after the number, which this rank's gradient has skipped, and close those that are open."""
        backward = self._current_backward()
        passed_by = reversed(forward.runs[number + 1 : max(0, backward.walks[forward])])
        backward.walks[forward] = reached = min(backward.walks[forward], number)
        for run in [run for run in backward.open if run.forward is forward and run.started > reached]:
            backward.open.remove(run)
            run.unit.to_sharded()
        for run in passed_by:
            self._come_to(run)

    def _come_to(self, run: Run) -> None:
        """Gather the groups that the run's backward needs; free and reduce those that are no longer needed."""
        backward, forward, number = self._current_backward(), run.forward, run.number
        window = forward.runs[max(0, number - self.prefetch) : number + 1][::-1]
        needed = {group for each in (*window, *backward.open) for group in each.unit.groups}
        for group in self._gathered():
            if group not in needed and not forward.uses(group, number):
                self._free(group)
        # Which groups are reduced, and in which order, depends only on the order of the runs, never on which
        # parameters received a gradient: that may differ between ranks, but their collectives must not.
        for group in list(backward.producing):
            if group not in needed and not forward.uses(group, number):
                del backward.producing[group]
                self.gradients.take(group)
        # Casting these gradients and finishing the previous reduction has freed memory for weights. Weights are
        # gathered before these gradients are sent, as they are needed sooner.
        for each in window:
            for group in each.unit.groups:
                group.gather()
        self.gradients.send()
        for group in run.unit.groups:
            backward.producing[group] = None

    @torch.no_grad()
    def _after_backward(self) -> None:
        """End a backward pass: visit the runs that it has not reached, then reduce and free all remaining groups."""
        backward = self._current_backward()
        self._walk_out()
        if self._n_to_come > 1 or self._turns.taken:
            self._agree("ends a backward")
        self._n_to_come = 0
        self._free_idle()
        for group in backward.producing:
            self.gradients.take(group)
        self.gradients.end_backward()
        self._turns.end_reading()
        if self._forward in backward.walks:
            self._forward = Forward()
        self._backward = None

    def finish(self) -> None:
        """Average the gradients that backward passes have accumulated, unless that has been done."""
        self.forget_failed_backward()
        if self.gradients.unfinished and self.gradients.synchronize:
            self._agree("averages accumulated gradients")
            self.gradients.average()

    def forget_failed_backward(self) -> None:
        """If an error has ended a backward pass, drop the gradients that have not reached ``grad``."""
        if self._backward is None:
            return
        for run in self._backward.open:
            run.unit.to_sharded()
        self._backward, self._n_to_come = None, 0
        self.gradients.drop()
        self._free_idle()
        self._break_off_reading()

    # groups

    def _gathered(self) -> list[ShardedGroup]:
        return [group for group in self.groups if group.state is not GroupState.SHARDED]

    def _free(self, group: ShardedGroup) -> None:
        """Free a group unless a unit is running with it, or is about to."""
        if group not in self._reserved and (self._running is None or group not in self._running.groups):
            group.free()

    def _free_idle(self) -> None:
        for group in self._gathered():
            self._free(group)


def _refuse_backward_inside(name: str, _: Tensor) -> None:
    """Raise RuntimeError for a backward through a unit that was called inside a backward."""
    raise RuntimeError(
        f"{name} is under FSDP, where no backward runs inside a backward: checkpoint it with use_reentrant=False"
    )
