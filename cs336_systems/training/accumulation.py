"""Gradient accumulation: several micro-batches share one optimizer step, in the memory of one.

The loss of N micro-batches is the mean over all of their tokens. Each has as many as any other, so that is the mean of
their losses, and each backward adds the gradient of its loss over N to what is there, in place. With several ranks the
gradients stay on their rank (``local_gradients``) until the last backward, which averages their sum over the ranks.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


def micro_batches(n: int, token_ids: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(batch, seq) ids and targets as ``n`` pairs of equally many sequences each, in their order; views.

    Raises:
        ValueError: they cannot be dealt out equally.
    """
    if token_ids.shape[0] % n:
        raise ValueError(f"{token_ids.shape[0]} sequences do not make {n} micro-batches of equally many")
    return list(zip(token_ids.chunk(n), targets.chunk(n), strict=True))


@contextmanager
def local_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Forward and backward inside send no gradients to other ranks, whoever would: wrapper or optimizer."""
    with ExitStack() as stack:
        for owner in (model, optimizer):
            no_sync = getattr(owner, "no_sync", None)
            if callable(no_sync):
                stack.enter_context(no_sync())
        if callable(set_sync := getattr(model, "set_requires_gradient_sync", None)):  # torch's FSDP2
            set_sync(False)
            stack.callback(set_sync, True)
        yield


def part_name(phase: str, part: int) -> str:
    """A phase of the micro-batch with this number, from 1: ``forward``, ``forward 2``, ...; see ``config.phase_of``."""
    return phase if part == 1 else f"{phase} {part}"
