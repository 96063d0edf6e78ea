"""Distributed data parallelism in four forms: replicas compute gradients of different data and average them.

                      collectives       of one gradient each   of many gradients each
                          after backward    NaiveDDP               FlatDDP
    during backward   OverlappedDDP          BucketedDDP(module, bucket_size_mb)

Each collective has a latency, so fewer of them cost less; one that starts during backward overlaps with it. All four
average, as torch's DDP does: if ranks have equal parts of a batch and the loss is a mean, the result is the gradient of
the whole batch.

    model = BucketedDDP(model, bucket_size_mb=25)      # weights and buffers become rank 0's
    loss_function(model(x), y).backward()              # afterwards .grad is the average: clip now
    optimizer.step()
    optimizer.zero_grad()

    with model.no_sync():                              # accumulate: gradients stay local, nothing is sent
        loss_function(model(x), y).backward()

**Synchronisation ends with backward**: once ``backward`` has returned, later work on the current stream sees averaged
gradients. Several backwards may run in a row, because averaging is linear. ``finish_gradient_synchronization`` is
needed where no backward synchronises: after accumulating gradients in ``no_sync``, on a rank that ran no backward while
others did, and after a backward that failed. After any other backward it returns at once, so it may be called in every
step.

**Every rank issues the same collectives in the same order**, whichever parameters its data uses: one per trainable
parameter (naive, overlapped), one per dtype and device (flat) or one per bucket (bucketed). Buckets hold parameters in
the reverse order of their construction. A bucket is sent when its last gradient is ready and all buckets before it have
been sent; the remaining buckets are sent when backward has ended.

**Parameters without a gradient.** A rank that does not use a parameter contributes zeros. A parameter that no rank uses
keeps ``grad`` None, and the optimizer skips it as in one process. To tell the two cases apart, ranks exchange a byte
per parameter each step; the host waits for the answer only if a parameter was unused.

**Limits.** Ranks must run equally many backwards outside ``no_sync``. After a backward that failed, every rank must
call ``finish_gradient_synchronization``, or the next forward raises. An error is also raised if parameters are
unfrozen, added or replaced after wrapping, if a gradient is not dense, and on double backward. Reentrant checkpointing
runs a separate backward for each segment: gradients are correct, but all of them may be sent once per segment.
Gradients that ``torch.autograd.grad`` returns are not averaged. After wrapping, each rank has buffers of its own. A
wrapped module cannot be copied or pickled.

Method: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from cs336_systems.distributed.buckets import Bucket, broadcast_from_rank_0, partition, used_on_any_rank
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_schedule import inside_backward
from cs336_systems.distributed.fsdp_units import is_unit
from cs336_systems.distributed.process_group import check_same_across_ranks
from cs336_systems.distributed.wrapped import Members, NotCopied, check_shapes_are_known
from cs336_systems.hardware import MIB


class _Average:
    """Averages a contiguous tensor over ranks, in place, adding in ``dtype``; asynchronous until ``wait``."""

    def __init__(
        self, tensor: Tensor, dtype: torch.dtype | None, backend: str, group: dist.ProcessGroup | None
    ) -> None:
        self.tensor = tensor
        self.sent = tensor if dtype is None else tensor.to(dtype)
        self.divided = tensor.is_cuda and backend == "nccl"  # gloo has no AVG
        operation = dist.ReduceOp.AVG if self.divided else dist.ReduceOp.SUM
        self.group = group
        self.work = dist.all_reduce(self.sent, op=operation, group=group, async_op=True)

    def wait(self) -> None:
        """Make later work on the current stream see the average."""
        assert self.work is not None
        self.work.wait()
        if not self.divided:
            self.sent.div_(dist.get_world_size(self.group))
        if self.sent is not self.tensor:
            self.tensor.copy_(self.sent)


@dataclass
class _Progress:
    """The progress of a backward and its collectives; setting attributes of a module would be slow."""

    ready: set[int] = field(default_factory=set)  # the positions of parameters whose gradients are ready
    under_way: list[_Average] = field(default_factory=list)
    n_started: int = 0  # the number of buckets whose collectives have started


@dataclass
class _ReadyHook:
    """Reports a gradient to a wrapper by a weak reference: Python cannot collect cycles through tensors' hooks."""

    wrapper: "weakref.ref[DDP]"
    position: int

    def __call__(self, parameter: Tensor) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper._gradient_is_ready(self.position)


