"""One step of many ranks: wrappers around the model, and optimizers whose state is sharded.

    naive, flat              this suite's DDP after backward: a message per gradient, or one
    overlapped, bucketed     the same during backward: a message per gradient, or per bucket
    torch-ddp                torch's DistributedDataParallel
    fsdp                     this suite's FSDP; its units are the blocks
    fsdp2                    torch's fully_shard of embedding, blocks, and norm with head, as torchtitan does

Wrappers that shard parameters take a model on ``meta`` or on its device and return a module whose parameters are passed
to the optimizer. Buffers are constants in this model, so wrappers need not broadcast them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.blocks import QuantizedProducts, WrittenOutBlock
from cs336_systems.blocks.quantized import FORMATS, WEIGHTS
from cs336_systems.blocks.weights import PARTS
from cs336_systems.config import check_known
from cs336_systems.distributed.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.fsdp_quantized import QuantizedTravel
from cs336_systems.distributed.mesh import Mesh
from cs336_systems.distributed.process_group import Rank, limited_group
from cs336_systems.distributed.sharded_optimizer import REDUCE_SCATTER, SHARD, ShardedOptimizer
from cs336_systems.model import TransformerLM
from cs336_systems.model.transformer import TransformerBlock
from cs336_systems.ranks import Parallel
from cs336_systems.training.muon import Muon, RowsOfRanks, muon_groups
from cs336_systems.training.optimizer import decay_groups, optimizer_class
from cs336_systems.training.precision import DTYPES

Group = dist.ProcessGroup | None
_DTYPES = {"same": None, **DTYPES}
_LADDER = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": BucketedDDP}


def _ddp(model: TransformerLM, parallel: Parallel, rank: Rank, mesh: Mesh | None) -> nn.Module:
    """One of our four wrappers, which differ in when and in which pieces they send gradients."""
    sized = {"bucket_size_mb": parallel.bucket_size_mb} if parallel.wrapper == "bucketed" else {}
    dtype, group = _DTYPES[parallel.communication_dtype], _group(parallel, rank, mesh)
    return _LADDER[parallel.wrapper](model, communication_dtype=dtype, process_group=group, **sized)


def _group(parallel: Parallel, rank: Rank, mesh: Mesh | None) -> Group:
    """The group in which DDP sends; None for the default group."""
    if mesh is not None:
        return mesh.same_weights
    return limited_group(rank, parallel.max_ctas) if parallel.max_ctas else None


def _torch_ddp(model: TransformerLM, parallel: Parallel, rank: Rank, mesh: Mesh | None) -> nn.Module:
    """Gradients are bucket views, as in our DDP; otherwise torch's defaults, such as a first bucket of 1 MiB."""
    group = _group(parallel, rank, mesh)
    replica = nn.parallel.DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=parallel.bucket_size_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    if parallel.communication_dtype == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        replica.register_comm_hook(group, bf16_compress_hook)
    return replica


def _fsdp(model: TransformerLM, parallel: Parallel, rank: Rank, mesh: Mesh | None) -> nn.Module:
    return FSDP(
        model,
        _DTYPES[parallel.compute_dtype],
        prefetch=parallel.prefetch,
        peer_copies=parallel.gather_by == "copies" and rank.backend != "fake",  # whose ranks have no memory
        units=lambda module: isinstance(module, TransformerBlock),
        quantized=_travel,
        device=rank.device,
        process_group=mesh.shards if mesh else None,
        replicas=mesh.group("replica") if mesh else None,
    )


def _travel(unit: nn.Module) -> QuantizedTravel | None:
    """How the weights of a block are sent quantized, if all of them are used quantized with one scale each."""
    products = unit.products if isinstance(unit, WrittenOutBlock) else None
    if not (isinstance(products, QuantizedProducts) and products.recipe.scaling == "tensor"):
        return None
    own = products.quantizers
    return QuantizedTravel(
        {name: PARTS[name] for name in WEIGHTS},
        FORMATS[products.recipe.matmul],
        make_quantizer=own.parts_quantizer,
        transpose=own.transpose_bytes,
        deliver=products.receive,
    )


