"""Parameters as FSDP holds them: shards that stay, whole copies that come and go, and the collectives between the two.

A parameter of two or more dimensions is split along the first one as ``torch.chunk`` would: rank r holds rows
[r c, (r + 1) c) with c = ceil(rows / world_size), so the last ranks may hold fewer rows, or none. Two objects stand for
it: ``kept``, the shard in the module's own dtype, which the optimizer sees, and ``working``, the whole in
``compute_dtype``, which the module sees while it runs. Parameters of fewer dimensions are whole on every rank;
their ``working`` is a cast copy, or ``kept`` itself if there is nothing to cast.

Parameters that are used together form a ``ShardedGroup`` and travel in one collective. Its buffers are laid out so that
NCCL has nothing to pack or unpack around it: every parameter has a padded slot of the rank's shards and a slot of the
whole, and the coalesced collective moves each of them from slot to slot in one kernel. Only dtype changes copy: shards
into ``compute_dtype`` before they are gathered, gradients into ``reduce_dtype`` before they are reduced.

Between uses the storage of the whole copies has zero bytes. Autograd saves tensors, not bytes: what it saved in forward
is the same storage, which holds the weights again once it is resized and gathered for backward. For that each
``working`` has a version counter of its own (``_alias``), which writing through another alias does not move.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceOp, ReduceScatterOptions

_ALIGNMENT = 64
"""Elements to which slots are rounded: 128 bytes of bf16, more than vectorised loads and NCCL ask for."""


def _aligned(n_elements: int) -> int:
    return -(-n_elements // _ALIGNMENT) * _ALIGNMENT


def _alias(buffer: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A contiguous tensor in ``buffer``'s storage, with a version counter of its own, as a view would not have."""
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(
        buffer.untyped_storage(), offset, torch.Size(shape), stride
    )


@dataclass(eq=False)
class ManagedParameter:
    """One parameter under all its names: what stays, and what the module sees while it runs."""

    names: tuple[str, ...]
    kept: nn.Parameter
    working: nn.Parameter
    shape: torch.Size
    """Of the whole parameter."""
    has_gradient: bool = False
    """Whether this rank contributed to the gradient since the last synchronization."""


@dataclass(eq=False)
class ShardedParameter(ManagedParameter):
    """A parameter that is split over the ranks."""

    offset_bytes: int = 0
    """Where the whole begins in the group's buffer."""
    accumulated: Tensor | None = None
    """Whole gradient of backward passes under ``no_sync``, in the dtype in which it will be reduced."""

    def take_gradient(self, dtype: torch.dtype) -> Tensor | None:
        """What has been accumulated and the last backward's gradient, summed; both are given up."""
        fresh, self.working.grad = self.working.grad, None
        old, self.accumulated = self.accumulated, None
        if fresh is None or old is None:
            return old if fresh is None else fresh
        return old.add_(fresh.to(dtype))


