"""Sequences of several sources in fixed shares, for the one ``Loader``.

    mixture = Mixture({"data/web": web, "data/code": code}, [Fraction(7, 10), Fraction(3, 10)])

The source of the k-th sequence is given by a formula, without random numbers or state, so a run resumes anywhere. Of
the first k sequences floor(k share) are from the first source; of the rest, the second source's are counted in the same
way, and so on. So any part of a run has each source's share to within a few sequences. Each source has its own endless
order of epochs.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cs336_systems.pretraining.loader import Sequences


class Mixture(Sequences):
    """Sources by name, of one context length, one kind and one device, with their shares, which add up to 1."""

    def __init__(self, parts: Mapping[str, Sequences], shares: Sequence[Fraction]) -> None:
        first = next(iter(parts.values()))
        self._parts, self.shares = dict(parts), list(shares)
        self.context_length, self.device = first.context_length, first.device
        self.n_tokens = sum(part.n_tokens for part in parts.values())

    @property
    def parts(self) -> dict[str, Sequences]:
        return self._parts

    @property
    def identity(self) -> dict[str, int]:
        millionths = {f"millionths of source {i}": int(share * 10**6) for i, share in enumerate(self.shares, 1)}
        return {name: n for part in self._parts.values() for name, n in part.identity.items()} | millionths

    @property
    def fingerprint(self) -> list[int]:
        return [each for part in self._parts.values() for each in part.fingerprint]

    def __len__(self) -> int:
        """Return the number of sequences of all sources together, which defines an epoch."""
        return sum(map(len, self._parts.values()))

    def mean(self, values: Mapping[str, float]) -> float:
        return sum(float(share) * values[name] for name, share in zip(self._parts, self.shares, strict=True))

    def counts(self, n_taken: int) -> list[int]:
        """Return how many of the first ``n_taken`` sequences are from each source."""
        counts, left, rest = [], n_taken, Fraction(1)
        for share in self.shares[:-1]:
            own = share / rest
            counts.append(left * own.numerator // own.denominator)
            left, rest = left - counts[-1], rest - share
        return [*counts, left]

    def epochs(self, n_taken: int) -> dict[str, float]:
        taken = zip(self._parts.items(), self.counts(n_taken), strict=True)
        return {name: n / len(part) for (name, part), n in taken}

    def read_order(self, start: int, n: int, seed: int) -> Tensor:
        edges = [self.counts(k) for k in range(start, start + n + 1)]
        giver = np.argmax(np.diff(np.array(edges), axis=0), axis=1)
        batch: Tensor | None = None
        for i, part in enumerate(self._parts.values()):
            rows = np.flatnonzero(giver == i)
            if not len(rows):
                continue
            own = part.read_order(edges[0][i], len(rows), seed)
            if batch is None:
                batch = part.empty(len(own), n)
            batch[:, torch.from_numpy(rows)] = own
        assert batch is not None
        return batch

    def read(self, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        raise NotImplementedError("the sequences of a mixture have no numbers")

    def send(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        return next(iter(self._parts.values())).send(batch)
