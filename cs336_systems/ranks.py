"""How ranks share a training step: ``Parallel``, a part of every ``TrainingCase``. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from cs336_systems.declared import option


def mesh_shape(
    world_size: int, context: int, tensor: int, *, replicas: int = 1, pipeline: int = 1
) -> tuple[int, int, int, int, int]:
    """Return the sizes of the mesh along pipeline, replica, shard, context and tensor; their product is ``world_size``.

    Raises:
        ValueError: a size is not positive, or the others do not divide ``world_size``.
    """
    sizes = {"pipeline": pipeline, "replicas": replicas, "context": context, "tensor": tensor}
    asked = " x ".join(f"{name} {n}" for name, n in sizes.items() if n != 1)
    if min(sizes.values()) < 1:
        raise ValueError(f"sizes along a mesh must be positive, got {asked}")
    if world_size % (others := pipeline * replicas * context * tensor):
        raise ValueError(f"{asked} needs a multiple of {others} ranks, got {world_size}")
    return pipeline, replicas, world_size // others, context, tensor


CONTEXT_ORDERS = ("zigzag", "ring", "gathered")
TORCH_CONTEXT_ORDERS = ("torch", "torch-gathered")
"""Torch's own context parallelism, where each rank has the tokens of zigzag."""
TORCH_CONTEXT_ATTENTIONS = ("sdpa-cudnn", "sdpa-flash")

CONTEXT_ORDER_HELP = (
    "Which tokens a context rank holds, and how keys and values reach it: ring, in parts one after the other; zigzag, "
    "early and late parts, for equal work; gathered, zigzag's parts, with all keys gathered first."
)


def context_parts(length: int, n_ranks: int, order: str) -> int:
    """Return the number of equal parts into which context ranks divide a sequence of ``length`` tokens.

    Raises:
        ValueError: that number does not divide the length.
    """
    n_parts = 1 if n_ranks == 1 else n_ranks if order == "ring" else 2 * n_ranks
    if length % n_parts:
        raise ValueError(f"context {n_ranks} in order {order} needs {n_parts} equal parts, got {length} tokens")
    return n_parts


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
"""Orders in which the stages of a pipeline work, as ``costs/parallelism/schedules.py`` explains."""

GatherBy = Literal["collectives", "copies"]
TensorBy = Literal["collectives", "copies", "torch", "torch-async"]
PipelineBy = Literal["auto", "messages", "copies", "torch"]

SPLIT_BY_TORCH = ("zb-h1", "zbv", "dualpipev")
"""Schedules for which torch splits a backward into inputs and weights, which it cannot do for compiled blocks."""

PIPELINE = ("pipeline", "pipeline_schedule", "pipeline_chunks", "pipeline_by")
"""Fields of ``Parallel`` about stages."""

SHARED_BATCH = ("tensor", "tensor_by", "context", "context_order", *PIPELINE[:-1])
"""Fields of ``Parallel`` that say how ranks share a batch."""


