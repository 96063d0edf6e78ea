"""Which modules gather what: a module of any kind, divided into units, and its parameters into groups.

A *unit* is a module that has its parameters unsharded while it runs, and sharded around it. By default that is every
outermost module that holds a matrix itself (``Linear``, ``Embedding``, ``MultiheadAttention`` with all that is inside),
and every module that has been compiled (``block.compile()``). A predicate names larger units, such as a model's blocks;
whatever it leaves over is divided by default.

A *group* is a set of parameters that the same units use, in one dtype; it travels in one collective. A parameter that
several units share, as a tied embedding is, is a group of its own: it exists once and its gradient is reduced once.

Limits: a module whose weights its parent reads without calling it must lie in a unit with that parent (name the
parent in the predicate; otherwise the read raises); ranks must run the same units in the same order.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_systems.distributed.fsdp_gradients import ReplicatedParameters
from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedGroup
from cs336_systems.distributed.fsdp_quantized import QuantizedGroup, QuantizedRows, QuantizedTravel
from cs336_systems.distributed.neighbours import empty_like_run, neighbours
from cs336_systems.distributed.peer_memory import Turns


class Elsewhere(Tensor):
    """Stands for a sharded parameter, in a forward, where no unit that has it whole is running.

    Dtype, device and shape are those of the whole, for code that asks for no more; what would compute is refused.
    ``nn.TransformerEncoderLayer`` reads no weights of its children that are not plain tensors, and so calls them.
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
        """Refuse to compute with it, by a RuntimeError."""
        guard = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(
            f"{guard._name} is read outside of its own module's call, where a rank has only a part of it: name the "
            "module that reads it in FSDP's units=, so that it gathers what is inside it"
        )


@dataclass(eq=False)
class ParameterSlot:
    """An attribute of a module that refers to a parameter; units that have the module in common share it."""

    module: nn.Module
    attribute: str
    parameter: ManagedParameter
    resting: Tensor = field(init=False)
    """The module refers to this while no unit needs the parameter unsharded."""
    users: int = 0
    """The number of units that need it at this moment."""

    def __post_init__(self) -> None:
        self.resting = self.parameter.sharded_param

    def check(self) -> None:
        """Check that the module still refers to the parameter, before it is needed.

        Raises:
            RuntimeError: the user has registered another one in the module.
        """
        registered = self.module._parameters.get(self.attribute)
        if registered is not self.resting and registered is not self.parameter.unsharded_param:
            raise RuntimeError(f"{self.parameter.names[0]} was replaced under FSDP: copy values into it instead")

    def rest(self, tensor: Tensor) -> None:
        """Let the module refer to the tensor whenever no unit needs the parameter unsharded."""
        self.resting = tensor
        if not self.users:
            self.register(tensor)

    def register(self, tensor: Tensor) -> None:
        """Let the module refer to the tensor."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]  # a tenth of setattr's time
        else:
            setattr(self.module, self.attribute, tensor)


Predicate = Callable[[nn.Module], bool]
Initialise = Callable[[nn.Module], Any]
Travels = Callable[[nn.Module], QuantizedTravel | None]

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: their parameters count as their parent's."""


@dataclass(eq=False)
class Unit:
    """A module that has its parameters unsharded while it runs."""

    name: str
    """The module's name in the wrapped module, which itself goes by the name of its class."""
    module: nn.Module
    groups: list[ShardedGroup] = field(default_factory=list)
    param_slots: list[ParameterSlot] = field(default_factory=list)

    def to_unsharded(self) -> None:
        """Register the unsharded parameters in the module, until ``to_sharded`` has been called as often."""
        for slot in self.param_slots:
            slot.users += 1
            parameter = slot.parameter
            parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)  # the user's to change
            slot.register(parameter.unsharded_param)

    def to_sharded(self) -> None:
        """Register the sharded parameters in the module, unless they are still needed unsharded."""
        for slot in self.param_slots:
            slot.users -= 1
            if not slot.users:
                slot.register(slot.resting)

    def run_by(self, run: Callable[..., Any]) -> None:
        """Have a call of the module call ``run(self, its own __call__, args, kwargs)`` from now on."""
        self.module._fsdp_call = functools.partial(run, self)  # type: ignore[assignment]
        module_class: Any = type(self.module)
        self.module.__class__ = _unit_class(module_class)


