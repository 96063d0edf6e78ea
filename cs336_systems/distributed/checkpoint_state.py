"""A model and its optimizer as named tensors, sharing their memory: what a checkpoint holds, whoever wraps the model.

    state = NamedState(model)
    state.model()                         # model/NAME and buffer/NAME -> tensor; of FSDP's shards a DTensor
    state.optimizer(optimizer, settings)  # optimizer/NAME/KEY -> tensor; of a ShardedOptimizer's shards, boxes

The names, and the shapes of the whole, are the same however ranks divide them. Nothing is sent.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from cs336_systems.distributed.checkpoint_boxes import Boxes
from cs336_systems.distributed.ddp import DDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedParameter
from cs336_systems.distributed.fsdp_state_dict import WholeTensors
from cs336_systems.distributed.optimizer_state import is_per_element
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.shards import Piece, in_memory_order

MODEL = "model/"
"""Before the names of parameters in a checkpoint."""
BUFFER = "buffer/"
OPTIMIZER = "optimizer/"


class NamedState:
    """Names and tensors; the model is under FSDP, under this suite's DDP, or whole and equal on every rank."""

    def __init__(self, model: nn.Module) -> None:
        self._module = model.module if isinstance(model, (FSDP, DDP)) else model
        self._whole: Callable[[ManagedParameter, Tensor], Tensor] = lambda _, value: value
        if isinstance(model, FSDP):
            self._whole = WholeTensors(model.process_group, model.device).of
            managed = model.managed_parameters()
        else:
            managed = [ManagedParameter((name,), p, p, p.shape) for name, p in self._module.named_parameters()]
        self._parameters = {parameter.names[0]: parameter for parameter in managed}
        self.device = managed[0].sharded_param.device
        self._name_of: dict[Tensor, str] = {p.sharded_param: name for name, p in self._parameters.items()}

    def model(self) -> dict[str, Tensor]:
        """Parameters, and the buffers that the module's own state dict would hold, by kind and name."""
        tensors = {
            f"{MODEL}{name}": self._whole(parameter, parameter.sharded_param.detach())
            for name, parameter in self._parameters.items()
        }
        buffers = {
            f"{BUFFER}{prefix}{'.' * bool(prefix)}{name}": buffer
            for prefix, module in self._module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return tensors | buffers

    def with_extra_state(self) -> dict[str, nn.Module]:
        """The modules that keep more than tensors in their state dict, by name after ``extra``."""
        return {
            f"extra/{name}": module
            for name, module in self._module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

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

    def optimizer(self, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Tensor]:
        """The optimizer's tensors; its numbers and its groups go into ``settings``.

        Raises:
            ValueError: a parameter is not the model's, or a state cannot be resharded.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # states in host memory may still be written
        tensors: dict[str, Tensor] = {}
        settings["optimizer"] = [
            {key: _plain(value) for key, value in group.items() if key != "params"} | {"params": names}
            for group, names in zip(optimizer.param_groups, self._groups(optimizer), strict=True)
        ]
        if isinstance(optimizer, ShardedOptimizer):
            return self._shares(optimizer, settings)
        for sharded_param, state in optimizer.state.items():
            name = self._name_of[sharded_param]
            parameter = self._parameters[name]
            for key, value in state.items():
                entry = _entry(name, key)
                if not isinstance(value, Tensor):
                    settings["scalars"][entry] = value
                elif value.shape == sharded_param.shape:
                    tensors[entry] = self._whole(parameter, value)
                elif value.dim() == 0 or not isinstance(parameter, ShardedParameter):
                    tensors[entry] = value
                else:
                    raise ValueError(
                        f"optimizer state {key} of {name} has shape {tuple(value.shape)}, its shard "
                        f"{tuple(sharded_param.shape)}: only states like the shard can be read by other "
                        "numbers of ranks"
                    )
        return tensors

    def _shares(self, optimizer: ShardedOptimizer, settings: dict[str, Any]) -> dict[str, Tensor]:
        """This rank's share; what is one for a whole parameter is told by the rank that has the first element."""
        tensors: dict[str, Tensor] = {}
        for parameter, piece, state in optimizer.shares():
            assert piece.tensor is not None
            name = self._name_of[parameter]
            for key, value in state.items():
                entry = _entry(name, key)
                if is_per_element(key, value, piece.tensor) and value.shape != parameter.shape:
                    tensors[entry] = Boxes.of_stretch(parameter, piece.start, value)
                elif piece.start == 0 and isinstance(value, Tensor):
                    tensors[entry] = value
                elif piece.start == 0:
                    settings["scalars"][entry] = value
        return tensors

    def empty_optimizer_state(
        self,
        path: Path,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        stored: dict[str, TensorStorageMetadata],
    ) -> dict[str, Tensor]:
        """Tensors for what the checkpoint holds of the optimizer, or of this rank's share of it, to be filled; those of
        the optimizer itself if it is one that has its state ``in_place``.

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
        tensors: dict[str, Tensor] = {}
        for entry, metadata in stored.items():
            if not entry.startswith(OPTIMIZER):
                continue
            (name, key), dtype = _split(entry), metadata.properties.dtype
            parameter = self._parameters[name]
            if isinstance(optimizer, ShardedOptimizer) and key != "step" and metadata.size == parameter.shape:
                piece = pieces.get(parameter.sharded_param)
                start, n = (piece.start, piece.stop - piece.start) if piece else (0, 0)
                flat = torch.zeros(n, dtype=dtype)  # in host memory, from which the optimizer takes it
                tensors[entry] = Boxes.of_stretch(parameter.sharded_param, start, flat)
            elif metadata.size == parameter.shape:
                away = key in getattr(optimizer, "offload", ()) and not isinstance(parameter, ShardedParameter)
                place = torch.device("cpu") if away else self.device
                shard = torch.zeros_like(parameter.sharded_param, dtype=dtype, device=place).detach()
                tensors[entry] = self._whole(parameter, shard)
            else:
                tensors[entry] = torch.zeros(metadata.size, dtype=dtype)
        return tensors

    def restore_optimizer(
        self, optimizer: torch.optim.Optimizer, settings: dict[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        """Hand the optimizer the filled tensors, the numbers and the settings of its groups."""
        names = [name for group in settings["optimizer"] for name in group["params"]]
        number_of = {name: number for number, name in enumerate(names)}
        state: dict[str, dict[str, Any]] = {}
        for entry, value in (tensors | settings["scalars"]).items():
            name, key = _split(entry)
            state.setdefault(name, {})[key] = value.to_local() if isinstance(value, DTensor) else value
        groups = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            | {"params": [number_of[name] for name in group["params"]]}
            for group in settings["optimizer"]
        ]
        if not isinstance(optimizer, ShardedOptimizer):
            numbered = {number_of[name]: values for name, values in state.items()}
            optimizer.load_state_dict({"state": numbered, "param_groups": groups})
            return
        shares: dict[Tensor, dict[str, Any]] = {}
        for parameter, piece in _pieces(optimizer).items():
            if (values := state.get(self._name_of[parameter])) is not None:
                assert piece.tensor is not None
                shares[piece.tensor] = {key: _of_piece(value, piece.tensor) for key, value in values.items()}
        optimizer.load_shares(shares, groups)


def _pieces(optimizer: torch.optim.Optimizer) -> dict[Tensor, Piece]:
    """By parameter, what this rank updates of it: one stretch at most."""
    if not isinstance(optimizer, ShardedOptimizer):
        return {}
    return {parameter: piece for parameter, piece, _ in optimizer.shares()}


def _of_piece(value: Any, tensor: Tensor) -> Any:
    """A stretch that was filled as a state of a piece of a parameter; anything else as it is."""
    if not isinstance(value, Boxes):
        return value
    assert value.flat is not None
    return in_memory_order(value.flat, tensor)


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
