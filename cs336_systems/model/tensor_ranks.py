"""The ranks that share every matrix of a model, and their collectives, as an object that operations get.

Under tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) each of t ranks holds a part of the
heads, of the feed-forward width and of the vocabulary, and rows [i R/t, (i + 1) R/t) of the residual stream's R rows.
A product that needs all rows gathers them; one whose ranks each know a part of every sum leaves each rank the sums of
its own rows. ``distributed/tensor.py`` does so in a process group; ``ALONE`` is one rank, which has everything.
"""

from collections.abc import Sequence

from torch import Tensor


class TensorRanks:
    """The base class: one rank alone."""

    n_ranks = 1
    rank = 0

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: the rows of all ranks, (t r, ...), of this rank's contiguous x (r, ...)."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: this rank's rows (r, ...) of the sum over the ranks of contiguous x (t r, ...)."""
        return x

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce: the sum over the ranks of each tensor, in one collective."""
        return list(tensors)


ALONE = TensorRanks()
