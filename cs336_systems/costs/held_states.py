"""Parameters, gradients and moments that a rank holds during a step: whole, sharded, or on the host.

Units are numbered in the order of forward: 0 the embedding, 1 to n the blocks, n + 1 norm and head. A step says which
it begins, ends, and comes to in backward, and makes whole gradients itself, as ``"{unit} gradient of {piece}"``;
``Sharded`` frees them where FSDP (``distributed/fsdp_schedule.py``) has reduced them. Sizes are in bytes, ``width``
those of an element.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from cs336_systems.config import ModelConfig
from cs336_systems.costs.fsdp import Shape, is_sharded, model_units, shard_elements
from cs336_systems.costs.ledger import Ledger

SLOT_ELEMENTS = 64
"""To which FSDP rounds the place of a parameter in its unit's memory."""


def block_pieces(config: ModelConfig, width: int) -> dict[str, int]:
    """A block's weights as they lie in memory, and its gradients: matrices that are multiplied together as one."""
    d_model = config.d_model
    vectors = {"ln1": d_model, "ln2": d_model} | ({"qkv_bias": config.d_qkv} if config.qkv_bias else {})
    matrices = {
        "qkv": config.d_qkv * d_model,
        "output": d_model * d_model,
        "gate_up": 2 * config.d_ff * d_model,
        "down": config.d_ff * d_model,
    }
    return {name: n * width for name, n in (vectors | matrices).items()}


class Whole:
    """Parameters, gradients and moments of one rank that has them all."""

    def __init__(self, config: ModelConfig, width: int, ledger: Ledger) -> None:
        self.config, self.width, self.ledger = config, width, ledger
        self.n_units = config.n_layers + 2
        self.head_unit = self.n_units - 1
        block, embedding = block_pieces(config, width), config.vocab_size * config.d_model * width
        head = {} if config.tie_embeddings else {"head": embedding}
        head["ln_final"] = config.d_model * width
        self.pieces = [{"embedding": embedding}, *[block] * config.n_layers, head]
        """Of the embedding, of the blocks in order, and of the head."""

    def make(self, states: Mapping[str, int]) -> None:
        """Those that are there all the time; ``states`` of the optimizer by name, with their bytes per element."""
        self._make("parameters", "weight of", self.pieces)
        for i, shape in enumerate(shape for unit in model_units(self.config) for shape in unit):
            self._make_states(i, prod(shape), states)

    def _make_states(self, i: int, n_elements: int, states: Mapping[str, int]) -> None:
        """Of a parameter: they follow the parameters as they are named, not as they lie."""
        self.ledger.make("optimizer state", **{f"{name} {i}": n_elements * width for name, width in states.items()})

    def _make(self, part: str, what: str, pieces: Iterable[Mapping[str, int]]) -> None:
        for unit, sizes in enumerate(pieces):
            self.ledger.make(part, **{f"{unit} {what} {name}": size for name, size in sizes.items()})

    def begin(self, unit: int) -> None:
        """Of a unit's forward: its weights are needed."""

    def end(self, unit: int, *, last: bool = False) -> None:
        """Of a unit's forward, ``last`` where backward begins with it."""

    def come_to(self, unit: int) -> None:
        """In backward: the units after it are done with."""

    def transpose(self, unit: int, weight: str, n_bytes: int) -> None:
        """In backward: a quantized weight's transposed copy is read."""

    def finish(self) -> None:
        """Backward has come through all units."""


class Accumulated(Whole):
    """Those of a rank that has gradients of an earlier micro-batch, to which autograd adds what backward makes."""

    def make(self, states: Mapping[str, int]) -> None:
        super().make(states)
        self._make("gradients", "earlier gradient of", self.pieces)

    def come_to(self, unit: int) -> None:
        self._add(unit + 1)

    def finish(self) -> None:
        self._add(0)

    def _add(self, unit: int) -> None:
        if unit < self.n_units:  # a tied head's gradient has become a part of the embedding's
            self.ledger.free(*(f"{unit} gradient of {name}" for name in self.pieces[unit]))


class Leaving(Whole):
    """Those of a rank whose gradients leave for the host as backward makes them (``training/host_gradients.py``).

    Where they accumulate, what has come from the host leaves as the sum, and the first of the next unit is on its way.
    """

    def __init__(
        self, config: ModelConfig, width: int, ledger: Ledger, *, accumulates: bool, in_flight_bytes: int
    ) -> None:
        super().__init__(config, width, ledger)
        self.accumulates, self.in_flight_bytes = accumulates, in_flight_bytes
        self.leaving: deque[tuple[str, int]] = deque()

    def come_to(self, unit: int) -> None:
        self._send(unit + 1)

    def finish(self) -> None:
        self._send(0)
        while self.leaving:
            self.ledger.free(self.leaving.popleft()[0])

    def _send(self, unit: int) -> None:
        if unit >= self.n_units:
            return
        for name, n_bytes in reversed(self.pieces[unit].items()):
            gradient = f"{unit} gradient of {name}"
            if self.accumulates:
                self.ledger.make("gradients", **{f"{unit} sum of {name}": n_bytes})
                self.ledger.free(gradient)
                gradient = f"{unit} sum of {name}"
            self.leaving.append((gradient, n_bytes))
            while len(self.leaving) > 1 and sum(n for _, n in list(self.leaving)[:-1]) > self.in_flight_bytes:
                self.ledger.free(self.leaving.popleft()[0])


