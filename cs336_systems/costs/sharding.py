"""Calculates, for sharded optimizer state, the bytes that each rank holds and the bytes that it sends per step.

Three forms of data parallelism on W ranks, with P bytes of parameters, as many of gradients, and k P of optimizer state
(k = 2 for AdamW, 1 for SGD with momentum):

    form         who updates            gradients        parameters    bytes per link and step    state per rank
    replicated   every rank, all        all-reduce       -             2 (W-1)/W P                k P
    owned        a rank, its tensors    all-reduce       broadcast     2 (W-1)/W P + P            k P/W, a tensor more
    scattered    a rank, its slices     reduce-scatter   all-gather    2 (W-1)/W P                k P/W

``owned`` is the CS336 handout's sharded optimizer, ``scattered`` ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1):
an all-reduce is a reduce-scatter and an all-gather, so ZeRO replaces the all-gather of gradients, which ranks do not
need, by the all-gather of parameters. Parameters stay whole on every rank in all three forms, gradients in two.

``owned`` cannot cut a tensor, so the fullest rank may hold up to one largest tensor more than 1/W; ``scattered`` cuts
anywhere. Links are those of the ring of ``communication.py``, and each collective counts its busiest link. Sizes are in
bytes, including the padding that aligns tensors in flat buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cs336_systems.config import check_known
from cs336_systems.costs.communication import cost
from cs336_systems.hardware import MIB

FORMS = ("replicated", "owned", "scattered")

ALIGNMENT_BYTES = 128
"""Bytes; tensors in a flat buffer begin at multiples of it: a cache line, and more than any vectorised load needs."""

DEFAULT_BUCKET_SIZE_MB = 100.0
"""Two NVLink-connected H200 reach 277 GB/s with 100 MiB and 198 with 10; larger ones leave less to overlap."""


def greedy_partition(sizes: Sequence[int], world_size: int, loads: Sequence[int] = ()) -> list[int]:
    """Assign each size to a rank: largest first, to the rank with the least load so far, the lowest of equals.

    No rank's load exceeds the mean by more than the largest size (Graham 1969).

    Args:
        loads: the present load of each rank; zero by default.
    """
    totals = list(loads) or [0] * world_size
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = min(range(world_size), key=lambda rank: (totals[rank], rank))
        totals[owners[i]] += sizes[i]
    return owners


@dataclass(frozen=True)
class BucketPlan:
    """A flat buffer of ``n_bytes`` in which the tensors numbered ``members`` begin at ``offsets``."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    n_bytes: int

    def pieces(self, member_sizes: Sequence[int], world_size: int) -> list[list[tuple[int, int, int]]]:
        """For each member its (rank, start, stop), in bytes of the member, when the buffer is cut in equal shards."""
        shard = self.n_bytes // world_size
        found = []
        for size, offset in zip(member_sizes, self.offsets, strict=True):
            end = offset + size
            cuts = sorted({offset, end, *(c for c in range(0, self.n_bytes, shard) if offset < c < end)})
            found.append([(start // shard, start - offset, stop - offset) for start, stop in pairwise(cuts)])
        return found


def plan_buckets(sizes: Sequence[int], bucket_bytes: int, shards: int) -> list[BucketPlan]:
    """Tensors in order, in buffers of at most ``bucket_bytes`` (a larger tensor has one to itself) and the padding.

    Args:
        shards: equal and aligned parts into which every buffer can be cut.
    """
    buckets: list[dict[int, int]] = []  # number of each tensor -> its offset
    end = 0
    for i, size in enumerate(sizes):
        if not buckets or end + size > bucket_bytes:
            buckets.append({})
            end = 0
        buckets[-1][i] = end
        end = _rounded(end + size, ALIGNMENT_BYTES)
    ends = [max(offset + sizes[i] for i, offset in bucket.items()) for bucket in buckets]
    return [
        BucketPlan(tuple(bucket), tuple(bucket.values()), _rounded(max(end, 1), shards * ALIGNMENT_BYTES))
        for bucket, end in zip(buckets, ends, strict=True)
    ]


def _rounded(n_bytes: int, multiple: int) -> int:
    return -(-n_bytes // multiple) * multiple


def state_bytes_by_rank(
    form: str,
    sizes: Sequence[int],
    world_size: int,
    *,
    per_parameter: int = 2,
    bucket_bytes: int = int(DEFAULT_BUCKET_SIZE_MB * MIB),
) -> list[int]:
    """Optimizer state of each rank: tensors like the parameters, without step counters.

    Args:
        sizes: bytes of each trainable parameter, of one dtype and device, in the optimizer's order.
        per_parameter: state tensors like each parameter: 2 for Adam and AdamW, 1 for SGD with momentum.
        bucket_bytes: bound of the flat buffers, which decides where ``scattered`` cuts.

    Raises:
        ValueError: no such form.
    """
    check_known("form", form, FORMS, " of data parallelism")
    if form == "replicated" or world_size == 1:
        return [per_parameter * sum(sizes)] * world_size
    held = [0] * world_size
    if form == "owned":
        for size, owner in zip(sizes, greedy_partition(sizes, world_size), strict=True):
            held[owner] += size
    else:
        sizes = sizes[::-1]
        for plan in plan_buckets(sizes, bucket_bytes, world_size):
            for pieces in plan.pieces([sizes[member] for member in plan.members], world_size):
                for rank, start, stop in pieces:
                    held[rank] += stop - start
    return [per_parameter * n_bytes for n_bytes in held]


def link_bytes_per_step(form: str, n_bytes: int, world_size: int) -> float:
    """Bytes in one direction over each collective's busiest link, summed over collectives; bounds the time of sending.

    Broadcasts of different owners leave different links idle, but run one after another: each counts in full, though
    over a step a link carries only (W-1)/W of them. Padding is left out.

    Args:
        n_bytes: bytes of the parameters, and of their gradients.

    Raises:
        ValueError: no such form.
    """
    check_known("form", form, FORMS, " of data parallelism")
    collectives = {
        "replicated": ("all_reduce",),
        "owned": ("all_reduce", "broadcast"),
        "scattered": ("reduce_scatter", "all_gather"),
    }[form]
    return sum(cost(collective, world_size, n_bytes).wire_bytes for collective in collectives)
