"""FSDP's parameters: permanent shards, temporary whole copies, and the collectives between the two.

A parameter of two or more dimensions is split along the first one as ``torch.chunk`` would: rank r holds rows
[r c, (r + 1) c) with c = ceil(rows / world_size), so the last ranks may hold fewer rows, or none. Two objects represent
it: ``sharded_param``, the rows in the module's own dtype, which the optimizer sees, and ``unsharded_param``, the whole
in ``compute_dtype``, which the module sees while it runs. Parameters of fewer dimensions are replicated.

Parameters that are used together form a ``ShardedGroup`` and are sent in one collective. Nothing is copied except by
casts: of shards to ``compute_dtype`` before the gather, of gradients to the shards' dtype before the reduction.
Parameters that a module has laid out as one matrix form one matrix again when gathered (``buckets.py``), if the ranks
divide all rows evenly.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cs336_systems.distributed.buckets import alias, neighbours
from cs336_systems.distributed.peer_memory import Copies, PackedGather, PeerMemory, Turns, all_gather

_ALIGNMENT = 64  # elements; slot sizes are multiples of it: 128 bytes of bf16, enough for vector loads and NCCL

Hook = Callable[[Any], None]


class GradientHooks(OrderedDict[int, Hook]):
    """Replaces a parameter's ``register_post_accumulate_grad_hook``: hooks run on the average, not on a rank's part."""

    def __call__(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


def _refuse_hook(hook: Hook) -> None:
    """Replace ``register_hook`` of a shard: raise RuntimeError."""
    raise RuntimeError("a shard of FSDP is in no graph, so hooks must be register_post_accumulate_grad_hook's")


@dataclass(eq=False)
class ManagedParameter:
    """One parameter under all its names."""

    names: tuple[str, ...]
    sharded_param: nn.Parameter
    """The parameter that the optimizer sees: the rank's rows, or all rows if the parameter is replicated."""
    unsharded_param: nn.Parameter  # what the module sees while it runs
    shape: torch.Size  # the shape of the whole parameter
    first_element: int = field(default=0, kw_only=True)
    """The position in the whole parameter of the first element of ``sharded_param``."""
    has_gradient: bool = field(default=False, kw_only=True)
    """Whether this rank contributed to the gradient since the last synchronization."""
    _hooks: GradientHooks = field(default_factory=GradientHooks, kw_only=True)

    def take_hooks(self) -> None:
        """Make hooks that are registered from now on run once the gradient is the average over the ranks."""
        self.sharded_param.register_post_accumulate_grad_hook = self._hooks  # type: ignore[method-assign]
        if self.unsharded_param is not self.sharded_param:
            self.sharded_param.register_hook = _refuse_hook  # type: ignore[method-assign]

    def run_hooks(self) -> None:
        """Call the user's hooks, in the order in which they were registered."""
        for hook in list(self._hooks.values()):
            hook(self.sharded_param)


@dataclass(eq=False)
class ShardedParameter(ManagedParameter):
    """A parameter that is split over the ranks."""

    padded_numel: int  # the number of elements of a shard, padded to be equal on all ranks, as collectives need
    memory: Tensor  # collectives read the shard here
    accumulated: Tensor | None = None  # the whole gradient of backward passes under ``no_sync``, in the shard's dtype


