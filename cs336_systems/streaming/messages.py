"""Messages of a ring of ranks: activations and their gradients from layer to layer, and one sum at the end of a step.

    messages = RingMessages(rank)                     # a collective; before slabs take the memory
    step = StreamedStep(plan, schedule, ops, device, messages=messages)

A schedule has one lane for what a rank sends and one for what it receives (``schedule.py``). Each sender has a process
group of its own, so that its messages queue behind no others; receivers take them in the order in which they are sent.
Under NCCL each message is a kernel of ``MAX_CTAS`` thread blocks that waits for its partner.
"""

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.pipeline import MAX_CTAS
from cs336_systems.distributed.process_group import Rank, nccl_options


class Messages(Protocol):
    """Messages between the ranks of a ring, which arrive in the order of sending, and sums over all ranks."""

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to send, on the current stream."""

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Begin to receive into a tensor, on the current stream."""

    def total_(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""


class RingMessages:
    """Messages by torch's process groups, between all ranks of the default group.

    Args:
        rank: this process, as ``process_group.joined`` gives it.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        options = nccl_options(rank, MAX_CTAS) if rank.backend == "nccl" else None
        how: dict[str, Any] = {"timeout": timedelta(seconds=rank.timeout_s), "pg_options": options}
        self._of_sender = [dist.new_group(**how) for _ in range(rank.world_size)]
        probe = torch.zeros(1, device=rank.device)
        for source in range(rank.world_size):  # NCCL connects when it is first used
            for target in range(rank.world_size):
                if source != target and rank.rank in (source, target):
                    (self.send(probe, target) if rank.rank == source else self.receive(probe, source)).wait()
        self.total_(probe)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        work = dist.isend(tensor, group=self._of_sender[self.rank.rank], group_dst=peer)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._of_sender[peer], group_src=peer)
        assert work is not None
        return work

    def total_(self, tensor: Tensor) -> None:
        """Sum in place; DistError if another rank is gone, or does not come in time."""
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise dist.DistError(f"rank {self.rank.rank} waited in vain for the others' norms: {error}") from error
