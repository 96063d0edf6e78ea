"""The five collectives of data parallelism over flat tensors, each with a way to check its result element by element.

    collective        before: rank r holds     after: rank r holds                     total bytes N
    all_reduce        x_r, N bytes             sum over ranks of x, in place           of the tensor
    all_gather        x_r, N / n bytes         x_0 ... x_{n-1} one after another       of the result
    reduce_scatter    x_r, N bytes             part r of the sum over ranks of x       of the input
    broadcast         x_0 on rank 0, N bytes   x_0, in place                           of the tensor
    all_to_all        x_r, N bytes             part r of x_0 ... x_{n-1}               of the input

Total bytes are counted as in nccl-tests; the links carry ``busbw_factor`` times as much (costs/communication.py).

``Exchange`` is one collective with its tensors. They hold small integers in a periodic pattern that differs on each
rank and whose period no power of two divides, so that a missing, repeated, shifted or misrouted chunk is detected. Sums
are exact in bf16 up to 21 ranks. In torch 2.11 gloo's ``reduce_scatter`` takes as long as an ``all_reduce`` or longer
(two ranks, 10 MB: 14.1 against 9.5 ms), where a ring would take half.

    exchange = Exchange("all_gather", 1_000_000, torch.float32, rank)
    exchange.reset()
    exchange.run()
    assert exchange.wrong_elements() == 0
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.config import check_known
from cs336_systems.costs.communication import COLLECTIVES
from cs336_systems.distributed.process_group import Rank, per_rank

_PERIOD = 13
_EXACT_INTEGERS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
"""The integer up to which a dtype represents every integer."""


class Exchange:
    """One collective on this rank's device, whose total bytes (see the module) are ``n_elements`` elements.

    Raises:
        ValueError: no such collective, an ``n_elements`` that the world size does not divide, or a world whose sums are
            beyond the integers that ``dtype`` holds exactly.
    """

    def __init__(self, collective: str, n_elements: int, dtype: torch.dtype, rank: Rank) -> None:
        check_known("collective", collective, COLLECTIVES)
        if rank.world_size * (_PERIOD - 1) > _EXACT_INTEGERS[dtype]:
            raise ValueError(f"{dtype} cannot hold sums over {rank.world_size} ranks exactly")
        self.collective = collective
        self.rank = rank
        self.part = per_rank(n_elements, rank.world_size, "number of elements")
        self.n_elements = n_elements
        self.total_bytes = n_elements * dtype.itemsize
        n_sent = self.part if collective == "all_gather" else n_elements
        self._pattern = _pattern(0, n_sent, rank.rank, rank.device).to(dtype)
        self.sent = torch.empty_like(self._pattern)
        n_received = self.part if collective == "reduce_scatter" else n_elements
        in_place = collective in ("all_reduce", "broadcast")
        self.received = self.sent if in_place else torch.empty(n_received, dtype=dtype, device=rank.device)

    def reset(self) -> None:
        """Restore the tensors to their values before the collective."""
        if self.received is not self.sent:
            self.received.fill_(-1.0)
        self.sent.copy_(self._pattern)

    def run(self) -> None:
        match self.collective:
            case "all_reduce":
                dist.all_reduce(self.sent)
            case "all_gather":
                dist.all_gather_into_tensor(self.received, self.sent)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(self.received, self.sent)
            case "broadcast":
                dist.broadcast(self.sent, src=0)
            case "all_to_all":
                dist.all_to_all_single(self.received, self.sent)

    def wrong_elements(self) -> int:
        """The number of elements of this rank's result that one ``run`` after ``reset`` got wrong; NaN is wrong."""
        n, part, own, device = self.rank.world_size, self.part, self.rank.rank, self.rank.device
        match self.collective:
            case "all_reduce":
                pieces = [_sum_of_patterns(0, self.n_elements, n, device)]
            case "reduce_scatter":
                pieces = [_sum_of_patterns(own * part, part, n, device)]
            case "broadcast":
                pieces = [_pattern(0, self.n_elements, 0, device)]
            case "all_gather":
                pieces = [_pattern(0, part, other, device) for other in range(n)]
            case _:
                pieces = [_pattern(own * part, part, other, device) for other in range(n)]
        received = self.received.split(len(pieces[0]))
        return sum(int((got != expected).sum()) for got, expected in zip(received, pieces, strict=True))


def _pattern(start: int, length: int, rank: int, device: torch.device) -> Tensor:
    """Elements ``start`` to ``start + length`` of what a rank sends: integers below ``_PERIOD``, as float32."""
    first = start + 5 * rank
    return torch.arange(first, first + length, dtype=torch.int32, device=device).remainder_(_PERIOD).float()


def _sum_of_patterns(start: int, length: int, world_size: int, device: torch.device) -> Tensor:
    return functools.reduce(Tensor.add_, (_pattern(start, length, rank, device) for rank in range(world_size)))
