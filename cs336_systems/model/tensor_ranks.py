"""The ranks that share every matrix of a model, and their collectives, as an object that is passed to operations.

Under tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) each of t ranks holds a part of the
heads, of the feed-forward width and of the vocabulary, and rank i rows [i R/t, (i + 1) R/t) of the residual stream's R
rows (tokens). A product that needs all rows gathers them. A product that is divided along the dimension over which it
sums gives partial sums, which are reduce-scattered: each rank gets the sums of its own rows. Rows may travel while
products run (Wang et al. 2023, "Overlap communication with dependent computation via decomposition"): ``arriving``
gives first the rows that are there, and ``sums`` computes first those that others need.

``distributed/tensor.py`` and ``tensor_travel.py`` do so in a process group; ``ALONE`` is one rank with everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

Part = tuple[slice, Any, Callable[[], None]]
"""A slice of all rows, these rows, and a function by which the current stream (on a CPU: the caller) waits for them."""

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Arriving:
    """The rows of all ranks, which iterating gives part by part, each after having waited for it."""

    whole: Any
    """All of them, a tensor (t r, ...) or what ``read_as`` made of it, once ``wait`` has been called."""
    parts: tuple[Part, ...]
    finish: Callable[[], object] = lambda: None
    """Puts this rank's own rows into ``whole``, or waits until they are there."""

    def read_as(self, make: Callable[[Tensor], Any]) -> "Arriving":
        """The same rows as what ``make`` makes of each tensor, a view for example; it may not read values."""
        parts = tuple((rows, make(part), wait) for rows, part, wait in self.parts)
        return replace(self, whole=make(self.whole), parts=parts)

    def __iter__(self) -> Iterator[tuple[slice, Any]]:
        for rows, part, wait in self.parts:
            wait()
            yield rows, part

    def wait(self) -> None:
        """Wait until ``whole`` is whole."""
        for _, _, wait in self.parts:
            wait()
        self.finish()


class TensorRanks:
    """The interface, and one rank alone."""

    n_ranks = 1
    rank = 0
    under_products = False
    """Whether rows travel while products run: work without them is then best put between a gather and its products."""

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: the rows of all ranks, (t r, ...), of this rank's contiguous x (r, ...)."""
        return x

    def arriving(self, x: Tensor, *, whole: bool = True) -> Arriving:
        """``gather``, of which parts may be on their way.

        Args:
            whole: copy this rank's own rows into place at once, while other work runs; else only in ``wait``.

        The caller must have waited for all of them before it begins the second exchange (gather or sums) after this.
        """
        rows = self.gather(x)
        return Arriving(rows, ((EVERYTHING, rows, lambda: None),))

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: this rank's rows (r, ...) of the sum over the ranks of contiguous x (t r, ...)."""
        return x

    def sums(self, compute: Callable[[Tensor, slice], object], like: Tensor, width: int) -> Tensor:
        """This rank's rows, (r, width), of the sum over the ranks of what they compute.

        Args:
            compute: ``compute(out, rows)`` writes the given slice of rows of this rank's addend into ``out``.
            like: a tensor with the rows of all ranks, (t r, ...), and the result's dtype.
            width: columns of the result.
        """
        addend = like.new_empty(like.shape[0], width)
        compute(addend, EVERYTHING)
        return self.scatter(addend)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce: the sum over the ranks of each tensor, in one collective."""
        return list(tensors)

    def largest_(self, magnitudes: Tensor) -> Tensor:
        """All-reduce, in place: the largest over the ranks of each magnitude (fp32, without sign), NaN if one is."""
        return magnitudes


ALONE = TensorRanks()
