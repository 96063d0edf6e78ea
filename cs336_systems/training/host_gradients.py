"""Gradients that leave for host memory as backward makes them: on the device are those on their way, and no others.

    optimizer.host_gradients = HostGradients(model.parameters())        # a FusedAdamW
    loss.backward()                                                     # p.grad is None
    norm = optimizer.host_gradients.norm()
    optimizer.step(); optimizer.zero_grad()

Micro-batches add up as on the device, to the bit: what is on the host comes back, the new gradient is added to it, and
the sum leaves. What comes next is fetched ahead, in the order of the backward before. The norm is that of ``grad_norm``
over the gradients in the order of the parameters, to the bit: each one's squares are added up while it is here.

Host memory takes one slab, as large as all gradients. Gradients must be dense, and are for one rank.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from cs336_systems.costs.offload import IN_FLIGHT_BYTES
from cs336_systems.kernels.grad_norm import norm_of_sums, norm_table, sums_of_squares
from cs336_systems.kernels.host_link import Coming, HostLink
from cs336_systems.kernels.tensor_table import TensorTable
from cs336_systems.training.host_states import place


class HostGradients:
    """The gradients of these parameters, those that have one, on the host.

    Raises:
        RuntimeError: there is not as much host memory.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        device = trainable[0].device
        hosts = place({parameter: {"gradient": parameter.dtype} for parameter in trainable}, device)
        self._hosts = {parameter: named["gradient"] for parameter, named in hosts.items()}
        self._link = HostLink(device, IN_FLIGHT_BYTES)
        self._tables: dict[Tensor, TensorTable] = {parameter: norm_table() for parameter in trainable}
        self._sums: dict[Tensor, Tensor] = {}
        """Of the squares of what is there, by chunks."""
        self._coming: dict[Tensor, Coming] = {}
        self._arrived: dict[Tensor, None] = {}
        """In this backward."""
        self._next: dict[Tensor, Tensor] = {}
        """After which parameter's gradient came which, in the last backward."""
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(self._take)

    def of(self, parameter: Tensor) -> Tensor | None:
        """The gradient in host memory, which the device may still be writing; None if there is none."""
        return self._hosts[parameter] if parameter in self._sums else None

    def tensors(self) -> list[Tensor]:
        """Those that are there, in the order of the parameters."""
        return [host for parameter, host in self._hosts.items() if parameter in self._sums]

    def norm(self) -> Tensor:
        """Of all gradients together, fp32, shape (), on the device."""
        return norm_of_sums([self._sums[parameter] for parameter in self._hosts if parameter in self._sums])

    def settle(self) -> None:
        """Let what the device does from here on find all gradients on the host."""
        self._link.release()

    def forget(self) -> None:
        """There are no gradients any more."""
        for coming in self._coming.values():
            coming.wait()
        for left in (self._coming, self._sums, self._arrived):
            left.clear()

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient, host = parameter.grad, self._hosts[parameter]
        assert gradient is not None
        parameter.grad = None
        if parameter in self._arrived:  # another backward
            self._arrived.clear()
        if self._arrived:
            self._next[next(reversed(self._arrived))] = parameter
        self._arrived[parameter] = None
        if parameter in self._sums:
            coming = self._coming.pop(parameter, None) or self._link.fetch([host])
            gradient = coming.wait()[0].add_(gradient)
        following = self._next.get(parameter)
        if following is not None and following in self._sums and following not in self._arrived:
            self._coming[following] = self._link.fetch([self._hosts[following]])
        self._sums[parameter] = sums_of_squares([gradient], self._tables[parameter])
        self._link.send([gradient], [host])
