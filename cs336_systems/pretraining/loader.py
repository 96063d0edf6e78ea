"""Batches out of a stream of tokens, to learn (deterministic, resumable, on any number of ranks) and to evaluate.

    sequences = Sequences(dataset.train, context_length=1024, vocab_size=151_936, device="cuda")
    loader = Loader(sequences, batch_size=512, rank=0, world_size=8, seed=0)
    inputs, targets = next(loader)           # (64, 1024) int64 each, on the device

Sequence i of a stream has the inputs iC .. iC+C-1 and the targets one further, C being the context length: an epoch
learns every token once, but for the first and for the tail, fewer than C tokens, that makes no sequence. Each epoch
has an order of its own, drawn from the seed and its number, and the epochs follow each other without a seam: batch b is
the sequences bG .. bG+G-1 of that endless order, of which rank r of W takes the r-th of W equal slices. So G, not W,
decides what is learned when, and a run continues where its state was taken, on any number of ranks that divides G.
Of n worlds that train together (``deal``), world k takes the k-th of n such batches, and all n are taken at once.

A thread reads ahead into pinned memory, and the copy to the device waits for nothing, so a step never waits for the
loader unless the disk is slower than it. Cutting takes 11 ms of a core for 524,288 tokens (AMD EPYC).
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from cs336_systems.distributed.process_group import Rank, per_rank
from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.pretraining.dataset import TokenStream
from cs336_systems.training.precision import autocast, matmul_precision

if TYPE_CHECKING:
    from cs336_systems.pretraining.capped import CappedStep
    from cs336_systems.training.step import TrainStep

_AHEAD = 2
"""Batches that are read before they are asked for."""
_PLACES, _PLACE_TOKENS = 16, 1024
"""Evenly spaced places of a stream by which it is recognised, and the most tokens of each: one page of the disk."""


class Sequences:
    """The sequences of a stream, cut, checked and sent to a device.

    Args:
        context_length: tokens per sequence.
        vocab_size: the model's; ids that are not below it are refused.

    Raises:
        ValueError: the stream is shorter than a sequence, or its vocabulary is larger than the model's.
    """

    def __init__(
        self, stream: TokenStream, context_length: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.context_length, self.n_tokens, self.stream = context_length, len(stream), stream
        self._vocab_size, self.device = vocab_size, torch.device(device)
        self._order: tuple[tuple[int, int], NDArray[np.int64]] | None = None  # the epoch that was read last
        first = stream.files[0].path
        if len(self) < 1:
            needed = f"one sequence of {context_length:,} needs {context_length + 1:,}"
            raise ValueError(f"{first} has {self.n_tokens:,} tokens, and {needed}")
        if stream.vocab_size > vocab_size:
            raise ValueError(f"{first} has a vocabulary of {stream.vocab_size:,}, the model one of {vocab_size:,}")

    @property
    def parts(self) -> dict[str, "Sequences"]:
        """The sources by name: these sequences alone, without one."""
        return {"": self}

    @property
    def fingerprint(self) -> list[int]:
        return fingerprint(self.stream)

    def mean(self, values: Mapping[str, float]) -> float:
        """The mean of a value of each source, by their shares."""
        return values[""]

    def epochs(self, n_taken: int) -> dict[str, float]:
        """How many epochs of each source the first so many sequences of the endless order are."""
        return {"": n_taken / len(self)}

    @property
    def identity(self) -> dict[str, int]:
        """What else decides what a sequence is, besides context length and tokens."""
        return {}

    def __len__(self) -> int:
        return max(0, self.n_tokens - 1) // self.context_length

    def read_order(self, start: int, n: int, seed: int) -> Tensor:
        """As ``read``, the ``n`` sequences from place ``start`` on of the endless order of a seed; for one thread."""
        chosen = np.empty(n, np.int64)
        done = 0
        while done < n:
            epoch, position = divmod(start + done, len(self))
            if self._order is None or self._order[0] != (seed, epoch):
                self._order = (seed, epoch), epoch_order(len(self), seed, epoch)
            part = self._order[1][position : position + n - done]
            chosen[done : done + len(part)] = part
            done += len(part)
        return self.read(chosen)

    def read(self, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """(2, len(numbers), context_length) int64 in memory from which the device can copy: inputs, targets.

        Raises:
            ValueError: an id is beyond the model's vocabulary.
        """
        length, batch = self.context_length, self.empty(2, len(numbers))
        inputs, targets = batch.numpy()
        tokens = np.empty(length + 1, np.int64)
        for row, number in enumerate(numbers):
            start = int(number) * length
            self.stream.copy(start, tokens)
            self.check(tokens, start)
            inputs[row], targets[row] = tokens[:-1], tokens[1:]
        return batch

    def empty(self, n: int, n_rows: int) -> Tensor:
        """(n, n_rows, context_length) int64 in memory from which the device can copy."""
        pinned = self.device.type == "cuda"
        shape = n, n_rows, self.context_length
        return torch.empty(shape, dtype=torch.int64, pin_memory=pinned, device="cpu")

    def check(self, tokens: NDArray[np.int64], start: int) -> None:
        """Raise ValueError if one of the stream's tokens from ``start`` on is beyond the model's vocabulary."""
        if tokens.max() >= self._vocab_size:
            place = self.stream.place(start + int(tokens.argmax()))
            fault = f"token {tokens.max()} is beyond the model's vocabulary of {self._vocab_size:,}"
            raise ValueError(f"{fault}: {place}")

    def send(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Both halves on the device; the allocator of pinned memory keeps ``batch`` until the copy has ended."""
        inputs, targets = batch.to(self.device, non_blocking=True)
        return inputs, targets


