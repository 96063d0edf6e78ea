"""The division of any module into FSDP units, and of its parameters into groups.

A *unit* is a module that has its parameters unsharded while it runs, and sharded around it. By default that is every
outermost module that holds a matrix itself (``Linear``, ``Embedding``, ``MultiheadAttention`` with all that is inside),
and every outermost one that has been compiled. A predicate names larger units, such as a model's blocks; whatever it
leaves over is divided by default. No unit lies in another.

A *group* is a set of parameters of one dtype that the same units use; it is sent in one collective. A parameter that
several units share, such as a tied embedding, is in a group with only those that the same units share.

Forward and backward follow an order that depends only on the calls of units (``Forward``), never on which tensors are
alive or which parameters received a gradient: those may differ between ranks, but their collectives must not.

Limits: a module whose weights its parent reads without calling it must lie in a unit with that parent (name the
parent in the predicate; otherwise the read raises); ranks must run the same units in the same order.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed.buckets import broadcast_from_rank_0, empty_like_run, neighbours
from cs336_systems.distributed.fsdp_gradients import ReplicatedParameters
from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedGroup
from cs336_systems.distributed.fsdp_quantized import QuantizedGroup, QuantizedRows, QuantizedTravel
from cs336_systems.distributed.peer_memory import Turns
from cs336_systems.distributed.wrapped import NotCopied


class Elsewhere(Tensor):
    """Replaces a sharded parameter in a forward while no unit that gathers it is running.

    Its dtype, device and shape, which code may read, are the whole parameter's; computing with it is refused.
    """

    _is_param = True
    _name: str

    @staticmethod
    def __new__(cls, parameter: ManagedParameter) -> "Elsewhere":
        whole = parameter.unsharded_param
        guard: Elsewhere = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=whole.dtype, device=whole.device, requires_grad=whole.requires_grad
        )
        guard._name = parameter.names[0]
        return guard

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise RuntimeError, as no operation may compute with it."""
        guard = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(
            f"{guard._name} is read outside of its own module's call, where a rank has only a part of it: name the "
            "module that reads it in FSDP's units=, so that it gathers what is inside it"
        )