class DDP(NotCopied, nn.Module):
    """Wraps a module so that backward averages its gradients over the ranks; the base class of the four forms.

    Args:
        module: any module, whole on every rank and on its device, of the same structure everywhere; it stays reachable
            as ``.module``, and names in ``state_dict`` begin with ``module.``.
        capacity_bytes: the most bytes of gradients that a bucket holds, unless one gradient is larger; with 0 each
            gradient has its own bucket.
        during_backward: whether a bucket is sent as soon as its last gradient is ready; if not, after backward.
        communication_dtype: the dtype in which gradients are sent and added up; None means their own.
            ``torch.bfloat16`` halves the bytes of fp32 gradients, but rounds them.
        process_group: the group whose ranks hold the replicas; its rank 0 gives weights and buffers. None means the
            default group. ``process_group.limited_group`` leaves more multiprocessors to backward.

    Raises:
        RuntimeError: there is no process group.
        ValueError: ranks differ in names, shapes, dtypes, memory formats or options (every rank raises); a tensor is on
            the meta device, of a lazy module, wrapped already or sharded by FSDP; ``communication_dtype`` is not a
            floating-point one; this rank is not in the process group.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        capacity_bytes: float,
        during_backward: bool,
        communication_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(f"{type(self).__name__} needs a process group: join one first")
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of this {type(self).__name__}")
        for name, child in module.named_modules():
            if isinstance(child, FSDP) or is_unit(child):
                place = f"its {name}" if name else "it"
                raise ValueError(
                    f"{type(self).__name__} cannot wrap {type(module).__name__}: {place} is sharded by FSDP, "
                    "which averages gradients itself"
                )
        check_shapes_are_known((*module.named_parameters(), *module.named_buffers()))
        options = (type(self).__name__, capacity_bytes, communication_dtype)
        described = [str(options), *_description(module)]
        check_same_across_ranks(described, "modules and options of data parallelism", process_group)
        if communication_dtype is not None and not communication_dtype.is_floating_point:
            raise ValueError(f"communication_dtype must be a floating-point dtype, got {communication_dtype}")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device: give it storage and values first")
        _check_not_watched(module)
        broadcast_from_rank_0([*module.parameters(), *module.buffers()], process_group)

        self.module = module
        self._during_backward = during_backward
        self._communication_dtype = communication_dtype
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        names = self._names
        self._members = Members(module, lambda: names)
        self._trainable = [parameter for parameter in self._names if parameter.requires_grad]
        self._frozen = [parameter for parameter in self._names if not parameter.requires_grad]
        self._synchronizing = True
        self._averaged: int | None = None
        """The first gradient's version after a backward has averaged; None otherwise."""
        self._progress = _Progress()
        self._process_group = process_group
        self._backend = dist.get_backend(process_group)
        groups = partition(self._trainable[::-1], capacity_bytes)
        self._buckets = [Bucket(group, names) for group in groups]
        bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._bucket_of = [bucket_of[parameter] for parameter in self._trainable]
        for position, parameter in enumerate(self._trainable):
            parameter.register_post_accumulate_grad_hook(_ReadyHook(weakref.ref(self), position))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; raises RuntimeError after a failed backward or if a parameter has been added."""
        if self._synchronizing and torch.is_grad_enabled():
            self._members.check()
            if self._progress.ready and not inside_backward():
                raise RuntimeError(
                    "the last backward failed midway: call finish_gradient_synchronization() on every rank, "
                    "then clear the gradients"
                )
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate on this rank alone; ``finish_gradient_synchronization`` does nothing inside."""
        before, self._synchronizing, self._averaged = self._synchronizing, False, None
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the average over the ranks; every rank calls this between backward and ``step``.

        After a backward that synchronised, the first call has nothing to do, unless the gradients have been set to None
        or to zero since. In that case, and without a backward, this rank's gradients are averaged as they are, and a
        missing one counts as zeros.

        Raises:
            RuntimeError: a parameter that was frozen at construction no longer is.
            ValueError: a gradient is not dense.
        """
        if not self._synchronizing:
            return
        gradients = (parameter.grad for parameter in self._trainable if parameter.grad is not None)
        first = next(gradients, None)
        if self._averaged is None or first is None:
            self._synchronize()
        elif first._version != self._averaged and not any(bool(gradient.any()) for gradient in (first, *gradients)):
            self._synchronize()  # written since, by zero_grad(set_to_none=False), not by clipping
        self._averaged = None

    def _backward_has_ended(self) -> None:
        self._synchronize()
        self._averaged = next((p.grad._version for p in self._trainable if p.grad is not None), 0)

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Send the remaining buckets and make the current stream wait, and the host if a parameter was unused."""
        if not self._trainable:
            return
        if unfrozen := [self._names[parameter] for parameter in self._frozen if parameter.requires_grad]:
            raise RuntimeError(f"{unfrozen[0]} was frozen when it was wrapped, and its gradient is not averaged")
        used = [parameter.grad is not None for parameter in self._trainable]
        for bucket in self._buckets[self._progress.n_started :]:
            self._start(bucket)
            if not self._during_backward:
                self._progress.under_way.pop().wait()
        used_anywhere, exchange = used_on_any_rank(used, self._trainable[0].device, self._process_group)
        exchange.wait()
        for average in self._progress.under_way:
            average.wait()
        for parameter, is_used in zip(self._trainable, used_anywhere, strict=True):
            if not is_used:
                parameter.grad = None
        self._progress = _Progress()
        for bucket in self._buckets:
            bucket.reset()

    def _gradient_is_ready(self, position: int) -> None:
        """Handle that backward has accumulated into the ``grad`` of the trainable parameter at the position."""
        if not self._synchronizing:
            return
        progress = self._progress
        if position in progress.ready:
            raise RuntimeError(
                f"backward reached {self._names[self._trainable[position]]} again before it had ended: it is "
                "checkpointed twice (use_reentrant=False allows that), or the last backward failed "
                "(call finish_gradient_synchronization() on every rank)"
            )
        if not progress.ready:
            self._averaged = None
            Variable._execution_engine.queue_callback(self._backward_has_ended)
        progress.ready.add(position)
        self._bucket_of[position].gradient_is_ready()
        if self._during_backward:  # never before earlier buckets: the order must be the same on every rank
            while progress.n_started < len(self._buckets) and not self._buckets[progress.n_started].waiting_for:
                self._start(self._buckets[progress.n_started])

    def _start(self, bucket: Bucket) -> None:
        gradients = bucket.gather()
        self._progress.n_started += 1
        average = _Average(gradients, self._communication_dtype, self._backend, self._process_group)
        self._progress.under_way.append(average)


