"""State dicts of a sharded module: whole names stand for whole tensors, as after torch's ``fully_shard``.

``state_dict()`` of the wrapper, of the module inside, or of any part of it shows each shard as a ``DTensor`` that
shares its memory: ``torch.distributed.checkpoint`` writes and reads these, and ``full_tensor()`` gathers one.
``load_state_dict()`` takes such tensors, others, and plain whole tensors, of which every rank copies its own rows.
With ``keep_vars=True`` a state dict holds the parameters themselves, which are shards.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedParameter
from cs336_systems.distributed.fsdp_units import NotCopied

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class WholeTensors(NotCopied):
    """The ranks of a group as the place over which tensors are split; no communication."""

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self._process_group = process_group
        self._device = device

    @functools.cached_property
    def _mesh(self) -> "DeviceMesh":
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._process_group, self._device.type)

    def of(self, parameter: ManagedParameter, value: Tensor) -> Tensor:
        """A tensor like the parameter's shard as the whole tensor that it is a part of, sharing its memory."""
        if not isinstance(parameter, ShardedParameter):
            return value
        from torch.distributed.tensor import DTensor, Shard  # over a second, which not every import is to take

        stride = torch.empty(parameter.shape, device="meta").stride()
        return DTensor.from_local(value, self._mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=stride)

    def rows(self, parameter: ShardedParameter, value: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, which may be a ``DTensor``."""
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(value, DTensor):
            return parameter.rows_of(value)
        if value.device_mesh == self._mesh and value.placements == (Shard(0),):
            return value.to_local()
        return parameter.rows_of(value.full_tensor())


def show_whole(module: nn.Module, managed: Iterable[ManagedParameter], wholes: WholeTensors) -> None:
    """Have every part of the module translate between its shards and the whole tensors of its state dicts."""
    of_shard = {parameter.sharded_param: parameter for parameter in managed}
    for holder in module.modules():
        own = {name: of_shard[p] for name, p in holder._parameters.items() if p is not None}
        if own:
            holder.register_state_dict_post_hook(functools.partial(_to_wholes, own, wholes))
            holder.register_load_state_dict_pre_hook(functools.partial(_to_rows, own, wholes))


def _to_wholes(
    own: dict[str, ManagedParameter], wholes: WholeTensors, module: nn.Module, state_dict: Any, prefix: str, *_: Any
) -> None:
    for name, parameter in own.items():
        if prefix + name in state_dict and not isinstance(state_dict[prefix + name], nn.Parameter):
            state_dict[prefix + name] = wholes.of(parameter, parameter.sharded_param.detach())


def _to_rows(
    own: dict[str, ManagedParameter],
    wholes: WholeTensors,
    module: nn.Module,
    state_dict: Any,
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise ValueError(f"load_state_dict(assign=True) would replace shards of FSDP, as {prefix}{next(iter(own))}")
    for name, parameter in own.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, ShardedParameter) or not isinstance(value, Tensor):
            continue
        if value.shape == parameter.shape:
            state_dict[prefix + name] = wholes.rows(parameter, value)
        else:
            error_messages.append(f"{prefix}{name} must be whole, {tuple(parameter.shape)}, got {tuple(value.shape)}")
            state_dict[prefix + name] = parameter.sharded_param.detach()  # or torch would compare it with the rows
