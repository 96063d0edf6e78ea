"""Options of ``benchmark_sharded_optimizer.py``, and its grid, the ways to hold state innermost. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from cs336_systems.case import Parallel
from cs336_systems.costs.sharding import DEFAULT_BUCKET_SIZE_MB
from cs336_systems.experiments.options import RankedCase, RankedOptions, RankedRun, training_cells

Sharding = Literal["replicated", "owned", "scattered", "torch-zero"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)


@dataclass(frozen=True)
class Options(RankedOptions):
    """What does sharding the optimizer state save, and what does it cost?"""

    CPU_DEFAULTS = RankedRun.CPU_DEFAULTS | {"bucket_size_mb": (0.1,), "warmup": 1, "steps": 5}
    size: tuple[str, ...] = ("xl",)
    dtype: tuple[Literal["fp32", "tf32", "bf16", "autocast-bf16"], ...] = ("fp32",)
    warmup: int = 5
    """Steps before the timed ones, in addition to two in which memory is read."""
    timeout: float = 600.0
    sharding: tuple[Sharding, ...] = SHARDINGS
    """Where the optimizer state is held: replicated, owned, scattered, torch-zero."""
    bucket_size_mb: tuple[float, ...] = (DEFAULT_BUCKET_SIZE_MB,)
    """MiB of the buckets in which gradients and parameters are sent (torch-zero sends parameters in one per rank)."""


@dataclass(frozen=True)
class ShardingCell(RankedCase):
    """One way to hold the state of one model; the fields are columns, sizes are per rank."""

    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB
    sharding: str = "replicated"

    @property
    def variant(self) -> str:
        return self.sharding

    @property
    def parallel(self) -> Parallel:
        """``scattered`` reduces gradients itself; the others leave that to ``BucketedDDP``."""
        wrapper = "none" if self.sharding == "scattered" else "bucketed"
        return Parallel(wrapper, optimizer_state=self.sharding, bucket_size_mb=self.bucket_size_mb)

    def __str__(self) -> str:
        return f"{self.sharding} on {self.world_size} ranks: {super().__str__()}"


def make_cells(options: Options) -> list[ShardingCell]:
    """The grid; raises ValueError for a value that no cell can have."""
    ways = [{"bucket_size_mb": mb, "sharding": way} for mb in options.bucket_size_mb for way in options.sharding]
    return training_cells(ShardingCell, options, inner=ways)
