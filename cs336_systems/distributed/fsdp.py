"""Fully sharded data parallelism: parameters, gradients and optimizer state divided among the ranks (ZeRO-3).

    model = FSDP(model, compute_dtype=torch.bfloat16, units=lambda module: isinstance(module, TransformerBlock))
    optimizer = torch.optim.AdamW(model.parameters())      # sees shards, so its state is sharded too
    loss_function(model(inputs), targets).backward()       # gathers weights, frees them, averages gradients
    clip_grad_norm_(model, 1.0)
    optimizer.step()

Every parameter of two or more dimensions is sharded along its first (``fsdp_parameters.py``); others are replicated.
Units of the module, such as blocks, gather their parameters just before use, in forward and again in backward
(``fsdp_units.py``, ``fsdp_schedule.py``). A step has two all-gathers and a reduce-scatter, so it sends 1.5 times as
much as an all-reduce of the gradients. Sources: Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (PyTorch
FSDP). As in ``torch.distributed.fsdp.fully_shard``, each parameter is sharded by itself and few units are prefetched.

Precision: shards, their gradients and the optimizer keep the dtype that the module was built in, fp32 as a rule. With
``compute_dtype`` the module's weights and inputs, but not its buffers, are cast to that dtype; weights are cast before
they are sent. Gradients are cast back to the shards' dtype before they are sent, because a sum of bf16 gradients over
the ranks would round at every addition.

Gradients are averages over the ranks, which are complete when backward returns and correct if each rank's loss is the
mean over an equal part of the global batch. If a backward fails on all ranks, call ``zero_grad`` before the next step.
Norms of a shard's gradient and ``torch.amp.GradScaler`` are refused, because they need whole gradients
(``fsdp_gradients.py``).

``save_checkpoint`` and ``load_checkpoint`` save and load shards; ``gather_full_params`` returns whole tensors. State
dicts are refused, because ``torch.distributed.checkpoint`` would mistake this rank's rows, and their moments, for whole
tensors.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cs336_systems.distributed.fsdp_parameters import ManagedParameter, ShardedGroup
from cs336_systems.distributed.fsdp_schedule import GatherOrder, inside_backward
from cs336_systems.distributed.fsdp_units import Predicate, ShardedUnits, Travels, is_unit
from cs336_systems.distributed.norms import check_max_norm, joint_norm, scale_to_norm
from cs336_systems.distributed.peer_memory import Turns, why_not_mapped
from cs336_systems.distributed.process_group import check_same_across_ranks
from cs336_systems.distributed.tensor import tensor_dim
from cs336_systems.distributed.wrapped import Members, NotCopied, check_shapes_are_known
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks


class FSDP(NotCopied, nn.Module):
    """Wraps any module and shards its parameters over the ranks of the default process group.

    Args:
        module: the whole module, on this rank's device or on ``meta``. Shards of rank 0's parameters replace its own.
        compute_dtype: the dtype in which the module runs and weights are sent; None means the parameters' own.
        prefetch: the number of units whose weights are gathered ahead of the one that runs; with 0 a unit's weights are
            gathered when it is called.
        peer_copies: whether each rank copies the other ranks' rows from their memory (``peer_memory.py``) instead of
            using all-gathers; all ranks must be on one host. The values are the same. All-gathers are still used for
            weights that are cast, and for units that are called outside a forward of this module.
        units: a function that says whether a submodule is a unit, whose parameters are gathered together; None divides
            the module as ``fsdp_units.py`` says.
        quantized: a function that says how a unit's matrices are sent in eight bits (``fsdp_quantized.py``), or None if
            they are sent as stored.
        device: the device to which a module on ``meta`` moves; by default this rank's GPU under NCCL, else the CPU. Its
            submodules' ``reset_parameters`` initialise it; with the same seed, to the values of a model built in one
            process.
        process_group: the ranks that share the module; None for the default group.
        replicas: this rank and the ranks of other such groups that hold the same shard (hybrid sharding: Zhao et al.
            2023, section 3.2.2); gradients are averaged over them, too, shard by shard.

    Raises:
        ValueError: the module has no parameters, is lazy, is on several devices, is partly under FSDP already, or
            differs between ranks; an argument is out of range; ``peer_copies`` is set, but ranks cannot read each
            other's memory.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        prefetch: int = 1,
        peer_copies: bool = False,
        units: Predicate | None = None,
        quantized: Travels | None = None,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if type(prefetch) is not int or prefetch < 0:
            raise ValueError(f"prefetch must be a whole number and not negative, got {prefetch!r}")
        if units is not None and not callable(units):
            raise ValueError(f"units must be a function that says whether a module is one, got {units!r}")
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype must be a floating-point dtype, got {compute_dtype}")
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
        self.process_group = process_group or dist.distributed_c10d._get_default_group()
        self.has_replicas = replicas is not None
        check_same_across_ranks(described, "the model's parameters", self.process_group)
        self.compute_dtype = compute_dtype
        self.device = _device(module, device, self.process_group)
        if peer_copies and (reason := why_not_mapped(self.device, self.process_group)):
            raise ValueError(f"peer_copies need ranks that map each other's memory, but {reason}")
        if replicas is not None:
            check_same_across_ranks(described, "the model's parameters", replicas)
        turns = Turns(self.device, self.process_group, taken=peer_copies, replicas=replicas)
        sharded = ShardedUnits(module, turns, predicate=units, quantized=quantized, compute_dtype=compute_dtype)
        self.module = module
        self.part: Hashable = None
        """The part of the module that the next forward runs; it should call the same units as its last forward."""
        self.units = sharded.units
        self.groups: list[ShardedGroup] = sharded.groups
        self.replicated: list[ManagedParameter] = sharded.replicated.parameters
        self._order = GatherOrder(sharded, prefetch)
        for unit in sharded.units:
            unit.run_by(self._order.run)
        managed = self.managed_parameters()
        for parameter in managed:
            parameter.take_hooks()
        for part in (self, *module.modules()):
            part.register_state_dict_pre_hook(_refuse_state_dict)
            part.register_load_state_dict_pre_hook(_refuse_state_dict)
        self._members = Members(
            module, lambda: (tensor for one in managed for tensor in (one.sharded_param, one.unsharded_param))
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward in ``compute_dtype``; raises RuntimeError if a parameter was added or replaced."""
        self._members.check()
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        with self._order.forward(self.part):
            return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    @contextmanager
    def task(self, following: tuple[Hashable, bool] | None, *, runs_units: bool) -> Iterator[None]:
        """Run the body as a task of a pipeline stage, and prefetch the first weights of the next task meanwhile.

        Args:
            following: (part, whether backward) of the next task; None if it is neither forward nor backward.
            runs_units: whether this task is a forward or a backward.
        """
        part, backward = following or (None, False)
        self._order.expect(part, backward, now=not runs_units)
        try:
            yield
        except BaseException:
            self._order.expect_nothing()
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward accumulate whole gradients on this rank and send none.

        The next backward outside, or ``finish_gradient_synchronization``, averages the sum. To drop the sum, as after
        an error, call this module's ``zero_grad``; an optimizer's ``zero_grad`` does not clear it.
        """
        before = self._order.gradients.synchronize
        self._order.gradients.synchronize = False
        try:
            yield
        finally:
            self._order.gradients.synchronize = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as any module does, and drop what backward passes inside ``no_sync`` have accumulated."""
        if not inside_backward():
            self._order.forget_failed_backward()  # whose units have their parameters unsharded
            self._order.gradients.drop()
        super().zero_grad(set_to_none)

    def finish_gradient_synchronization(self) -> None:
        """Average gradients accumulated inside ``no_sync``, unless a later backward outside has averaged them.

        After any other backward every ``grad`` already is the average over the ranks, and this changes nothing.
        """
        self._order.finish()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Return every whole parameter, in the shards' dtype, by its name in the wrapped module; a collective call.

        The tensors are new and belong to the caller. Names that share a parameter share its tensor.
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
        """Raise ValueError if ``to`` or ``half`` would change anything: shards are views of their groups' buffers."""
        with torch.no_grad():
            if any(fn(tensor) is not tensor for tensor in (*self.parameters(), *self.buffers())):
                raise ValueError(f"FSDP({type(self.module).__name__}) cannot be moved or cast: do so before wrapping")
        return self

    def _fqn_modifiers(self) -> NoReturn:
        """Refuse ``torch.distributed.checkpoint``, which reads this from every module, also for optimizer state."""
        _refuse_state_dict(self)


def _device(module: nn.Module, device: torch.device | str | None, process_group: dist.ProcessGroup) -> torch.device:
    if device is not None:
        return torch.empty(0, device=device).device  # with an index, as parameters have it
    found = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), None)
    if found is not None:
        return found
    if dist.get_backend(process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def clip_grad_norm_(fsdp: FSDP, max_norm: float) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``, with one all-reduce of two numbers.

    Every rank calls this after backward and scales by the same factor, max_norm / (norm + 1e-6) if that is below one,
    as ``torch.nn.utils.clip_grad_norm_`` does. Under tensor parallelism a second all-reduce adds the sums of squares of
    gradients that tensor ranks divide; replicated gradients count once. Returns the norm before clipping, a scalar on
    the device.

    Raises:
        ValueError: ``max_norm`` is not positive, or the module is not under FSDP or is only a stage of a pipeline.
    """
    check_max_norm(max_norm)
    if not isinstance(fsdp, FSDP):
        raise ValueError(f"this clips the gradients of an FSDP, got {type(fsdp).__name__}")
    if hasattr(fsdp.module, "on_two_stages"):
        raise ValueError("stages of a pipeline share the model: clip by training.clipping.GradientGuard")
    ranks: TensorRanks = getattr(fsdp.module, "tensor_ranks", ALONE)
    sharded = [parameter for group in fsdp.groups for parameter in group.parameters]
    ours, everyones = (_squares(each, ranks, fsdp.device) for each in (sharded, fsdp.replicated))
    dist.all_reduce(ours, group=fsdp.process_group)
    divided, whole = ours + everyones
    found = [p.sharded_param.grad.detach() for p in fsdp.managed_parameters() if p.sharded_param.grad is not None]
    widest = reduce(torch.promote_types, (gradient.dtype for gradient in found), torch.float32)
    norm = (ranks.total([divided[None]])[0][0] + whole).sqrt().to(widest)
    scale_to_norm(found, norm, max_norm)
    return norm


def _squares(parameters: Iterable[ManagedParameter], ranks: TensorRanks, device: torch.device) -> Tensor:
    """fp64 (2,): the sums of squares of the gradients that tensor ranks divide, and of all others."""
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for parameter in parameters:
        if (gradient := parameter.sharded_param.grad) is not None:
            found[ranks.n_ranks == 1 or tensor_dim(parameter.names[0]) is None].append(gradient.detach())
    return torch.stack([joint_norm(each, device).double() for each in found]).square()


def _refuse_state_dict(module: nn.Module, *_: Any) -> NoReturn:
    """Replace ``state_dict`` and ``load_state_dict``: raise RuntimeError."""
    raise RuntimeError(
        f"{type(module).__name__} holds this rank's rows under FSDP, so it saves and loads no state dict: use "
        "save_checkpoint and load_checkpoint for shards, and gather_full_params() for whole tensors"
    )
