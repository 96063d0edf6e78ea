"""The gradients of shards as users meet them: they know that they are parts, and hooks see them once they are averages.

Code outside reads ``.grad`` as if it were whole. Most of that is right for rows as well, and stays untouched: an
optimizer's arithmetic, elementwise clipping, clearing. Two operations are not, and ``ShardGradient`` intercepts them
where torch's ``DTensor`` does, below autograd and for whoever calls them:

    torch.amp.GradScaler    looks for infinities: the ranks agree on what they found, in an all-reduce of one number per
                            dtype, so that all skip a step or none; a step without a scaler sends nothing
    a norm of all elements  would be that of one rank's rows, and different on each: refused

Every other operation runs on the rows themselves and returns plain tensors, ``detach()`` among them.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

_FIND_INFINITIES = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_NORM = torch.ops.aten.linalg_vector_norm.default
_NORMS = torch.ops.aten._foreach_norm.Scalar

Hook = Callable[[Any], None]


class ShardGradient(Tensor):
    """This rank's rows of an average over the ranks, sharing the memory of ``rows``."""

    rows: Tensor
    process_group: dist.ProcessGroup

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rows: Tensor, process_group: dist.ProcessGroup) -> "ShardGradient":
        self = Tensor._make_subclass(cls, rows)
        self.rows = rows
        self.process_group = process_group
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the rows.

        Raises:
            RuntimeError: it is a norm over the rows of this rank alone.
        """
        if func is _NORMS or (func is _NORM and _over_all(*args, **(kwargs or {}))):
            raise RuntimeError(
                "a gradient under FSDP holds this rank's rows alone, and so would its norm: clip with "
                "cs336_systems.distributed.fsdp.clip_grad_norm_(fsdp, max_norm), or take rows by grad.detach()"
            )
        result = func(*_rows(args), **{key: _rows(value) for key, value in (kwargs or {}).items()})
        if func is _FIND_INFINITIES:
            gradients, found_inf, _ = args
            shard = next(gradient for gradient in gradients if isinstance(gradient, cls))
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=shard.process_group)
        in_place = args and isinstance(args[0], cls) and result is args[0].rows
        return args[0] if in_place else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _rows(value: Any) -> Any:
    """An operation's argument, which may be a list of tensors, with rows for gradients."""
    if isinstance(value, ShardGradient):
        return value.rows
    return [_rows(each) for each in value] if isinstance(value, (list, tuple)) else value


def _over_all(x: Tensor, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether a norm with these arguments is one number for all of x."""
    return not dim or len(dim) == x.dim()


class GradientHooks:
    """A parameter's ``register_post_accumulate_grad_hook`` under FSDP: hooks run on the average, not on a rank's part.

    autograd would never run those of a shard, which is in no graph, and would run those of a parameter that every rank
    holds whole before its gradient is averaged.
    """

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, Hook] = OrderedDict()

    def __call__(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def run(self, parameter: Tensor) -> None:
        """Call the hooks, in the order in which they were registered."""
        for hook in list(self._hooks.values()):
            hook(parameter)


def refuse_hook(hook: Hook) -> None:
    """A shard's ``register_hook``.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("a shard of FSDP is in no graph, so hooks must be register_post_accumulate_grad_hook's")
