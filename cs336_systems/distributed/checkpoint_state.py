"""A model and its optimizer as named stretches that share their memory: what a checkpoint holds, whoever wraps it.

    state = NamedState(model)
    state.model()                         # model/NAME and buffer/NAME -> Stretch: this rank's shard, or the whole
    state.optimizer(optimizer, settings)  # optimizer/NAME/KEY -> Stretch

Names, and shapes of whole tensors, are the same however ranks divide them. There is no communication.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedParameter
from cs336_systems.distributed.optimizer_state import is_per_element
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.shards import Piece
from cs336_systems.distributed.stretches import StoredTensor, Stretch

MODEL = "model/"
"""Before the names of parameters in a checkpoint."""
BUFFER = "buffer/"
OPTIMIZER = "optimizer/"


class NamedState:
    """Names and tensors; the model is under FSDP, under this suite's DDP, or whole and equal on every rank.

    Raises:
        ValueError: a module keeps more than tensors in its state dict (``get_extra_state``).
    """

    def __init__(self, model: nn.Module) -> None:
        self._module = model.module if isinstance(model, (FSDP, DDP)) else model
        if isinstance(model, FSDP):
            managed = model.managed_parameters()
        else:
            managed = [ManagedParameter((name,), p, p, p.shape) for name, p in self._module.named_parameters()]
        for name, module in self._module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                kind = type(module).__name__
                raise ValueError(f"{name or 'the model'} is a {kind}, whose extra state checkpoints cannot hold")
        self._parameters = {parameter.names[0]: parameter for parameter in managed}
        self.device = managed[0].sharded_param.device
        self._name_of: dict[Tensor, str] = {p.sharded_param: name for name, p in self._parameters.items()}

    def model(self) -> dict[str, Stretch]:
        """Parameters, and the buffers that the module's own state dict would hold, by kind and name."""
        parameters = {
            f"{MODEL}{name}": _stretch(parameter, parameter.sharded_param.detach())
            for name, parameter in self._parameters.items()
        }
        buffers = {
            f"{BUFFER}{prefix}{'.' * bool(prefix)}{name}": Stretch.whole(buffer)
            for prefix, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return parameters | buffers

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters of each of the optimizer's groups."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._name_of:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model lacks: "
                        "make it from the model's parameters() after wrapping"
                    )
        return [[self._name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    def optimizer(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Stretch]:
        """The optimizer's tensors; its numbers and its groups go into ``settings``.

        Raises:
            ValueError: a parameter is not the model's, or a state cannot be resharded.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # states in host memory may still be written
        settings["optimizer"] = [
            {key: _plain(value) for key, value in group.items() if key != "params"} | {"params": names}
            for group, names in zip(optimizer.param_groups, self._groups(optimizer), strict=True)
        ]
        if isinstance(optimizer, ShardedOptimizer):
            return self._shares(optimizer, settings)
        stretches: dict[str, Stretch] = {}
        for sharded_param, state in optimizer.state.items():
            name = self._name_of[sharded_param]
            parameter = self._parameters[name]
            for key, value in state.items():
                entry = _entry(name, key)
                if not isinstance(value, Tensor):
                    settings["scalars"][entry] = value
                elif value.shape == sharded_param.shape:
                    stretches[entry] = _stretch(parameter, value)
                elif value.dim() == 0 or not isinstance(parameter, ShardedParameter):
                    stretches[entry] = Stretch.whole(value)
                else:
                    raise ValueError(
                        f"optimizer state {key} of {name} has shape {tuple(value.shape)}, its shard "
                        f"{tuple(sharded_param.shape)}: only states like the shard can be read by other "
                        "numbers of ranks"
                    )
        return stretches

    def _shares(self, optimizer: ShardedOptimizer, settings: dict[str, Any]) -> dict[str, Stretch]:
        """This rank's share; a value that stands for a whole parameter comes from the rank with its first element."""
        stretches: dict[str, Stretch] = {}
        for parameter, piece, state in optimizer.shares():
            assert piece.tensor is not None
            name = self._name_of[parameter]
            for key, value in state.items():
                entry = _entry(name, key)
                if is_per_element(key, value, piece.tensor) and value.shape != parameter.shape:
                    stretches[entry] = Stretch(tuple(parameter.shape), piece.start, value, _memory_order(parameter))
                elif piece.start == 0 and isinstance(value, Tensor):
                    stretches[entry] = Stretch.whole(value)
                elif piece.start == 0:
                    settings["scalars"][entry] = value
        return stretches

    def empty_optimizer_state(
        self, path: Path, optimizer: torch.optim.Optimizer, settings: dict[str, Any], stored: Mapping[str, StoredTensor]
    ) -> dict[str, Stretch]:
        """What the checkpoint holds of the optimizer, or of this rank's share of it, in memory that is to be filled.

        That is the optimizer's own memory if it has its state ``in_place``.

        Raises:
            ValueError: the checkpoint has no optimizer, or one over other parameters.
        """
        ours = self._groups(optimizer)
        theirs = [group["params"] for group in settings["optimizer"] or []]
        if ours != theirs:
            raise ValueError(
                f"{path} is a checkpoint of another optimizer: it holds parameter groups of "
                f"{[len(group) for group in theirs]} parameters, here are {[len(group) for group in ours]}, "
                "or their names differ"
            )
        if getattr(optimizer, "in_place", False):
            return self.optimizer(optimizer, {})
        pieces = _pieces(optimizer)
        stretches: dict[str, Stretch] = {}
        for entry, there in stored.items():
            name, key = _split(entry)
            if not entry.startswith(OPTIMIZER) or name not in self._parameters:
                continue
            parameter = self._parameters[name]
            like = parameter.sharded_param
            if isinstance(optimizer, ShardedOptimizer) and key != "step" and there.shape == parameter.shape:
                stretches[entry] = _empty_share(like, pieces.get(like), there.dtype)
            elif there.shape == parameter.shape:
                offloaded = key in getattr(optimizer, "offload", ()) and not isinstance(parameter, ShardedParameter)
                place = torch.device("cpu") if offloaded else self.device
                stretches[entry] = _stretch(parameter, torch.zeros_like(like, dtype=there.dtype, device=place).detach())
            else:
                stretches[entry] = Stretch.whole(torch.zeros(there.shape, dtype=there.dtype))
        return stretches

    def restore_optimizer(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], stretches: dict[str, Stretch]
    ) -> None:
        """Hand the optimizer the filled tensors, the numbers and the settings of its groups."""
        names = [name for group in settings["optimizer"] for name in group["params"]]
        number_of = {name: number for number, name in enumerate(names)}
        tensors = {entry: stretch.values for entry, stretch in stretches.items()}
        state: dict[str, dict[str, Any]] = {}
        for entry, value in (tensors | settings["scalars"]).items():
            name, key = _split(entry)
            state.setdefault(name, {})[key] = value
        groups = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            | {"params": [number_of[name] for name in group["params"]]}
            for group in settings["optimizer"]
        ]
        if not isinstance(optimizer, ShardedOptimizer):
            numbered = {number_of[name]: values for name, values in state.items()}
            optimizer.load_state_dict({"state": numbered, "param_groups": groups})
            return
        shares = {
            piece.tensor: state[name]
            for parameter, piece in _pieces(optimizer).items()
            if piece.tensor is not None and (name := self._name_of[parameter]) in state
        }
        optimizer.load_shares(shares, groups)