@dataclass(eq=False)
class ParameterSlot:
    """An attribute of a module that refers to a parameter; units that contain the same module share it."""

    module: nn.Module
    attribute: str
    parameter: ManagedParameter
    users: int = 0  # the number of units that need it now

    def __post_init__(self) -> None:
        self.resting: Tensor = self.parameter.sharded_param
        """The tensor to which the module refers while no unit needs the parameter unsharded."""

    def check(self) -> None:
        """Raise RuntimeError if the user has registered another parameter in the module."""
        registered = self.module._parameters.get(self.attribute)
        if registered is not self.resting and registered is not self.parameter.unsharded_param:
            raise RuntimeError(f"{self.parameter.names[0]} was replaced under FSDP: copy values into it instead")

    def rest(self, tensor: Tensor) -> None:
        """Make the module refer to the tensor whenever no unit needs the parameter unsharded."""
        self.resting = tensor
        if not self.users:
            self.register(tensor)

    def register(self, tensor: Tensor) -> None:
        """Make the module refer to the tensor."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]  # a tenth of setattr's time
        else:
            setattr(self.module, self.attribute, tensor)


Predicate = Callable[[nn.Module], bool]
Travels = Callable[[nn.Module], QuantizedTravel | None]


@dataclass(eq=False)
class Unit:
    """A module that has its parameters unsharded while it runs."""

    name: str  # the module's name in the wrapped module; the wrapped module itself has its class's name
    module: nn.Module
    groups: list[ShardedGroup] = field(default_factory=list)
    param_slots: list[ParameterSlot] = field(default_factory=list)

    def to_unsharded(self) -> None:
        """Register the unsharded parameters in the module, until ``to_sharded`` has been called as often."""
        for slot in self.param_slots:
            slot.users += 1
            parameter = slot.parameter
            parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)  # the user may change it
            slot.register(parameter.unsharded_param)

    def to_sharded(self) -> None:
        """Register the sharded parameters in the module, unless they are still needed unsharded."""
        for slot in self.param_slots:
            slot.users -= 1
            if not slot.users:
                slot.register(slot.resting)

    def run_by(self, run: Callable[..., Any]) -> None:
        """Make calls of the module call ``run(self, the module's own __call__, args, kwargs)`` from now on."""
        self.module._fsdp_call = functools.partial(run, self)  # type: ignore[assignment]
        module_class: Any = type(self.module)
        self.module.__class__ = _unit_class(module_class)


class Forward:
    """The units that a forward has run, and those of the previous forward, which it is expected to run.

    The first forward expects no units and so prefetches none. Calls of units between the end of a forward and its
    backward, such as those of a loss computed in chunks, count as the forward's.
    """

    def __init__(self, previous: "Forward | None" = None) -> None:
        self.units: list[Unit] = []  # the units that it has run, in the order in which they began
        self.runs: list[Run] = []  # the runs that will have a backward, in the order in which they ended
        self.serial = 0  # the number of this forward among those since the last backward that may have a backward
        self.n_inside: int | None = None  # the number of units that it ran before its end
        self._expected_inside = previous.n_inside if previous else 0
        self.expected: list[Unit] = previous.units if previous else []
        self.as_expected = bool(self.expected)
        self._last_use = {group: i for i, unit in enumerate(self.expected) for group in unit.groups}
        self._first_run: dict[ShardedGroup, int] = {}

    def left(self) -> list[Unit]:
        """Units still expected before the forward ends or, after its end, before anything else begins."""
        until = len(self.expected) if self.n_inside is not None else self._expected_inside
        return self.expected[len(self.units) : until] if self.as_expected else []

    def keeps(self, group: ShardedGroup, position: int) -> bool:
        """Whether the group stays after the unit at the position, because it is used again soon."""
        if not self.as_expected:
            return False
        # Backward starts at the last run, so nothing is freed once that has begun.
        last_has_begun = len(self.units) == len(self.expected)
        return self._last_use[group] > position or (last_has_begun and bool(self.runs))

    def add_run(self, unit: Unit, started: int) -> "Run":
        """Record a call that will have a backward."""
        run = Run(self, unit, started, len(self.runs))
        self.runs.append(run)
        for group in unit.groups:
            self._first_run.setdefault(group, run.number)
        return run

    def uses(self, group: ShardedGroup, number: int) -> bool:
        """Whether one of the runs up to the number uses the group."""
        return group in self._first_run and self._first_run[group] <= number


@dataclass(eq=False)
class Run:
    """One call of a unit in a forward, which will have a backward."""

    forward: Forward
    unit: Unit
    started: int
    """The number of runs that had ended when this one began; it is less than ``number`` if other runs lie inside."""
    number: int  # the number of runs that had ended before this one did


@dataclass
class Backward:
    """One backward pass; the weak reference ``lives`` is dead once autograd has dropped the pass."""

    lives: "weakref.ref[Any]"
    walks: dict[Forward, int] = field(default_factory=dict)
    """For each forward, the number of the run that this backward has reached."""
    open: list[Run] = field(default_factory=list)
    """The runs that it is inside, whose recomputation needs their parameters."""
    producing: dict[ShardedGroup, None] = field(default_factory=dict)
    """The groups whose gradients it is computing, in the order in which it reached them."""


class _CalledByRunner(NotCopied):
    """A base class put before the others of a unit's class.

    Hooks would not work: ``module.compile()`` moves them into the compiled code, whereas ``__call__`` stays outside.
    """

    _fsdp_call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_call(super().__call__, args, kwargs)  # type: ignore[misc]


def is_unit(module: nn.Module) -> bool:
    return isinstance(module, _CalledByRunner)


@functools.cache
def _unit_class(module_class: Any) -> type:
    return type(
        f"FSDP{module_class.__name__}", (_CalledByRunner, module_class), {"__module__": module_class.__module__}
    )


_Found = dict[tuple[nn.Module, str], tuple[nn.Parameter, dict[nn.Module | None, None]]]
"""Each attribute of a module that is a parameter, and the modules of the units that contain it, None for no unit."""


def _find_slots(
    module: nn.Module, outer: nn.Module | None, predicate: Predicate | None, casts: bool, found: _Found
) -> None:
    """Add the slots of a module inside the unit ``outer`` to ``found``, in the order of ``module.modules()``."""
    own = {attribute: parameter for attribute, parameter in module._parameters.items() if parameter is not None}
    unit = outer
    if unit is None and (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules  # what torch.compile returns
        or (predicate is not None and predicate(module))
        or any(parameter.dim() > 1 for parameter in own.values())
    ):
        unit = outer = module
    elif unit is None and casts and own:
        unit = module  # without its children, as its vectors are whole already
    for attribute, parameter in own.items():
        found.setdefault((module, attribute), (parameter, {}))[1][unit] = None
    for child in module.children():
        _find_slots(child, outer, predicate, casts, found)


class ShardedUnits:
    """A module's units and groups; the constructor replaces its parameters by shards with rank 0's values.

    That goes group by group, in the order of ``module.modules()``. Parameters on ``meta`` are materialised module by
    module just before (``_materialise``), so only incomplete groups are held whole. Raises ValueError for a parameter
    on another device, or a module on ``meta`` that cannot be initialised.
    """

    def __init__(
        self,
        module: nn.Module,
        turns: Turns,
        *,
        predicate: Predicate | None,
        quantized: Travels | None,
        compute_dtype: torch.dtype | None,
    ) -> None:
        device, process_group = turns.device, turns.group
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.device not in (device, torch.device("meta")):
                raise ValueError(f"parameter {name} is on {parameter.device}, and is to be sharded on {device}")
            names.setdefault(parameter, []).append(name)
        found: _Found = {}
        _find_slots(module, None, predicate, compute_dtype is not None, found)
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        units_of: dict[nn.Parameter, dict[nn.Module | None, None]] = {}
        for place, (parameter, own) in found.items():
            places.setdefault(parameter, []).append(place)
            units_of.setdefault(parameter, {}).update(own)
        members: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter, own in units_of.items():
            if parameter.dim() > 1:
                members.setdefault((parameter.dtype, frozenset(own)), []).append(parameter)
        waiting_for = {key: {holder for p in group for holder, _ in places[p]} for key, group in members.items()}

        self.turns = turns
        self.quantized_rows = QuantizedRows(self.turns)  # the rows of the groups that are sent quantized
        run_of = {parameter: run for run in neighbours(names) for parameter in run}
        made: dict[nn.Parameter, nn.Parameter] = {}
        managed: dict[nn.Parameter, ManagedParameter] = {}
        group_of: dict[nn.Parameter, ShardedGroup] = {}

        def shard(originals: list[nn.Parameter]) -> None:
            wholes = [made.pop(parameter) for parameter in originals]
            self._broadcast(wholes)
            used_by = [unit for unit in units_of[originals[0]] if unit is not None]
            travel = quantized(used_by[0]) if quantized and len(used_by) == 1 else None
            kind: Any = ShardedGroup
            if travel is not None and travel.serves(wholes, process_group.size()):
                kind = functools.partial(QuantizedGroup, travel, self.quantized_rows)
            own_names = [tuple(names[parameter]) for parameter in originals]
            group = kind(own_names, wholes, compute_dtype=compute_dtype, turns=self.turns)
            for parameter, sharded in zip(originals, group.parameters, strict=True):
                managed[parameter], group_of[parameter] = sharded, group
                for holder, attribute in places[parameter]:
                    setattr(holder, attribute, sharded.sharded_param)

        for owner in list(module.modules()):
            _materialise(owner, made, run_of, device)
            for key, holders in list(waiting_for.items()):
                holders.discard(owner)
                if not holders:
                    del waiting_for[key]
                    shard(members[key])
        vectors = [parameter for parameter in places if parameter.dim() <= 1]
        wholes = [made[parameter] for parameter in vectors]
        self._broadcast([*wholes, *module.buffers()])
        names_of_vectors = [tuple(names[parameter]) for parameter in vectors]
        self.replicated = ReplicatedParameters(names_of_vectors, wholes, compute_dtype=compute_dtype, turns=self.turns)
        managed |= dict(zip(vectors, self.replicated.parameters, strict=True))
        for owner in module.modules():
            if isinstance(owner, nn.RNNBase):  # on a GPU it would move new weights into a buffer of cuDNN's
                owner.flatten_parameters = lambda: None  # type: ignore[method-assign]

        units: dict[nn.Module, Unit] = {}
        name_of = {module: name for name, module in module.named_modules()}
        for place, (parameter, own) in found.items():
            ours = managed[parameter]
            if ours.unsharded_param is ours.sharded_param:  # nothing to gather or to cast
                continue
            slot = ParameterSlot(*place, ours)
            for holder in own:
                if holder is None:
                    continue
                unit = units.setdefault(holder, Unit(name_of[holder] or type(holder).__name__, holder))
                unit.param_slots.append(slot)
                if parameter in group_of and group_of[parameter] not in unit.groups:
                    unit.groups.append(group_of[parameter])
        self.units = list(units.values())  # the units that have something to gather or to cast
        self.groups = list(dict.fromkeys(group_of.values()))

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's values: first to ranks of the same place in other shard groups, then within each group."""
        if self.turns.replicas is not None:
            broadcast_from_rank_0(tensors, self.turns.replicas)
        broadcast_from_rank_0(tensors, self.turns.group)


def _materialise(
    owner: nn.Module,
    made: dict[nn.Parameter, nn.Parameter],
    run_of: Mapping[nn.Parameter, list[nn.Parameter]],
    device: torch.device,
) -> None:
    """Give the module's own parameters and buffers storage, and values if they were on ``meta``.

    Neighbours get storage together, whichever module they belong to. Modules are visited in the order in which a
    constructor would call each ``reset_parameters``, so equal seeds give the values of the whole model on one device.
    """
    was_meta = False
    for attribute, parameter in owner._parameters.items():
        if parameter is None:
            continue
        if not parameter.is_meta:
            made.setdefault(parameter, parameter)
            continue
        was_meta = True
        if parameter not in made:
            run = run_of[parameter]
            for each, memory in zip(run, empty_like_run(run, device=device), strict=True):
                made[each] = nn.Parameter(memory, each.requires_grad)
        owner._parameters[attribute] = made[parameter]
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            was_meta = True
            owner._buffers[name] = torch.empty_like(buffer, device=device)
    if was_meta:
        if (reset := getattr(owner, "reset_parameters", None)) is None:
            raise ValueError(f"{type(owner).__name__} is on meta and has no reset_parameters to give it values")
        with torch.no_grad():
            reset()
