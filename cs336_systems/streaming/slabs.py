"""One slab on the device and one on the host: a schedule's rings and regions, and tensors in their slots and places.

    memory = Memory(schedule, layout, device)
    memory.tensors(Slot("products", 3), "products")["gate_up"]
    memory.run_of("context", "context", first=4, n=2)            # neighbouring slots as one tensor
    memory.slot_bytes(Slot("weights", 0), "weights").copy_(memory.place_bytes(place, "weights"), non_blocking=True)

Tensors are made once for each slot and kept: a step makes none of these.
"""

from functools import cache

import torch
from torch import Tensor

from cs336_systems.kernels.host_memory import Slab, aligned, device_slab, host_slab
from cs336_systems.streaming.layout import Layout
from cs336_systems.streaming.schedule import Place, Schedule, Slot


class Memory:
    """What a schedule names, as memory.

    Raises:
        ValueError: an item that the schedule puts into a slot or a place is larger than that.
        RuntimeError: the host has not as much memory, or it cannot be pinned.
    """

    def __init__(self, schedule: Schedule, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.rings, self.regions = schedule.rings, schedule.regions
        self.device_slab = device_slab(sum(aligned(ring.n_bytes) for ring in self.rings.values()), device)
        self.host_slab = host_slab(sum(aligned(region.n_bytes) for region in self.regions.values()), device)
        self._rings = {name: _piece(self.device_slab, ring.n_bytes) for name, ring in self.rings.items()}
        self._regions = {name: _piece(self.host_slab, region.n_bytes) for name, region in self.regions.items()}
        self.tensors, self.run_of = cache(self._tensors), cache(self._run_of)
        self.slot_bytes, self.place_bytes = cache(self._slot_bytes), cache(self._place_bytes)

    def _tensors(self, slot: Slot, what: str) -> dict[str, Tensor]:
        """The parts of an item by name."""
        memory = self._slot_bytes(slot, what)
        return self._parts(memory, what)

    def _parts(self, memory: Tensor, what: str) -> dict[str, Tensor]:
        return {
            part.name: memory[start : start + part.n_bytes].view(part.dtype).view(part.shape)
            for part, start in zip(self.layout.parts[what], self.layout.offsets(what), strict=True)
        }

    def place_tensors(self, place: Place, what: str) -> dict[str, Tensor]:
        """The parts of an item on the host."""
        return self._parts(self._place_bytes(place, what), what)

    def _slot_bytes(self, slot: Slot, what: str) -> Tensor:
        """The memory of an item in its slot, uint8."""
        return self._within(self._rings[slot.ring], self.rings[slot.ring].slot_bytes, slot, what)

    def _place_bytes(self, place: Place, what: str) -> Tensor:
        """The same on the host."""
        return self._within(self._regions[place.region], self.regions[place.region].place_bytes, place, what)

    def _run_of(self, ring: str, what: str, first: int, n: int) -> Tensor:
        """Items of one part in neighbouring slots, as one tensor: the first dimension is theirs together."""
        (part,), size = self.layout.parts[what], self.rings[ring].slot_bytes
        if size != part.n_bytes:
            raise ValueError(f"slots of {ring} have {size} bytes, {what} {part.n_bytes}: neighbours are not one tensor")
        memory = self._rings[ring][first * size : (first + n) * size]
        return memory.view(part.dtype).view(n * part.shape[0], *part.shape[1:])

    def _within(self, memory: Tensor, size: int, where: Slot | Place, what: str) -> Tensor:
        n_bytes = self.layout.n_bytes(what)
        if n_bytes > size:
            raise ValueError(f"{what} has {n_bytes} bytes, {where} {size}")
        return memory[where.index * size : where.index * size + n_bytes]


def _piece(slab: Slab, n_bytes: int) -> Tensor:
    return slab.take((n_bytes,), torch.uint8)