class NotCopied:
    """A base of classes that cannot be copied or pickled: they refer to a process group and to other ranks' parts."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy`` and ``pickle``, which call this, by a RuntimeError."""
        raise RuntimeError(
            f"{type(self).__name__} cannot be copied or pickled under FSDP: copy the module before it is wrapped, and "
            "save gather_full_params(), or a sharded checkpoint by save_checkpoint"
        )


class _CalledByRunner(NotCopied):
    """A base that a unit's class has before its own bases.

    Hooks would not do: ``module.compile()`` moves a module's hooks into the compiled code; ``__call__`` stays outside.
    """

    _fsdp_call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_call(super().__call__, args, kwargs)  # type: ignore[misc]


def is_unit(module: nn.Module) -> bool:
    """Whether the module is a unit already."""
    return isinstance(module, _CalledByRunner)


@functools.cache
def _unit_class(module_class: Any) -> type:
    return type(
        f"FSDP{module_class.__name__}", (_CalledByRunner, module_class), {"__module__": module_class.__module__}
    )


@dataclass
class _Slot:
    """An attribute of a module that is a parameter, before sharding; a tied parameter has several."""

    unit: nn.Module | None
    """The module of the unit that it lies in; None if no unit is needed there."""
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


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether its parameters must stay in the dtype of its running averages, as those of batch norms must."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def _find_slots(
    module: nn.Module,
    outer: nn.Module | None,
    predicate: Predicate | None,
    casts: bool,
    found: list[_Slot],
    seen: set[tuple[nn.Module | None, nn.Module]],
) -> None:
    """Add the slots of a module inside the unit ``outer`` to ``found``, in the order of ``module.modules()``.

    A closure that calls itself would keep itself and whole parameters alive until Python's collector comes.
    """
    own = list(_own_parameters(module))
    inside = outer
    if outer is None or not _is_compiled(outer):  # nothing can be gathered in the middle of compiled code
        named = _is_compiled(module) or (predicate is not None and predicate(module))
        if named or (outer is None and any(p.dim() > 1 for _, _, p in own)):
            inside = module
    if (inside, module) in seen:
        return
    seen.add((inside, module))
    # A holder of nothing but vectors has them whole already; if they are cast, it is a unit without its children.
    unit = module if inside is None and casts and own else inside
    found.extend(_Slot(unit, *slot) for slot in own)
    for child in module.children():
        if not isinstance(child, _CONTAINERS):
            _find_slots(child, inside, predicate, casts, found, seen)


@dataclass
class ShardedUnits:
    """A module's units and groups, after its parameters have been sharded."""

    units: list[Unit]
    """The units that have something to gather or to cast, in the order of ``module.modules()``."""
    groups: list[ShardedGroup]
    replicated: ReplicatedParameters
    turns: Turns
    """They tell when ranks copy each other's rows."""
    quantized_rows: QuantizedRows
    """The rows of the groups that travel quantized."""