class Sharded(Whole):
    """Those of one of several ranks that hold shards: ``distributed/fsdp_schedule.py`` by its effects on memory.

    Args:
        in_bytes: of each unit, whether its matrices travel quantized (``distributed/fsdp_quantized.py``).
    """

    def __init__(
        self,
        config: ModelConfig,
        width: int,
        ledger: Ledger,
        n_shards: int,
        prefetch: int,
        update: str,
        in_bytes: Sequence[bool],
    ) -> None:
        super().__init__(config, width, ledger)
        self.in_bytes = in_bytes
        self.transposed: dict[int, list[str]] = {}
        self.n_shards, self.prefetch, self.updates_early = n_shards, prefetch, update == "under-backward"
        units = model_units(config)
        head = [] if config.tie_embeddings else units[-1]
        self.matrices = [
            [shape for shape in unit if is_sharded(shape)] for unit in (*units[: config.n_layers + 1], head)
        ]
        self.gathered: set[int] = set()
        self.reducing: int | None = None

    def make(self, states: Mapping[str, int]) -> None:
        vectors = [{name: size for name, size in unit.items() if self._is_vector(name)} for unit in self.pieces]
        self._make("parameters", "weight of", vectors)
        for unit, matrices in enumerate(self.matrices):
            shards = sum(self._slot(shape, 1) for shape in matrices)
            self.ledger.make("parameters", **{f"{unit} shards": shards * self.width})
            if self.in_bytes[unit]:
                n_bytes = sum(shard_elements(shape, self.n_shards) for shape in matrices)
                self.ledger.make("parameters", **{f"{unit} quantized shards": n_bytes})
        for i, shape in enumerate(shape for unit in model_units(self.config) for shape in unit):
            self._make_states(i, shard_elements(shape, self.n_shards), states)

    @staticmethod
    def _is_vector(piece: str) -> bool:
        return piece in ("ln1", "ln2", "qkv_bias", "ln_final")

    def _slot(self, shape: Shape, n_shards: int) -> int:
        return -(-shard_elements(shape, self.n_shards) * n_shards // SLOT_ELEMENTS) * SLOT_ELEMENTS

    def _group(self, unit: int) -> int:
        """The unit that has its weights: a tied head's are the embedding's."""
        return 0 if not self.matrices[unit] else unit

    def _gather(self, unit: int) -> None:
        group = self._group(unit)
        if group not in self.gathered:
            self.gathered.add(group)
            whole = sum(self._slot(shape, self.n_shards) for shape in self.matrices[group])
            width = 1 if self.in_bytes[group] else self.width
            self.ledger.make("gathered parameters", **{f"{group} gathered": whole * width})

    def _free(self, unit: int) -> None:
        self.gathered.remove(unit)
        self.ledger.free(f"{unit} gathered", *self.transposed.pop(unit, ()))

    def transpose(self, unit: int, weight: str, n_bytes: int) -> None:
        name, there = f"{unit} transposed {weight}", self.transposed.setdefault(unit, [])
        if self.in_bytes[unit] and name not in there:
            there.append(name)
            self.ledger.make("gathered parameters", **{name: n_bytes})

    def begin(self, unit: int) -> None:
        for each in range(unit, min(unit + self.prefetch, self.head_unit) + 1):
            self._gather(each)

    def end(self, unit: int, *, last: bool = False) -> None:
        stays = last or (unit == 0 and self._group(self.head_unit) == 0)  # a tied embedding is used again
        if not stays and unit in self.gathered:
            self._free(unit)

    def come_to(self, unit: int) -> None:
        window = {self._group(each) for each in range(max(0, unit - self.prefetch), unit + 1)}
        tied = {0} if self._group(self.head_unit) == 0 else set()
        for group in self.gathered - window - tied:
            self._free(group)
        if unit < self.head_unit and self._group(unit + 1) != 0:
            self._reduce(unit + 1)
        for each in sorted(window, reverse=True):
            self._gather(each)

    def _reduce(self, unit: int) -> None:
        self._finish_reduction()
        self.reducing = unit
        shards = sum(shard_elements(shape, self.n_shards) for shape in self.matrices[unit])
        self.ledger.make("gradients", **{f"{unit} gradients of shards": shards * self.width})

    def _finish_reduction(self) -> None:
        if self.reducing is not None:
            matrices = (name for name in self.pieces[self.reducing] if not self._is_vector(name))
            self.ledger.free(*(f"{self.reducing} gradient of {name}" for name in matrices))
            if self.updates_early:
                self.ledger.free(f"{self.reducing} gradients of shards")

    def finish(self) -> None:
        for group in list(self.gathered):
            self._free(group)
        self._reduce(0)
        self._finish_reduction()
