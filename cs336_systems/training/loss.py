"""Cross entropy over a vocabulary, written for reading: log-sum-exp minus the target's logit.

The log-sum-exp subtracts the row's maximum before it exponentiates, so that no logit, however large, overflows; half
precision logits are widened to fp32 first. The price is one fp32 copy of the logits, which ``costs/memory.py`` counts.
"""

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats: logits (..., vocab), int64 targets (...) -> scalar, at least fp32.

    Raises:
        ValueError: the leading shapes of logits and targets differ.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not match logits {tuple(logits.shape)} without the vocabulary"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - target_logits).mean()
