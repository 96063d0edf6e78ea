"""Gradients under FSDP: reduce-scattered to shards of the average over ranks. Uses of a whole gradient are refused.

Each group is reduced as soon as backward no longer needs it, overlapped with the rest of backward (``Reduction``).
Parameters of fewer than two dimensions are replicated; their ``unsharded_param`` is a copy in ``compute_dtype``, or
``sharded_param`` itself. Their gradients are sent in the last message of a step, which also counts the ranks that have
a gradient of each parameter. Under ``no_sync`` whole gradients are kept instead, in the shards' dtype.

Other code reads ``.grad`` as if it were whole. That is correct for an optimizer's arithmetic, elementwise clipping and
clearing, but not for norms and ``torch.amp.GradScaler``'s search for infinities: ``ShardGradient`` refuses those below
autograd. Every other operation, ``detach()`` included, runs on the rows and returns plain tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceOp, ReduceScatterOptions
from torch.utils._pytree import tree_map_only

from cs336_systems.distributed.buckets import alias, empty_like_run, neighbours
from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedGroup, ShardedParameter
from cs336_systems.distributed.peer_memory import Turns

_OF_THE_WHOLE = (
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten._foreach_norm.Scalar,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
)


class ShardGradient(Tensor):
    """This rank's rows of an average over the ranks, sharing the memory of ``rows``."""

    rows: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rows: Tensor) -> "ShardGradient":
        self = Tensor._make_subclass(cls, rows)
        self.rows = rows
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the rows; RuntimeError for reductions to one number, which would differ on each rank."""
        if func in _OF_THE_WHOLE:
            raise RuntimeError(
                f"a gradient under FSDP holds this rank's rows alone, of which {func} would tell: clip with "
                "cs336_systems.distributed.fsdp.clip_grad_norm_(fsdp, max_norm), or take rows by grad.detach()"
            )
        own, options = tree_map_only(cls, lambda gradient: gradient.rows, (args, kwargs or {}))
        result = func(*own, **options)
        return args[0] if args and isinstance(args[0], cls) and result is args[0].rows else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class ReplicatedParameters:
    """Parameters that every rank holds whole; their gradients are averaged in one all-reduce.

    Args:
        names: all names of each parameter, which is equal on every rank and keeps its memory.
        compute_dtype: the dtype in which the module sees floating-point parameters; None means their own.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, ...]],
        parameters: Sequence[nn.Parameter],
        *,
        compute_dtype: torch.dtype | None,
        turns: Turns,
    ) -> None:
        self._turns = turns
        cast = [p for p in parameters if compute_dtype not in (None, p.dtype) and p.dtype.is_floating_point]
        copies: dict[Tensor, nn.Parameter] = {}
        for run in neighbours(cast):
            for parameter, memory in zip(run, empty_like_run(run, dtype=compute_dtype), strict=True):
                copies[parameter] = nn.Parameter(memory.copy_(parameter.detach()), parameter.requires_grad)
        self.parameters = [
            ManagedParameter(name, parameter, copies.get(parameter, parameter), parameter.shape)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        self._cast = {
            parameter: alias(copy.detach(), int(copy.storage_offset()), parameter.shape)
            for parameter in self.parameters
            if (copy := parameter.unsharded_param) is not parameter.sharded_param
        }

    def refresh(self, parameters: Iterable[ManagedParameter]) -> None:
        """Cast the current values of these parameters into the copies that the module sees, if there are copies."""
        if cast := [parameter for parameter in parameters if parameter in self._cast]:
            torch._foreach_copy_([self._cast[p] for p in cast], [p.sharded_param.detach() for p in cast])

    def collect(self) -> None:
        """Add the gradients of the cast copies to those of the parameters, in the parameters' dtype."""
        for parameter in self._cast:
            gradient, parameter.unsharded_param.grad = parameter.unsharded_param.grad, None
            if gradient is None:
                continue
            if parameter.sharded_param.grad is None:
                parameter.sharded_param.grad = gradient.to(parameter.sharded_param.dtype)
            else:
                parameter.sharded_param.grad.add_(gradient)

    def drop_gradients(self) -> None:
        """Drop the gradients of the cast copies."""
        for parameter in self._cast:
            parameter.unsharded_param.grad = None

    def all_reduce(self, sharded: Sequence[ManagedParameter]) -> Tensor:
        """Average the gradients, and count the ranks that have a gradient of each parameter, in one collective.

        A rank without a gradient of a parameter contributes zeros; a parameter without one on any rank gets none.
        Returns the counts of ``sharded``, on the device.
        """
        trainable = [parameter for parameter in self.parameters if parameter.sharded_param.requires_grad]
        dtype = torch.float32
        for parameter in trainable:
            parameter.has_gradient = parameter.sharded_param.grad is not None
            dtype = torch.promote_types(dtype, parameter.sharded_param.dtype)
        counted = [*sharded, *trainable]
        sizes = [parameter.shape.numel() for parameter in trainable]
        flat = torch.zeros(sum(sizes) + len(counted), dtype=dtype, device=self._turns.device)
        *averages, counts = flat.split([*sizes, len(counted)])
        averages = [part.view(parameter.shape) for part, parameter in zip(averages, trainable, strict=True)]
        present = [i for i, parameter in enumerate(trainable) if parameter.has_gradient]
        gradients = [gradient for parameter in trainable if (gradient := parameter.sharded_param.grad) is not None]
        if present:
            torch._foreach_copy_([averages[i] for i in present], gradients)
        counts.fill_(1)
        for i, parameter in enumerate(counted):
            if not parameter.has_gradient:
                counts[i] = 0  # a fill, which waits for nothing, unlike a copy from the host
        dist.all_reduce(flat, group=self._turns.group)
        if self._turns.replicas is not None:
            dist.all_reduce(flat, group=self._turns.replicas)
        flat[: sum(sizes)].div_(self._turns.n_ranks)
        if present:
            torch._foreach_copy_(gradients, [averages[i] for i in present])
        for i, parameter in enumerate(trainable):
            if not parameter.has_gradient and counts[len(sharded) + i] > 0:
                parameter.sharded_param.grad = averages[i].to(parameter.sharded_param.dtype, copy=True)
            if parameter.sharded_param.grad is not None:
                parameter.run_hooks()
        return counts[: len(sharded)]


def take_gradients(parameters: Sequence[ShardedParameter]) -> list[Tensor | None]:
    """Take from each parameter the sum of its accumulated gradient and the last backward's.

    Sums have the accumulated gradient's dtype. Raises RuntimeError for a sparse gradient.
    """
    taken: list[Tensor | None] = []
    sums: list[Tensor] = []
    added: list[Tensor] = []
    for parameter in parameters:
        fresh, parameter.unsharded_param.grad = parameter.unsharded_param.grad, None
        if fresh is not None and fresh.layout is not torch.strided:
            raise RuntimeError(f"{parameter.names[0]} has a sparse gradient, which FSDP cannot shard: use sparse=False")
        old, parameter.accumulated = parameter.accumulated, None
        if fresh is not None and old is not None:
            sums.append(old)
            added.append(fresh)
        taken.append(fresh if old is None else old)
    if sums:
        torch._foreach_add_(sums, added)
    return taken


class Reduction:
    """A reduce-scatter, and an all-reduce of the shards over replicas if there are any.

    Gradients are taken at once, sent by ``start``, and added to the shards' by ``finish``.
    """

    def __init__(self, group: ShardedGroup) -> None:
        self.parameters, dtype = group.trainable, group.dtype
        self._turns = group.turns
        self.missing: list[ShardedParameter] = []
        """Parameters to which this rank has contributed nothing and which had no gradient before."""
        sizes = [parameter.padded_numel for parameter in self.parameters]
        gradients = take_gradients(self.parameters)
        staged, sources, self._inputs = [], [], []
        for parameter, size, gradient in zip(self.parameters, sizes, gradients, strict=True):
            parameter.has_gradient |= gradient is not None
            if gradient is None:  # takes part regardless: ranks may differ in what they used
                padded = torch.zeros(size * group.world_size, dtype=dtype, device=group.device)
            elif gradient.dtype == dtype and gradient.numel() == size * group.world_size and gradient.is_contiguous():
                padded = gradient.view(-1)
            else:
                padded = torch.empty(size * group.world_size, dtype=dtype, device=group.device)
                padded[gradient.numel() :].zero_()
                staged.append(padded[: gradient.numel()].view_as(gradient))
                sources.append(gradient)
            self._inputs.append(padded)
        if staged:
            torch._foreach_copy_(staged, sources)
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=group.device)
        self._outputs = list(self._flat.split(sizes))
        self._averages = dist.get_backend(group.process_group) == "nccl"
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Start the collectives, unless they have started."""
        if self._work is None:
            options = ReduceScatterOptions()
            options.reduceOp = ReduceOp(ReduceOp.AVG if self._averages else ReduceOp.SUM)
            self._work = self._turns.group.reduce_scatter_tensor_coalesced(self._outputs, self._inputs, options)
            if self._turns.replicas is None:
                return
            with self._turns.on_stream():  # which waits for the shards, as later gathers do anyway
                self._work.wait()
                op = ReduceOp.AVG if self._averages else ReduceOp.SUM
                self._work = dist.all_reduce(self._flat, op, self._turns.replicas, async_op=True)

    def wait(self) -> None:
        """Make the current stream (on a CPU: the caller) wait, if the collectives have started."""
        if self._work is not None:
            self._work.wait()

    def finish(self) -> None:
        """Wait, then add the averages to the shards' gradients."""
        self.wait()
        self._inputs.clear()
        if not self._averages:
            self._flat.div_(self._turns.n_ranks)
        for parameter, output in zip(self.parameters, self._outputs, strict=True):
            shard = parameter.sharded_param
            average = output[: shard.numel()].view_as(shard)
            if shard.grad is not None:
                shard.grad.add_(average)
            else:
                # Also if no rank has a gradient, which only ReplicatedParameters.all_reduce finds out.
                shard.grad = ShardGradient(average)
                if not parameter.has_gradient:
                    self.missing.append(parameter)
                    continue
            parameter.run_hooks()


