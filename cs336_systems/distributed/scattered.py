"""ZeRO 1 and 2 in ``ShardedOptimizer``: gradients reduce-scattered during backward, bucket by bucket, and freed.

When the last gradient of a bucket is ready, its gradients are packed into one flat tensor and reduce-scattered, or
reduced to the bucket's owner if it has one, and ``.grad`` is set to None. The flat tensor lives until the next bucket
is complete. Only the mean over the ranks of this rank's shard is kept; it accumulates over the backwards of a step.
Each backward reduces every bucket once, in order.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from cs336_systems.distributed.buckets import Bucket, used_on_any_rank
from cs336_systems.distributed.shards import ParameterBucket, in_memory_order


class _BucketGradients:
    """The gradients of one bucket: those that backward computes, and the mean of this rank's shard."""

    def __init__(self, bucket: ParameterBucket, names: Mapping[Tensor, str]) -> None:
        self.bucket = bucket
        self.whole = Bucket(bucket.parameters, names, bucket.offsets, bucket.flat.numel())
        self.mean: Tensor | None = None  # the sum of the means of the backwards so far, flat; None if there was none
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None  # a reduction, its input and its output

    def reduce(self) -> set[Tensor]:
        """Start the reduce-scatter, with zeros for absent gradients; returns the parameters that had one."""
        present = {parameter for parameter in self.bucket.parameters if parameter.grad is not None}
        if self.bucket.trainable:
            self.finish()
            flat = self.whole.gather()
            for parameter in self.bucket.parameters:
                parameter.grad = None
            owner, group = self.bucket.owner, self.bucket.member.group
            if owner is None:
                shard = torch.empty_like(self.bucket.shard_of(flat))
                work = dist.reduce_scatter_tensor(shard, flat, group=group, async_op=True)
            else:
                shard, work = flat, dist.reduce(flat, group=group, group_dst=owner, async_op=True)
            self._under_way = work, flat, shard
        return present

    def finish(self) -> None:
        """Wait for the reduce-scatter, if one is in progress, add its mean to the shard's, and free the rest."""
        if self._under_way is not None:
            work, _, shard = self._under_way
            work.wait()
            self._under_way = None
            if self.bucket.owner in (None, self.bucket.member.rank):
                shard.div_(self.bucket.member.world_size)
                self.mean = shard if self.mean is None else self.mean.add_(shard)

    def give(self, unused: set[Tensor]) -> None:
        """Set the gradients of this rank's pieces, except of parameters that have a gradient on no rank."""
        self.finish()
        shard = self.bucket.shard_of(self.bucket.flat)
        for parameter, piece in self.bucket.own.items():
            start = (piece.tensor.data_ptr() - shard.data_ptr()) // shard.element_size()
            piece.tensor.grad = None
            if self.mean is not None and parameter not in unused:
                piece.tensor.grad = in_memory_order(self.mean[start:], piece.tensor)

    def clear(self) -> None:
        self.finish()
        self.mean = None
        for piece in self.bucket.own.values():
            piece.tensor.grad = None


class GradientScatter:
    """Starts each bucket's reduce-scatter when its last gradient arrives, in the order of the buckets on every rank.

    Its hooks do not keep it alive: once the optimizer is gone, they do nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.enabled = True  # whether backward reduces gradients, or leaves them whole
        self._in_order: list[_BucketGradients] = []
        self._of: dict[Tensor, _BucketGradients] = {}
        self._n_reduced = 0  # buckets reduced since this backward, or this step, began
        self._backward: int | None = None  # autograd's number of the backward that is running
        self._used: set[Tensor] = set()  # parameters with a gradient on this rank in this step
        self._unused: set[Tensor] | None = None
        """Parameters without a gradient on any rank; None if ranks have reduced since they last exchanged this."""

    def watch(self, buckets: Iterable[ParameterBucket], names: Mapping[Tensor, str]) -> None:
        """Also reduce the gradients of these buckets, after those of earlier calls; ``names`` are for errors."""
        for bucket in buckets:
            own = _BucketGradients(bucket, names)
            self._in_order.append(own)
            self._of |= dict.fromkeys(bucket.parameters, own)
            for parameter in bucket.parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_weakly(self._gradient_arrived))

    def _gradient_arrived(self, parameter: Tensor) -> None:
        own = self._of[parameter]
        if not self.enabled or not own.bucket.holds(parameter):  # another optimizer has taken it
            return
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward, self._n_reduced = task, 0
            for each in self._in_order:
                each.whole.reset()
            Variable._execution_engine.queue_callback(_weakly(self._end_backward, task))
        own.whole.gradient_is_ready()
        self._reduce_next()

    def _end_backward(self, task: int) -> None:
        if task == self._backward:
            self._reduce_next(all_=True)
            self._backward = None

    def _reduce_next(self, all_: bool = False) -> None:
        """Reduce, in order, the next buckets that are complete, or all remaining ones."""
        for own in self._in_order[self._n_reduced :]:
            if own.whole.waiting_for and not all_:
                return
            self._used |= own.reduce()
            self._unused = None
            if self._n_reduced:
                self._in_order[self._n_reduced - 1].finish()
            self._n_reduced += 1

    def reduce_the_rest(self) -> list[dist.Work]:
        """Reduce the buckets that backward has not: on a rank without a backward, or after ``no_sync``.

        A parameter without a gradient on any rank stays without one, so that the optimizer skips it. To find these, the
        ranks exchange a byte per parameter; only a rank that lacks a gradient waits for the result.
        """
        if self._n_reduced == len(self._in_order) and any(parameter.grad is not None for parameter in self._of):
            self._n_reduced = 0
        self._reduce_next(all_=True)
        trained = [parameter for parameter in self._of if parameter.requires_grad]
        if self._unused is not None or not trained:
            return []
        used, exchange = used_on_any_rank(
            [parameter in self._used for parameter in trained], trained[0].device, self._group
        )
        used_anywhere = {parameter for parameter, is_used in zip(trained, used, strict=True) if is_used}
        self._unused = self._of.keys() - self._used - used_anywhere
        return [exchange]

    def give(self, bucket: ParameterBucket) -> None:
        """Set the gradients of this rank's pieces once everything is reduced."""
        self._of[bucket.parameters[0]].give(self._unused or set())

    def clear(self) -> None:
        """Drop all gradients and begin a new step."""
        for own in self._in_order:
            own.clear()
        self._n_reduced, self._unused = 0, None
        self._used.clear()


def _weakly(method: Callable[..., None], *bound: Any) -> Callable[..., None]:
    """A hook that calls the method while its object lives."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        if (alive := reference()) is not None:
            alive(*bound, *arguments)

    return hook
