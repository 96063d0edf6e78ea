"""Conversations as rows of equal length: one per row with padding, or several packed, which do not see each other.

    rows = Conversations(dataset.train, 2048, vocab_size, "cuda", packing=True)
    inputs, targets = rows.send(rows.read([0, 1]))      # (2, 2048, 2) tokens and starts, (2, 2048) targets

Only tokens of answers are targets; other tokens and padding are ``IGNORED``. Targets stay in host memory, where the
head reads which rows need no logits (``linear_cross_entropy.py``). A conversation of n tokens takes n - 1 positions, as
its last token is only a target. Packing places conversations from the longest to the shortest, each into the row with
the least sufficient space (best-fit decreasing; Johnson 1974). Rows are the same in all epochs; their order is shuffled
in each.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cs336_systems.kernels.linear_cross_entropy import IGNORED
from cs336_systems.pretraining.dataset import ANSWER, BEGIN, TokenStream
from cs336_systems.pretraining.loader import Sequences

Long = Literal["cut", "drop"]


class Conversations(Sequences):
    """The conversations of a stream with marks, in rows.

    Args:
        packing: whether whole conversations share a row. Inputs are then (rows, context_length, 2): each token and the
            first position of its conversation. Otherwise they are (rows, context_length), one conversation each.
        long: whether conversations beyond the context are cut or dropped.

    Raises:
        ValueError: no conversation is left, or the vocabulary is larger than the model's.
    """

    def __init__(
        self,
        stream: TokenStream,
        context_length: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        packing: bool = False,
        long: Long = "cut",
    ) -> None:
        marks = np.empty(len(stream), np.uint8)
        stream.copy(0, marks, marks=True)
        begin = np.flatnonzero(marks & BEGIN)
        length = np.diff(begin, append=len(marks))
        too_long = length > context_length + 1
        kept = length > 1 if long == "cut" else (length > 1) & ~too_long
        begin, length = begin[kept], np.minimum(length, context_length + 1)[kept]
        # Targets are the tokens from the second of each conversation on; reduceat needs the appended 0 as a last end.
        answers = np.append(marks & ANSWER, np.uint8(0))
        edges = np.stack((begin + 1, begin + length), axis=1).ravel()
        n_targets = np.add.reduceat(answers, edges, dtype=np.int64)[::2] if len(edges) else np.zeros(0, np.int64)
        self._begin, self._length = begin[n_targets > 0], length[n_targets > 0]
        places = self._length - 1
        self._rows = packed(places, context_length) if packing else [[i] for i in range(len(places))]
        self.packing, self._drops = packing, long == "drop"
        if not self._rows:
            raise ValueError(
                f"{stream.files[0].path} has no conversation with an answer within {context_length:,} tokens"
            )
        super().__init__(stream, context_length, vocab_size, device)
        room = len(self) * context_length
        self.share_in_use, self.share_of_targets = float(places.sum() / room), float(n_targets.sum() / room)
        self.said = (
            f"{len(places):,} conversations in {len(self):,} rows of {context_length:,} tokens: "
            f"{100 * self.share_in_use:.1f}% of them in use, {100 * self.share_of_targets:.1f}% targets"
        )
        if n := int(too_long.sum()):
            self.said += f"; {n:,} beyond the context {'are cut' if long == 'cut' else 'are dropped'}"
        if n := int((n_targets == 0).sum() + (length < 2).sum()):
            self.said += f"; {n:,} have no answer within it and are dropped"

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def identity(self) -> dict[str, int]:
        return {"packing": int(self.packing), "long_dropped": int(self._drops), "n_sequences": len(self)}

    def read(self, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """(2 or, packed, 3, len(numbers), context_length) int64: inputs, targets, starts; raises as ``Sequences``."""
        batch = self.empty(3 if self.packing else 2, len(numbers))
        inputs, targets, *starts = batch.numpy()
        inputs.fill(0)
        targets.fill(IGNORED)
        for row, number in enumerate(numbers):
            place = 0
            for i in self._rows[int(number)]:
                begin, n = int(self._begin[i]), int(self._length[i])
                tokens, marks = np.empty(n, np.int64), np.empty(n, np.uint8)
                self.stream.copy(begin, tokens)
                self.stream.copy(begin, marks, marks=True)
                self.check(tokens, begin)
                own = slice(place, place + n - 1)
                inputs[row, own] = tokens[:-1]
                targets[row, own] = np.where(marks[1:] & ANSWER, tokens[1:], IGNORED)
                for each in starts:
                    each[row, own] = place
                place = own.stop
            for each in starts:  # padding sees only itself
                each[row, place:] = place
        return batch

    def send(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Send only the inputs to the device; targets stay in (pinned) host memory."""
        inputs, *starts = (each.to(self.device, non_blocking=True) for each in (batch[0], *batch[2:]))
        return (torch.stack((inputs, *starts), dim=-1) if starts else inputs), batch[1]


def packed(sizes: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack items of ``sizes`` into rows of ``capacity`` by best-fit decreasing; return each row's item indices."""
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of ``with_space``, sorted
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        if (found := bisect_left(spaces, size)) < len(spaces):
            space = spaces[found]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[found]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        left = space - size
        if left and left not in with_space:
            insort(spaces, left)
        if left:
            with_space.setdefault(left, []).append(row)
    return rows
