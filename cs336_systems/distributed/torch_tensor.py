"""Torch's own tensor and sequence parallelism for this model: the peer of ``tensor.py``.

    share_by_torch(model, mesh.devices["tensor"])                   # an unsharded model, before it is compiled
    loss = loss_of_words(model(token_ids), targets)

The plan is torchtitan's for Llama 3: q, k, v, w1 and w3 are column-parallel, output and w2 row-parallel, norms and the
residual stream sequence-parallel, embedding, head and loss vocabulary-parallel. ``parallelize_module`` supports only
torch's own modules, so layers are replaced by those, with the same parameters.
"""

import functools
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from cs336_systems.model import TransformerLM
from cs336_systems.model.layers import Embedding, Head, Linear


class _Head(nn.Linear):
    """The head of a model whose loss is computed outside of it."""

    def forward(self, x: Tensor, targets: None = None) -> Tensor:
        return super().forward(x)


def share_by_torch(model: TransformerLM, ranks: DeviceMesh, *, in_pieces: bool = False) -> None:
    """Shard a model in place over the ranks of a 1-D mesh; a collective.

    Args:
        in_pieces: use torch's asynchronous tensor parallelism in compiled blocks, where pieces of matmuls overlap with
            pieces of collectives; needs GPUs with peer access.

    Raises:
        ValueError: the model ties its embeddings or normalises queries and keys, which the plan does not support.
    """
    if model.config.tie_embeddings or model.config.qk_norm:
        raise ValueError("torch's tensor parallelism is set up for models without tied embeddings and norms of queries")
    _use_torch_layers(model)
    if in_pieces:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(ranks.get_group().group_name)
    by_rows = RowwiseParallel(output_layouts=Shard(1))
    of_block: dict[str, ParallelStyle] = {
        **dict.fromkeys(("ln1", "ln2"), SequenceParallel()),
        "attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.w1", "ffn.w3"), ColwiseParallel()),
        **dict.fromkeys(("attn.output_proj", "ffn.w2"), by_rows),
    }
    around: dict[str, ParallelStyle] = {
        "token_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "ln_final": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, ranks, around)
    for block in model.layers:
        parallelize_module(block, ranks, of_block)


def loss_of_words(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats, fp32, of logits (B, S, vocab) sharded over the vocabulary; targets int64 (B, S)."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


@functools.cache
def enter_loss_parallel() -> AbstractContextManager[None]:
    """Let ``F.cross_entropy`` accept sharded logits from now on, in forward and backward; nothing else changes.

    Returns the context, which the cache keeps open.
    """
    context: AbstractContextManager[None] = loss_parallel()
    context.__enter__()
    return context


def _use_torch_layers(module: nn.Module) -> None:
    for name, layer in list(module.named_children()):
        if not isinstance(layer, Linear | Embedding):
            _use_torch_layers(layer)
            continue
        rows, columns = layer.weight.shape
        new: nn.Module
        if isinstance(layer, Embedding):
            new = nn.Embedding(rows, columns, device="meta")
        else:
            kind = _Head if isinstance(layer, Head) else nn.Linear
            new = kind(columns, rows, bias=layer.bias is not None, device="meta")
        for own, parameter in layer.named_parameters():
            setattr(new, own, parameter)
        setattr(module, name, new)