class GroupState(Enum):
    """Whether a group's unsharded parameters have no memory, are being gathered, or are ready on the current stream."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedGroup:
    """Parameters of one dtype that are gathered, freed and reduced together.

    Args:
        names: all names of each parameter.
        parameters: whole, and equal on every rank; the group copies this rank's rows and keeps no other reference.
        compute_dtype: the dtype of the unsharded parameters; None means the parameters' own.
        turns: if ``turns.taken``, ranks copy each other's rows, except rows that are cast.
    """

    _travels_as_stored = True  # whether rows are sent as the shards hold them, unless they are cast

    def __init__(
        self,
        names: Sequence[tuple[str, ...]],
        parameters: Sequence[nn.Parameter],
        *,
        compute_dtype: torch.dtype | None,
        turns: Turns,
    ) -> None:
        self.process_group = process_group = turns.group
        self.world_size = world_size = process_group.size()
        self.device = parameters[0].device
        self.dtype = dtype = parameters[0].dtype
        self.compute_dtype = compute_dtype if compute_dtype and dtype.is_floating_point else dtype
        self.turns = turns
        self.state = GroupState.SHARDED
        self._work: dist.Work | PackedGather | Copies | None = None

        # Every parameter has a padded slot for this rank's rows and one for the whole: the coalesced collective moves
        # rows from slot to slot in one kernel, without packing or unpacking by NCCL.
        n_rows = [-(-parameter.shape[0] // world_size) for parameter in parameters]
        sizes = [n * parameter[:1].numel() for n, parameter in zip(n_rows, parameters, strict=True)]
        n_sharded, starts = _offsets(sizes)
        n_unsharded, unsharded_starts = _unsharded_offsets(parameters, [size * world_size for size in sizes])
        self._slots = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._memory: PeerMemory | None = None
        self._copies: Copies | None = None  # copies of the rows of all ranks, if rows are copied
        if self._travels_as_stored and self.compute_dtype == dtype:
            self._sharded = self._read_by_all(n_sharded, dtype)
        else:
            self._sharded = torch.zeros(n_sharded, dtype=dtype, device=self.device)
        self._unsharded = torch.empty(n_unsharded, dtype=self.compute_dtype, device=self.device)
        self._gather_inputs = [self._sharded[slot] for slot in self._slots]
        self._gather_outputs: list[Tensor] = []
        self._own_outputs: list[Tensor] = []  # the parts of ``_gather_outputs`` where this rank's rows arrive
        self.parameters: list[ShardedParameter] = []
        for i, whole in enumerate(parameters):
            first = n_rows[i] * process_group.rank()
            rows = whole.detach()[first : first + n_rows[i]]
            memory = alias(self._sharded, starts[i], rows.shape).copy_(rows)
            sharded = nn.Parameter(memory, whole.requires_grad)
            # An optimizer that draws random numbers per element needs the shard's place in the whole parameter.
            sharded.first_element = place = first * whole[:1].numel()  # type: ignore[attr-defined]
            unsharded = nn.Parameter(alias(self._unsharded, unsharded_starts[i], whole.shape), whole.requires_grad)
            parts = names[i], sharded, unsharded, whole.shape, sizes[i], memory
            self.parameters.append(ShardedParameter(*parts, first_element=place))
            self._gather_outputs.append(alias(self._unsharded, unsharded_starts[i], (sizes[i] * world_size,)))
            own_start = unsharded_starts[i] + process_group.rank() * sizes[i]
            self._own_outputs.append(alias(self._unsharded, own_start, (sizes[i],)))
        self._plan_copies(self._gather_outputs)
        self._unsharded_bytes = self.unsharded_bytes
        self._unsharded.untyped_storage().resize_(0)

    def _read_by_all(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make zeros, (numel,), which other ranks read if rows are copied, in which case this is a collective."""
        if not self.turns.taken:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        self._memory = PeerMemory(numel, dtype, self.device, self.process_group)
        return self._memory.of_rank[self.process_group.rank()]

    def _plan_copies(self, outputs: Sequence[Tensor]) -> None:
        """If rows are copied, prepare the copies into ``outputs``, one whole parameter each, (world_size * n,)."""
        if self._memory is not None:
            rows = [[memory[slot] for memory in self._memory.of_rank] for slot in self._slots]
            self._copies = Copies(outputs, rows)

    @property
    def is_cast(self) -> bool:
        """Whether the unsharded parameters, and so their gradients, have another dtype than the shards."""
        return self.compute_dtype != self.dtype

    @property
    def trainable(self) -> list[ShardedParameter]:
        """The parameters that take part in a reduction."""
        return [parameter for parameter in self.parameters if parameter.sharded_param.requires_grad]

    @property
    def unsharded_bytes(self) -> int:
        """The bytes that the unsharded parameters hold now."""
        return self._unsharded.untyped_storage().nbytes()

    def check_data(self) -> None:
        """Raise RuntimeError if the user has replaced a shard's memory, as collectives would read the old one."""
        for parameter in self.parameters:
            if parameter.sharded_param.data_ptr() != parameter.memory.data_ptr():
                raise RuntimeError(f"{parameter.names[0]}.data was set under FSDP: copy values into it instead")

    def gather(self) -> None:
        """Start to gather the unsharded parameters, unless that has been done or begun."""
        if self.state is not GroupState.SHARDED:
            return
        self.check_data()
        self.state = GroupState.GATHERING
        # Allocated on the current stream, which waits for the collective before it uses them and frees them after.
        self._unsharded.untyped_storage().resize_(self._unsharded_bytes)
        with self.turns.on_stream(), torch.no_grad():
            outputs, self._sent = self._exchanged()
            if self._copies is not None and self.turns.reading:
                self._work = self._copies.begin()
            else:
                self._work = all_gather(self.process_group, outputs, self._sent)

    def _exchanged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Flat tensors that receive each whole parameter, and this rank's rows as they are sent."""
        if self.compute_dtype == self._sharded.dtype:
            return self._gather_outputs, self._gather_inputs
        # Cast into this rank's part of the output: separate memory would be held until the gather is waited for.
        torch._foreach_copy_(self._own_outputs, self._gather_inputs)
        return self._gather_outputs, self._own_outputs

    def wait(self) -> None:
        """Make the current stream (on a CPU: the caller) wait until the unsharded parameters are gathered."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            del self._sent
            self.state = GroupState.UNSHARDED

    def check_in_place(self) -> None:
        """Raise RuntimeError if a module has replaced a parameter's memory, as later gathers would fill the old one."""
        for parameter, output in zip(self.parameters, self._gather_outputs, strict=True):
            if parameter.shape.numel() and parameter.unsharded_param.data_ptr() != output.data_ptr():
                raise RuntimeError(f"{parameter.names[0]} was moved to other memory while its module ran")

    def free(self) -> None:
        """Free the memory of the unsharded parameters."""
        self.wait()
        # Only the bytes: autograd has saved this storage in forward, and the next gather refills it with the weights.
        self._unsharded.untyped_storage().resize_(0)
        self.state = GroupState.SHARDED

    def full(self) -> list[Tensor]:
        """Gather the whole parameters, in their own dtype, into new tensors."""
        self.check_data()
        outputs = [shard.new_empty(shard.numel() * self.world_size) for shard in self._gather_inputs]
        all_gather(self.process_group, outputs, self._gather_inputs).wait()
        return [
            output[: parameter.shape.numel()].view(parameter.shape)
            for parameter, output in zip(self.parameters, outputs, strict=True)
        ]

    def drop_gradients(self) -> None:
        """Drop the gradients that have not been reduced, accumulated ones too."""
        for parameter in self.parameters:
            parameter.unsharded_param.grad = parameter.accumulated = None
            parameter.has_gradient = False

    @property
    def has_gradients(self) -> bool:
        """Whether the last backward left gradients here that have been neither reduced nor accumulated."""
        return any(parameter.unsharded_param.grad is not None for parameter in self.parameters)


def _unsharded_offsets(parameters: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Like ``_offsets``, but neighbours whose rows divide evenly, and so need no padding, stay neighbours."""
    number_of = {parameter: i for i, parameter in enumerate(parameters)}
    runs: list[list[int]] = []
    for run in neighbours(parameters):
        numbers = [number_of[parameter] for parameter in run]
        even = all(parameters[i].numel() == sizes[i] for i in numbers[:-1])
        runs += [numbers] if even else [[i] for i in numbers]
    total, run_starts = _offsets([sum(sizes[i] for i in numbers) for numbers in runs])
    starts = [0] * len(sizes)
    for numbers, start in zip(runs, run_starts, strict=True):
        for i in numbers:
            starts[i] = start
            start += sizes[i]
    return total, starts


def _offsets(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """The length of a buffer of aligned slots, and the offset of each slot."""
    total, starts = 0, []
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return total, starts
