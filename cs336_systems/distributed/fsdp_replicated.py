"""Parameters that FSDP does not split: those of fewer than two dimensions, which every rank holds whole.

Their ``sharded_param`` is whole on every rank, and their ``unsharded_param`` a copy of it in ``compute_dtype``, or
itself if there is nothing to cast (``fsdp_parameters.py``). All their gradients travel in the last message of a step,
which also counts the ranks that have a gradient of each parameter, of the sharded ones too.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.fsdp_parameters import ManagedParameter
from cs336_systems.distributed.neighbours import alias, empty_like_run, neighbours


class ReplicatedParameters:
    """Parameters that every rank holds whole; their gradients are averaged in one all-reduce.

    Args:
        names: all names of each parameter.
        parameters: equal on every rank; they stay in use.
        compute_dtypes: in which the module sees each of them; None for its own.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, ...]],
        parameters: Sequence[nn.Parameter],
        *,
        compute_dtypes: Sequence[torch.dtype | None],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._process_group = process_group
        copies = _cast_copies(dict(zip(parameters, compute_dtypes, strict=True)))
        self.parameters = [
            ManagedParameter(name, parameter, copies.get(parameter, parameter), parameter.shape)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        self._cast = {
            parameter: alias(copy.detach(), int(copy.storage_offset()), parameter.shape)
            for parameter in self.parameters
            if (copy := parameter.unsharded_param) is not parameter.sharded_param
        }

    def refresh(self, parameters: Iterable[ManagedParameter]) -> None:
        """Cast what the user has made of these parameters, as far as they are cast, into what the module sees."""
        cast = [parameter for parameter in parameters if parameter in self._cast]
        if cast:
            torch._foreach_copy_(
                [self._cast[parameter] for parameter in cast],
                [parameter.sharded_param.detach() for parameter in cast],
            )

    def collect(self) -> None:
        """Add the gradients of the cast copies to those of the parameters, in the parameters' dtype."""
        for parameter in self._cast:
            gradient, parameter.unsharded_param.grad = parameter.unsharded_param.grad, None
            if gradient is None:
                continue
            if parameter.sharded_param.grad is None:
                parameter.sharded_param.grad = gradient.to(parameter.sharded_param.dtype)
            else:
                parameter.sharded_param.grad.add_(gradient)

    def drop_gradients(self) -> None:
        """Give up the gradients of the cast copies."""
        for parameter in self._cast:
            parameter.unsharded_param.grad = None

    def all_reduce(self, device: torch.device, sharded: Sequence[ManagedParameter]) -> Tensor:
        """Average the gradients, and count the ranks that have one of each parameter, in the same collective.

        A rank without a gradient of a parameter contributes zeros; if no rank has one, none is made.

        Returns:
            For each of ``sharded``, a number that is zero if no rank has contributed to its gradient; on the device.
        """
        trainable = [parameter for parameter in self.parameters if parameter.sharded_param.requires_grad]
        for parameter in trainable:
            parameter.has_gradient = parameter.sharded_param.grad is not None
        dtype = torch.float32
        for parameter in trainable:
            dtype = torch.promote_types(dtype, parameter.sharded_param.dtype)
        counted = [*sharded, *trainable]
        sizes = [parameter.shape.numel() for parameter in trainable]
        flat = torch.zeros(sum(sizes) + len(counted), dtype=dtype, device=device)
        *averages, counts = flat.split([*sizes, len(counted)])
        averages = [part.view(parameter.shape) for part, parameter in zip(averages, trainable, strict=True)]
        present = [i for i, parameter in enumerate(trainable) if parameter.has_gradient]
        gradients = [gradient for parameter in trainable if (gradient := parameter.sharded_param.grad) is not None]
        if present:
            torch._foreach_copy_([averages[i] for i in present], gradients)
        counts.fill_(1)
        for i, parameter in enumerate(counted):
            if not parameter.has_gradient:
                counts[i] = 0  # a fill, which unlike a copy from the host waits for nothing
        dist.all_reduce(flat, group=self._process_group)
        flat[: sum(sizes)].div_(self._process_group.size())
        if present:
            torch._foreach_copy_(gradients, [averages[i] for i in present])
        for i, parameter in enumerate(trainable):
            if not parameter.has_gradient and counts[len(sharded) + i] > 0:
                parameter.sharded_param.grad = averages[i].to(parameter.sharded_param.dtype, copy=True)
            if parameter.sharded_param.grad is not None:
                parameter.run_hooks()
        return counts[: len(sharded)]


def _cast_copies(compute_dtypes: Mapping[nn.Parameter, torch.dtype | None]) -> dict[Tensor, nn.Parameter]:
    """For each parameter of another dtype than it is to be computed in: one of its own in that dtype."""
    cast = [p for p, dtype in compute_dtypes.items() if dtype not in (None, p.dtype) and p.dtype.is_floating_point]
    copies: dict[Tensor, nn.Parameter] = {}
    for run in neighbours(cast):
        for parameter, memory in zip(run, empty_like_run(run, dtype=compute_dtypes[run[0]]), strict=True):
            copies[parameter] = nn.Parameter(memory.copy_(parameter.detach()), parameter.requires_grad)
    return copies
