"""The loss on held-out tokens: the mean over every token of the sequences, whatever the batches and the ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.distributed.process_group import Rank
from cs336_systems.pretraining.capped import CappedStep
from cs336_systems.pretraining.loader import Sequences
from cs336_systems.training.precision import autocast, matmul_precision
from cs336_systems.training.step import TrainStep


def evaluation_batches(
    sequences: Sequences, batch_size: int, *, rank: int = 0, world_size: int = 1, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Every sequence once: inputs, targets, and for how many sequences this batch counts.

    All ranks get equally many batches of equal shapes, as sharded models need. The last few sequences, where they do
    not divide by the ranks, go to every rank and count for a share each. So the mean over the stream is the sum over
    batches and ranks of (mean loss x count), divided by the sum of counts.

    Args:
        batch_size: the most sequences per batch of each rank.
        limit: the number of first sequences to take; by default all.
    """
    n_sequences = len(sequences) if limit is None else min(limit, len(sequences))
    n_dealt = n_sequences - n_sequences % world_size
    own, shared = range(rank, n_dealt, world_size), range(n_dealt, n_sequences)
    for numbers, share in ((own, 1.0), (shared, 1 / world_size)):
        for start in range(0, len(numbers), batch_size):
            chosen = numbers[start : start + batch_size]
            inputs, targets = sequences.send(sequences.read(chosen))
            yield inputs, targets, len(chosen) * share


@torch.no_grad()
def evaluate(
    step: TrainStep | CappedStep, sequences: Sequences, rank: Rank, batch_size: int, limit: int | None = None
) -> tuple[float, int]:
    """Nats per token and the number of tokens; waits for the device; a collective.

    Raises:
        ValueError: an id is beyond the model's vocabulary.
    """
    total = torch.zeros(2, dtype=torch.float64, device=rank.device)
    ranks = {"rank": rank.rank, "world_size": rank.world_size}
    for token_ids, targets, n_sequences in evaluation_batches(sequences, batch_size, limit=limit, **ranks):
        with matmul_precision(step.precision), autocast(step.precision, rank.device):
            loss = step.loss_of(token_ids, targets)
        total[0] += loss * n_sequences
        total[1] += n_sequences
    if rank.world_size > 1:
        dist.all_reduce(total)
    loss_sum, n = total.tolist()
    return loss_sum / n, round(n) * sequences.context_length
