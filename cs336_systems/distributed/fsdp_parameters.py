"""FSDP's parameters: permanent shards, temporary whole copies, and the collectives between the two.

A parameter of two or more dimensions is split along the first one as ``torch.chunk`` would: rank r holds rows
[r c, (r + 1) c) with c = ceil(rows / world_size), so the last ranks may hold fewer rows, or none. Two objects stand for
it: ``sharded_param``, the rows in the module's own dtype, which the optimizer sees, and ``unsharded_param``, the whole
in ``compute_dtype``, which the module sees while it runs. Parameters of fewer dimensions are replicated.

Parameters that are used together form a ``ShardedGroup`` and travel in one collective. Only dtype changes copy: shards
into ``compute_dtype`` before they are gathered, gradients into the shards' dtype before they are reduced. What a module
has laid out as one matrix is one again when it is gathered (``buckets.py``), if the ranks divide all rows evenly.
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

_ALIGNMENT = 64  # elements to which slots are rounded: 128 bytes of bf16, more than vectorised loads and NCCL ask for

Hook = Callable[[Any], None]


class GradientHooks(OrderedDict[int, Hook]):
    """A parameter's ``register_post_accumulate_grad_hook``, whose hooks run on the average, not on a rank's part."""

    def __call__(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


def _refuse_hook(hook: Hook) -> None:
    """Stand for ``register_hook`` of a shard, and raise RuntimeError."""
    raise RuntimeError("a shard of FSDP is in no graph, so hooks must be register_post_accumulate_grad_hook's")


@dataclass(eq=False)
class ManagedParameter:
    """One parameter under all its names."""

    names: tuple[str, ...]
    sharded_param: nn.Parameter
    """The optimizer sees this: the rank's rows, or all of them if the parameter is replicated."""
    unsharded_param: nn.Parameter  # the module sees this while it runs
    shape: torch.Size  # the shape of the whole parameter
    first_element: int = field(default=0, kw_only=True)
    """The position in the whole parameter of the first element of ``sharded_param``."""
    has_gradient: bool = field(default=False, kw_only=True)
    """Whether this rank contributed to the gradient since the last synchronization."""
    _hooks: GradientHooks = field(default_factory=GradientHooks, kw_only=True)

    def take_hooks(self) -> None:
        """Run hooks that are registered from now on once the gradient is the average over the ranks."""
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

    padded_numel: int  # the number of elements of a shard, padded so that all ranks' are equal, as collectives need it
    memory: Tensor  # collectives read the shard here
    accumulated: Tensor | None = None  # the whole gradient of backward passes under ``no_sync``, in the shard's dtype


