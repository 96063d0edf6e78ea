"""ZeRO underneath ``ShardedOptimizer``: gradients reduce-scattered under backward, parameters all-gathered.

Stage 1: each bucket is one flat buffer, whose gradients lie in a flat buffer of their own from the moment they are
reduced: reducing needs no memory beyond the gradients, and ``.grad`` is scratch memory from then until it is cleared.

Stage 2: that buffer lives from the moment that a bucket is complete until the next one is, when its reduction has had
the time of a bucket to end. What stays is the shard, in which the backwards of a step add up; ``.grad`` is None. (This
stage has been run on CPUs alone so far.)
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from cs336_systems.distributed.shards import BucketLayout, FlatBuffer, Piece, Runs, check_dense, flat_buffers

_NO_BACKWARD = -1


@dataclass
class _Accumulation:
    """What has become of a bucket's gradients since they were cleared."""

    arrived: set[Tensor] = field(default_factory=set)
    """Parameters whose gradients backward has made."""
    n_expected: int = 0
    """How many it will make; known once the first has arrived, for parameters may be frozen between steps."""
    launched: bool = False
    """Whether reducing has started."""
    absent: set[Tensor] = field(default_factory=set)
    """Parameters without a gradient on this rank when it did."""


class ScatteredBucket:
    """One flat buffer, of which this rank updates one shard, and the gradients that belong to it."""

    def __init__(self, buffer: FlatBuffer, rank: int, world_size: int) -> None:
        self.buffer = buffer
        self.rank, self.world_size = rank, world_size
        self.shard = buffer.flat.chunk(world_size)[rank]
        self.unused: set[Tensor] = set()
        """Parameters, of this bucket among others, that no rank has a gradient of."""
        self.accumulation = _Accumulation()
        self._reduction: dist.Work | None = None
        """The one that is under way."""
        self._gradients: Tensor | None = None
        self._gradient_views: dict[Tensor, Tensor] = {}
        self.pieces: dict[Tensor, list[Piece]] = {}
        views, cuts = buffer.views_of(buffer.flat), buffer.cuts(world_size)
        for parameter, view, spans in zip(buffer.parameters, views, cuts, strict=True):
            begin = view.storage_offset()
            self.pieces[parameter] = [
                Piece(owner, start, stop, buffer.flat[begin + start : begin + stop] if owner == rank else None)
                for owner, start, stop in spans
            ]

    @property
    def parameters(self) -> list[Tensor]:
        return self.buffer.parameters

    def arrive(self, parameter: Tensor) -> None:
        """Note that backward has made a parameter's gradient."""
        if not self.accumulation.arrived:
            self.accumulation.n_expected = sum(p.requires_grad for p in self.buffer.parameters)
        self.accumulation.arrived.add(parameter)

    @property
    def complete(self) -> bool:
        """Whether the gradients of all trainable parameters have arrived."""
        if not self.accumulation.arrived:
            return not any(parameter.requires_grad for parameter in self.buffer.parameters)
        return len(self.accumulation.arrived) == self.accumulation.n_expected

    def holds(self, parameter: Tensor) -> bool:
        """Whether a parameter's ``.grad`` is this bucket's view, and not one that backward or somebody else made."""
        return parameter.grad is not None and parameter.grad is self._gradient_views.get(parameter)

    @property
    def current(self) -> bool:
        """Whether what is reduced, or being so, are the gradients that the parameters have now."""
        return self.accumulation.launched and all(
            self.holds(parameter) if parameter.grad is not None else parameter in self.accumulation.absent
            for parameter in self.buffer.parameters
        )

    def forget(self, *, free: bool) -> None:
        """Begin anew: no gradient has arrived. ``free`` also gives up their memory."""
        self.finish()
        self.accumulation = _Accumulation()
        if free:
            self._gradients, self._gradient_views = None, {}
            for pieces in self.pieces.values():
                for piece in pieces:
                    if piece.tensor is not None:
                        piece.tensor.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Start the reduce-scatter; every ``.grad`` becomes a view of what is reduced, an absent one counts as zero."""
        absent = {parameter for parameter in self.buffer.parameters if parameter.grad is None}
        self.accumulation.launched, self.accumulation.absent = True, absent
        if not self.buffer.trainable:
            return
        self.finish()
        if self._gradients is None:
            self._gradients = torch.empty_like(self.buffer.flat)
            self._gradient_views = dict(zip(self.buffer.parameters, self.buffer.views_of(self._gradients), strict=True))
        views = self._gradient_views
        present = [parameter for parameter in views if parameter not in absent and not self.holds(parameter)]
        if present:
            torch._foreach_copy_([views[p] for p in present], [p.grad for p in present if p.grad is not None])
        if absent:
            torch._foreach_zero_([views[parameter] for parameter in absent])
        for parameter in present:
            parameter.grad = views[parameter]
        # In place: the sum replaces this rank's own gradients of its shard.
        mine = self._gradients.chunk(self.world_size)[self.rank]
        self._reduction = dist.reduce_scatter_tensor(mine, self._gradients, async_op=True)

    def finish(self) -> None:
        """Wait for the reduce-scatter, if one is under way, and make the mean of the sum."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        assert self._gradients is not None
        self._gradients.chunk(self.world_size)[self.rank].div_(self.world_size)

    @property
    def reduced(self) -> Tensor | None:
        """The gradients of this rank's shard once they are reduced, flat; None if there are none."""
        return None if self._gradients is None else self._gradients.chunk(self.world_size)[self.rank]

    def prepare(self) -> list[Tensor]:
        self.buffer.hold()
        mine = [
            (parameter, piece.tensor)
            for parameter, pieces in self.pieces.items()
            for piece in pieces
            if piece.tensor is not None
        ]
        self.finish()
        shard = self.reduced
        if shard is None:
            return [tensor for _, tensor in mine]
        begin = self.shard.storage_offset()
        for parameter in self.accumulation.absent - self.unused:
            if parameter.requires_grad:  # as on the ranks that have one: all ranks can tell whether it is cleared
                parameter.grad = self._gradient_views.get(parameter)
        for parameter, tensor in mine:
            offset = tensor.storage_offset() - begin
            tensor.grad = None if parameter in self.unused else shard[offset : offset + tensor.numel()]
        return [tensor for _, tensor in mine]

    def send(self) -> list[dist.Work]:
        if not self.buffer.trainable:
            return []
        return [dist.all_gather_into_tensor(self.buffer.flat, self.shard, async_op=True)]


