"""A model and its optimizer as named stretches that share their memory: the contents of a checkpoint, for any wrapper.

    state = NamedState(model)
    state.model()                         # model/NAME and buffer/NAME -> Stretch: this rank's shard, or the whole
    state.optimizer(optimizer, settings)  # optimizer/NAME/KEY -> Stretch

Names, and the shapes of whole tensors, do not depend on how ranks divide them; a pipeline stage has some of them.
Nothing here communicates.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.stretches import StoredTensor, Stretch
from cs336_systems.distributed.tensor import tensor_dim
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

MODEL, BUFFER, OPTIMIZER = "model/", "buffer/", "optimizer/"
"""In a checkpoint, names of parameters, of buffers and of optimizer state begin with these."""

_TORCH = "torch.optim."  # the modules of torch's optimizers begin with this

_ONLY_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that do not change what a step computes."""

_DECOUPLED = "decoupled_weight_decay"
"""The option by which torch distinguishes AdamW from Adam; other implementations of AdamW lack it."""


class NamedState:
    """Named stretches of a model under FSDP, under this suite's DDP, or whole and equal on every rank; no extra state.

    Parameters that the model lists in ``not_saved``, such as frozen weights stored elsewhere, are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._module = model.module if isinstance(model, (FSDP, DDP)) else model
        for name, module in self._module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                kind = type(module).__name__
                raise ValueError(f"{name or 'the model'} is a {kind}, whose extra state checkpoints cannot hold")
        self._ranks: TensorRanks = getattr(self._module, "tensor_ranks", ALONE)
        if isinstance(model, FSDP):
            held = {
                p.names[0]: Stretch(tuple(p.shape), p.first_element, p.sharded_param)
                for p in model.managed_parameters()
            }
        else:
            held = {name: Stretch.whole(parameter) for name, parameter in self._module.named_parameters()}
        not_saved: frozenset[str] = getattr(self._module, "not_saved", frozenset())
        self._shares = {name: self._of_whole(name, one) for name, one in held.items() if name not in not_saved}
        self._name_of = {share.values: name for name, share in self._shares.items()}

    def model(self) -> dict[str, Stretch]:
        """Parameters, and the buffers that the module's ``state_dict`` would hold, by kind and name."""
        parameters = {MODEL + name: share.like(share.values.detach()) for name, share in self._shares.items()}
        buffers = {
            f"{BUFFER}{prefix}{'.' * bool(prefix)}{name}": Stretch.whole(buffer)
            for prefix, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return parameters | buffers

    def _of_whole(self, name: str, stretch: Stretch) -> Stretch:
        """Convert a stretch of this tensor rank's part of a parameter to a stretch of the whole parameter."""
        dim = None if self._ranks.n_ranks == 1 else tensor_dim(name)
        if dim is None:
            return stretch
        n_ranks, size = self._ranks.n_ranks, prod(stretch.shape)
        shape = tuple(n * (n_ranks if d == dim else 1) for d, n in enumerate(stretch.shape))
        parts = (dim, n_ranks) if dim or stretch.order else ()  # rows of the parts are consecutive already
        return replace(stretch, shape=shape, start=stretch.start + self._ranks.rank * size, parts=parts)

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """For each group of the optimizer, the names of its parameters that this rank has."""
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter not in self._name_of:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks: "
                    "make it from the model's parameters() after wrapping"
                )
        return [[self._name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    def _updated(self, optimizer: torch.optim.Optimizer) -> dict[str, Stretch]:
        """The elements that the optimizer updates on this rank, by name."""
        if not isinstance(optimizer, ShardedOptimizer):
            return self._shares
        updated = {}
        for parameter, piece in optimizer.pieces.items():
            order = () if piece.tensor.shape == parameter.shape else _memory_order(parameter)
            name = self._name_of[parameter]
            updated[name] = self._of_whole(name, Stretch(tuple(parameter.shape), piece.start, piece.tensor, order))
        return updated

    def optimizer(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Stretch]:
        """The optimizer's state tensors; its scalars and its groups are written into ``settings``.

        Raises ValueError if a parameter is not the model's or a state cannot be resharded.
        """
        if (device := next(iter(self._name_of)).device).type == "cuda":
            torch.cuda.synchronize(device)  # copies to states in host memory may not have ended
        settings["optimizer_class"] = _class_of(optimizer)
        settings["optimizer"] = [
            {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
            | {"params": names}
            for group, names in zip(optimizer.param_groups, self.groups(optimizer), strict=True)
        ]
        stretches: dict[str, Stretch] = {}
        for name, share in self._updated(optimizer).items():
            own = share.values
            for key, value in optimizer.state.get(own, {}).items():
                if "/" in key:
                    raise ValueError(f"optimizer state {key} of {name} has a slash in its name")
                entry = f"{OPTIMIZER}{name}/{key}"
                if not isinstance(value, Tensor):
                    settings["scalars"][entry] = value
                elif key != "step" and value.shape == own.shape:  # torch recognises a counter by its name, too
                    stretches[entry] = share.like(value)
                elif value.dim() == 0 or share.shape == own.shape:
                    stretches[entry] = Stretch.whole(value)
                else:
                    raise ValueError(
                        f"optimizer state {key} of {name} has shape {tuple(value.shape)}, its shard "
                        f"{tuple(own.shape)}: only states like the shard can be read by other numbers of ranks"
                    )
        return stretches

    def empty_optimizer_state(
        self,
        path: Path,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        stored: Mapping[str, StoredTensor],
        groups: list[list[str]],
    ) -> dict[str, Stretch]:
        """Memory for this rank's part of the optimizer state in the checkpoint, still to be filled.

        It is the optimizer's own memory if the optimizer keeps its state ``in_place``, else new host memory.

        Args:
            groups: for each group, the names of its parameters on all ranks; a pipeline stage has some of them.

        Raises:
            ValueError: the checkpoint has no optimizer, one over other parameters, or one of another kind.
        """
        theirs = [group["params"] for group in settings["optimizer"] or []]
        difference: str | None = f"its groups have {list(map(len, theirs))} parameters, this optimizer's differ"
        if list(map(sorted, groups)) == list(map(sorted, theirs)):
            difference = _another_kind(optimizer, settings)
        if difference:
            raise ValueError(f"{path} is a checkpoint of another optimizer: {difference}")
        if getattr(optimizer, "in_place", False):
            return self.optimizer(optimizer, {})
        updated = self._updated(optimizer)
        stretches: dict[str, Stretch] = {}
        for entry, there in stored.items():
            name, key = _split(entry)
            if not entry.startswith(OPTIMIZER) or name not in self._shares:
                continue
            if key == "step" or there.shape != self._shares[name].shape:
                stretches[entry] = Stretch.whole(torch.zeros(there.shape, dtype=there.dtype, device="cpu"))
            elif share := updated.get(name):
                memory = torch.zeros_like(share.values, dtype=there.dtype, device="cpu", requires_grad=False)
                stretches[entry] = share.like(memory)
            else:
                stretches[entry] = Stretch(there.shape, 0, torch.zeros(0, dtype=there.dtype, device="cpu"))
        return stretches

    def restore_optimizer(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], stretches: Mapping[str, Stretch]
    ) -> None:
        """Load the filled tensors, the scalars and the settings of the groups into the optimizer."""
        own = self.groups(optimizer)
        number_of = {name: number for number, name in enumerate(name for names in own for name in names)}
        tensors = {entry: stretch.values for entry, stretch in stretches.items() if entry.startswith(OPTIMIZER)}
        state: dict[str, dict[str, Any]] = {}
        for entry, value in (tensors | settings["scalars"]).items():
            name, key = _split(entry)
            if name in number_of:
                state.setdefault(name, {})[key] = value
        groups = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            | {"params": [number_of[name] for name in names]}
            for group, names in zip(settings["optimizer"], own, strict=True)
        ]
        if isinstance(optimizer, ShardedOptimizer):
            shares = self._updated(optimizer)
            optimizer.load_shares({shares[name].values: state[name] for name in shares.keys() & state}, groups)
        else:
            numbered = {number_of[name]: values for name, values in state.items()}
            optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def united(groups_of_ranks: Sequence[list[list[str]]]) -> list[list[str]]:
    """For each group, the union over ranks of its names; ValueError if ranks differ in their number of groups."""
    if len(lengths := {len(groups) for groups in groups_of_ranks}) > 1:
        raise ValueError(f"optimizers of the ranks have {sorted(lengths)} groups, but all need the same number")
    return [list(dict.fromkeys(chain(*of_ranks))) for of_ranks in zip(*groups_of_ranks, strict=True)]


def check_json(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that JSON cannot hold."""
    for key, value in settings.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a checkpoint cannot hold {key} = {reprlib.repr(value)}: {error}") from None


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """The torch class that the optimizer is or inherits from, else its most basic class below ``Optimizer``."""
    lineage = (optimizer.optimizer_cls if isinstance(optimizer, ShardedOptimizer) else type(optimizer)).__mro__
    lineage = lineage[: lineage.index(torch.optim.Optimizer)]
    kind = next((each for each in lineage if each.__module__.startswith(_TORCH)), lineage[-1])
    return f"{kind.__module__}.{kind.__qualname__}"


def _another_kind(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> str | None:
    """Say why this optimizer cannot continue from the saved one, or None if it can.

    Torch's classes must be the same. Any other class continues from one if either's name ends with the other's, as
    FusedAdamW and AdamW do. Boolean options that change what a step computes must be equal.
    """
    ours = _class_of(optimizer)
    theirs = settings.get("optimizer_class", ours)  # earlier versions did not write it
    n_of_torch = sum(name.startswith(_TORCH) for name in (ours, theirs))
    short, long = sorted((name.rpartition(".")[2] for name in (ours, theirs)), key=len)
    if (n_of_torch == 2 and theirs != ours) or not long.endswith(short):
        return f"it is of {theirs}, this one is {ours}"
    for saved, group in zip(settings["optimizer"], optimizer.param_groups, strict=True):
        switches = {key for each in (saved, group) for key, value in each.items() if isinstance(value, bool)}
        for key in sorted(switches.difference(_ONLY_HOW)):
            both_say = key != _DECOUPLED or key in saved.keys() & group.keys()
            if both_say and saved.get(key, False) != group.get(key, False):
                return f"{key} is {saved.get(key, False)} there and {group.get(key, False)} here"
    return None


def _memory_order(parameter: Tensor) -> tuple[int, ...]:
    """The dimensions, outermost in memory first; empty if that is their own order."""
    strides = torch.empty_like(parameter.detach(), device="meta").stride()
    order = tuple(sorted(range(parameter.dim()), key=lambda d: -strides[d]))
    return order if order != tuple(range(parameter.dim())) else ()


def _split(entry: str) -> tuple[str, str]:
    """Split the name of a state entry into parameter and key; the names of modules may contain slashes."""
    name, _, key = entry.removeprefix(OPTIMIZER).rpartition("/")
    return name, key
