"""The memory of a step under caps: what items consist of, the slabs that hold them, and what never leaves the device.

    tensors = MemoryMap.of(plan.work)              # q, residual, gate_up ... of an item, with shapes and dtypes
    memory = Memory(schedule, tensors, device)     # one slab on the device and one on the host
    memory.tensors(Slot("products", 3), "products")["gate_up"]
    memory.run_of("context", "context", first=4, n=2)            # neighbouring slots as one tensor
    memory.slot_bytes(Slot("weights", 0), "weights").copy_(memory.place_bytes(place, "weights"), non_blocking=True)

Weights, gradients, moments and masters have the tensors of ``blocks.BlockWeights``. Keys and values of a token are
neighbours, so that those of chunks in neighbouring slots are one tensor. Their gradients are summed in at least fp32,
as are statistics. Adapters and all their state never leave the device. Sizes: n tokens of a chunk, D d_model, F d_ff,
P = (H + 2 K) E the width of q | k | v.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from cs336_systems.blocks.adapters import adapter_shapes
from cs336_systems.blocks.weights import PARTS
from cs336_systems.config import Lora, ModelConfig
from cs336_systems.costs.streaming import StreamedWork
from cs336_systems.kernels.host_memory import Slab, aligned, device_slab, host_slab
from cs336_systems.model import TransformerBlock
from cs336_systems.model.layers import RotaryEmbedding
from cs336_systems.streaming.schedule import Place, Schedule, Slot
from cs336_systems.training.precision import BY_BYTES

MASTER = "master"
"""The name of fp32 weights that the optimizer keeps beside bf16 ones."""
EMBEDDING, NORM, HEAD = "token_embeddings.weight", "ln_final.weight", "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """One tensor of an item."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MemoryMap:
    """The parts of every kind of item, one after the other."""

    dtype: torch.dtype
    """The dtype of weights, gradients and activations."""
    parts: Mapping[str, tuple[Part, ...]]
    states: Mapping[str, torch.dtype]
    """Names of the states that the optimizer keeps of each parameter."""
    adapters: Mapping[str, tuple[Part, ...]]
    """The parts of a layer's adapters: weights, gradients and each state; empty if there are none."""

    @classmethod
    def of(cls, work: StreamedWork) -> "MemoryMap":
        """The items of a step."""
        config, dtype = work.config, BY_BYTES[work.precision.parameter_bytes]
        states = {name: BY_BYTES[size] for name, size in work.moments}
        n, d, wide = work.chunk, config.d_model, torch.promote_types(dtype, torch.float32)
        weights = (
            Part("ln1", (d,), dtype),
            Part("qkv", (config.d_qkv, d), dtype),
            *([Part("qkv_bias", (config.d_qkv,), dtype)] if config.qkv_bias else []),
            *([Part(name, (config.d_head,), dtype) for name in ("q_norm", "k_norm")] if config.qk_norm else []),
            Part("output", (d, config.d_query), dtype),
            Part("ln2", (d,), dtype),
            Part("gate_up", (2 * config.d_ff, d), dtype),
            Part("down", (d, config.d_ff), dtype),
        )
        of_dtypes = {"weights": dtype, "gradients": dtype, **states}
        of_state = {what: tuple(replace(part, dtype=of) for part in weights) for what, of in of_dtypes.items()}
        adapters = {}
        if work.lora is not None:
            of_state = {"weights": weights}
            shapes = _adapter_shapes(config, work.lora)
            adapters = {
                what: tuple(Part(name, shape, of) for name, shape in shapes.items()) for what, of in of_dtypes.items()
            }
        sequences, positions = work.batch
        keys_values = (n, 2, config.kv_heads, config.d_head)
        parts = {
            **of_state,
            "input": (
                Part("x", (sequences, positions, d), dtype),
                Part("rstd1", (n,), wide),
                Part("rstd2", (n,), wide),
                *(Part(name, shape, torch.float32) for name, shape in work.maxima.items()),
            ),
            "context": (Part("keys_values", keys_values, dtype),),
            "attention": (
                Part("attended", (n, config.d_query), dtype),
                Part("lse", (sequences, config.n_heads, positions), wide),
            ),
            "products": (
                Part("q", (n, config.d_query), dtype) if work.is_long else Part("qkv", (n, config.d_qkv), dtype),
                Part("residual", (n, d), dtype),
                Part("gate_up", (n, 2 * config.d_ff), dtype),
            ),
            "dy": (Part("dy", (sequences, positions, d), dtype),),
            "dcontext": (Part("keys_values", keys_values, wide),),
        }
        return cls(dtype, parts, states, adapters)

    def n_bytes(self, what: str) -> int:
        return sum(part.n_bytes for part in self.parts[what])

    def views(self, memory: Tensor, what: str) -> dict[str, Tensor]:
        """The parts of an item in its memory, by name."""
        return _views(memory, self.parts[what])


def _adapter_shapes(config: ModelConfig, lora: Lora) -> dict[str, tuple[int, int]]:
    """Shapes of a layer's adapters, by the names of ``BlockWeights``."""
    shapes = adapter_shapes(TransformerBlock(config, device="meta"), lora)
    held = {name: [shapes[part] for part in parts] for name, parts in PARTS.items() if parts[0] in shapes}
    return {name: (sum(rows for rows, _ in parts), parts[0][1]) for name, parts in held.items()}


def _views(memory: Tensor, parts: Sequence[Part]) -> dict[str, Tensor]:
    found, end = {}, 0
    for part in parts:
        start, end = end, end + part.n_bytes
        found[part.name] = memory[start:end].view(part.dtype).view(part.shape)
    return found


