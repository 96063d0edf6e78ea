"""Cells under memory caps by sums alone, without a search or a schedule: what a reader can do with a pencil."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from cs336_systems.config import resolve_size
from cs336_systems.costs.streaming import Rates, StreamedWork
from cs336_systems.experiments.streaming.cells import hardware_named
from cs336_systems.hardware import GIB
from cs336_systems.streaming.choice import DEVICE_OVERHEAD, HOST_OVERHEAD
from cs336_systems.streaming.estimate import Layout, Levels, WorkSeconds


def streamed_work(size: str, context_length: int, chunk: int) -> StreamedWork:
    """A model's pieces on sequences of a length in chunks of so many tokens."""
    config = replace(resolve_size(size), max_context_length=None).at_context(context_length)
    return StreamedWork(config, context_length, chunk)


def sustained(device: str = "h200") -> Rates:
    """What a device sustains, as the simulation has it."""
    return Rates.of(hardware_named(device))


class _Sums(ABC):
    """A layout within two caps; the fields are those of who inherits."""

    work: StreamedWork
    device_gib: float
    host_gib: float

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Without levels."""

    @property
    def ring_bytes(self) -> int:
        """Of the smallest rings."""
        return self.layout.least_ring_bytes

    @property
    def device_bytes(self) -> float:
        """Of the device, for state and what is kept."""
        beside = DEVICE_OVERHEAD + self.work.fixed_bytes + self.work.temporary_bytes
        return self.device_gib * GIB - beside - self.ring_bytes

    @property
    def kept_room(self) -> float:
        """Bytes of both memories that state leaves for what forward keeps."""
        state = self.work.config.n_layers * self.work.state_bytes
        return self.device_bytes + self.host_gib * GIB - HOST_OVERHEAD - state

    @property
    def round_seconds(self) -> float:
        """Of kernels, nothing computed again."""
        seconds = self.layout.seconds
        return self.layout.chunks * (seconds.forward + seconds.backward + seconds.ends)


@dataclass(frozen=True)
class ByHand(_Sums):
    """Interleaved rounds of so many chunks within two caps, by sums alone: each pair of layer and chunk is kept at
    ``products`` or at ``attention``, and nothing else is sought.
    """

    work: StreamedWork
    chunks: int
    device_gib: float
    host_gib: float

    @cached_property
    def layout(self) -> Layout:
        seconds = WorkSeconds.of(self.work, sustained())
        return Layout(self.work, seconds, self.chunks, "interleaved", weights=0, gradients=0, moments=0)

    def _kept_bytes(self, products: int) -> int:
        layout = self.layout
        counts = layout.kept_counts(Levels(layout.pairs, products))
        return sum(n * layout.slot_bytes[ring] for ring, n in counts.items())

    @property
    def least_bytes(self) -> int:
        """That a round keeps with all pairs at ``attention``."""
        return self._kept_bytes(0)

    @property
    def products_bytes(self) -> int:
        """That it keeps besides with all of them at ``products``."""
        return self._kept_bytes(self.layout.pairs) - self.least_bytes

    @property
    def by_memory(self) -> float:
        """Share of pairs whose products have room."""
        return (self.kept_room - self.least_bytes) / self.products_bytes

    @property
    def again_seconds(self) -> float:
        """Of a round with all pairs at ``attention``."""
        return self.layout.pairs * self.layout.seconds.again_attention

    @property
    def state_in_bytes(self) -> float:
        """Of weights, twice, and gradients that a round has come in: the device's bytes hold weights first."""
        layer, n_layers = self.work.layer_bytes, self.work.config.n_layers
        return 3 * n_layers * layer - self.device_bytes - min(self.device_bytes, n_layers * layer)

    @property
    def by_link(self) -> float:
        """Share of pairs whose products come in while kernels run."""
        rate = sustained().link_in_both
        left = rate * (self.round_seconds + self.again_seconds) - self.state_in_bytes - self.least_bytes
        return left / (self.products_bytes + rate * self.again_seconds)

    @property
    def at_products(self) -> float:
        """Share of pairs that are kept at ``products``."""
        return max(0.0, min(1.0, self.by_memory, self.by_link))

    @property
    def again_share(self) -> float:
        """Of the time of a round, in which kernels compute again."""
        again = (1 - self.at_products) * self.again_seconds
        return again / (self.round_seconds + again)

    @property
    def optimizer_seconds(self) -> float:
        """While moments come in and go out."""
        moments = self.work.state_bytes - 2 * self.work.layer_bytes
        return self.work.config.n_layers * moments / sustained().link_in_both

    def tokens_per_s(self, tokens_per_step: float) -> float:
        """Of steps of so many tokens, whose rounds an optimizer follows that nothing hides."""
        rounds = tokens_per_step / (self.chunks * self.work.chunk)
        seconds = rounds * (self.round_seconds + (1 - self.at_products) * self.again_seconds)
        return tokens_per_step / (seconds + self.optimizer_seconds)


@dataclass(frozen=True)
class LongByHand(_Sums):
    """One round of one sequence within two caps, by sums alone: attention's output of all layers is kept, and x of
    every ``input_every``-th.
    """

    work: StreamedWork
    device_gib: float
    host_gib: float
    input_every: int

    @cached_property
    def layout(self) -> Layout:
        seconds, chunks = WorkSeconds.of(self.work, sustained()), self.work.chunks_per_sequence
        return Layout(self.work, seconds, chunks, "sequential", 0, 0, 0, False, self.input_every)

    @property
    def pairs(self) -> int:
        """Of layer and chunk."""
        return self.layout.pairs

    @property
    def input_bytes(self) -> int:
        """Of x of all pairs."""
        return self.pairs * self.work.item_bytes("input")

    @property
    def attention_bytes(self) -> int:
        """Of attention's output of all pairs."""
        return self.pairs * self.work.item_bytes("attention")

    @property
    def restored(self) -> int:
        """Layers' x that a chunk has restored."""
        return self.layout.restores

    @property
    def attention_seconds(self) -> float:
        """Of a pair whose attention is computed again, beyond what is again at ``attention``."""
        return self.layout.seconds.again_input - self.layout.seconds.again_attention

    @property
    def least_again_seconds(self) -> float:
        """Of a step that keeps x and attention of all."""
        return self.pairs * (self.layout.seconds.keys + self.layout.seconds.again_attention)

    @property
    def restore_seconds(self) -> float:
        """Of a layer's x of one chunk."""
        return self.layout.seconds.restore

    @property
    def tokens_per_s(self) -> float:
        """Of one round, without its optimizer."""
        again = self.least_again_seconds + self.work.chunks_per_sequence * self.restored * self.restore_seconds
        return self.work.context_length / (self.round_seconds + again)