class Loader:
    """An endless iterator over this rank's part of each global batch.

    Args:
        batch_size: sequences per step, of all ranks of one world together.
        seed: decides the order; below 2^32.

    Raises:
        ValueError: the batch cannot be divided over the ranks; from ``next``: an id is beyond the model's vocabulary.
    """

    def __init__(
        self, sequences: Sequences, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self.batch_size = batch_size
        self._sequences, self._rows = sequences, per_rank(batch_size, world_size, "batch of")
        self._first_row = rank * self._rows
        self._identity = {"seed": seed, "context_length": sequences.context_length, "n_tokens": sequences.n_tokens}
        self._identity |= sequences.identity
        self.taken = 0
        """Sequences that all ranks and worlds have taken, over all epochs: the next batch's place in the order."""
        self._world, self._n_worlds = 0, 1
        self._ahead: deque[Future[Tensor]] = deque()
        self._thread = ThreadPoolExecutor(1, "loader")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next batch, (batch_size / world_size, context_length) int64."""
        while len(self._ahead) <= _AHEAD:
            later = len(self._ahead) * self.batch_size * self._n_worlds
            self._ahead.append(self._thread.submit(self._read, self.own_rows.start + later + self._first_row))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self.taken += self.batch_size * self._n_worlds
        return self._sequences.send(batch)

    def epochs(self) -> dict[str, float]:
        """Epochs of each source so far."""
        return self._sequences.epochs(self.taken)

    @property
    def own_rows(self) -> range:
        """Places of the endless order that this world's next batch has."""
        start = self.taken + self._world * self.batch_size
        return range(start, start + self.batch_size)

    def deal(self, world: int, n_worlds: int) -> None:
        """Take the batches of world ``world`` out of ``n_worlds`` from the next one on."""
        if (world, n_worlds) != (self._world, self._n_worlds):
            self._world, self._n_worlds = world, n_worlds
            self._drop_ahead()

    def go_back(self) -> None:
        """Let the last batch of all worlds come again, perhaps dealt otherwise."""
        self.taken -= self.batch_size * self._n_worlds
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def epochs_after(self, n_batches: int) -> float:
        """Epochs, of which a part may be one, that so many more batches of all worlds reach."""
        return (self.taken + n_batches * self.batch_size * self._n_worlds) / len(self._sequences)

    def epochs_in(self, n_batches: int) -> float:
        """Epochs, of which a part may be one, that so many batches of all worlds are."""
        return n_batches * self.batch_size * self._n_worlds / len(self._sequences)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, ``position`` being in sequences; and the data and order that this is in."""
        epoch, position = divmod(self.taken, len(self._sequences))
        place = {"epoch": epoch, "position": position, "fingerprint": self._sequences.fingerprint}
        return place | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; batch and world size may be others.

        Raises:
            ValueError: it is of another seed, context length or number of tokens, or of other tokens.
        """
        for name, own in self._identity.items():
            if (then := state.get(name, 0)) != own:
                was, now = f"{then:,}", f"{own:,}"
                if name.startswith("millionths"):
                    name, was, now = name.replace("millionths", "the share"), f"{then / 1e6:g}", f"{own / 1e6:g}"
                fault = f"{name}: {was} in the data of the saved run, {now} in this one's"
                raise ValueError(f"{fault}; a run goes on with its own data, and --init begins one on others")
        saved = state.get("fingerprint", ())  # none in states before 2026-11-27
        places = zip(self._sequences.fingerprint, saved, strict=False)
        if sum(a != b for a, b in places) > 1:  # a broken token may have been mended in one of them
            fault = "has as many tokens as the data of the saved run, but other ones: name another --out"
            first = next(iter(self._sequences.parts.values()))
            raise ValueError(f"{first.stream.files[0].path} {fault}")
        self._drop_ahead()
        self.taken = state["epoch"] * len(self._sequences) + state["position"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _read(self, start: int) -> Tensor:
        """This rank's part of a batch, whose first place in the endless order is ``start``."""
        return self._sequences.read_order(start, self._rows, self._identity["seed"])


def fingerprint(stream: TokenStream) -> list[int]:
    """Checksums of evenly spaced places of a stream, whatever its files and their width."""
    found = []
    for place in range(_PLACES):
        start, end = (len(stream) * edge // _PLACES for edge in (place, place + 1))
        tokens = np.empty(min(end - start, _PLACE_TOKENS), "<i8")
        stream.copy(start, tokens)
        found.append(zlib.crc32(tokens.tobytes()))
    return found


def epoch_order(n_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch: (n_sequences,) numbers of sequences."""
    # NumPy keeps what RandomState draws as it is for ever, and does not promise that of its newer generators.
    return np.random.RandomState(np.array([seed, epoch])).permutation(n_sequences)


def evaluation_batches(
    sequences: Sequences, batch_size: int, *, rank: int = 0, world_size: int = 1, limit: int | None
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
    step: "TrainStep | CappedStep",
    sequences: Sequences,
    rank: Rank,
    batch_size: int,
    limit: int | None = None,
    own: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    place: tuple[int, int] | None = None,
) -> tuple[float, int]:
    """The mean loss of held-out targets in nats, and their number; waits for the device; a collective.

    Args:
        own: this rank's part of the tokens of whole sequences, as large as that of any other.
        place: this rank's number among those that have batches of their own, and theirs; by default all have.

    Raises:
        ValueError: an id is beyond the model's vocabulary.
    """
    total = torch.zeros(3, dtype=torch.float64, device=rank.device)
    number, n_data = place or (rank.rank, rank.world_size)
    batches = evaluation_batches(sequences, batch_size, limit=limit, rank=number, world_size=n_data)
    for token_ids, targets, n_sequences in batches:
        with matmul_precision(step.precision), autocast(step.precision, rank.device):
            loss = step.loss_of(own(token_ids), own(targets))
        counts = torch.stack([(each != IGNORED).sum() for each in (own(targets), targets)])
        n_own, n_all = counts.to(rank.device, non_blocking=True) * (n_sequences / len(targets))
        total += torch.stack((torch.where(n_own > 0, loss * n_own, 0.0), n_own, n_all))  # the mean of none is NaN
    if rank.world_size > 1:
        dist.all_reduce(total)
    loss_sum, n, n_counted = total.tolist()
    return loss_sum / n, round(n_counted * n_data / rank.world_size)
