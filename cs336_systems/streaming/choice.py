"""Memory caps, and what is chosen under them: a plan with its schedule, times and bytes, or that no plan fits."""

import math
from dataclasses import dataclass
from functools import cached_property

from cs336_systems.costs.lanes import LaneTimes
from cs336_systems.costs.streaming import Rates
from cs336_systems.hardware import GIB
from cs336_systems.kernels.host_memory import TABLE_SHARE
from cs336_systems.streaming.plan import Plan
from cs336_systems.streaming.schedule import Schedule

DEVICE_OVERHEAD = int(1.05 * GIB)
"""Of the CUDA context and kernels (measured on an H200: 0.74), cuBLAS's workspaces and what torch reserves unused."""
HOST_OVERHEAD = 3 * GIB
"""By which the process grows beside its slab: the same."""


@dataclass(frozen=True)
class Caps:
    """In bytes; what the process needs beside slots is inside."""

    device: int
    host: int
    device_overhead: int = DEVICE_OVERHEAD
    host_overhead: int = HOST_OVERHEAD
    table_share: float = TABLE_SHARE
    """Of the host's slab, which is pinned: what that takes of the device."""


@dataclass(frozen=True)
class Choice:
    """A plan that fits, and what it should cost."""

    plan: Plan
    schedule: Schedule
    times: LaneTimes
    caps: Caps
    rates: Rates

    @property
    def tokens_per_s(self) -> float:
        return self.plan.tokens / self.times.span

    @property
    def model_flops_per_s(self) -> float:
        """Causal; MFU is its share of the peak."""
        return self.tokens_per_s * self.plan.work.model_flops_per_token()

    @property
    def hardware_flops_per_s(self) -> float:
        """What is computed again counts too: HFU."""
        work = self.plan.work
        flops = sum(work.hardware_flops(str(o.kind), o.chunk, o.level) for o in self.schedule.operations)
        return flops / self.times.span

    @property
    def fits(self) -> bool:
        """Both caps."""
        device, host = sum(self.device_parts.values()), sum(self.host_parts.values())
        return device <= self.caps.device and host <= self.caps.host

    @cached_property
    def device_parts(self) -> dict[str, int]:
        """Bytes on the device, the page tables of the host's slab among what is not torch's."""
        work = self.plan.work
        tables = math.ceil(self.caps.table_share * sum(region.n_bytes for region in self.schedule.regions.values()))
        rings = {ring: self.schedule.rings[ring].n_bytes for ring in self.schedule.rings}
        beside = {"embedding, head": work.fixed_bytes, "temporaries": work.temporary_bytes}
        return beside | {"context, libraries": self.caps.device_overhead + tables} | rings

    @cached_property
    def host_parts(self) -> dict[str, int]:
        """Bytes on the host."""
        regions = {name: region.n_bytes for name, region in self.schedule.regions.items()}
        return {"process": self.caps.host_overhead} | regions


class CapsTooSmallError(ValueError):
    """No plan fits: one sentence on what is short, by how much, and the smallest caps that would do."""
