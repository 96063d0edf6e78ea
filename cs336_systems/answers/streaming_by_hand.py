"""Cells under memory caps by sums alone, without a search or a schedule: what a reader can do with a pencil."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

from cs336_systems.config import resolve_size
from cs336_systems.costs.streaming import Rates, StreamedWork
from cs336_systems.hardware import GIB, hardware_named
from cs336_systems.streaming.choose import DEVICE_OVERHEAD, HOST_OVERHEAD
from cs336_systems.streaming.estimate import WorkSeconds
from cs336_systems.streaming.plan import Keep, Plan


def streamed_work(size: str, context_length: int, chunk: int) -> StreamedWork:
    """A model's pieces on sequences of a length in chunks of so many tokens."""
    config = replace(resolve_size(size), max_context_length=None).at_context(context_length)
    return StreamedWork(config, context_length, chunk)


def sustained(device: str = "h200") -> Rates:
    """What a device sustains, as the simulation has it."""
    return Rates.of(hardware_named(device))


class _Sums(ABC):
    """A plan within two caps; the fields are those of who inherits."""

    work: StreamedWork
    device_gib: float
    host_gib: float

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan of one round that keeps the least."""

    @cached_property
    def seconds(self) -> WorkSeconds:
        """Seconds of the work."""
        return WorkSeconds.of(self.work, sustained())

    @property
    def ring_bytes(self) -> int:
        """Of the smallest rings."""
        return self.plan.least_ring_bytes

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
        return self.plan.chunks * (self.seconds.forward + self.seconds.backward + self.seconds.ends)


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
    def plan(self) -> Plan:
        return Plan(self.work, self.chunks, 1, "interleaved", Keep(0, 0))

    def _kept_bytes(self, products: int) -> int:
        return self.plan.kept_bytes(Keep(self.plan.pairs, products))

    @property
    def least_bytes(self) -> int:
        """That a round keeps with all pairs at ``attention``."""
        return self._kept_bytes(0)

    @property
    def products_bytes(self) -> int:
        """That it keeps besides with all of them at ``products``."""
        return self._kept_bytes(self.plan.pairs) - self.least_bytes

    @property
    def by_memory(self) -> float:
        """Share of pairs whose products have room."""
        return (self.kept_room - self.least_bytes) / self.products_bytes

    @property
    def again_seconds(self) -> float:
        """Of a round with all pairs at ``attention``."""
        return self.plan.pairs * self.seconds.recompute_attention

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
        rounds = tokens_per_step / self.plan.round_tokens
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
    def plan(self) -> Plan:
        chunks, n_layers = self.work.chunks_per_sequence, self.work.config.n_layers
        everything = Keep(chunks * n_layers, 0)
        return Plan(self.work, chunks, 1, "sequential", everything, keep_context=False, input_every=self.input_every)

    @property
    def pairs(self) -> int:
        """Of layer and chunk."""
        return self.plan.pairs

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
        return self.plan.restores

    @property
    def attention_seconds(self) -> float:
        """Of a pair whose attention is computed again, beyond what is again at ``attention``."""
        return self.seconds.recompute_input - self.seconds.recompute_attention

    @property
    def least_again_seconds(self) -> float:
        """Of a step that keeps x and attention of all."""
        return self.pairs * (self.seconds.keys + self.seconds.recompute_attention)

    @property
    def restore_seconds(self) -> float:
        """Of a layer's x of one chunk."""
        return self.seconds.restore

    @property
    def tokens_per_s(self) -> float:
        """Of one round, without its optimizer."""
        again = self.least_again_seconds + self.work.chunks_per_sequence * self.restored * self.restore_seconds
        return self.work.context_length / (self.round_seconds + again)