class GroupState(Enum):
    """Whether a group's unsharded parameters have no memory, are on their way, or there for the current stream."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedGroup:
    """Parameters of one dtype that are gathered, freed and reduced together.

    Args:
        names: all names of each parameter.
        parameters: whole, and equal on every rank; the group copies this rank's rows and holds on to no more.
        compute_dtype: of the unsharded parameters; None keeps the parameters' own.
        turns: if they are taken, ranks copy each other's rows, but for those that are cast.
    """

    _travels_as_stored = True  # whether rows travel as the shards hold them, unless they are cast

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

        # Every parameter has a padded slot of this rank's rows and one of the whole: the coalesced collective moves it
        # from slot to slot in one kernel, and NCCL has nothing to pack or unpack around it.
        n_rows = [-(-parameter.shape[0] // world_size) for parameter in parameters]
        sizes = [n * parameter[:1].numel() for n, parameter in zip(n_rows, parameters, strict=True)]
        n_sharded, starts = _offsets(sizes)
        n_unsharded, unsharded_starts = _unsharded_offsets(parameters, [size * world_size for size in sizes])
        self._slots = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._memory: PeerMemory | None = None
        self._copies: Copies | None = None  # they bring the rows of all ranks, if rows are copied
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
            # An optimizer that draws random numbers per element asks for its place in the whole parameter.
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
        """Make zeros, (numel,), which the other ranks read if rows are copied; a collective then."""
        if not self.turns.taken:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        self._memory = PeerMemory(numel, dtype, self.device, self.process_group)
        return self._memory.of_rank[self.process_group.rank()]

    def _plan_copies(self, outputs: Sequence[Tensor]) -> None:
        """If rows are copied, note how: ``outputs`` is where the whole of each parameter arrives, (world_size * n,)."""
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
        """The bytes that the unsharded parameters hold at this moment."""
        return self._unsharded.untyped_storage().nbytes()

    def check_data(self) -> None:
        """Raise RuntimeError if the user has given a shard other memory, which collectives would not read."""
        for parameter in self.parameters:
            if parameter.sharded_param.data_ptr() != parameter.memory.data_ptr():
                raise RuntimeError(f"{parameter.names[0]}.data was set under FSDP: copy values into it instead")

    def gather(self) -> None:
        """Start to make the unsharded parameters, unless they are there or on their way."""
        if self.state is not GroupState.SHARDED:
            return
        self.check_data()
        self.state = GroupState.GATHERING
        # Allocated for the current stream, which waits for the collective before it uses them and frees them after.
        self._unsharded.untyped_storage().resize_(self._unsharded_bytes)
        with self.turns.on_stream(), torch.no_grad():
            outputs, self._sent = self._exchanged()
            if self._copies is not None and self.turns.reading:
                self._work = self._copies.begin()
            else:
                self._work = all_gather(self.process_group, outputs, self._sent)

    def _exchanged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Flat tensors in which the whole of each parameter arrives, and this rank's rows as the others get them."""
        if self.compute_dtype == self._sharded.dtype:
            return self._gather_outputs, self._gather_inputs
        # Cast to where they would arrive: memory of their own would last until the gather is waited for.
        torch._foreach_copy_(self._own_outputs, self._gather_inputs)
        return self._gather_outputs, self._own_outputs

    def wait(self) -> None:
        """Make the current stream (on a CPU: the caller) wait until the unsharded parameters are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            del self._sent
            self.state = GroupState.UNSHARDED

    def check_in_place(self) -> None:
        """Raise RuntimeError if a module has given a parameter other memory, in which no later gather would arrive."""
        for parameter, output in zip(self.parameters, self._gather_outputs, strict=True):
            if parameter.shape.numel() and parameter.unsharded_param.data_ptr() != output.data_ptr():
                raise RuntimeError(f"{parameter.names[0]} was moved to other memory while its module ran")

    def free(self) -> None:
        """Give the memory of the unsharded parameters back."""
        self.wait()
        # The bytes alone: what autograd saved in forward is this storage, and the weights again once they are gathered.
        self._unsharded.untyped_storage().resize_(0)
        self.state = GroupState.SHARDED

    def full(self) -> list[Tensor]:
        """The whole parameters in their own dtype, gathered into tensors of their own."""
        self.check_data()
        outputs = [shard.new_empty(shard.numel() * self.world_size) for shard in self._gather_inputs]
        all_gather(self.process_group, outputs, self._gather_inputs).wait()
        return [
            output[: parameter.shape.numel()].view(parameter.shape)
            for parameter, output in zip(self.parameters, outputs, strict=True)
        ]

    def drop_gradients(self) -> None:
        """Give up the gradients that have not been reduced, accumulated ones too."""
        for parameter in self.parameters:
            parameter.unsharded_param.grad = parameter.accumulated = None
            parameter.has_gradient = False

    @property
    def has_gradients(self) -> bool:
        """Whether the last backward left gradients here that have been neither reduced nor accumulated."""
        return any(parameter.unsharded_param.grad is not None for parameter in self.parameters)


def _unsharded_offsets(parameters: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Like ``_offsets``, but neighbours stay neighbours where their rows divide evenly, so without padding."""
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
    """The length of a buffer of aligned slots, and where each begins."""
    total, starts = 0, []
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return total, starts