def _stretch(parameter: ManagedParameter, value: Tensor) -> Stretch:
    """A tensor like the parameter's shard as a stretch of the whole."""
    if not isinstance(parameter, ShardedParameter):
        return Stretch.whole(value)
    return Stretch(tuple(parameter.shape), parameter.first_row * parameter.shape[1:].numel(), value)


def _empty_share(parameter: Tensor, piece: Piece | None, dtype: torch.dtype) -> Stretch:
    """State like a piece of a parameter, in host memory, from which a ``ShardedOptimizer`` takes it."""
    shape = tuple(parameter.shape)
    if piece is None or piece.tensor is None:
        return Stretch(shape, 0, torch.zeros(0, dtype=dtype))
    share = torch.zeros_like(piece.tensor, dtype=dtype, device="cpu").detach()
    return Stretch(shape, piece.start, share, () if share.shape == shape else _memory_order(parameter))


def _memory_order(parameter: Tensor) -> tuple[int, ...]:
    """The dimensions, outermost in memory first; empty where that is their own order."""
    strides = torch.empty_like(parameter.detach(), device="meta").stride()
    order = tuple(sorted(range(parameter.dim()), key=lambda d: -strides[d]))
    return order if order != tuple(range(parameter.dim())) else ()


def _pieces(optimizer: torch.optim.Optimizer) -> dict[Tensor, Piece]:
    """By parameter, what this rank updates of it: one stretch at most."""
    if not isinstance(optimizer, ShardedOptimizer):
        return {}
    return {parameter: piece for parameter, piece, _ in optimizer.shares()}


def _entry(name: str, key: str) -> str:
    if "/" in key:
        raise ValueError(f"optimizer state {key} of {name} has a slash in its name")
    return f"{OPTIMIZER}{name}/{key}"


def _split(entry: str) -> tuple[str, str]:
    """The parameter and the key of an entry of optimizer state; the names of modules may hold slashes."""
    name, _, key = entry.removeprefix(OPTIMIZER).rpartition("/")
    return name, key


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it."""
    return value.item() if isinstance(value, Tensor) else value