def _fsdp2(model: TransformerLM, parallel: Parallel, rank: Rank, mesh: Mesh | None) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    kind = rank.device.type
    ranks = DeviceMesh.from_group(mesh.same_weights, kind) if mesh else init_device_mesh(kind, (rank.world_size,))
    # Block inputs are in the compute dtype already, except the rotary tables, which our FSDP leaves in fp32, too.
    compute_dtype = _DTYPES[parallel.compute_dtype]
    reduce_dtype = None if compute_dtype is None else torch.float32
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    pinned = rank.device.type == "cuda"
    where = CPUOffloadPolicy(pin_memory=pinned) if parallel.on_host else OffloadPolicy()
    shard = partial(fully_shard, mesh=ranks, mp_policy=policy, offload_policy=where)
    if not model.config.tie_embeddings:
        shard(model.token_embeddings)
        shard([model.ln_final, model.lm_head], reshard_after_forward=False)
    for block in model.layers:
        shard(block)
    shard(model)
    return model


WRAPPERS: dict[str, Callable[[TransformerLM, Parallel, Rank, Mesh | None], nn.Module]] = {
    **dict.fromkeys(_LADDER, _ddp),
    "torch-ddp": _torch_ddp,
    "fsdp": _fsdp,
    "fsdp2": _fsdp2,
}


def wrap(model: TransformerLM, parallel: Parallel, rank: Rank | None, mesh: Mesh | None = None) -> nn.Module:
    """The wrapped model; the model itself for ``none``.

    Args:
        mesh: the mesh of the ranks; None if all hold the same weights.

    Raises:
        ValueError: there is no such wrapper, or no process group.
    """
    if parallel.wrapper == "none":
        return model
    check_known("wrapper", parallel.wrapper, ("none", *WRAPPERS))
    if rank is None:
        raise ValueError(f"wrapper {parallel.wrapper!r} needs a process group, this process has joined none")
    if parallel.wrapper in ("fsdp", "fsdp2"):  # which refill the same parameters in each pass
        for block in model.layers:
            if isinstance(block, WrittenOutBlock) and isinstance(block.products, QuantizedProducts):
                block.products.remember = False
    return WRAPPERS[parallel.wrapper](model, parallel, rank, mesh)


def make_parallel_optimizer(
    name: str,
    model: nn.Module,
    parallel: Parallel,
    *,
    decay: str = "all",
    group: Group = None,
    **hyperparameters: Any,
) -> torch.optim.Optimizer:
    """The optimizer of a name in ``config.OPTIMIZERS`` over trainable parameters; ``parallel`` says where its state is.

    ``replicated``: on every rank. ``owned``: each tensor's on one rank, for gradients that a wrapper averages.
    ``scattered``: ZeRO stage 1, which reduces the gradients itself; ``scattered-gradients``: stage 2, which keeps only
    its shard of them. ``torch-zero``: torch's ZeroRedundancyOptimizer.

    Args:
        decay: the parameters that ``weight_decay`` applies to: all, or ``matrices``, without norms and biases.
        group: the ranks that hold the same weights; None for all.
        hyperparameters: of the optimizer.

    Raises:
        ValueError: there is no such optimizer, or no such place for its state.
    """
    params: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cls, options = optimizer_class(name, params[0].device)
    if name == "muon":
        params = muon_groups(model, decay_vectors=decay == "all")
    elif decay == "matrices":
        params = decay_groups(params)
    options |= hyperparameters
    if parallel.optimizer_state == "replicated":
        optimizer = cls(params, **options)
        if isinstance(optimizer, Muon) and isinstance(model, FSDP):
            shapes: dict[torch.Tensor, torch.Size] = {p.sharded_param: p.shape for p in model.managed_parameters()}
            optimizer.matrices = RowsOfRanks(shapes, model.process_group)
        return optimizer
    if parallel.optimizer_state == "torch-zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports TorchScript, with its warnings

        return ZeroRedundancyOptimizer(params, cls, group, parameters_as_bucket_view=True, **options)
    forms = {"owned": None, "scattered": REDUCE_SCATTER, "scattered-gradients": SHARD}
    if parallel.optimizer_state not in forms:
        raise ValueError(f"unknown place of optimizer state {parallel.optimizer_state!r}")
    options |= {"bucket_size_mb": parallel.bucket_size_mb, "process_group": group}
    return ShardedOptimizer(params, cls, reduce_gradients=forms[parallel.optimizer_state], **options)
