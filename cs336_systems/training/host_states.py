"""States and gradients in host memory: AdamW's step fetches, updates and sends them back in pieces.

While one batch of pieces is updated, the next is being fetched and the previous one sent back, so a step takes as long
as the link takes for the slower direction, and the device holds three batches: 3 x 128 MiB for moments in bf16. A piece
is a stretch of one tensor; AdamW is elementwise and counts elements in the whole tensor (``kernels/adamw.py``), so
where tensors are cut changes no bit.

    hosts = place({p: {"exp_avg": torch.bfloat16} for p in parameters}, device)      # one slab for all of them
    staged_adamw_(updates, {"exp_avg"}, link, scale)
    optimizer.host_gradients = HostGradients(model.parameters())        # of a FusedAdamW: p.grad is None after backward

Bytes over the link per parameter: the states once in and once out, gradients once in. On an H200 a step with moments in
bf16 took 145 ms for Qwen2.5-1.5B and 766 ms for 7B, where 51 GB/s each way take 121 and 597 (before batches were full).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336_systems.costs.offload import BATCH_ELEMENTS, IN_FLIGHT_BYTES
from cs336_systems.kernels.adamw import Update, adamw_, check_updates
from cs336_systems.kernels.grad_norm import norm_of_sums, norm_table, sums_of_squares
from cs336_systems.kernels.host_memory import Coming, HostLink, aligned, host_slab
from cs336_systems.kernels.tensor_table import TensorTable

PIECE_ELEMENTS = 128
"""A tensor is cut at multiples of it, where its elements are aligned as in the whole tensor."""


def place(dtypes: Mapping[Tensor, Mapping[str, torch.dtype]], device: torch.device) -> dict[Tensor, dict[str, Tensor]]:
    """For each parameter, zeros like it by the given names, in one slab of host memory, pinned for a GPU ``device``.

    Raises:
        RuntimeError: there is too little host memory.
    """
    n_bytes = sum(aligned(p.numel() * dtype.itemsize) for p, named in dtypes.items() for dtype in named.values())
    slab = host_slab(n_bytes, device)
    hosts = {}
    for parameter, named in dtypes.items():
        strides = torch.empty_like(parameter.detach(), device="meta").stride()
        hosts[parameter] = {
            name: slab.take((parameter.numel(),), dtype).as_strided(parameter.shape, strides)
            for name, dtype in named.items()
        }
    return hosts


def staged_adamw_(
    updates: Sequence[Update],
    staged: Collection[str],
    link: HostLink,
    scale: Tensor | None,
) -> None:
    """``adamw_`` with stochastic rounding for updates whose ``staged`` fields are in host memory; the same bits.

    Raises:
        ValueError: as ``adamw_``.
    """
    if not updates:
        return
    check_updates(updates, link.device, staged)
    batches = _batches(updates)
    back = [name for name in staged if name != "gradient"]

    def fetch(number: int) -> Coming:
        return link.fetch([getattr(update, name) for update in batches[number] for name in staged])

    coming = fetch(0)
    for i, batch in enumerate(batches):
        here = coming
        if i + 1 < len(batches):
            coming = fetch(i + 1)
        tensors = iter(here.wait())
        arrived: list[dict[str, Any]] = [{name: next(tensors) for name in staged} for _ in batch]
        ready = [update._replace(**own) for update, own in zip(batch, arrived, strict=True)]
        adamw_(ready, scale)
        sent = [
            (getattr(now, name), getattr(host, name)) for now, host in zip(ready, batch, strict=True) for name in back
        ]
        if sent:
            link.send(*zip(*sent, strict=True))
    link.release()


def _batches(updates: Sequence[Update]) -> list[list[Update]]:
    """All elements of all tensors in pieces, each a stretch of memory, divided among batches."""
    batches: list[list[Update]] = [[]]
    room = BATCH_ELEMENTS
    for update in updates:
        begin, n = 0, update.parameter.numel()
        while begin < n or begin == 0:
            if room < PIECE_ELEMENTS:
                batches.append([])
                room = BATCH_ELEMENTS
            end = n if n - begin <= room else begin + room // PIECE_ELEMENTS * PIECE_ELEMENTS
            batches[-1].append(_piece(update, begin, end))
            begin, room = max(end, 1), room - (end - begin)
    return batches


def _piece(update: Update, begin: int, end: int) -> Update:
    """Elements of an update in memory order; each piece has its own step count, and the first one's is kept."""
    stretches: dict[str, Any] = {
        name: tensor.detach().as_strided((end - begin,), (1,), tensor.storage_offset() + begin)
        for name, tensor in update.tensors.items()
    }
    step = update.step if begin == 0 else update.step.clone()
    return update._replace(step=step, offset=update.offset + begin, **stretches)


class HostGradients:
    """Offloads gradients to host memory as backward computes them; the device holds only those in flight.

    Micro-batches accumulate as in autograd: the sum on the host is fetched, the new gradient is added, and the sum is
    sent back. Gradients are prefetched in the order of the previous backward. The norm has the bits of ``grad_norm``
    over the gradients in the order of the parameters: each one's squares are summed while it is on the device. Host
    memory takes one slab, as large as all gradients. Gradients must be dense, and there must be only one rank.

    Raises:
        RuntimeError: there is too little host memory.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        device = trainable[0].device
        hosts = place({parameter: {"gradient": parameter.dtype} for parameter in trainable}, device)
        self._hosts = {parameter: named["gradient"] for parameter, named in hosts.items()}
        self._link = HostLink(device, IN_FLIGHT_BYTES)
        self._tables: dict[Tensor, TensorTable] = {parameter: norm_table() for parameter in trainable}
        self._sums: dict[Tensor, Tensor] = {}
        """The sums of squares of the present gradients, by chunks."""
        self._coming: dict[Tensor, Coming] = {}
        self._arrived: dict[Tensor, None] = {}
        """The parameters whose gradients this backward has computed, in order."""
        self._next: dict[Tensor, Tensor] = {}
        """The parameter whose gradient followed another's in the last backward."""
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(self._take)

    def of(self, parameter: Tensor) -> Tensor | None:
        """The gradient in host memory, which the device may still be writing; None if there is none."""
        return self._hosts[parameter] if parameter in self._sums else None

    def tensors(self) -> list[Tensor]:
        """The present gradients, in the order of the parameters."""
        return [host for parameter, host in self._hosts.items() if parameter in self._sums]

    def norm(self) -> Tensor:
        """The norm of all gradients together, fp32, shape (), on the device."""
        return norm_of_sums([self._sums[parameter] for parameter in self._hosts if parameter in self._sums])

    def settle(self) -> None:
        """Make the device's later work wait until all gradients are on the host."""
        self._link.release()

    def forget(self) -> None:
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
