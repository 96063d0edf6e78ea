"""Only the attention of one block, on ranks that share sequences: the part ``attention`` of ``mesh.py``.

With a hand-written backward it is this suite's implementation. With keep ``autograd`` it is a named implementation
through autograd; if the context order is torch's, torch divides it over the context ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from cs336_systems.attention.dispatch import attention_op, unsupported_reason
from cs336_systems.blocks import block_ops
from cs336_systems.case import Unsupported
from cs336_systems.distributed.context import context_ops
from cs336_systems.distributed.process_group import Rank
from cs336_systems.distributed.torch_context import sharing_by_torch
from cs336_systems.experiments.mesh import MeshCell
from cs336_systems.experiments.ranked import Effort, peak_metrics, time_metrics
from cs336_systems.harness.clock import time_phases_of_ranks
from cs336_systems.harness.memory import PeakMeter
from cs336_systems.harness.record import Metric
from cs336_systems.training.assemble import mesh_of
from cs336_systems.training.precision import parameter_dtype


def attention_phases(cell: MeshCell, rank: Rank) -> dict[str, Callable[[], None]]:
    """Return forward and backward of one block's attention for a rank's heads and tokens, on data from N(0, 1).

    Raises:
        Unsupported: the attention cannot serve these tensors.
    """
    config, mesh = cell.config.part(cell.tensor), mesh_of(cell, rank)
    torch.manual_seed(cell.seed)
    n_heads, n_kv_heads, length = config.n_heads, config.kv_heads, cell.context_length // cell.context
    projected = torch.randn(3, cell.batch_size, length, n_heads + 2 * n_kv_heads, config.d_head, device=rank.device)
    qkv, dqkv, do = projected.to(parameter_dtype(cell.precision)).transpose(2, 3)
    q, k, v = qkv.split_with_sizes((n_heads, n_kv_heads, n_kv_heads), dim=1)
    do = do[:, :n_heads]
    if not cell.written_out:
        return _phases_by_autograd(cell.attention, [each.clone() for each in (q, k, v)], do.clone())
    ops = block_ops(cell.kernels, cell.attention)
    if mesh is not None and (group := mesh.group("context")) is not None:
        ops = context_ops(ops, group, cell.context_order)
    into = dqkv.split_with_sizes((n_heads, n_kv_heads, n_kv_heads), dim=1)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward() -> None:
        found[:] = [ops.attention_forward(q, k, v)]

    def backward() -> None:
        ops.attention_backward(do, q, k, v, *found[0], into)

    return {"forward": forward, "backward": backward}


def _phases_by_autograd(attention: str, qkv: list[torch.Tensor], do: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return forward and backward of a named attention; backward computes the gradients of q, k and v."""
    leaves = [each.requires_grad_() for each in qkv]
    if reason := unsupported_reason(attention, *leaves, causal=True):
        raise Unsupported(f"attention {attention}: {reason}")
    attend, found = attention_op(attention), []

    def forward() -> None:
        found.append(attend(*leaves, causal=True))

    def backward() -> None:
        torch.autograd.grad(found.pop(), leaves, do)

    return {"forward": forward, "backward": backward}


def measure_attention(cell: MeshCell, rank: Rank, effort: Effort) -> list[Metric]:
    """Times and memory of attention alone."""
    meter, phases, mesh = PeakMeter(rank.device), attention_phases(cell, rank), mesh_of(cell, rank)
    sharing: AbstractContextManager[object] = nullcontext()
    if mesh is not None and cell.parallel.context_by_torch:
        sharing = sharing_by_torch(mesh.devices["context"], cell.context_length, cell.context_order)
    with sharing:
        times = time_phases_of_ranks(phases, rank, steps=cell.steps, warmup=effort.warmup(cell))
    return time_metrics(times, cell) + peak_metrics(meter, rank)