@dataclass(frozen=True)
class Parallel:
    """How ranks share a step: the mesh, what wraps the model, and how the optimizer's state is sharded."""

    wrapper: str = "none"
    """The wrapper of the model: none, or a name of ``training.parallel.WRAPPERS``, such as bucketed or fsdp."""
    optimizer_state: str = "replicated"
    """The optimizer's state: replicated, owned, scattered, scattered-gradients or torch-zero, as
    ``training.parallel.make_parallel_optimizer`` explains."""
    bucket_size_mb: float = option(
        25.0, "MiB of the buckets in which gradients (and owned parameters) are sent.", sign="positive", shown=True
    )
    communication_dtype: str = option(
        "same",
        "Dtype in which DDP sends and reduces gradients: their own, or bf16.",
        values=("same", "bf16"),
        shown=True,
    )
    max_ctas: int = option(
        0,
        "Most thread blocks of each NCCL kernel that sends DDP's gradients; each block takes a multiprocessor from "
        "backward. 0: NCCL chooses.",
        sign="not negative",
    )
    compute_dtype: str = "same"
    """The dtype in which FSDP gathers weights and computes: same as its shards, or bf16."""
    prefetch: int = option(1, "How many units ahead our FSDP gathers weights.", sign="not negative", shown=True)
    gather_by: GatherBy = option(
        "collectives",
        "How our FSDP gathers weights: in collectives, or by copying from the other ranks' memory on the same host.",
        shown=True,
    )
    update: str = option(
        "after-backward",
        "When the optimizer updates our FSDP's shards: after backward, or each unit as soon as its gradients are "
        "reduced.",
        values=("after-backward", "under-backward"),
    )
    on_host: bool = False
    """Whether torch's FSDP2 keeps shards, their gradients and the optimizer's state in host memory."""
    replicas: int = option(
        1,
        "Copies of FSDP's shards (hybrid sharding): weights are divided over the ranks of each, and gradients "
        "averaged over all.",
        sign="positive",
        shown=True,
    )
    tensor: int = option(
        1,
        "Ranks of tensor and sequence parallelism: they share matrices and tokens. Not with --keep autograd.",
        sign="positive",
        shown=True,
    )
    tensor_by: TensorBy = option(
        "collectives",
        "How tensor ranks exchange rows: collectives, between matrix products; copies, from each other's memory while "
        "products run, which needs ranks on one host (few rows still go by collectives; CPUs send messages); "
        "torch and torch-async, by torch's own tensor parallelism of the model with --keep autograd.",
        shown=True,
    )
    context: int = option(
        1,
        "Ranks of context parallelism, which share sequences. Not with --keep autograd.",
        sign="positive",
        shown=True,
    )
    context_order: str = option(
        "zigzag",
        f"{CONTEXT_ORDER_HELP} torch and torch-gathered: zigzag's parts by torch's own context parallelism, with "
        "--keep autograd and for attention alone; keys go round a ring, or are gathered.",
        values=(*CONTEXT_ORDERS, *TORCH_CONTEXT_ORDERS),
        shown=True,
    )

    pipeline: int = option(
        1,
        "Stages of a pipeline, each with a part of the blocks, through which micro-batches (--accumulate) pass. Not "
        "with --keep autograd.",
        sign="positive",
        shown=True,
    )
    pipeline_schedule: str = option(
        "1f1b",
        "Order in which stages work: gpipe; 1f1b; interleaved, several chunks of blocks a stage; zb-h1, gradients of "
        "weights put off; zbv, the same with two chunks a stage in opposite order; dualpipev.",
        values=SCHEDULES,
        shown=True,
    )
    pipeline_chunks: int = option(
        2, "Chunks of blocks that a stage of the schedule interleaved has; by default 2.", sign="positive", asked=None
    )
    pipeline_by: PipelineBy = option(
        "messages",
        "Who runs the stages: messages and copies, this suite, whose stages send activations beside operations, "
        "by messages of NCCL or gloo, or by copy engines of GPUs on one host (CPUs send messages); torch, "
        "torch.distributed.pipelining with --keep autograd.",
        shown=True,
    )

    @property
    def ranks_per_batch(self) -> int:
        """The number of ranks that share a batch."""
        return self.pipeline * self.context * self.tensor

    @property
    def tensor_by_torch(self) -> bool:
        """Whether torch's ``parallelize_module`` divides the matrices."""
        return self.tensor > 1 and self.tensor_by.startswith("torch")

    @property
    def by_torch(self) -> bool:
        """Whether ranks share a batch by torch's own parallelism."""
        return self.tensor_by_torch or self.context_by_torch or self.pipeline_by_torch

    @property
    def pipeline_by_torch(self) -> bool:
        """Whether torch runs the stages of a pipeline."""
        return self.pipeline > 1 and self.pipeline_by == "torch"

    @property
    def context_by_torch(self) -> bool:
        """Whether torch's context parallelism divides sequences."""
        return self.context > 1 and self.context_order in TORCH_CONTEXT_ORDERS