class FreedBucket(ScatteredBucket):
    """One that keeps no more of its gradients than the shard of this rank."""

    def __init__(self, buffer: FlatBuffer, rank: int, world_size: int) -> None:
        super().__init__(buffer, rank, world_size)
        self._sum: Tensor | None = None
        """The sum of the gradients of the backwards so far, of this rank's shard."""

    @property
    def current(self) -> bool:
        return self.accumulation.launched and all(parameter.grad is None for parameter in self.buffer.parameters)

    @property
    def reduced(self) -> Tensor | None:
        return self._sum

    def forget(self, *, free: bool) -> None:
        super().forget(free=True)
        self._sum = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Start the reduce-scatter; every ``.grad`` becomes None."""
        before = self.accumulation.absent if self.accumulation.launched else set(self.buffer.parameters)
        super().reduce()
        self.accumulation.absent &= before
        for parameter in self._gradient_views:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the reduce-scatter, if one is under way, add its mean to the shard, and free the rest."""
        if self._gradients is None:
            return
        super().finish()
        mine = self._gradients.chunk(self.world_size)[self.rank]
        self._sum = mine.clone() if self._sum is None else self._sum.add_(mine)
        self._gradients, self._gradient_views = None, {}


class GradientScatter:
    """Starts each bucket's reduce-scatter when its last gradient arrives, in the order of the buckets on every rank.

    Its hooks do not keep it alive: when the optimizer goes, they do nothing.

    Args:
        names: of the parameters, for errors; those to be laid out later are added to it.
        frees: whether whole gradients are given up once they are reduced, after each backward (stage 2).
    """

    def __init__(self, names: Mapping[Tensor, str], *, frees: bool = False) -> None:
        self._names, self.frees = names, frees
        self.buckets: list[ScatteredBucket] = []
        self.enabled = True
        self._bucket_of: dict[Tensor, ScatteredBucket] = {}
        self._next = 0
        self._backward = _NO_BACKWARD
        """Autograd's number of the one that gradients last came from."""
        self._exchanged: tuple[list[bool], Tensor] | None = None

    def layout(self, runs: Runs, rank: int, world_size: int, bucket_bytes: int) -> BucketLayout:
        """Lay out runs of parameters, last first, as backward makes their gradients, and watch these."""
        buckets = []
        for buffer in flat_buffers(reversed(runs), bucket_bytes, world_size):
            bucket = (FreedBucket if self.frees else ScatteredBucket)(buffer, rank, world_size)
            buckets.append(bucket)
            for parameter in buffer.parameters:
                self._bucket_of[parameter] = bucket
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_weakly(self._gradient_arrived))
        self.buckets += buckets
        return BucketLayout(list(buckets), {p: self._bucket_of[p].pieces[p] for run in runs for p in run})

    def _gradient_arrived(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]
        check_dense(parameter, self._names[parameter])
        if not bucket.buffer.holds(parameter):  # another optimizer has taken it, or step() will take it back
            return
        if self.frees:
            self._end_with_backward()
        elif bucket.accumulation.launched:
            if bucket.holds(parameter):
                raise RuntimeError(
                    "backward added to gradients that are reduced already: run all but the last backward of a step "
                    "inside no_sync(), and clear gradients with the optimizer's zero_grad()"
                )
            self.forget(free=True)
        if not self.enabled:
            return
        bucket.arrive(parameter)
        # Not before those ahead of it: so every rank sends in the same order, whatever its data makes it use.
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._reduce_next()

    def _reduce_next(self) -> None:
        self.buckets[self._next].reduce()
        if self.frees and self._next:
            self.buckets[self._next - 1].finish()
        self._next += 1

    def _end_with_backward(self) -> None:
        """Let every backward reduce each bucket once, whatever it makes gradients of."""
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._begin_anew()
            self._backward = task
            Variable._execution_engine.queue_callback(_weakly(self._end_backward, task))

    def _end_backward(self, task: int) -> None:
        if task == self._backward:
            while self._next < len(self.buckets):
                self._reduce_next()
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.accumulation.arrived.clear()

    def reduce_the_rest(self) -> list[dist.Work]:
        """Start what backward has not: buckets with unused parameters, and gradients that were set by hand.

        What no rank has a gradient of stays without one, so that the optimizer skips it. The ranks exchange a byte per
        parameter to know; only a rank that lacks a gradient needs the answer, and waits for it.
        """
        if not self.frees and all(parameter.grad is None for parameter in self._bucket_of):
            self.forget(free=True)  # cleared by hand after a step, and no backward since: one may have been elsewhere
        for bucket in self.buckets:
            if not bucket.current:
                bucket.reduce()
        self._next = len(self.buckets)
        parameters = list(self._bucket_of)
        absent = [parameter in self._bucket_of[parameter].accumulation.absent for parameter in parameters]
        if self._exchanged is None or self._exchanged[0] != absent:  # a copy to the device waits for backward
            device = next((p.device for p in parameters if p.requires_grad), parameters[0].device)
            self._exchanged = (absent, torch.tensor(absent, device=device).logical_not().to(torch.uint8))
        used = self._exchanged[1].clone()
        exchange = dist.all_reduce(used, op=dist.ReduceOp.MAX, async_op=True)
        if any(parameter.requires_grad for parameter, is_absent in zip(parameters, absent, strict=True) if is_absent):
            exchange.wait()
            absent = [not is_used for is_used in used.tolist()]
        unused = {parameter for parameter, is_absent in zip(parameters, absent, strict=True) if is_absent}
        for bucket in self.buckets:
            bucket.unused = unused
        return [exchange]

    def forget(self, *, free: bool) -> None:
        """Gradients have been cleared: ``free`` if set to None, else to zero."""
        for bucket in self.buckets:
            bucket.forget(free=free)
        self._next = 0


def _weakly(method: Callable[..., None], *bound: Any) -> Callable[..., None]:
    """The method as a hook, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (alive := reference()) is not None:
            alive(*bound, *arguments)

    return hook
