"""Functions as torch operators: opaque to ``torch.compile``, seen by dispatch modes, and cheap to call.

    @operator("rms_norm_forward", _results)
    def forward_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

registers ``cs336_systems::rms_norm_forward`` for every device, and is what callers call from then on. By hand rather
than through ``torch.library.custom_op``, whose calls pass through Python once more: on a CPU 28 us of the host where
this takes 12. An operator has no formula for autograd; a ``torch.autograd.Function`` that calls it is that.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("cs336_systems", "FRAGMENT")


def operator(
    name: str, results: Callable[..., Any], mutates: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Register a function whose signature is annotated; the operator takes its place.

    Args:
        name: after ``cs336_systems::``.
        results: of the same arguments, empty tensors of the shapes, dtypes and strides that it returns.
        mutates: arguments that it writes into; results must not share memory with arguments.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates), op_name=name)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cs336_systems::{name}", results, lib=_LIBRARY)
        registered: OpOverload = getattr(torch.ops.cs336_systems, name).default
        return registered

    return register
