"""How ranks share a training step: the sizes of the mesh, what ZeRO shards, the pipeline's schedule, the micro-batch.

    Layout(shards=4, tensor=8, zero=3, n_micro_batches=2).n_ranks          # 32

Rank numbers vary fastest along tensor, then along context, shard, replica and pipeline, as in ``distributed/mesh.py``:
the dimensions that send most per second stay inside a host, and stages, which send least, are farthest apart (Narayanan
et al. 2021, section 3).

    ZeRO 0    every rank updates all weights that it holds; gradients are averaged once a step
         1    optimizer states are sharded over the ranks along shard and context
         2    so are gradients, which are reduce-scattered after each micro-batch
         3    so are weights, which are gathered for each forward and each backward (FSDP)

Replicas hold the same shards (hybrid sharding). Source: Rajbhandari et al. 2020, section 5. (This suite's FSDP differs
if a step has several micro-batches: it keeps unsharded gradients and reduce-scatters their sum.)
"""

from dataclasses import dataclass
from math import prod
from typing import Any

DIMENSIONS = ("tensor", "context", "shard", "replica", "pipeline")
"""From the innermost to the outermost."""

ZERO_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Layout:
    """The division of a step among ranks, and of a rank's batch into micro-batches.

    Raises:
        ValueError: a size is not positive, there is no such level, or ZeRO 0, which divides nothing, has shards.
    """

    replicas: int = 1
    shards: int = 1
    """The data-parallel ranks over which ZeRO shards states, together with the ranks along context."""
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    """The stages of the pipeline."""
    zero: int = 0
    keep: str = "products"
    """The level of activations that blocks with a hand-written backward keep (``costs/kept.py``)."""
    micro_batch: int = 1
    """The sequences of a micro-batch, which the ranks along context and tensor share."""
    n_micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    """Chunks of layers per stage."""
    context_order: str = "zigzag"
    tensor_by: str = "collectives"

    def __post_init__(self) -> None:
        sizes = ("replicas", "shards", "context", "tensor", "pipeline", "micro_batch", "n_micro_batches", "chunks")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.zero not in ZERO_LEVELS:
            raise ValueError(f"ZeRO has the levels {', '.join(map(str, ZERO_LEVELS))}, got {self.zero}")
        if self.zero == 0 and self.shards > 1:
            raise ValueError(f"ZeRO 0 divides no states: {self.shards} shards are replicas")

    @classmethod
    def of_data(cls, n: int, zero: int, **others: Any) -> "Layout":
        """The layout of n data-parallel groups of ranks: shards if ZeRO shards anything, else replicas."""
        return cls(replicas=1 if zero else n, shards=n if zero else 1, zero=zero, **others)

    @property
    def data(self) -> int:
        """The number of data-parallel groups, each with its own sequences."""
        return self.replicas * self.shards

    @property
    def n_ranks(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def n_state_shards(self) -> int:
        """The number of ranks over which ZeRO shards; 1 at level 0."""
        return self.shards * self.context if self.zero else 1

    @property
    def n_copies(self) -> int:
        """The number of ranks that hold the same states and all-reduce their gradients."""
        return self.data * self.context // self.n_state_shards

    def stride(self, dimension: str) -> int:
        """The distance between neighbours along a dimension, in ranks."""
        return prod(self._sizes[name] for name in DIMENSIONS[: DIMENSIONS.index(dimension)])

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"replica": self.replicas, "shard": self.shards, "context": self.context, "tensor": self.tensor}
        return sizes | {"pipeline": self.pipeline}

    def __str__(self) -> str:
        """Return a short description: the dimensions with several ranks, and the other choices."""
        mesh = " x ".join(f"{name} {size}" for name, size in self._sizes.items() if size > 1) or "one GPU"
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        words = [mesh, f"ZeRO {self.zero}", *([self.schedule + chunks] if self.pipeline > 1 else []), self.keep]
        micro_batches = f"{self.n_micro_batches} micro-batch{'es' if self.n_micro_batches > 1 else ''}"
        return ", ".join([*words, f"{micro_batches} of {self.micro_batch}"])
