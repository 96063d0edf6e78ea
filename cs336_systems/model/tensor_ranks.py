"""The ranks that share every matrix of a model, and their collectives, as an object that operations get.

Under tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) each of t ranks holds a part of the
heads, of the feed-forward width and of the vocabulary, and rows [i R/t, (i + 1) R/t) of the residual stream's R rows.
A product that needs all rows gathers them; one whose ranks each know a part of every sum leaves each rank the sums of
its own rows. Rows may travel while products run (Wang et al. 2023, "Overlap communication with dependent computation
via decomposition"): ``arriving`` gives the rows that are there first, and ``sums`` computes those first that leave.

``distributed/tensor.py`` does so in a process group; ``ALONE`` is one rank, which has everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Part = tuple[slice, Tensor, Callable[[], None]]
"""Which rows, the rows, and a function that makes the current stream (on a CPU: the caller) wait for them."""

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Arriving:
    """The rows of all ranks, which iterating gives part by part, each after having waited for it."""

    whole: Tensor
    """All of them, (t r, ...), once the iteration has ended."""
    parts: tuple[Part, ...]
    finish: Callable[[], None] = lambda: None
    """Waits for what is done last."""

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for rows, part, wait in self.parts:
            wait()
            yield rows, part
        self.finish()

    def wait(self) -> None:
        """Wait until ``whole`` is whole."""
        for _ in self:
            pass


class TensorRanks:
    """The base class: one rank alone."""

    n_ranks = 1
    rank = 0
    under_products = False
    """Whether rows travel while products run; what needs none of them may then come between."""

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: the rows of all ranks, (t r, ...), of this rank's contiguous x (r, ...)."""
        return x

    def arriving(self, x: Tensor) -> Arriving:
        """``gather``, of which parts may be on their way; all are to be waited for, at most one gather later."""
        whole = self.gather(x)
        return Arriving(whole, ((EVERYTHING, whole, lambda: None),))

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: this rank's rows (r, ...) of the sum over the ranks of contiguous x (t r, ...)."""
        return x

    def sums(self, compute: Callable[[Tensor, slice], object], like: Tensor, width: int) -> Tensor:
        """This rank's rows, (r, width), of the sum over the ranks of what they compute.

        Args:
            compute: a function of memory and of a slice of rows, which writes these rows of this rank's addend.
            like: a tensor with the rows of all ranks.
        """
        addend = like.new_empty(like.shape[0], width)
        compute(addend, EVERYTHING)
        return self.scatter(addend)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce: the sum over the ranks of each tensor, in one collective."""
        return list(tensors)


ALONE = TensorRanks()