def _check_not_watched(module: nn.Module) -> None:
    """Raise ValueError if a living wrapper averages the gradient of one of the module's parameters."""
    for name, parameter in module.named_parameters():
        hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        if any(isinstance(hook, _ReadyHook) and hook.wrapper() is not None for hook in hooks):
            raise ValueError(f"{name} is averaged by another wrapper already")


def _description(module: nn.Module) -> list[str]:
    """A line per parameter and buffer; ranks must have equal ones."""
    return [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()} on {tensor.device.type}"
        f"{', trained' if tensor.requires_grad else ''}"
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]


class NaiveDDP(DDP):
    """Sends each gradient in a collective of its own after backward; keyword arguments are those of ``DDP``."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, capacity_bytes=0, during_backward=False, **options)


class FlatDDP(DDP):
    """Sends all gradients in one collective per dtype and device after backward; keywords are those of ``DDP``."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, capacity_bytes=math.inf, during_backward=False, **options)


class OverlappedDDP(DDP):
    """Sends each gradient in a collective of its own as soon as it is ready; keyword arguments are those of ``DDP``."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, capacity_bytes=0, during_backward=True, **options)


class BucketedDDP(DDP):
    """Sends each bucket of gradients as soon as its last gradient is ready; keyword arguments are those of ``DDP``.

    Args:
        bucket_size_mb: the most MiB of gradients that a bucket holds, as torch's ``bucket_cap_mb``; None sets no limit.
            Small buckets are sent early and leave little to wait for at the end; large ones use the links better.

    Raises:
        ValueError: the size is not positive.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float | None = 25.0, **options: Any) -> None:
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be positive, got {bucket_size_mb}")
        capacity = math.inf if bucket_size_mb is None else bucket_size_mb * MIB
        super().__init__(module, capacity_bytes=capacity, during_backward=True, **options)
