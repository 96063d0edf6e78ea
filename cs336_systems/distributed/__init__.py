"""Several devices: process groups, collectives, data parallelism, the sharded optimizer, FSDP."""

from cs336_systems.distributed.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

__all__ = ["FSDP", "BucketedDDP", "FlatDDP", "NaiveDDP", "OverlappedDDP", "ShardedOptimizer"]
