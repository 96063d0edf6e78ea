"""What has been decided for a step under memory caps: chunks, rounds, their order, what is kept, what lives where.

    plan = choose(config, context_length, Caps(24 * GIB, 75 * GIB), rates).plan    # choose.py, choice.py
    schedule = build(plan)                                                         # build.py

State of layers (weights, gradients, moments) is resident, in slots of its own, or streams through a ring: resident
layers lie spread over the model, so that the link's work is even. What forward keeps goes through rings, too, and the
pairs of (layer, chunk) that backward needs soonest stay in their slots, as many as there are.
"""

from dataclasses import dataclass
from typing import Literal

from cs336_systems.costs.streaming import LEVELS, StreamedWork

Order = Literal["sequential", "interleaved"]
ORDERS: tuple[Order, ...] = ("sequential", "interleaved")

STATE_RINGS = ("weights", "gradients")


@dataclass(frozen=True)
class Plan:
    """Raises:
    ValueError: a number is not positive, an order or a level is unknown, layers are missing or too many, or x is to be
        restored from what is not kept.
    """

    work: StreamedWork
    chunks: int
    """C of a round."""
    rounds: int
    """R of a step."""
    order: Order
    levels: tuple[tuple[str, ...], ...]
    """By layer, then chunk: what is kept."""
    slots: tuple[tuple[str, int], ...]
    """By ring (weights, gradients, input, attention, products; context in sequences), without those of residents."""
    resident: tuple[tuple[str, int], ...] = ()
    """Layers whose ``weights``, ``gradients`` or ``moments`` never leave the device."""
    edge_levels: tuple[tuple[str, ...], ...] | None = None
    """Of the first and the last of interleaved rounds, which run partly alone; None for those of the others."""
    keep_context: bool = True
    """Of sequences longer than a chunk: k and v are kept; else their product runs again."""
    input_every: int = 1
    """n: x is kept of every n-th layer, the first one included. That of the others is restored: computed again from
    what the layers below, down to one whose x is kept, keep of x and attention. None keeps products then."""
    clipping: bool = True
    """By the global norm: the optimizer waits for the end of backward."""

    def __post_init__(self) -> None:
        n_layers = self.work.config.n_layers
        if self.input_every < 1:
            raise ValueError(f"input_every must be at least 1, got {self.input_every}")
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}: known are {', '.join(ORDERS)}")
        if self.rounds < 1 or self.chunks < 1 or self.chunks % self.work.chunks_per_sequence:
            whole = f", in whole sequences of {self.work.chunks_per_sequence}" if self.work.is_long else ""
            raise ValueError(f"rounds and chunks must be positive{whole}, got {self.rounds} and {self.chunks}")
        for of_round in (self.levels, self.edge_levels or self.levels):
            if len(of_round) != n_layers or {len(levels) for levels in of_round} != {self.chunks}:
                raise ValueError(f"levels must be of {n_layers} layers and {self.chunks} chunks each")
            if unknown := {level for levels in of_round for level in levels} - set(LEVELS):
                raise ValueError(f"unknown level {min(unknown)!r}: known are {', '.join(LEVELS)}")
            for layer, levels in enumerate(of_round):
                known: tuple[str, ...] = LEVELS if self.input_every == 1 else LEVELS[:2]
                if is_source(layer, n_layers, self.input_every):
                    known = ("attention",)
                if wrong := set(levels) - set(known):
                    every = f"where x is kept of every {self.input_every} layers, layer {layer}"
                    raise ValueError(f"{every} keeps {' or '.join(known)}, got {min(wrong)}")
        for what, layers in self.resident:
            if what not in (*STATE_RINGS, "moments") or not 0 <= layers <= n_layers:
                raise ValueError(f"{layers} layers cannot have resident {what}, of {n_layers}")

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.work.chunk * self.chunks * self.rounds

    @property
    def sequences(self) -> int:
        """Of a round."""
        return self.work.chunk * self.chunks // self.work.context_length

    def level(self, layer: int, round: int, chunk: int) -> str:
        """At which a (layer, chunk) is kept in a round."""
        edge = self.edge_levels if round in (0, self.rounds - 1) else None
        return (edge or self.levels)[layer][chunk]

    def resident_layers(self, what: str) -> tuple[int, ...]:
        """Which layers' ``weights``, ``gradients`` or ``moments`` are resident, spread evenly."""
        n, n_layers = dict(self.resident).get(what, 0), self.work.config.n_layers
        return tuple((2 * i + 1) * n_layers // (2 * n) for i in range(n))


def restored_from(layer: int, n_layers: int, input_every: int, order: Order) -> int:
    """The layer from whose x that of ``layer`` is restored before its backward; itself, where x is there.

    What a group's last layer has restored on its way stays for the layers below it if there is room: in sequential
    rounds as much as groups above have left, with the x that they had kept. In interleaved ones the next round has it.
    """
    first = layer - layer % input_every
    if layer == min(first + input_every, n_layers) - 1:
        return first
    groups_above = (n_layers - 1) // input_every - layer // input_every
    return min(layer, first + (groups_above if order == "sequential" else 0))


def is_source(layer: int, n_layers: int, input_every: int) -> bool:
    """Whether x of the next layer is restored from what this one keeps."""
    return layer + 1 < n_layers and (layer + 1) % input_every > 0


def spread_levels(
    n_layers: int, chunks: int, products: int, attention: int, input_every: int = 1
) -> tuple[tuple[str, ...], ...]:
    """So many (layer, chunk) pairs keep products, so many of the others attention, spread evenly over the model, but
    that layers from which x of the next is restored keep attention first of all.
    """
    pairs = n_layers * chunks
    sources = sum(is_source(layer, n_layers, input_every) for layer in range(n_layers)) * chunks

    def chosen(i: int, n: int, of: int) -> bool:
        return (i + 1) * n // of > i * n // of

    levels, others = [], 0
    for i in range(pairs):
        if chosen(i, products, pairs):
            levels.append("products")
        elif is_source(i // chunks, n_layers, input_every):
            levels.append("attention")
        else:
            levels.append("attention" if chosen(others, attention - sources, pairs - products - sources) else "input")
            others += 1
    return tuple(tuple(levels[layer * chunks : (layer + 1) * chunks]) for layer in range(n_layers))
