"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among the ranks (ZeRO-3).

    model = FSDP(model, compute_dtype=torch.bfloat16, units=lambda module: isinstance(module, TransformerBlock))
    optimizer = torch.optim.AdamW(model.parameters())      # sees shards, so its state is sharded too
    loss_function(model(inputs), targets).backward()       # gathers weights, frees them, averages gradients
    clip_grad_norm_(model, 1.0)
    optimizer.step()

Every parameter of two or more dimensions is sharded along its first (``fsdp_parameters.py``); units of the module
gather theirs just ahead of use, in forward and once more in backward (``fsdp_units.py``, ``fsdp_schedule.py``). A step
sends what an all-reduce of the gradients would and half as much again: two all-gathers and a reduce-scatter.
Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (PyTorch FSDP); the layout per parameter and the
bounded look-ahead are those of ``torch.distributed.fsdp.fully_shard``.

Precision: shards, their gradients and the optimizer keep the dtype that the module was built in, fp32 as a rule. With
``compute_dtype`` the module runs as if it had been cast to it, inputs included, but for buffers and for the parameters
of batch norms, which must match their running averages; weights are cast before they travel. Gradients are widened
before they travel (``reduce_dtype`` chooses otherwise): the sum over ranks of bf16 gradients would round at every
addition.

Gradients are averages over the ranks, as if each rank's loss were the mean over an equal part of the global batch. They
are averaged as backward returns. A backward that an error has ended leaves in ``grad`` whatever had come there, as
without FSDP: after ``zero_grad`` the next step is right, if all ranks had the error. Gradients of shards know that they
are parts (``fsdp_gradients.py``): ``torch.amp.GradScaler`` works, norms are refused.

State dicts speak of whole tensors, as after torch's ``fully_shard``: ``state_dict()`` of the wrapper, of the module
inside, or of any part of it shows each shard as a ``DTensor`` that shares its memory; ``torch.distributed.checkpoint``
writes and reads these, and ``full_tensor()`` gathers one. ``load_state_dict()`` takes such tensors, others, and plain
whole tensors, of which every rank copies its own rows. With ``keep_vars=True`` a state dict holds the shards. **The
optimizer's state is this rank's rows**, which ``get_state_dict`` of ``torch.distributed.checkpoint`` would take for the
whole on every rank: ``save_checkpoint`` saves it.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedGroup, ShardedParameter
from cs336_systems.distributed.fsdp_schedule import GatherOrder, inside_backward
from cs336_systems.distributed.fsdp_units import Initialise, NotCopied, Predicate, Travels, is_unit, shard_module
from cs336_systems.distributed.peer_memory import why_not_mapped
from cs336_systems.distributed.process_group import check_same_across_ranks
from cs336_systems.distributed.wrapped import Members, check_shapes_are_known


