"""Which rank updates which parameters, and how others receive them: flat buckets, owned by a rank or cut into shards.

Parameters move into flat tensors once, at construction (``param.data`` becomes a view), so that a collective sends many
of them without copying any. A *bucket* is one flat tensor, whose parameters are updated and sent together:

    owned       Each parameter has one owner, and a bucket holds parameters of one owner, who broadcasts them.
    scattered   A bucket is cut into equal shards, one per rank, wherever the cut falls; all ranks gather the shards.

Parameters are laid out in runs (``buckets.py``): those that are multiplied as one matrix stay one matrix in one bucket,
and have one owner in the owned kind. Every rank must lay out the same runs in the same order.

Parameters may still be arriving while training continues (``Arrivals``): each module waits for its own when its forward
begins. Call ``wait_for_parameters(model)`` before other code reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.costs.sharding import BucketPlan, greedy_partition, plan_buckets
from cs336_systems.distributed.buckets import neighbours, starts_in

Runs = list[list[Tensor]]


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements of a parameter that this rank updates, beginning at ``start`` in memory order.

    ``tensor`` is what its optimizer sees: the parameter, a view of it, or a one-dimensional view of a part of it.
    """

    start: int
    tensor: Tensor


class Member(NamedTuple):
    """This rank's number in a group; None means the default group, or a single rank without a group."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Member":
        """This rank in a group, or alone if no group was joined; ValueError if it is not in the group."""
        joined = dist.is_available() and dist.is_initialized()
        if joined and dist.get_rank(group) < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group whose ranks share the state")
        return cls(dist.get_rank(group), dist.get_world_size(group), group) if joined else cls(0, 1)


class ParameterBucket:
    """Parameters of one dtype and device as views of one flat tensor, in which each run begins where ``plan`` says.

    Args:
        member: this rank among those that share the bucket.
        owner: the rank that updates all of them; None to cut the bucket into shards.
    """

    def __init__(self, runs: Sequence[Sequence[Tensor]], plan: BucketPlan, member: Member, owner: int | None) -> None:
        self.parameters = [parameter for run in runs for parameter in run]
        self.owner, self.member = owner, member
        first = self.parameters[0]
        itemsize = first.element_size()
        self.flat = torch.zeros(plan.n_bytes // itemsize, dtype=first.dtype, device=first.device)
        self.offsets: list[int] = []  # where each parameter begins, in elements
        self._views: dict[Tensor, Tensor] = {}
        for run, offset in zip(runs, plan.offsets, strict=True):
            begin = offset // itemsize
            # Each run has its own storage object on the same memory, because ``torch.save`` writes whole storages.
            rows = torch.from_dlpack(self.flat[begin : begin + sum(parameter.numel() for parameter in run)])
            for parameter, start in zip(run, starts_in(run), strict=True):
                self.offsets.append(begin + start)
                self._views[parameter] = in_memory_order(rows[start:], parameter)
        for parameter, view in self._views.items():
            parameter.data = view.copy_(parameter.detach())
        self.own: dict[Tensor, Piece] = {}  # by parameter, the piece of it that this rank updates, if any
        if owner is not None:
            self.own = {parameter: Piece(0, parameter) for parameter in self.parameters if owner == member.rank}
            return
        sizes = [parameter.numel() for parameter in self.parameters]
        plan = BucketPlan(tuple(range(len(sizes))), tuple(self.offsets), self.flat.numel())
        cut = plan.pieces(sizes, member.world_size)
        for parameter, begin, spans in zip(self.parameters, self.offsets, cut, strict=True):
            for updated_by, start, stop in spans:
                if updated_by == member.rank:
                    self.own[parameter] = Piece(start, self.flat[begin + start : begin + stop])

    def shard_of(self, flat: Tensor) -> Tensor:
        """This rank's shard of a tensor as long as the bucket; the whole tensor if the bucket has an owner."""
        return flat if self.owner is not None else flat.chunk(self.member.world_size)[self.member.rank]

    def take_views(self) -> None:
        """Make the owner's pieces views of its parameters, so that their gradients are separate from backward's."""
        self.own = {parameter: Piece(0, self._views[parameter]) for parameter in self.own}

    def holds(self, parameter: Tensor) -> bool:
        """Whether a parameter still is a view of the bucket, not moved by another optimizer or by hand."""
        return parameter.data_ptr() == self._views[parameter].data_ptr()

    def check(self) -> None:
        """Raise ValueError unless all parameters are views of the bucket."""
        if moved := [tuple(parameter.shape) for parameter in self._views if not self.holds(parameter)]:
            raise ValueError(
                f"a parameter of shape {moved[0]} was moved, cast or given to another sharded optimizer after its own "
                "was made: make the optimizer last"
            )

    @property
    def trainable(self) -> bool:
        """Whether a step can change anything in the bucket; the same on every rank."""
        return any(parameter.requires_grad or parameter.grad is not None for parameter in self.parameters)

    def send(self) -> list[dist.Work]:
        """Start to send this rank's updates to the other ranks, without waiting."""
        if not self.trainable:
            return []
        if self.owner is not None:
            return [dist.broadcast(self.flat, group_src=self.owner, group=self.member.group, async_op=True)]
        shard = self.shard_of(self.flat)
        return [dist.all_gather_into_tensor(self.flat, shard, self.member.group, async_op=True)]


def in_memory_order(flat: Tensor, like: Tensor) -> Tensor:
    """A view of the first elements of ``flat`` with the shape and memory format of ``like``."""
    return flat.as_strided(like.shape, torch.empty_like(like.detach(), device="meta").stride())


def runs_of(parameters: Sequence[Tensor]) -> Runs:
    """The parameters in runs, each either all trainable or all frozen at present."""
    return neighbours(parameters, alike=lambda parameter: parameter.requires_grad)


