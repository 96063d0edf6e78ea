"""Training on several ranks: process groups, collectives, data parallelism, the sharded optimizer, FSDP, checkpoints.

The classes here wrap any ``nn.Module`` or ``torch.optim.Optimizer`` after a process group has been joined (see
``process_group.py``). The four forms of data parallelism keep a replica on each rank; ``ShardedOptimizer`` shards the
optimizer's state (ZeRO stages 1 and 2), ``FSDP`` also gradients and parameters (stage 3).
"""

from cs336_systems.distributed.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

__all__ = ["FSDP", "BucketedDDP", "FlatDDP", "NaiveDDP", "OverlappedDDP", "ShardedOptimizer"]
