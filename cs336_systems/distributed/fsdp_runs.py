"""The units that a forward of FSDP has run, those that are therefore expected, and whether all ranks run the same.

The expected order, of the forward and of its backward, follows from calls of units alone, never from which tensors are
alive or which parameters received a gradient: ranks may differ in those, and their collectives must not.

An all-gather of one expert's weights on rank 0 and of another's on rank 1 hangs, aborts, or mixes the two. Ranks
therefore tell each other where a forward and a backward begin and end, and which units they call if these are not the
ones of the last forward. They do so through the process group's store, from host to host: no device waits, and no
collective is added. One comparison takes about 0.2 ms of the host (2 ranks of one machine); a step has three.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from cs336_systems.distributed.fsdp_parameters import ShardedGroup
from cs336_systems.distributed.fsdp_units import Unit
from cs336_systems.distributed.presence import HAS_LEFT, presence_of_this_rank


class Forward:
    """The units that a forward has run, beside those of the previous one, which it is expected to run.

    The first forward expects nothing, and so gathers nothing ahead. Calls of units between the end of a forward and
    its backward, as by a loss in chunks, are the forward's as well.
    """

    def __init__(self, previous: "Forward | None" = None) -> None:
        self.units: list[Unit] = []
        """The units that it has run, in the order in which they began."""
        self.runs: list[Run] = []
        """The runs that backward comes back to, in the order in which they ended."""
        self.serial = 0
        """The number of this forward among those since the last backward that a backward may come to."""
        self.n_inside: int | None = None
        """The number of units that it ran before its end."""
        self._expected_inside = previous.n_inside if previous else 0
        self.expected: list[Unit] = previous.units if previous else []
        self.as_expected = bool(self.expected)
        self._last_use = {group: i for i, unit in enumerate(self.expected) for group in unit.groups}
        self._first_run: dict[ShardedGroup, int] = {}

    def left(self) -> list[Unit]:
        """Units that are expected before the forward ends, or after that before anything else begins."""
        until = len(self.expected) if self.n_inside is not None else self._expected_inside
        return self.expected[len(self.units) : until] if self.as_expected else []

    def begin(self, unit: Unit, prefetch: int) -> list[Unit]:
        """Note that a unit begins, and return those that are expected next."""
        self.units.append(unit)
        return self.expected[len(self.units) :][:prefetch] if self.as_expected else []

    def keeps(self, group: ShardedGroup, position: int) -> bool:
        """Whether the group is used again so soon after the unit at the position that it stays."""
        if not self.as_expected:
            return False
        # Backward starts at the last run, so once that has begun nothing is freed.
        last_has_begun = len(self.units) == len(self.expected)
        return self._last_use[group] > position or (last_has_begun and bool(self.runs))

    def add_run(self, unit: Unit, started: int) -> "Run":
        """Note a call to which backward will come back."""
        run = Run(self, unit, started, len(self.runs))
        self.runs.append(run)
        for group in unit.groups:
            self._first_run.setdefault(group, run.number)
        return run

    def uses(self, group: ShardedGroup, number: int) -> bool:
        """Whether the group is used by one of the runs up to the number."""
        return group in self._first_run and self._first_run[group] <= number


@dataclass(eq=False)
class Run:
    """One call of a unit in a forward that backward will come back to."""

    forward: Forward
    unit: Unit
    started: int
    """The number of runs that had ended when this one began: less than ``number`` where it holds vectors alone."""
    number: int
    """The number of runs that had ended before this one did."""


@dataclass
class Backward:
    """One backward pass."""

    lives: "weakref.ref[Any]"
    """The reference is empty once autograd has given the pass up."""
    walks: dict[Forward, int] = field(default_factory=dict)
    """The number of the run that it has come to, in each forward."""
    open: list[Run] = field(default_factory=list)
    """The runs that it is inside of, whose recomputation needs their parameters."""
    producing: dict[ShardedGroup, None] = field(default_factory=dict)
    """The groups whose gradients it is making, in the order in which it came to them."""


class Agreement:
    """Compares what ranks say, one sentence each, in turns."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = process_group.rank(), process_group.size()
        self._alone = self._world_size == 1 or dist.get_backend(process_group) == "fake"
        if not self._alone:
            self._ranks, self._presence = dist.get_process_group_ranks(process_group), presence_of_this_rank()
            self._store: Any = process_group.get_group_store()
            self._second_store: Any = self._store.clone()  # type: ignore[attr-defined]
            self._name = f"FSDP {self._store.add(f'FSDP of rank {self._rank}', 1)}"  # wrapped in one order everywhere
        self._n = 0

    def check(self, what: str, flag: bool = False) -> bool:
        """Wait for what the other ranks are about to do, as the end of a sentence that begins with the rank's number.

        Returns:
            Whether the flag is up on any rank.

        Raises:
            RuntimeError: they are about to do something else; on every rank, and before any has done it.
            DistError: a rank has left.
        """
        if self._alone:
            return flag
        keys = [f"{self._name}/{self._n}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], f"{what}\n{flag}")
        with self._presence.waiting(self._second_store, dict(zip(self._ranks, keys, strict=True))):
            values = [value.decode().rsplit("\n", 1) for value in self._store.multi_get(keys)]
        said, flags = zip(*values, strict=True)
        if self._n:  # whoever has come to this turn has read the last one
            self._store.delete_key(f"{self._name}/{self._n - 1}/{self._rank}")
        self._n += 1
        other = next((rank for rank, theirs in enumerate(said) if theirs != said[0]), None)
        if gone := [f"rank {rank} {word}" for rank, word in zip(self._ranks, said, strict=True) if HAS_LEFT in word]:
            raise dist.DistError(gone[0])
        if other is not None:
            raise RuntimeError(
                f"ranks under FSDP must run the same units in the same order, an expert without tokens as well, and "
                f"backward together: rank 0 {said[0]}, where rank {other} {said[other]}"
            )
        return "True" in flags