class FSDP(NotCopied, nn.Module):
    """A module of any kind with its parameters sharded over the ranks of a process group.

    Args:
        module: whole, on this rank's device, or on ``meta``. Its parameters are replaced; rank 0's values count.
        compute_dtype: the module runs and weights are communicated in it; None for the parameters' own.
        reduce_dtype: gradients are communicated in it; None for the parameters' own.
        prefetch: units whose weights are gathered ahead of the one that runs; 0 gathers when a unit is called.
        peer_copies: each rank copies the rows of the others from their memory (``peer_memory.py``), where collectives
            would gather them; on one host. The values are the same. Collectives still gather what is cast, and units
            that are called outside a forward of this module.
        units: says of a module whether its parameters are to be gathered together, as those of a block; None divides
            the module by default (see ``fsdp_units.py``).
        quantized: says of a unit how its matrices travel in eight bits (``fsdp_quantized.py``), or None: as stored.
        initialise: gives values to the parameters and buffers that a module from ``meta`` holds itself; by default the
            module's ``reset_parameters``. With equal seeds the model is the one that a single process would build.
        device: where a module from ``meta`` goes; by default this rank's GPU under NCCL, else the CPU.
        process_group: the default group if None.

    Raises:
        ValueError: the module has no parameters, is lazy, lies on several devices, is under FSDP already in part, or
            differs between ranks; an argument is out of range; ranks cannot read each other's memory, as
            ``peer_copies`` asks.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        prefetch: int = 1,
        peer_copies: bool = False,
        units: Predicate | None = None,
        quantized: Travels | None = None,
        initialise: Initialise | None = None,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch must not be negative, got {prefetch}")
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")
        check_shapes_are_known((*module.named_parameters(), *module.named_buffers()))
        described = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
        for name, each in module.named_modules():
            if isinstance(each, FSDP) or is_unit(each):
                name = name or type(module).__name__
                raise ValueError(f"{name} is under FSDP already: wrap the outermost module alone, and name units=")
        if not described:
            raise ValueError(f"{type(module).__name__} has no parameters to shard")
        for name, p in module.named_parameters():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ValueError(f"{name} has gradient hooks, which sharding would lose: register them after it")
        self.process_group: dist.ProcessGroup = process_group or dist.distributed_c10d._get_default_group()
        check_same_across_ranks(described, "the model's parameters", self.process_group)
        self.compute_dtype = compute_dtype
        self.device = _device(module, device, self.process_group)
        if peer_copies and (reason := why_not_mapped(self.device, self.process_group)):
            raise ValueError(f"peer_copies need ranks that map each other's memory, but {reason}")
        sharded = shard_module(
            module,
            predicate=units,
            quantized=quantized,
            initialise=initialise,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            peer_copies=peer_copies,
            device=self.device,
            process_group=self.process_group,
        )
        self.module = module
        self.units = sharded.units
        self.groups: list[ShardedGroup] = sharded.groups
        self.replicated: list[ManagedParameter] = sharded.replicated.parameters
        WholeTensors(self.process_group, self.device).show(module, self.managed_parameters())
        self._order = GatherOrder(sharded, prefetch, self.device, self.process_group)
        for unit in sharded.units:
            unit.run_by(self._order.run)
        for parameter in self.managed_parameters():
            parameter.take_hooks()
        managed = self.managed_parameters()
        self._members = Members(
            module, lambda: (tensor for one in managed for tensor in (one.sharded_param, one.unsharded_param))
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; floating-point inputs are cast to ``compute_dtype``.

        Raises:
            RuntimeError: a parameter was added or replaced after wrapping.
        """
        self._members.check()
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        with self._order.forward():
            return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate whole gradients on this rank and communicate none.

        They leave the weights gathered that the next forward begins with. It sees a change of shards in between by
        their versions, or new ``data``: code that writes into ``data``, or by a collective, must raise versions
        (``torch.autograd.graph.increment_version``).

        The next backward outside, or ``finish_gradient_synchronization``, averages the sum. To give it up instead, as
        after an error, call ``zero_grad`` of this module: an optimizer's does not know of it.
        """
        before = self._order.gradients.synchronize
        self._order.gradients.synchronize = False
        try:
            yield
        finally:
            self._order.gradients.synchronize = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as any module does, and give up what backward passes inside ``no_sync`` have accumulated."""
        if not inside_backward():
            self._order.forget_failed_backward()  # whose units have their parameters unsharded
            self._order.gradients.drop()
        super().zero_grad(set_to_none)

    def finish_gradient_synchronization(self) -> None:
        """Average what backward passes inside ``no_sync`` have accumulated, if none outside has done so.

        Any other backward returns when every parameter's ``grad`` is the average over the ranks, for whatever the
        current stream does next: this changes nothing then.
        """
        self._order.finish()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, in the shards' dtype, under its names in the wrapped module; a collective.

        The tensors are the caller's. Names that share a parameter share its tensor.
        """
        wholes: dict[str, Tensor] = {}
        for group in self.groups:
            for parameter, whole in zip(group.parameters, group.full(), strict=True):
                wholes |= dict.fromkeys(parameter.names, whole)
        for replicated in self.replicated:
            wholes |= dict.fromkeys(replicated.names, replicated.sharded_param.detach().clone())
        return {name: wholes[name] for name, _ in self.module.named_parameters(remove_duplicate=False)}

    def managed_parameters(self) -> list[ManagedParameter]:
        """Return all parameters, sharded ones first, in the same order on every rank."""
        return [*(parameter for group in self.groups for parameter in group.parameters), *self.replicated]

    def _apply(self, fn: Any, recurse: bool = True) -> "FSDP":
        """``nn.Module._apply``, which ``to`` and ``half`` call: the shards lie in buffers that it would leave behind.

        Raises:
            ValueError: it would change a tensor.
        """
        with torch.no_grad():
            if any(fn(tensor) is not tensor for tensor in (*self.parameters(), *self.buffers())):
                raise ValueError(f"FSDP({type(self.module).__name__}) cannot be moved or cast: do so before wrapping")
        return self


def _device(module: nn.Module, device: torch.device | str | None, process_group: dist.ProcessGroup) -> torch.device:
    """The device of the shards."""
    if device is not None:
        return torch.empty(0, device=device).device  # with an index, as parameters have it
    found = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), None)
    if found is not None:
        return found
    if dist.get_backend(process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def clip_grad_norm_(fsdp: FSDP, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; one all-reduce of one number.

    After backward. Every rank scales by the same factor, max_norm / (norm + 1e-6) if that is
    below one, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.

    Returns:
        The norm before clipping, a scalar on the device.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not positive.
    """
    if not (max_norm > 0 and norm_type > 0):
        raise ValueError(f"max_norm and norm_type must be positive, got {max_norm} and {norm_type}")
    sharded, replicated = (
        [p.sharded_param.grad.detach() for p in parameters if p.sharded_param.grad is not None]
        for parameters in ([p for group in fsdp.groups for p in group.parameters], fsdp.replicated)
    )
    ours, everyones = (
        torch.as_tensor(
            nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()], norm_type),
            device=fsdp.device,
            dtype=torch.float32,
        )
        for gradients in (sharded, replicated)
    )
    if norm_type == torch.inf:
        dist.all_reduce(ours, dist.ReduceOp.MAX, group=fsdp.process_group)
        norm = torch.maximum(ours, everyones)
    else:
        ours = ours**norm_type
        dist.all_reduce(ours, group=fsdp.process_group)
        norm = (ours + everyones**norm_type) ** (1 / norm_type)
    if gradients := sharded + replicated:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class WholeTensors(NotCopied):
    """Translates between the shards of a module and the whole tensors of its state dicts, which share their memory.

    Args:
        process_group: over whose ranks tensors are split.
        device: of the shards.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self._process_group, self._device = process_group, device

    def show(self, module: nn.Module, managed: Iterable[ManagedParameter]) -> None:
        """Translate in the state dicts of every part of the module from now on."""
        of_shard = {parameter.sharded_param: parameter for parameter in managed}
        for holder in module.modules():
            own = {name: of_shard[p] for name, p in holder._parameters.items() if p is not None}
            if own:
                holder.register_state_dict_post_hook(functools.partial(self._to_wholes, own))
                holder.register_load_state_dict_pre_hook(functools.partial(self._to_rows, own))

    @functools.cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._process_group, self._device.type)

    def _to_wholes(
        self, own: dict[str, ManagedParameter], module: nn.Module, state_dict: Any, prefix: str, *_: Any
    ) -> None:
        for name, parameter in own.items():
            if prefix + name in state_dict and not isinstance(state_dict[prefix + name], nn.Parameter):
                state_dict[prefix + name] = self._whole(parameter)

    def _whole(self, parameter: ManagedParameter) -> Tensor:
        rows = parameter.sharded_param.detach()
        if not isinstance(parameter, ShardedParameter):
            return rows
        from torch.distributed.tensor import DTensor, Shard  # takes over a second, which not every import is to take

        stride = torch.empty(parameter.shape, device="meta").stride()
        return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=stride)

    def _to_rows(
        self,
        own: dict[str, ManagedParameter],
        module: nn.Module,
        state_dict: Any,
        prefix: str,
        metadata: dict[str, Any],
        *others: Any,
    ) -> None:
        error_messages: list[str] = others[-1]
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(f"load_state_dict(assign=True) would replace shards of FSDP, as {prefix}{next(iter(own))}")
        for name, parameter in own.items():
            value = state_dict.get(key := prefix + name)
            if not isinstance(parameter, ShardedParameter) or not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:
                state_dict[key] = self._rows(parameter, value)
            else:
                error_messages.append(f"{key} must be whole, {tuple(parameter.shape)}, got {tuple(value.shape)}")
                state_dict[key] = parameter.sharded_param.detach()  # or torch would compare it with the rows

    def _rows(self, parameter: ShardedParameter, value: Tensor) -> Tensor:
        """This rank's rows of a whole tensor; of a ``DTensor`` by a collective, unless it is split alike."""
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(value, DTensor):
            return parameter.rows_of(value)
        if value.device_mesh == self._mesh and value.placements == (Shard(0),):
            return value.to_local()
        return parameter.rows_of(value.full_tensor())