class Gradients:
    """The gradients of all groups, and of the replicated parameters."""

    def __init__(self, groups: list[ShardedGroup], replicated: ReplicatedParameters) -> None:
        self.groups = groups
        self.replicated = replicated
        self.synchronize = True  # whether backward reduces gradients or accumulates them
        self.unfinished = False  # whether a backward has left gradients that are not averaged; the same on every rank
        self._accumulated: dict[ShardedGroup, None] = {}
        """Groups with gradients of backward passes that were not synchronized."""
        self._reduction: Reduction | None = None  # the reduction in progress
        self._missing: list[ShardedParameter] = []  # parameters whose gradient is zero unless another rank has one

    def take(self, group: ShardedGroup) -> None:
        """Take the group's gradients for a reduction, or under ``no_sync`` keep them whole."""
        if not group.trainable:
            return
        if not self.synchronize:
            if group.is_cast:  # others stay in place, so that the next backward can add to them
                for parameter, gradient in zip(group.trainable, take_gradients(group.trainable), strict=True):
                    parameter.accumulated = None if gradient is None else gradient.to(group.dtype)
            self._accumulated[group] = None
            return
        # One reduction at a time: with the group that backward fills, at most two have whole gradients in memory.
        self._finish_reduction()
        self._accumulated.pop(group, None)
        self._reduction = Reduction(group)

    def send(self) -> None:
        """Start the reduction of the gradients that were taken last."""
        if self._reduction is not None:
            self._reduction.start()

    def _finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.start()
            self._reduction.finish()
            self._missing += self._reduction.missing
            self._reduction = None

    def end_backward(self) -> None:
        """At the end of backward take gradients that came after their group's reduction; average unless ``no_sync``."""
        for group in self.groups:
            # These came after their group was reduced, unless earlier passes have accumulated them.
            if group.has_gradients and (group.is_cast or group not in self._accumulated):
                self.take(group)
        self.send()
        self.replicated.collect()
        self.unfinished = True
        if self.synchronize:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Wait for the reductions, and average the gradients of the replicated parameters.

        A parameter that no rank has used keeps no gradient, as on one device.
        """
        for group in list(self._accumulated):
            self.take(group)
        self._finish_reduction()
        sharded = [parameter for group in self.groups for parameter in group.trainable]
        # The last message of a step. It is sent even if nothing is replicated, as it counts ranks with a gradient.
        counts = self.replicated.all_reduce(sharded)
        if self._missing:  # only then does the host read the counts, and so wait for the device
            used = {parameter for parameter, count in zip(sharded, counts.tolist(), strict=True) if count}
            for parameter in self._missing:
                if parameter in used:
                    parameter.run_hooks()
                else:
                    parameter.sharded_param.grad = None
        for parameter in sharded:
            parameter.has_gradient = False
        self._missing.clear()
        self.unfinished = False

    def drop(self) -> None:
        """Drop all gradients that are not in a parameter's ``grad`` yet, accumulated ones too."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        for group in self.groups:
            group.drop_gradients()
        self.replicated.drop_gradients()
        self._accumulated.clear()
        self._missing.clear()
        self.unfinished = False
