"""Which tensors are alive as code is followed line by line, and the most bytes at each moment.

    ledger = Ledger(cuda_block_bytes)
    ledger.at("forward")
    ledger.make("activations", x=4096, y=4096)
    ledger.free("x")
    ledger.peak().n_bytes                                   # 8192

A tensor belongs to one of ``costs.memory.PARTS``. Sizes are in bytes.
"""

from collections.abc import Callable

from cs336_systems.costs.memory import PARTS, PeakMemory


class Ledger:
    """What is alive by name, and the most that was at each moment."""

    def __init__(self, block_bytes: Callable[[int], int]) -> None:
        self._block_bytes = block_bytes
        self._alive: dict[str, tuple[str, int]] = {}
        self._parts = dict.fromkeys(PARTS, 0)
        self._total, self._moment = 0, "states"
        self._most: dict[str, tuple[int, dict[str, int]]] = {}

    def at(self, moment: str) -> None:
        self._moment = moment
        self._note()

    def make(self, part: str, /, **sizes: int) -> None:
        """Tensors that are alive together from now on."""
        for name, size in sizes.items():
            assert name not in self._alive, name
            n_bytes = self._block_bytes(size)
            self._alive[name] = part, n_bytes
            self._parts[part] += n_bytes
            self._total += n_bytes
        self._note()

    def free(self, *names: str) -> None:
        for name in names:
            part, n_bytes = self._alive.pop(name)
            self._parts[part] -= n_bytes
            self._total -= n_bytes

    def become(self, name: str, part: str, other: str) -> None:
        """The same tensor under another name."""
        before, n_bytes = self._alive.pop(name)
        self._parts[before] -= n_bytes
        self._parts[part] += n_bytes
        self._alive[other] = part, n_bytes

    def _note(self) -> None:
        if self._total > self._most.get(self._moment, (-1,))[0]:
            self._most[self._moment] = self._total, self._parts.copy()

    def peak(self) -> PeakMemory:
        moments = {moment: total for moment, (total, _) in self._most.items()}
        moment = max(moments, key=lambda name: moments[name])
        parts = self._most[moment][1]
        return PeakMemory(moment, moments[moment], moments, {part: parts[part] for part in PARTS if parts[part]})