class Memory:
    """One slab on the device and one on the host, which hold a schedule's rings and regions.

    Tensors are made once for each slot and kept, so that a step makes none of these.

    Raises:
        ValueError: an item that the schedule puts into a slot or a place is larger than that.
        RuntimeError: the host has not as much memory, or it cannot be pinned.
    """

    def __init__(self, schedule: Schedule, tensors: MemoryMap, device: torch.device) -> None:
        self.map = tensors
        self.rings, self.regions = schedule.rings, schedule.regions
        self.device_slab = device_slab(sum(aligned(ring.n_bytes) for ring in self.rings.values()), device)
        self.host_slab = host_slab(sum(aligned(region.n_bytes) for region in self.regions.values()), device)
        self._rings = {name: self.device_slab.take((ring.n_bytes,), torch.uint8) for name, ring in self.rings.items()}
        self._regions = {name: self.host_slab.take((of.n_bytes,), torch.uint8) for name, of in self.regions.items()}
        self.tensors, self.run_of = cache(self._tensors), cache(self._run_of)
        self.slot_bytes, self.place_bytes = cache(self._slot_bytes), cache(self._place_bytes)

    def _tensors(self, slot: Slot, what: str) -> dict[str, Tensor]:
        """The parts of an item in its slot by name."""
        return self.map.views(self._slot_bytes(slot, what), what)

    def place_tensors(self, place: Place, what: str) -> dict[str, Tensor]:
        """The parts of an item on the host by name."""
        return self.map.views(self._place_bytes(place, what), what)

    def _slot_bytes(self, slot: Slot, what: str) -> Tensor:
        """The memory of an item in its slot, uint8."""
        return self._within(self._rings[slot.ring], self.rings[slot.ring].item_bytes, slot, what)

    def _place_bytes(self, place: Place, what: str) -> Tensor:
        """The memory of an item on the host, uint8."""
        return self._within(self._regions[place.region], self.regions[place.region].item_bytes, place, what)

    def _run_of(self, ring: str, what: str, first: int, n: int) -> Tensor:
        """Items of one part in ``n`` neighbouring slots as one tensor, joined in the first dimension."""
        (part,), size = self.map.parts[what], self.rings[ring].item_bytes
        if size != part.n_bytes:
            raise ValueError(f"slots of {ring} have {size} bytes, {what} {part.n_bytes}: neighbours are not one tensor")
        memory = self._rings[ring][first * size : (first + n) * size]
        return memory.view(part.dtype).view(n * part.shape[0], *part.shape[1:])

    def _within(self, memory: Tensor, size: int, where: Slot | Place, what: str) -> Tensor:
        n_bytes = self.map.n_bytes(what)
        if n_bytes > size:
            raise ValueError(f"{what} has {n_bytes} bytes, {where} {size}")
        return memory[where.number * size : where.number * size + n_bytes]


class Fixed:
    """The tensors that never leave the device: rotary tables, and those of embedding, final norm and head that this
    rank holds, with their state; of frozen ones weights alone, but the state of all adapters.

    A tied embedding has a gradient from each of its two uses, added up once at the end: rounds may be in any order, and
    the sums still have the same bits.
    """

    def __init__(self, work: StreamedWork, tensors: MemoryMap, device: torch.device) -> None:
        config, dtype = work.config, tensors.dtype
        matrix = config.vocab_size, config.d_model
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: matrix} if work.has_embedding else {}
        shapes |= {NORM: (config.d_model,), HEAD: matrix} if work.has_head else {}
        self.tied = config.tie_embeddings
        owned = {name: shape for name, shape in shapes.items() if not (self.tied and name == HEAD)}
        kept = {"weights": dtype, **({} if work.lora else tensors.states)}
        with_gradients = {} if work.lora else shapes
        layer_bytes = {what: sum(part.n_bytes for part in parts) for what, parts in tensors.adapters.items()}
        n_bytes = sum(aligned(prod(shape) * of.itemsize) for of in kept.values() for shape in owned.values())
        n_bytes += sum(aligned(prod(shape) * dtype.itemsize) for shape in with_gradients.values())
        n_bytes += sum(aligned(n) for n in layer_bytes.values()) * len(work.layers)
        self.slab: Slab = device_slab(n_bytes, device)
        self.states = {
            what: {name: self.slab.take(shape, of) for name, shape in owned.items()} for what, of in kept.items()
        }
        """``weights`` and what the optimizer keeps, by the names of parameters."""
        self.weights = self.states["weights"]
        self.gradients = {name: self.slab.take(shape, dtype) for name, shape in with_gradients.items()}
        self.adapters = {
            what: {layer: _views(self.slab.take((layer_bytes[what],), torch.uint8), parts) for layer in work.layers}
            for what, parts in tensors.adapters.items()
        }
        """``weights``, ``gradients`` and what the optimizer keeps of adapters, by layer and names of parts."""
        rotary = RotaryEmbedding(config.at_context(work.context_length), device=device, dtype=dtype)
        rotary.reset_parameters()
        self.cos, self.sin = rotary(work.context_length)

    @property
    def embedding(self) -> Tensor:
        """(V, D)"""
        return self.weights[EMBEDDING]

    @property
    def head(self) -> Tensor:
        """(V, D)"""
        return self.weights[EMBEDDING if self.tied else HEAD]

    def clear_gradients(self) -> None:
        """Sets gradients to zero, before a step."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def whole_gradients(self) -> Mapping[str, Tensor]:
        """Gradients of the weights, at the end of a step's last backward; to be asked for once in a step."""
        if self.tied and self.gradients:
            self.gradients[EMBEDDING].add_(self.gradients[HEAD])
        return {name: self.gradients[name] for name in self.weights if name in self.gradients}
