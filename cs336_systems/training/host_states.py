"""AdamW's step for tensors whose states, or gradients, lie in host memory: fetched, updated and sent back in pieces.

While one batch of pieces is updated, the next is on its way to the device and the one before on its way back, so a step
takes as long as the link takes for the longer direction, and the device holds three batches: 3 x 128 MiB for moments in
bf16. A piece is a stretch of one tensor; as AdamW goes element by element and counts them in the whole tensor
(``kernels/adamw.py``), where tensors are cut changes no bit.

    hosts = place({p: {"exp_avg": torch.bfloat16} for p in parameters}, device)      # one slab for all of them
    staged_adamw_(updates, {"exp_avg"}, link, scale, stochastic_rounding=True)

Bytes over the link per parameter: the states once in and once out, gradients once in. On an H200 a step with moments in
bf16 took 145 ms for Qwen2.5-1.5B and 766 ms for 7B, where 51 GB/s each way take 121 and 597 (before batches were full).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336_systems.costs.offload import BATCH_ELEMENTS
from cs336_systems.kernels.adamw import Update, adamw_, check_updates
from cs336_systems.kernels.host_link import Coming, HostLink
from cs336_systems.kernels.host_memory import aligned, host_slab

PIECE_ELEMENTS = 128
"""A tensor is cut at multiples of it, where its elements are aligned as in the whole tensor."""

Hosts = dict[Tensor, dict[str, Tensor]]
"""By parameter, its tensors in host memory by name."""


def place(dtypes: Mapping[Tensor, Mapping[str, torch.dtype]], device: torch.device) -> Hosts:
    """Zeros like each parameter in one slab of host memory, pinned for ``device`` if that is a GPU; those named.

    Raises:
        RuntimeError: there is not as much host memory.
    """
    n_bytes = sum(aligned(p.numel() * dtype.itemsize) for p, named in dtypes.items() for dtype in named.values())
    slab = host_slab(n_bytes, device)
    hosts: Hosts = {}
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
    scale: Tensor | None = None,
    *,
    stochastic_rounding: bool,
    clear_gradients: bool = False,
) -> None:
    """``adamw_`` where the fields named in ``staged`` are in host memory; to the bit what it is without.

    Gradients in host memory are read, and not cleared.

    Raises:
        ValueError: as ``adamw_``.
    """
    if not updates:
        return
    check_updates(updates, link.device, staged)
    batches = _batches(updates)
    back = [name for name in staged if name != "gradient"]
    coming: Coming | None = None
    for i, batch in enumerate(batches):
        here = coming or _fetch(batch, staged, link)
        coming = _fetch(batches[i + 1], staged, link) if i + 1 < len(batches) else None
        tensors = iter(here.wait())
        arrived: list[dict[str, Any]] = [{name: next(tensors) for name in staged} for _ in batch]
        ready = [update._replace(**own) for update, own in zip(batch, arrived, strict=True)]
        adamw_(ready, scale, stochastic_rounding=stochastic_rounding, clear_gradients=clear_gradients)
        sent = [
            (getattr(now, name), getattr(host, name)) for now, host in zip(ready, batch, strict=True) for name in back
        ]
        if sent:
            link.send(*zip(*sent, strict=True))
    link.release()


def _fetch(batch: Sequence[Update], staged: Collection[str], link: HostLink) -> Coming:
    return link.fetch([getattr(update, name) for update in batch for name in staged])


def _batches(updates: Sequence[Update]) -> list[list[Update]]:
    """All elements of all tensors in pieces, each a stretch of memory, dealt out to batches."""
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
    """Elements of an update in memory order; each piece counts the step for itself, the first for all."""
    stretches: dict[str, Any] = {
        name: tensor.detach().as_strided((end - begin,), (1,), tensor.storage_offset() + begin)
        for name, tensor in update.tensors.items()
    }
    step = update.step if begin == 0 else update.step.clone()
    return update._replace(step=step, offset=update.offset + begin, **stretches)
