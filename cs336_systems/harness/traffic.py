"""The traffic of a piece of code to other ranks: every collective with its kind, bytes and dtype.

    with Traffic() as traffic:
        loss.backward()
    sum(event.n_bytes for event in traffic.sent)

It watches c10d's operators as they are dispatched, on this thread and on autograd's, so that Python's wrappers, torch's
own DDP (whose reducer is C++) and functional collectives count alike. Matrix products are listed in between, which
shows what was sent before backward had ended. It slows what it watches down; code inside ``torch.compile`` must be
compiled already.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATMUL = "matmul"

_MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


@dataclass(frozen=True)
class Event:
    """One collective by c10d's name for it (``allreduce``, ``broadcast``, ...), or a matrix product (no bytes)."""

    kind: str
    n_bytes: int
    """Bytes of the operator's first tensors: for an all-reduce or a broadcast what it reduces or sends."""
    dtype: torch.dtype


class Traffic(TorchDispatchMode):
    """Lists the collectives that the code inside issues, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled, and its memory what it was; otherwise torch runs it eagerly under a mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for cls in types):
            return NotImplemented  # the subclass turns the operator into others, which come here: collectives perhaps
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            if tensors:
                kind = func._overloadpacket.__name__.rstrip("_")
                self.events.append(Event(kind, sum(tensor.nbytes for tensor in tensors), tensors[0].dtype))
        elif func._overloadpacket in _MATMULS:
            self.events.append(Event(MATMUL, 0, args[0].dtype))
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> list[Event]:
        """The collectives alone."""
        return [event for event in self.events if event.kind != MATMUL]