def owned_buckets(runs: Runs, member: Member, size: int, loads: list[int]) -> list[ParameterBucket]:
    """Buckets of at most ``size`` bytes with owners, balanced by bytes: trainable runs first, as others have no state.

    The list alternates between owners, so that all of them update at the same time.

    Args:
        loads: bytes of trainable parameters that each rank already owns; the bytes assigned here are added in place.
    """
    owners = owners_of(runs, member, loads)
    by_owner = [
        scattered_buckets([run for run in runs if owners[run[0]] == owner], member, size, owners)
        for owner in range(member.world_size)
    ]
    return [bucket for turn in zip_longest(*by_owner) for bucket in turn if bucket is not None]


def owners_of(runs: Runs, member: Member, loads: list[int]) -> dict[Tensor, int]:
    """The owner of each run by its first parameter; arguments as for ``owned_buckets``."""
    found: dict[Tensor, int] = {}
    for trainable in (True, False):
        chosen = [run for run in runs if run[0].requires_grad is trainable]
        owners = greedy_partition([_n_bytes(run) for run in chosen], member.world_size, loads if trainable else ())
        for run, owner in zip(chosen, owners, strict=True):
            found[run[0]] = owner
            loads[owner] += _n_bytes(run) * trainable
    return found


def scattered_buckets(
    runs: Iterable[Sequence[Tensor]], member: Member, size: int, owners: Mapping[Tensor, int] | None = None
) -> list[ParameterBucket]:
    """Buckets of at most ``size`` bytes that are cut into shards, except those of runs that have owners.

    Runs of different owners, dtypes or devices, or of which only one is frozen, are in different buckets. Buckets are
    in the order of their last runs, so those whose parameters become ready early come early.

    Args:
        owners: of runs, by their first parameters.
    """
    kinds: dict[tuple[torch.dtype, torch.device, bool, int | None], list[tuple[int, Sequence[Tensor]]]] = {}
    for position, run in enumerate(runs):
        kind = (run[0].dtype, run[0].device, run[0].requires_grad, (owners or {}).get(run[0]))
        kinds.setdefault(kind, []).append((position, run))
    planned = [
        ([members[i] for i in plan.members], plan, owner)
        for (*_, owner), members in kinds.items()
        for plan in plan_buckets([_n_bytes(run) for _, run in members], size, member.world_size if owner is None else 1)
    ]
    planned.sort(key=lambda entry: entry[0][-1][0])
    return [ParameterBucket([run for _, run in members], plan, member, owner) for members, plan, owner in planned]


def _n_bytes(run: Sequence[Tensor]) -> int:
    return sum(parameter.nbytes for parameter in run)


class Arrivals:
    """Makes modules' forwards, and reads and writes of their state dicts, wait for the modules' parameters.

    It does not keep the modules alive; a copy of it watches nothing.

    Args:
        modules: in the order in which forward calls them; a parameter may be in several.

    Raises:
        ValueError: a module is compiled, which would compile the wait as well.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._parameters = WeakKeyDictionary({module: frozenset(module.parameters()) for module in modules})
        self._under_way: WeakKeyDictionary[nn.Module, list[dist.Work]] = WeakKeyDictionary()
        self._handles: list[Any] = []
        for module in self._parameters:
            if module._compiled_call_impl is not None:
                raise ValueError(f"{type(module).__name__} is compiled: what its forward is to wait for would be, too")
        for module in self._parameters:
            self._handles.append(module.register_forward_pre_hook(self._wait_for, prepend=True))
            for part in module.modules():
                self._handles.append(part.register_state_dict_pre_hook(self._wait_for_all))
                self._handles.append(part.register_load_state_dict_pre_hook(self._wait_for_all))

    def __reduce__(self) -> tuple[type["Arrivals"], tuple[()]]:
        """Make deepcopy and pickle of modules, which include their hooks, copy an empty object."""
        return Arrivals, ()

    def in_order(self, buckets: Iterable[ParameterBucket]) -> list[tuple[ParameterBucket, list[nn.Module]]]:
        """The buckets in the order in which forward first reads them, each with the modules that read it.

        A bucket with a parameter that is in none of the modules has no readers, and comes before all others.
        """
        watched = frozenset[Tensor]().union(*self._parameters.values())
        placed: list[tuple[ParameterBucket, list[int]]] = []
        for bucket in buckets:
            own = bucket.parameters if watched.issuperset(bucket.parameters) else ()
            placed.append((bucket, [i for i, of in enumerate(self._parameters.values()) if not of.isdisjoint(own)]))
        placed.sort(key=lambda each: each[1][:1])
        modules = list(self._parameters)
        return [(bucket, [modules[i] for i in places]) for bucket, places in placed]

    def expect(self, works: list[dist.Work], readers: Iterable[nn.Module]) -> None:
        """Make the modules wait for these collectives."""
        for module in readers:
            self._under_way.setdefault(module, []).extend(works)

    def _wait_for(self, module: nn.Module, *_: Any) -> None:
        for work in self._under_way.pop(module, ()):
            work.wait()

    def _wait_for_all(self, *_: Any) -> None:
        self.wait()

    def wait(self) -> None:
        """Make later work on the current stream, which must be the training stream, see all parameters."""
        for module in list(self._under_way):
            self._wait_for(module)

    def close(self) -> None:
        """Wait, then remove the hooks."""
        self.wait()
        for handle in self._handles:
            handle.remove()


def wait_for_parameters(model: nn.Module) -> None:
    """Make later work on the current stream see all parameters of the model."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(arrivals := getattr(hook, "__self__", None), Arrivals):
                arrivals.wait()
