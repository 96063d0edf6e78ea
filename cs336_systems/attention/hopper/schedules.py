"""The tile sizes and ring depths of each kernel: a small committed table, without autotuning at run time.

Its keys are kernel and head-dim bucket. Criteria, on a GPU with 227 KiB of shared memory and 65,536 registers per SM:

* one program per SM: two or three consumer warpgroups of 64 rows and the producer use all registers, 240 per consumer
  thread with two consumers and 160 with three;
* a consumer should not spill registers (backward at head dim 128 does, 208 bytes). In forward a thread holds 64 scores,
  32 registers of P, 32 of the next P, and D/2 of the output; in backward BLOCK_Q of S^T and dP^T together, D of dk and
  dv together, BLOCK_Q D / 256 of dq, and the operands of matmuls in flight;
* deeper rings cost only shared memory.
"""

from dataclasses import dataclass
from typing import ClassVar

MAX_REGISTERS_WITH = {2: 168, 3: 128}
"""Registers per thread at launch with two consumers (12 warps) and three (16); setmaxnreg then redistributes them."""


@dataclass(frozen=True)
class ForwardSchedule:
    """How one program processes its query tiles."""

    block_k: int
    """Keys per tile."""
    consumers: int
    """Warpgroups with 64 query rows each."""
    stages: int
    """Slots of the key and of the value ring, at least 2."""
    take_turns: bool = False
    """Consumers start their matmuls in a fixed order, so that each one's softmax overlaps the others' matmuls."""

    def __post_init__(self) -> None:
        assert self.stages >= 2, self.stages

    @property
    def worker_registers(self) -> int:
        """Registers per thread of a consumer."""
        return {2: 240, 3: 160}[self.consumers]

    def __str__(self) -> str:
        return f"{64 * self.consumers}x{self.block_k}, {self.stages} stages{', in turns' if self.take_turns else ''}"


@dataclass(frozen=True)
class BackwardSchedule:
    """How one program processes the queries that see its 128 keys."""

    stages: int
    """Slots of the ring of queries and output gradients, at least 2."""
    block_q: ClassVar[int] = 64
    """Queries per step."""
    block_k: ClassVar[int] = 128
    """Keys per tile, 64 for each of the two consumers."""
    late_dq: bool = False
    """Multiply dS and K one step late, overlapping the next step's softmax, during which dq then needs registers."""
    left_in_registers: bool = False
    """Keep K and V, the left operands of S^T and dP^T, in registers instead of reading them from shared memory."""
    statistics_last: bool = False
    """Subtract lse / scale and delta after the product instead of before, which rounds S and dP at their size once, not
    with every 16 numbers that are summed up."""
    key_stages: int = 1
    """Slots of the rings of keys and values; a second one lets the next key tile's arrive early."""

    def __post_init__(self) -> None:
        assert self.stages >= 2, self.stages

    def __str__(self) -> str:
        return (
            f"{self.block_q}x{self.block_k}, {self.stages} stages{', late dq' if self.late_dq else ''}"
            f"{', K and V in registers' if self.left_in_registers else ''}"
            f"{', statistics last' if self.statistics_last else ''}"
            f"{f', {self.key_stages} key slots' if self.key_stages > 1 else ''}"
        )


# The fastest of those timed on an H200 (bf16, causal, length 16,384). Comments have its speed relative to cuDNN in the
# same rounds, then that of the next best; LOG.md has other attempts.
FORWARD: dict[int, ForwardSchedule] = {
    64: ForwardSchedule(128, 3, 3, take_turns=True),  # 1.18; two consumers of an earlier form 1.03
    128: ForwardSchedule(128, 2, 2),  # 1.10, at 8,192 and 32 heads over 8 1.26; three consumers of 64 keys 1.12, 1.20
}
SHORT_QUERIES = 1024
"""``SHORT_FORWARD`` is used up to this number of queries: its tiles of 128 queries have fewer padding rows than tiles
of 192. Measured with as many keys as queries."""
SHORT_FORWARD: dict[int, ForwardSchedule] = {
    64: ForwardSchedule(128, 2, 4),  # 1.07 times as fast as three consumers at 1,024, 0.96 at 2,048
}
BACKWARD: dict[int, BackwardSchedule] = {
    # 1.28; statistics first 1.25; with those and without late dq, of a slower form, 1.07
    64: BackwardSchedule(3, late_dq=True, left_in_registers=True, key_stages=2, statistics_last=True),
    128: BackwardSchedule(2),  # 1.15; statistics last 1.11; others spill
}


def forward_schedule(block_d: int, n_queries: int) -> ForwardSchedule:
    """The schedule of ``n_queries`` queries with tiles of ``block_d`` columns (``padded_head_dim``)."""
    return FORWARD[block_d] if n_queries > SHORT_QUERIES else SHORT_FORWARD.get(block_d, FORWARD[block_d])


def padded_head_dim(d_head: int) -> int:
    """Columns of a tile: the copy engine reads columns beyond the head dim as zeros, and does not write them."""
    return 64 if d_head <= 64 else 128
