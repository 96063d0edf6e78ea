"""The loss on held-out tokens: the mean over every token of the sequences, whatever the batches and the ranks."""

import torch
import torch.distributed as dist

from cs336_systems.distributed.process_group import Rank
from cs336_systems.pretraining.capped import CappedStep
from cs336_systems.pretraining.loader import evaluation_batches
from cs336_systems.pretraining.token_stream import TokenStream
from cs336_systems.training.precision import autocast, matmul_precision
from cs336_systems.training.step import TrainStep


@torch.no_grad()
def evaluate(
    step: TrainStep | CappedStep,
    stream: TokenStream,
    rank: Rank,
    *,
    context_length: int,
    batch_size: int,
    vocab_size: int,
    limit: int | None = None,
) -> tuple[float, int]:
    """Nats per token and the number of tokens; waits for the device; a collective.

    Args:
        batch_size: sequences at a time, of each rank.
        limit: take only so many sequences, the first.

    Raises:
        ValueError: as ``Loader``.
    """
    total = torch.zeros(2, dtype=torch.float64, device=rank.device)
    batches = evaluation_batches(
        stream,
        context_length=context_length,
        batch_size=batch_size,
        rank=rank.rank,
        world_size=rank.world_size,
        vocab_size=vocab_size,
        device=rank.device,
        limit=limit,
    )
    for token_ids, targets, n_sequences in batches:
        with matmul_precision(step.precision), autocast(step.precision, rank.device):
            loss = step.loss_of(token_ids, targets)
        total[0] += loss * n_sequences
        total[1] += n_sequences
    if rank.world_size > 1:
        dist.all_reduce(total)
    loss_sum, n = total.tolist()
    return loss_sum / n, round(n) * context_length