def shard_module(
    module: nn.Module,
    *,
    predicate: Predicate | None,
    quantized: Travels | None,
    initialise: Initialise | None,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    peer_copies: bool,
    device: torch.device,
    process_group: dist.ProcessGroup,
) -> ShardedUnits:
    """Replace the module's parameters by their shards, group by group, in the order of ``module.modules()``.

    Parameters on ``meta`` are made module by module just before (``_materialise``), so that only groups that are not
    complete yet are whole. Rank 0's values are everyone's: every parameter and buffer is broadcast first.

    Raises:
        ValueError: a parameter is on another device, or a module on ``meta`` cannot be initialised.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.device not in (device, torch.device("meta")):
            raise ValueError(f"parameter {name} is on {parameter.device}, not on {device} where it is to be sharded")
        names.setdefault(parameter, []).append(name)
    slots: list[_Slot] = []
    _find_slots(module, None, predicate, compute_dtype is not None, slots, set())
    slots_of: dict[nn.Parameter, list[_Slot]] = {}
    for slot in slots:
        slots_of.setdefault(slot.parameter, []).append(slot)
    members: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for parameter, own in slots_of.items():
        if parameter.dim() > 1:
            members.setdefault((parameter.dtype, frozenset(slot.unit for slot in own)), []).append(parameter)
    waiting_for = {key: {slot.module for p in group for slot in slots_of[p]} for key, group in members.items()}

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    turns = Turns(stream, device, process_group, taken=peer_copies)
    quantized_rows = QuantizedRows(process_group, stream)
    run_of = {parameter: run for run in neighbours(names) for parameter in run}
    made: dict[nn.Parameter, nn.Parameter] = {}
    managed: dict[nn.Parameter, ManagedParameter] = {}
    group_of: dict[nn.Parameter, ShardedGroup] = {}

    def shard(originals: list[nn.Parameter]) -> None:
        wholes = [made.pop(parameter) for parameter in originals]
        _broadcast(wholes, process_group)
        units = {slot.unit for parameter in originals for slot in slots_of[parameter]}
        travel = quantized(unit) if quantized and len(units) == 1 and (unit := units.pop()) is not None else None
        if travel is not None and not travel.serves(wholes, process_group.size()):
            travel = None
        kind: Any = ShardedGroup if travel is None else functools.partial(QuantizedGroup, travel, quantized_rows)
        group = kind(
            [tuple(names[parameter]) for parameter in originals],
            wholes,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            process_group=process_group,
            stream=stream,
            turns=turns,
        )
        for parameter, sharded in zip(originals, group.parameters, strict=True):
            managed[parameter], group_of[parameter] = sharded, group
            for slot in slots_of[parameter]:
                setattr(slot.module, slot.attribute, sharded.sharded_param)

    for owner in list(module.modules()):
        if isinstance(owner, _CONTAINERS):
            continue
        _materialise(owner, made, run_of, device, initialise)
        for key, holders in list(waiting_for.items()):
            holders.difference_update(_with_containers(owner))
            if not holders:
                del waiting_for[key]
                shard(members[key])
    vectors = [parameter for parameter in slots_of if parameter.dim() <= 1]
    wholes = [made[parameter] for parameter in vectors]
    _broadcast([*wholes, *module.buffers()], process_group)
    replicated = ReplicatedParameters(
        [tuple(names[parameter]) for parameter in vectors],
        wholes,
        compute_dtypes=[
            None if any(_keeps_statistics(slot.module) for slot in slots_of[p]) else compute_dtype for p in vectors
        ],
        process_group=process_group,
    )
    managed |= dict(zip(vectors, replicated.parameters, strict=True))
    for owner in module.modules():
        if isinstance(owner, nn.RNNBase):  # on a GPU it would move weights that are new to it into cuDNN's own buffer
            owner.flatten_parameters = lambda: None  # type: ignore[method-assign]

    units: dict[nn.Module, Unit] = {}
    param_slots: dict[tuple[nn.Module, str], ParameterSlot] = {}
    name_of = {module: name for name, module in module.named_modules()}
    for slot in slots:
        ours = managed[slot.parameter]
        if slot.unit is None or ours.unsharded_param is ours.sharded_param:  # nothing to gather, nor to cast
            continue
        unit = units.setdefault(slot.unit, Unit(name_of[slot.unit] or type(slot.unit).__name__, slot.unit))
        place = slot.module, slot.attribute
        unit.param_slots.append(param_slots.setdefault(place, ParameterSlot(*place, ours)))
        used = group_of.get(slot.parameter)
        if used is not None and used not in unit.groups:
            unit.groups.append(used)
    return ShardedUnits(list(units.values()), list(dict.fromkeys(group_of.values())), replicated, turns, quantized_rows)


def _materialise(
    owner: nn.Module,
    made: dict[nn.Parameter, nn.Parameter],
    run_of: Mapping[nn.Parameter, list[nn.Parameter]],
    device: torch.device,
    initialise: Initialise | None,
) -> None:
    """Give the module's own parameters and buffers storage, and values if they were on ``meta``.

    Neighbours are given theirs together, whichever module they belong to.

    Modules are visited in the order in which a constructor that calls ``reset_parameters`` of each would, so with equal
    seeds the values are those of the whole model on one device.
    """
    was_meta = False
    for holder, attribute, parameter in list(_own_parameters(owner)):
        if parameter.is_meta and parameter not in made:
            run = run_of[parameter]
            for each, memory in zip(run, empty_like_run(run, device=device), strict=True):
                made[each] = nn.Parameter(memory, each.requires_grad)
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
    """Give all ranks rank 0's values."""
    for tensor in tensors:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent.view(torch.uint8) if sent.dtype == torch.bool else sent, group_src=0, group=process_group)
        if not tensor.is_contiguous():
            tensor.detach().copy_(sent)