class _PackedGather:
    """An all-gather of several tensors as one message; ``wait`` waits for it and unpacks it.

    Each of ``shards`` is (n,), and the one of ``wholes`` that it goes to (world_size * n,), of the same dtype.
    """

    def __init__(self, process_group: dist.ProcessGroup, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        world_size, sizes = process_group.size(), [shard.numel() for shard in shards]
        self._wholes = [whole.view(world_size, size) for whole, size in zip(wholes, sizes, strict=True)]
        packed = torch.cat(tuple(shards))
        received = packed.new_empty(world_size, sum(sizes))
        self._parts = received.split(sizes, dim=1)
        self._work = dist.all_gather_into_tensor(received.view(-1), packed, group=process_group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        torch._foreach_copy_(self._wholes, self._parts)


def _all_gather(
    process_group: dist.ProcessGroup, wholes: list[Tensor], shards: list[Tensor]
) -> "dist.Work | _PackedGather":
    """Start to gather each of the flat ``shards`` into the one of ``wholes``, in one collective for all of them.

    On CPUs the message is packed here. gloo would do the same in its coalesced all-gather, but that one corrupts the
    heap (torch 2.11): gloo's two workers note which operation they have finished in one ``std::string`` without a lock,
    and "ALLGATHER_COALESCED", unlike the names of the other collectives used here, is too long to be stored in place.
    """
    if wholes[0].is_cuda:
        return process_group.allgather_into_tensor_coalesced(wholes, shards)
    return _PackedGather(process_group, wholes, shards)


class Reduction:
    """A reduce-scatter under way; ``finish`` waits for it and leaves the gradients of the shards where they belong."""

    def __init__(self, group: "ShardedGroup", parameters: list[ShardedParameter], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self._world_size = group.world_size
        self.missing: list[ShardedParameter] = []
        """Parameters to which this rank contributed nothing and that had no gradient before."""
        slots = [group.shard_slots[p] for p in parameters]
        sizes = [stop - start for start, stop in slots]
        gradients = [parameter.take_gradient(dtype) for parameter in parameters]
        staged, sources, self._inputs = [], [], []
        for parameter, size, gradient in zip(parameters, sizes, gradients, strict=True):
            parameter.has_gradient |= gradient is not None
            if gradient is None:
                whole = torch.zeros(size * group.world_size, dtype=dtype, device=group.device)
            elif gradient.dtype == dtype and gradient.numel() == size * group.world_size and gradient.is_contiguous():
                whole = gradient.view(-1)
            else:
                whole = torch.empty(size * group.world_size, dtype=dtype, device=group.device)
                whole[gradient.numel() :].zero_()
                staged.append(whole[: gradient.numel()].view_as(gradient))
                sources.append(gradient)
            self._inputs.append(whole)
        if staged:
            torch._foreach_copy_(staged, sources)
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=group.device)
        self._outputs = list(self._flat.split(sizes))
        options = ReduceScatterOptions()
        self._averages = dist.get_backend(group.process_group) == "nccl"
        options.reduceOp = ReduceOp(ReduceOp.AVG if self._averages else ReduceOp.SUM)
        self._work = group.process_group.reduce_scatter_tensor_coalesced(self._outputs, self._inputs, options)

    def finish(self) -> None:
        """Make the current stream (on a CPU: the caller) wait, then add the averages to the shards' gradients."""
        self._work.wait()
        self._inputs.clear()
        if not self._averages:
            self._flat.div_(self._world_size)
        for parameter, output in zip(self.parameters, self._outputs, strict=True):
            kept = parameter.kept
            average = output[: kept.numel()].view_as(kept).to(kept.dtype)
            if kept.grad is not None:
                kept.grad.add_(average)
                continue
            kept.grad = average
            if not parameter.has_gradient:
                self.missing.append(parameter)


class ShardedGroup:
    """Parameters of one dtype that are gathered, freed and reduced together.

    Args:
        names: all names of each parameter.
        wholes: the parameters, equal on every rank; the group copies this rank's rows and holds on to no more.
        compute_dtype: of the whole copies; None keeps the parameters' own.
        reduce_dtype: in which gradients are communicated; None for the parameters' own.
        stream: where gathers are issued, so that their casts do not wait in line behind the computation; None on a CPU.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, ...]],
        wholes: Sequence[nn.Parameter],
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        process_group: dist.ProcessGroup,
        stream: "torch.cuda.Stream | None",
    ) -> None:
        self.process_group = process_group
        self.world_size = world_size = process_group.size()
        self.device = wholes[0].device
        dtype = wholes[0].dtype
        self.compute_dtype = compute_dtype if compute_dtype and dtype.is_floating_point else dtype
        self.reduce_dtype = reduce_dtype or dtype
        self._stream = stream
        self.users = 0
        """Units that use the group at this moment."""
        self.is_gathered = False
        """Whether the whole copies are there, or on their way."""
        self._work: dist.Work | _PackedGather | None = None

        shard_sizes = [-(-whole.shape[0] // world_size) * whole[:1].numel() for whole in wholes]
        shard_total, self._shard_starts = _offsets(shard_sizes)
        whole_total, whole_starts = _offsets([size * world_size for size in shard_sizes])
        self._shards = torch.zeros(shard_total, dtype=dtype, device=self.device)
        self._wholes = torch.empty(whole_total, dtype=self.compute_dtype, device=self.device)
        self._whole_bytes = self._wholes.untyped_storage().nbytes()
        self._whole_slots = [
            _alias(self._wholes, start, (size * world_size,))
            for start, size in zip(whole_starts, shard_sizes, strict=True)
        ]
        self.parameters: list[ShardedParameter] = []
        self.shard_slots: dict[ManagedParameter, tuple[int, int]] = {}
        for name, whole, size, start, whole_start in zip(
            names, wholes, shard_sizes, self._shard_starts, whole_starts, strict=True
        ):
            chunk = -(-whole.shape[0] // world_size)
            rows = whole.detach()[chunk * process_group.rank() : chunk * (process_group.rank() + 1)]
            kept = nn.Parameter(_alias(self._shards, start, rows.shape), whole.requires_grad)
            kept.detach().copy_(rows)
            working = nn.Parameter(_alias(self._wholes, whole_start, whole.shape), whole.requires_grad)
            offset = whole_start * self._wholes.element_size()
            parameter = ShardedParameter(name, kept, working, whole.shape, offset_bytes=offset)
            self.parameters.append(parameter)
            self.shard_slots[parameter] = (start, start + size)
        self._shard_views = self._slots(self._shards)
        self._wholes.untyped_storage().resize_(0)

    @property
    def trainable(self) -> list[ShardedParameter]:
        """The parameters that take part in a reduction."""
        return [parameter for parameter in self.parameters if parameter.kept.requires_grad]

    @property
    def whole_bytes(self) -> int:
        """Bytes that the whole copies hold at this moment."""
        return self._wholes.untyped_storage().nbytes()

    @property
    def is_on_its_way(self) -> bool:
        """Whether a gather has been started that nobody has waited for."""
        return self._work is not None

    def gather(self) -> None:
        """Start to make the whole copies, unless they are there or on their way."""
        if self.is_gathered:
            return
        self.is_gathered = True
        # Allocated for the current stream, which waits for the collective before it uses them and frees them after.
        self._wholes.untyped_storage().resize_(self._whole_bytes)
        source = self._shards
        if self.compute_dtype != source.dtype:
            source = torch.empty_like(source, dtype=self.compute_dtype)
        with self._on_stream():
            if source is not self._shards:
                source.copy_(self._shards)
            self._sent = self._shard_views if source is self._shards else self._slots(source)
            self._work = _all_gather(self.process_group, self._whole_slots, self._sent)

    def wait(self) -> None:
        """Make the current stream (on a CPU: the caller) wait until the whole copies are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            del self._sent

    def check_in_place(self) -> None:
        """After a module has run with the whole copies.

        Raises:
            RuntimeError: the module has given one other memory, in which no later gather would arrive.
        """
        start = self._wholes.data_ptr()
        for parameter in self.parameters:
            if parameter.shape.numel() and parameter.working.data_ptr() != start + parameter.offset_bytes:
                raise RuntimeError(f"{parameter.names[0]} was moved to other memory while its module ran")

    def release(self) -> None:
        """Give the memory of the whole copies back."""
        self.wait()
        self._wholes.untyped_storage().resize_(0)
        self.is_gathered = False

    def full(self) -> list[Tensor]:
        """The whole parameters in their own dtype, gathered into tensors of their own."""
        sizes = [stop - start for start, stop in self.shard_slots.values()]
        outputs = [self._shards.new_empty(size * self.world_size) for size in sizes]
        _all_gather(self.process_group, outputs, self._shard_views).wait()
        return [
            output[: parameter.shape.numel()].view(parameter.shape)
            for parameter, output in zip(self.parameters, outputs, strict=True)
        ]

    def reduce(self) -> Reduction:
        """Start to average the gradients over the ranks, each rank receiving those of its shards."""
        return Reduction(self, self.trainable, self.reduce_dtype)

    def accumulate(self) -> None:
        """Set the gradients aside, whole, for a later reduction."""
        for parameter in self.trainable:
            gradient = parameter.take_gradient(self.reduce_dtype)
            parameter.accumulated = None if gradient is None else gradient.to(self.reduce_dtype)

    @property
    def has_gradients(self) -> bool:
        """Whether the last backward left gradients here that have been neither reduced nor set aside."""
        return any(parameter.working.grad is not None for parameter in self.parameters)

    def _slots(self, shards: Tensor) -> list[Tensor]:
        return [shards[start:stop] for start, stop in self.shard_slots.values()]

    def _on_stream(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        # The memory may have been another tensor's a moment ago, and the optimizer may still be writing the shards.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)


def _offsets(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """The length of a buffer of aligned slots, and where each begins."""
    total, starts = 0, []
    for size in sizes:
        starts.append(total)
        total += _aligned(size)
    return total, starts


class ReplicatedParameters:
    """Parameters that every rank holds whole; their gradients are averaged in one all-reduce."""

    def __init__(
        self,
        names: Sequence[tuple[str, ...]],
        wholes: Sequence[nn.Parameter],
        *,
        compute_dtype: torch.dtype | None,
        process_group: dist.ProcessGroup,
    ) -> None:
        self._process_group = process_group
        self.parameters = [
            ManagedParameter(name, kept, _cast_copy(kept, compute_dtype), kept.shape)
            for name, kept in zip(names, wholes, strict=True)
        ]
        self._cast = [parameter for parameter in self.parameters if parameter.working is not parameter.kept]
        self._targets = [_alias(parameter.working.detach(), 0, parameter.shape) for parameter in self._cast]

    def refresh(self) -> None:
        """Cast what the optimizer has made of the parameters into the copies that the module sees."""
        if self._cast:
            torch._foreach_copy_(self._targets, [parameter.kept.detach() for parameter in self._cast])

    def collect(self) -> None:
        """Add the gradients of the cast copies to those of the parameters, in the parameters' dtype."""
        for parameter in self._cast:
            gradient, parameter.working.grad = parameter.working.grad, None
            if gradient is None:
                continue
            if parameter.kept.grad is None:
                parameter.kept.grad = gradient.to(parameter.kept.dtype)
            else:
                parameter.kept.grad.add_(gradient)

    def all_reduce(self, device: torch.device, sharded: Sequence[ManagedParameter]) -> Tensor:
        """Average the gradients, and count the ranks that have one of each parameter, in the same collective.

        A rank without a gradient of a parameter contributes zeros; if no rank has one, none is made.

        Returns:
            For each of ``sharded``, a number that is zero if no rank has contributed to its gradient; on the device.
        """
        trainable = [parameter for parameter in self.parameters if parameter.kept.requires_grad]
        for parameter in trainable:
            parameter.has_gradient = parameter.kept.grad is not None
        dtype = torch.float32
        for parameter in trainable:
            dtype = torch.promote_types(dtype, parameter.kept.dtype)
        counted = [*sharded, *trainable]
        sizes = [parameter.shape.numel() for parameter in trainable]
        flat = torch.zeros(sum(sizes) + len(counted), dtype=dtype, device=device)
        *averages, counts = flat.split([*sizes, len(counted)])
        averages = [part.view(parameter.shape) for part, parameter in zip(averages, trainable, strict=True)]
        present = [i for i, parameter in enumerate(trainable) if parameter.has_gradient]
        gradients = [gradient for parameter in trainable if (gradient := parameter.kept.grad) is not None]
        if present:
            torch._foreach_copy_([averages[i] for i in present], gradients)
        counts.fill_(1)
        for i, parameter in enumerate(counted):
            if not parameter.has_gradient:
                counts[i] = 0  # a fill, which unlike a copy from the host waits for nothing
        dist.all_reduce(flat, group=self._process_group)
        flat[: sum(sizes)].div_(self._process_group.size())
        if present:
            torch._foreach_copy_(gradients, [averages[i] for i in present])
        for i, parameter in enumerate(trainable):
            if not parameter.has_gradient and counts[len(sharded) + i] > 0:
                parameter.kept.grad = averages[i].to(parameter.kept.dtype, copy=True)
        return counts[: len(sharded)]


def _cast_copy(kept: nn.Parameter, compute_dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter of its own in ``compute_dtype``, or ``kept`` if that is its dtype already."""
    if compute_dtype in (None, kept.dtype) or not kept.dtype.is_floating_point:
        return kept
    return nn.Parameter(kept.detach().to(compute_dtype), kept.requires_grad)
