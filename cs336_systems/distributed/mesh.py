"""The ranks of a step in five named dimensions: pipeline, replica, shard, context and tensor.

    mesh = Mesh.over(rank, context=2, tensor=2)          # 8 ranks: shard 2 x context 2 x tensor 2
    BucketedDDP(model, process_group=mesh.same_weights)      # the ranks that hold the same weights
    FSDP(model, process_group=mesh.shards, replicas=mesh.group("replica"))

Ranks along ``replica`` and ``shard``, together ``data``, have different sequences. Ranks along ``context`` share each
sequence: every rank holds some of its tokens. Ranks along ``tensor`` share every matrix: each holds some of its rows or
columns. Consecutive ranks of the default group are neighbours along ``tensor``, which sends most, so that its traffic
stays inside a host.

Ranks along ``pipeline`` also share sequences: each is a stage with some of the blocks. They send least, so their ranks
are farthest apart in the default group.

Ranks that differ only in data and context hold the same weights and average their gradients: they are the group of
every wrapper and sharded optimizer. Only FSDP with hybrid sharding divides weights over just shard and context.
"""

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cs336_systems.distributed.messages import GroupMessages, Mailbox, open_messages
from cs336_systems.distributed.process_group import Rank, divisions
from cs336_systems.ranks import mesh_shape

DIMENSIONS = ("pipeline", "replica", "shard", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The dimensions of the default group, and this rank's coordinate in each."""

    rank: Rank
    devices: DeviceMesh
    """With the names of ``DIMENSIONS``."""

    @classmethod
    def over(cls, rank: Rank, *, pipeline: int = 1, replicas: int = 1, context: int = 1, tensor: int = 1) -> "Mesh":
        """Divide the default group, once for each shape; a collective. Raises as ``mesh_shape``."""
        shape = mesh_shape(rank.world_size, context, tensor, replicas=replicas, pipeline=pipeline)
        key = dist.distributed_c10d._get_default_group(), shape
        if key not in divisions:
            kind = "cuda" if rank.device.type == "cuda" else "cpu"
            divisions[key] = cls(rank, init_device_mesh(kind, shape, mesh_dim_names=DIMENSIONS))
        found: Mesh = divisions[key]
        return found

    def size(self, dimension: str) -> int:
        """The number of ranks along a dimension, or along ``data``."""
        if dimension == "data":
            return self.size("replica") * self.size("shard")
        return self.devices.shape[DIMENSIONS.index(dimension)]

    def place(self, dimension: str) -> int:
        """This rank's coordinate along a dimension, or along ``data``."""
        if dimension == "data":
            return self.place("replica") * self.size("shard") + self.place("shard")
        return self.devices.get_local_rank(dimension)

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """The group of ranks along a dimension; None (to torch: all ranks) if this rank is alone."""
        return self.devices.get_group(dimension) if self.size(dimension) > 1 else None

    def messages(self, by: str, mailbox: Mailbox) -> GroupMessages:
        """Messages between the stages of this rank's pipeline. The first call makes them, which is a collective.

        Args:
            by, mailbox: as for ``open_messages``.

        Raises:
            ValueError, OSError: as ``open_messages``.
        """
        how = by, None if by == "messages" else mailbox
        if how not in self._messages:
            group = self.devices.get_group("pipeline")
            self._messages[how] = open_messages(self.rank, group, by, mailbox=mailbox)
        return self._messages[how]

    @cached_property
    def _messages(self) -> dict[tuple[str, Mailbox | None], GroupMessages]:
        """By the arguments of ``messages``."""
        return {}

    @cached_property
    def same_weights(self) -> dist.ProcessGroup:
        """The ranks that hold the same weights as this one, whole or in shards: those along data and context."""
        return self.devices["replica", "shard", "context"]._flatten("same_weights").get_group()

    @cached_property
    def shards(self) -> dist.ProcessGroup:
        """The ranks over which FSDP divides weights: those along shard and context."""
        return self.devices["shard", "context"]._flatten("shards").get_group()
