"""How well a saved model knows held-out data: its loss with a standard error, perplexity, and bits per byte.

    scores = score(trained.model, sequences, batch_size=8)
    scores.loss, scores.standard_error, scores.perplexity

The loss is the mean over all targets, summed in fp64. Tokens of one sequence are not independent, so the standard error
is that of a ratio of two sums over sequences, loss and targets (Cochran, Sampling Techniques, 1977, section 6.3).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.model import TransformerLM
from cs336_systems.pretraining.dataset import Dataset
from cs336_systems.pretraining.loader import Sequences, evaluation_batches
from cs336_systems.pretraining.tokenizer import JsonTokenizer, load_tokenizer


@dataclass(frozen=True)
class Scores:
    """Loss and its standard error in nats per target; NaN is the error of a single sequence."""

    loss: float
    standard_error: float
    n_targets: int
    n_sequences: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, n_tokens: int, n_bytes: int) -> float:
        """Return bits per byte for ``n_tokens`` tokens, all of them targets, that encode ``n_bytes`` of text."""
        return self.loss / math.log(2) * n_tokens / n_bytes


@torch.no_grad()
def score(model: TransformerLM, sequences: Sequences, batch_size: int, limit: int | None = None) -> Scores:
    """Score the first ``limit`` sequences, by default all.

    Raises:
        ValueError: an id is beyond the model's vocabulary.
    """
    losses, counts = [], []
    for token_ids, targets, _ in evaluation_batches(sequences, batch_size, limit=limit):
        losses.append(_of_each(model(token_ids), targets.to(token_ids.device)).cpu())
        counts.append((targets != IGNORED).sum(1).cpu())
    loss, count = torch.cat(losses), torch.cat(counts).double()
    mean = (loss.sum() / count.sum()).item()
    n = len(loss)
    variance = (loss - mean * count).square().sum() * n / (n - 1) if n > 1 else torch.tensor(math.nan)
    return Scores(mean, (variance.sqrt() / count.sum()).item(), int(count.sum()), n)


def _of_each(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of each sequence, (B,) fp64."""
    each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return each.view(targets.shape).double().sum(1)


def check_tokens(dataset: Dataset, tokenizer: JsonTokenizer, model: object) -> None:
    """Raise ValueError if a dataset's tokens are not those of a model's tokenizer."""
    if load_tokenizer(dataset.tokenizer, dataset.eos_id).vocabulary() != tokenizer.vocabulary():
        raise ValueError(f"{dataset.folder} has other tokens than {model}: tokenize its text with that tokenizer")
