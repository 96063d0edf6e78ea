"""Which modules gather what: a module of any kind, divided into units, and its parameters into groups.

A *unit* is a module that has its weights whole while it runs, and around it shards. By default that is every outermost
module that holds a matrix itself (``Linear``, ``Embedding``, ``MultiheadAttention`` with all that is inside), and every
module that has been compiled (``block.compile()``), because nothing can be gathered in the middle of compiled code. A
predicate names larger units, such as a model's blocks; whatever it leaves over is divided by default.

A *group* is a set of parameters that the same units use, in one dtype; it travels in one collective. A parameter that
several units share, as a tied embedding is, is a group of its own: it exists once and its gradient is reduced once.

A unit changes its class to a subclass of it that overrides ``__call__``. Hooks would not do: ``module.compile()`` moves
a module's hooks into the compiled code, while ``__call__`` stays outside of it.

Limits: a module whose weights its parent reads without calling it must lie in a unit with that parent (name the
parent in the predicate); ranks must run the same units in the same order.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ReplicatedParameters, ShardedGroup

Predicate = Callable[[nn.Module], bool]
Initialise = Callable[[nn.Module], Any]

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: their parameters count as their parent's."""


class Runner(Protocol):
    """Runs a unit's own code with its weights whole."""

    def forward(self, unit: "Unit", call: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


@dataclass(eq=False)
class Unit:
    """A module that has its weights whole while it runs."""

    name: str
    module: nn.Module
    groups: list[ShardedGroup] = field(default_factory=list)
    places: list[tuple[nn.Module, str, ManagedParameter]] = field(default_factory=list)
    """Where parameters sit that the module must find whole: (module, attribute, parameter)."""

    def show_working(self) -> None:
        for module, attribute, parameter in self.places:
            parameter.working.requires_grad_(parameter.kept.requires_grad)
            setattr(module, attribute, parameter.working)

    def show_kept(self) -> None:
        for module, attribute, parameter in self.places:
            setattr(module, attribute, parameter.kept)

    def run_by(self, runner: Runner) -> None:
        """From now on, calling the module is left to ``runner``."""
        self.module._fsdp_call = functools.partial(runner.forward, self)  # type: ignore[assignment]
        module_class: Any = type(self.module)
        self.module.__class__ = _unit_class(module_class)


class _CalledByRunner:
    """What a unit's class has before its own bases."""

    _fsdp_call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_call(super().__call__, args, kwargs)  # type: ignore[misc]


@functools.cache
def _unit_class(module_class: Any) -> type:
    return type(
        f"FSDP{module_class.__name__}", (_CalledByRunner, module_class), {"__module__": module_class.__module__}
    )


@dataclass
class _Place:
    unit: nn.Module | None
    """The module of the unit that the place lies in; None if no unit is needed there."""
    module: nn.Module
    attribute: str
    parameter: nn.Parameter


def _with_containers(module: nn.Module) -> list[nn.Module]:
    """The module and the containers of parameters below it."""
    found = [module]
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            found += _with_containers(child)
    return found


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for holder in _with_containers(module):
        for attribute, parameter in holder._parameters.items():
            if parameter is not None:
                yield holder, attribute, parameter


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _places(module: nn.Module, predicate: Predicate | None, casts: bool) -> list[_Place]:
    """Every place of a parameter, with the unit it lies in, in the order of ``module.modules()``."""
    found: list[_Place] = []
    seen: set[tuple[nn.Module | None, nn.Module]] = set()

    def visit(module: nn.Module, outer: nn.Module | None) -> None:
        own = list(_own_parameters(module))
        inside = outer
        if outer is None or not _is_compiled(outer):
            named = _is_compiled(module) or (predicate is not None and predicate(module))
            if named or (outer is None and any(p.dim() > 1 for _, _, p in own)):
                inside = module
        if (inside, module) in seen:
            return
        seen.add((inside, module))
        # A holder of nothing but vectors has them whole already; if they are cast, it is a unit without its children.
        unit = module if inside is None and casts and own else inside
        found.extend(_Place(unit, *place) for place in own)
        for child in module.children():
            if not isinstance(child, _CONTAINERS):
                visit(child, inside)

    visit(module, None)
    return found


@dataclass
class Layout:
    """A module's units and groups, after its parameters have been sharded."""

    units: list[Unit]
    groups: list[ShardedGroup]
    replicated: ReplicatedParameters


def shard_module(
    module: nn.Module,
    *,
    predicate: Predicate | None,
    initialise: Initialise | None,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    process_group: dist.ProcessGroup,
) -> Layout:
    """Replace the module's parameters by their shards, group by group, in the order of ``module.modules()``.

    Parameters on ``meta`` are made module by module just before (``_materialise``), so that only groups that are not
    complete yet are whole. Rank 0's values are everyone's: every parameter and buffer is broadcast first.

    Raises:
        ValueError: a parameter is on another device, or a module on ``meta`` cannot be initialised.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.device not in (device, torch.device("meta")):
            raise ValueError(f"parameter {name} is on {parameter.device}, not on {device} where it is to be sharded")
        names.setdefault(id(parameter), []).append(name)
    casts = compute_dtype is not None
    places = _places(module, predicate, casts)
    users: dict[nn.Parameter, dict[nn.Module, None]] = {}
    for place in places:
        users.setdefault(place.parameter, {})
        if place.unit is not None:
            users[place.parameter][place.unit] = None
    members: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for parameter, units in users.items():
        if parameter.dim() > 1:
            key = (parameter.dtype, *sorted(map(id, units)))
            members.setdefault(key, []).append(parameter)

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    made: dict[nn.Parameter, nn.Parameter] = {}
    managed: dict[nn.Parameter, ManagedParameter] = {}
    groups: dict[tuple[Any, ...], ShardedGroup] = {}

    def shard(key: tuple[Any, ...]) -> None:
        wholes = [made.pop(parameter) for parameter in members[key]]
        _broadcast(wholes, process_group)
        groups[key] = group = ShardedGroup(
            [tuple(names[id(parameter)]) for parameter in members[key]],
            wholes,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            process_group=process_group,
            stream=stream,
        )
        for parameter, sharded in zip(members[key], group.parameters, strict=True):
            managed[parameter] = sharded
            for place in places:
                if place.parameter is parameter:
                    setattr(place.module, place.attribute, sharded.kept)

    left = {key: {id(p.module) for p in places if p.parameter in group} for key, group in _as_sets(members).items()}
    for owner in list(module.modules()):
        if isinstance(owner, _CONTAINERS):
            continue
        _materialise(owner, made, device, initialise)
        done = {id(holder) for holder in _with_containers(owner)}
        for key in [key for key, holders in left.items() if holders & done]:
            left[key] -= done
            if not left[key]:
                shard(key)
    vectors = [parameter for parameter in users if parameter.dim() <= 1]
    wholes = [made[parameter] for parameter in vectors]
    _broadcast([*wholes, *module.buffers()], process_group)
    replicated = ReplicatedParameters(
        [tuple(names[id(parameter)]) for parameter in vectors],
        wholes,
        compute_dtype=compute_dtype,
        process_group=process_group,
    )
    managed |= dict(zip(vectors, replicated.parameters, strict=True))
    for owner in module.modules():
        if isinstance(owner, nn.RNNBase):  # on a GPU it would move weights that are new to it into cuDNN's own buffer
            owner.flatten_parameters = _leave_in_place  # type: ignore[method-assign]
    return Layout(_units(module, places, managed, groups), list(groups.values()), replicated)


def _leave_in_place() -> None:
    """Instead of ``RNNBase.flatten_parameters``."""


def _as_sets(members: dict[tuple[Any, ...], list[nn.Parameter]]) -> dict[tuple[Any, ...], set[nn.Parameter]]:
    return {key: set(group) for key, group in members.items()}


def _materialise(
    owner: nn.Module, made: dict[nn.Parameter, nn.Parameter], device: torch.device, initialise: Initialise | None
) -> None:
    """Give the module's own parameters and buffers storage, and values if they were on ``meta``.

    Modules are visited in the order in which a constructor that calls ``reset_parameters`` of each would, so with equal
    seeds the values are those of the whole model on one device.
    """
    was_meta = False
    for holder, attribute, parameter in list(_own_parameters(owner)):
        if parameter.is_meta and parameter not in made:
            made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        elif not parameter.is_meta:
            made.setdefault(parameter, parameter)
        if parameter.is_meta:
            was_meta = True
            setattr(holder, attribute, made[parameter])
    for holder in _with_containers(owner):
        for name, buffer in holder._buffers.items():
            if buffer is not None and buffer.is_meta:
                was_meta = True
                holder._buffers[name] = torch.empty_like(buffer, device=device)
    if not was_meta:
        return
    reset = functools.partial(initialise, owner) if initialise else getattr(owner, "reset_parameters", None)
    if reset is None:
        raise ValueError(f"{type(owner).__name__} is on meta and has no reset_parameters: pass initialise=")
    with torch.no_grad():
        reset()


@torch.no_grad()
def _broadcast(tensors: list[Any], process_group: dist.ProcessGroup) -> None:
    """Rank 0's values for all."""
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, group_src=0, group=process_group)
        if not tensor.is_contiguous():
            tensor.detach().copy_(sent)


def _units(
    module: nn.Module,
    places: list[_Place],
    managed: dict[nn.Parameter, ManagedParameter],
    groups: dict[tuple[Any, ...], ShardedGroup],
) -> list[Unit]:
    """The units that have something to gather or to cast, in the order of ``module.modules()``."""
    group_of: dict[ManagedParameter, ShardedGroup] = {
        parameter: group for group in groups.values() for parameter in group.parameters
    }
    units: dict[nn.Module, Unit] = {}
    names = {owner: name for name, owner in module.named_modules()}
    for place in places:
        parameter = managed[place.parameter]
        if place.unit is None or parameter.working is parameter.kept:
            continue
        unit = units.setdefault(place.unit, Unit(names[place.unit], place.unit))
        unit.places.append((place.module, place.attribute, parameter))
        group = group_of.get(parameter)
        if group is not None and group not in unit.groups:
            unit.groups.append(group)
    return list(units.values())
