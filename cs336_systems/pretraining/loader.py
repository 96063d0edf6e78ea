"""Batches from a stream of tokens, for training (deterministic, resumable, on any number of ranks) and evaluation.

    sequences = Sequences(dataset.train, context_length=1024, vocab_size=151_936, device="cuda")
    loader = Loader(sequences, batch_size=512, rank=0, world_size=8, seed=0)
    inputs, targets = next(loader)           # (64, 1024) int64 each, on the device

With context length C, sequence i of a stream has tokens iC .. iC+C-1 as inputs, and as targets the tokens one position
later. Every token is a target once per epoch, except the first and a tail of fewer than C tokens. Each epoch has its
own order, drawn from the seed and the epoch's number, and the epochs' orders are concatenated without end. With global
batch size G, batch b is sequences bG .. bG+G-1 of that order, and rank r of W takes the r-th of W equal slices. So the
order of training depends on G, not on W, and a run resumes on any number of ranks that divides G. When n worlds train
together (``deal``), each step takes n such batches, the k-th for world k.

A thread reads ahead into pinned memory, and the copy to the device is asynchronous, so a step waits for the loader only
if the disk is slower than the step. Cutting 524,288 tokens into sequences takes 11 ms of a core (AMD EPYC).
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
"""Batches that are read ahead."""
_PLACES, _PLACE_TOKENS = 16, 1024
"""Number of evenly spaced places whose checksums identify a stream, and the most tokens of each: one page on disk."""


class Sequences:
    """Cuts a stream into sequences, checks their token ids and sends them to a device.

    Args:
        context_length: tokens per sequence.
        vocab_size: the model's; larger token ids raise ValueError.

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
        """The sources by name; here only this one, whose name is empty."""
        return {"": self}

    @property
    def fingerprint(self) -> list[int]:
        return fingerprint(self.stream)

    def mean(self, values: Mapping[str, float]) -> float:
        """Return the mean of the sources' values, weighted by their shares."""
        return values[""]

    def epochs(self, n_taken: int) -> dict[str, float]:
        """Return, by source, how many epochs the first ``n_taken`` sequences of the endless order amount to."""
        return {"": n_taken / len(self)}

    @property
    def identity(self) -> dict[str, int]:
        """Further settings, besides context length and tokens, that determine what a sequence contains."""
        return {}

    def __len__(self) -> int:
        return max(0, self.n_tokens - 1) // self.context_length

    def read_order(self, start: int, n: int, seed: int) -> Tensor:
        """``read`` the ``n`` sequences from ``start`` on in a seed's endless order; not thread-safe."""
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
        """Return inputs and targets, (2, len(numbers), context_length) int64; pinned if the device is a GPU.

        Raises:
            ValueError: a token id is beyond the model's vocabulary.
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
        """Return uninitialised (n, n_rows, context_length) int64 on the host; pinned if the device is a GPU."""
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
        """Copy inputs and targets to the device asynchronously; the pinned allocator keeps ``batch`` until then."""
        inputs, targets = batch.to(self.device, non_blocking=True)
        return inputs, targets


class Loader:
    """An endless iterator over this rank's part of each global batch.

    Args:
        batch_size: sequences per step, summed over the ranks of one world.
        seed: determines the order; below 2^32.

    Raises:
        ValueError: the ranks do not divide the batch; from ``next``: a token id is beyond the model's vocabulary.
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
        """Sequences that all ranks and worlds have taken, over all epochs: the next batch's position in the order."""
        self._world, self._n_worlds = 0, 1
        self._ahead: deque[Future[Tensor]] = deque()
        self._thread = ThreadPoolExecutor(1, "loader")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next batch, (batch_size / world_size, context_length) int64 each."""
        while len(self._ahead) <= _AHEAD:
            later = len(self._ahead) * self.batch_size * self._n_worlds
            self._ahead.append(self._thread.submit(self._read, self.own_rows.start + later + self._first_row))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self.taken += self.batch_size * self._n_worlds
        return self._sequences.send(batch)

    def epochs(self) -> dict[str, float]:
        """Return the epochs of each source so far, fractions included."""
        return self._sequences.epochs(self.taken)

    @property
    def own_rows(self) -> range:
        """Positions of this world's next batch in the endless order."""
        start = self.taken + self._world * self.batch_size
        return range(start, start + self.batch_size)

    def deal(self, world: int, n_worlds: int) -> None:
        """From the next batch on, return those of world ``world`` out of ``n_worlds``."""
        if (world, n_worlds) != (self._world, self._n_worlds):
            self._world, self._n_worlds = world, n_worlds
            self._drop_ahead()

    def go_back(self) -> None:
        """Rewind by the last batch of all worlds; it may then be dealt differently."""
        self.taken -= self.batch_size * self._n_worlds
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def epochs_after(self, n_batches: int) -> float:
        """Return how many epochs, as a fraction, the run will have taken after ``n_batches`` more of all worlds."""
        return (self.taken + n_batches * self.batch_size * self._n_worlds) / len(self._sequences)

    def epochs_in(self, n_batches: int) -> float:
        """Return how many epochs, as a fraction, ``n_batches`` of all worlds are."""
        return n_batches * self.batch_size * self._n_worlds / len(self._sequences)

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch begins (``epoch``; ``position`` in sequences), and what identifies the data."""
        epoch, position = divmod(self.taken, len(self._sequences))
        place = {"epoch": epoch, "position": position, "fingerprint": self._sequences.fingerprint}
        return place | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; batch size and world size may differ.

        Raises:
            ValueError: the state has another seed, context length or number of tokens, or is of other data.
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
        if sum(a != b for a, b in places) > 1:  # one may differ because an invalid token was repaired
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
        """Read this rank's part of a batch, which begins at position ``start`` of the endless order."""
        return self._sequences.read_order(start, self._rows, self._identity["seed"])


def fingerprint(stream: TokenStream) -> list[int]:
    """Return checksums of evenly spaced places of a stream, independent of its files and their integer width."""
    found = []
    for place in range(_PLACES):
        start, end = (len(stream) * edge // _PLACES for edge in (place, place + 1))
        tokens = np.empty(min(end - start, _PLACE_TOKENS), "<i8")
        stream.copy(start, tokens)
        found.append(zlib.crc32(tokens.tobytes()))
    return found


def epoch_order(n_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch: (n_sequences,) int64 sequence numbers."""
    # NumPy guarantees that RandomState's values never change, and does not do so for its newer generators.
    return np.random.RandomState(np.array([seed, epoch])).permutation(n_sequences)


def evaluation_batches(
    sequences: Sequences, batch_size: int, *, rank: int = 0, world_size: int = 1, limit: int | None
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield inputs, targets and a count of sequences per batch; over all ranks every sequence counts once.

    All ranks get the same number of batches of the same shapes, as sharded models need. If the ranks do not divide the
    number of sequences, the remaining ones go to every rank with a count of 1 / world_size each. So the mean over the
    stream is the sum over batches and ranks of (mean loss x count), divided by the sum of counts.

    Args:
        batch_size: the most sequences per batch of each rank.
        limit: take only this many sequences, from the first on; None takes all.
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
    """Return the mean loss of held-out targets in nats, and the number of targets; waits for the device; a collective.

    Args:
        own: cuts this rank's part out of whole sequences; all ranks' parts have the same size.
        place: (index, number) of this rank among the ranks with different batches; by default all ranks.

    Raises:
        ValueError: a token id is beyond the model's vocabulary.
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
