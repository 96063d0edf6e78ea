"""Batches for training and evaluation out of a stream of tokens: deterministic, resumable, on any number of ranks.

    loader = Loader(dataset.train, context_length=1024, batch_size=512, rank=0, world_size=8, seed=0, device="cuda")
    inputs, targets = next(loader)           # (64, 1024) int64 each, on the device
    checkpoint["loader"] = loader.state_dict()

Sequence i of a stream has the inputs iC .. iC+C-1 and the targets one further, C being the context length: an epoch
learns every token once, but for the first and for the tail, fewer than C tokens, that makes no sequence. Each epoch
has an order of its own, drawn from the seed and its number. The epochs follow each other without a seam: batch b is
the sequences bG .. bG+G-1 of that endless order, of which rank r of W takes the r-th of W equal slices. So G, not W,
decides what is learned when, and a run continues where its state was taken, on any number of ranks that divides G.

The order is one index of 8 bytes per sequence; tokens are read where they lie. A thread reads ahead into pinned memory,
and the copy to the device waits for nothing, so a step never waits for the loader unless the disk is slower than it.
Cutting takes 11 ms of a core for 524,288 tokens (AMD EPYC). A CUDA graph that is captured while the thread reads needs
``capture_error_mode="thread_local"``, as with any thread that pins memory; ``training/cuda_graph.py`` has it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cs336_systems.distributed.process_group import per_rank
from cs336_systems.pretraining.token_stream import TokenStream

_AHEAD = 2
"""Batches that are read before they are asked for."""


class Loader:
    """An endless iterator over this rank's part of each global batch.

    Args:
        stream: what to learn.
        context_length: tokens per sequence.
        batch_size: sequences per step, of all ranks together.
        seed: of the order, below 2^32.
        vocab_size: of the model; ids that are not below it are refused.
        device: where batches go.

    Raises:
        ValueError: the batch cannot be divided over the ranks, the stream is shorter than a sequence, or its vocabulary
            is larger than the model's; from ``next``: an id is beyond the model's vocabulary.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        context_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        vocab_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n_sequences = count_sequences(stream, context_length)
        self.batch_size = batch_size
        self._rows = per_rank(batch_size, world_size, "batch of")
        self._first_row = rank * self._rows
        self._cutter = _Cutter(stream, context_length, vocab_size, torch.device(device))
        self._identity = {"seed": seed, "context_length": context_length, "n_tokens": len(stream)}
        self._taken = 0  # sequences, of all epochs and ranks
        self._order: tuple[int, NDArray[np.int64]] | None = None  # the epoch that was read last; of the thread alone
        self._ahead: deque[Future[Tensor]] = deque()
        self._thread = ThreadPoolExecutor(1, "loader")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next batch, (batch_size / world_size, context_length) int64."""
        while len(self._ahead) <= _AHEAD:
            start = self._taken + len(self._ahead) * self.batch_size
            self._ahead.append(self._thread.submit(self._read, start + self._first_row))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self._taken += self.batch_size
        return self._cutter.send(batch)

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins, ``position`` being in sequences; and what that is a position in."""
        epoch, position = divmod(self._taken, self.n_sequences)
        return {"epoch": epoch, "position": position, **self._identity}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where the state was taken; batch and world size may be others.

        Raises:
            ValueError: it is of another seed, context length or number of tokens.
        """
        for name, own in self._identity.items():
            if state[name] != own:
                raise ValueError(f"the data were at a position for {name} {state[name]:,}, and this run has {own:,}")
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._taken = state["epoch"] * self.n_sequences + state["position"]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, start: int) -> Tensor:
        """This rank's part of a batch, whose first place in the endless order is ``start``."""
        chosen = np.empty(self._rows, np.int64)
        done = 0
        while done < self._rows:
            epoch, position = divmod(start + done, self.n_sequences)
            if self._order is None or self._order[0] != epoch:
                self._order = epoch, epoch_order(self.n_sequences, self._identity["seed"], epoch)
            part = self._order[1][position : position + self._rows - done]
            chosen[done : done + len(part)] = part
            done += len(part)
        return self._cutter.cut(chosen)


def epoch_order(n_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch: (n_sequences,) numbers of sequences."""
    # NumPy keeps what RandomState draws as it is for ever, and does not promise that of its newer generators.
    return np.random.RandomState(np.array([seed, epoch])).permutation(n_sequences)


def count_sequences(stream: TokenStream, context_length: int) -> int:
    """Sequences in a stream.

    Raises:
        ValueError: there is none.
    """
    if context_length < 1:
        raise ValueError(f"a context has at least one token, got {context_length}")
    found = (len(stream) - 1) // context_length
    if found < 1:
        raise ValueError(
            f"{stream.files[0].path} has {len(stream):,} tokens, and one sequence of {context_length:,} needs "
            f"{context_length + 1:,}"
        )
    return found


def evaluation_batches(
    stream: TokenStream,
    *,
    context_length: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
    limit: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Every sequence of a stream once: inputs, targets, and for how many sequences this batch counts.

    All ranks get equally many batches of equal shapes, as sharded models need. The last few sequences, where they do
    not divide by the ranks, go to every rank and count for a share each. So the mean over the stream is the sum over
    batches and ranks of (mean loss x count), divided by the sum of counts.

    Args:
        batch_size: sequences per batch of each rank.
        limit: take only so many sequences, the first.

    Raises:
        ValueError: as ``Loader``.
    """
    cutter = _Cutter(stream, context_length, vocab_size, torch.device(device))
    n_sequences = count_sequences(stream, context_length)
    n_sequences = n_sequences if limit is None else min(limit, n_sequences)
    n_dealt = n_sequences - n_sequences % world_size
    for sequences, share in (
        (range(rank, n_dealt, world_size), 1.0),
        (range(n_dealt, n_sequences), 1 / world_size),
    ):
        for start in range(0, len(sequences), batch_size):
            chosen = sequences[start : start + batch_size]
            inputs, targets = cutter.send(cutter.cut(chosen))
            yield inputs, targets, len(chosen) * share


class _Cutter:
    """Cuts sequences out of a stream, checks their ids, and sends them to a device."""

    def __init__(self, stream: TokenStream, context_length: int, vocab_size: int | None, device: torch.device) -> None:
        if vocab_size is not None and (stream.vocab_size or 0) > vocab_size:
            raise ValueError(
                f"{stream.files[0].path} has a vocabulary of {stream.vocab_size:,}, the model one of {vocab_size:,}"
            )
        self._stream, self._context_length, self._vocab_size, self._device = stream, context_length, vocab_size, device

    def cut(self, sequences: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """(2, len(sequences), context_length) int64 in memory from which the device can copy: inputs, targets."""
        length = self._context_length
        pinned = self._device.type == "cuda"
        batch = torch.empty((2, len(sequences), length), dtype=torch.int64, pin_memory=pinned, device="cpu")
        inputs, targets = batch.numpy()
        tokens = np.empty(length + 1, np.int64)
        for row, sequence in enumerate(sequences):
            start = int(sequence) * length
            self._stream.copy(start, tokens)
            if self._vocab_size is not None and tokens.max() >= self._vocab_size:
                place = self._stream.place(start + int(tokens.argmax()))
                raise ValueError(
                    f"token {tokens.max()} is beyond the model's vocabulary of {self._vocab_size:,}: {place}"
                )
            inputs[row], targets[row] = tokens[:-1], tokens[1:]
        return batch

    def send(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Both halves on the device; the allocator of pinned memory keeps ``batch`` until the copy has ended."""
        inputs, targets = batch.to(self._device, non_blocking=True)
        return inputs, targets
