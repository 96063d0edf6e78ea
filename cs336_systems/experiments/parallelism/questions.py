"""Options of ``parallelism.py``, one class per subcommand. Imports no torch, pandas or matplotlib."""

from dataclasses import dataclass
from pathlib import Path

from cs336_systems.costs.parallelism.failures import FAILURES_PER_1000_NODE_DAYS
from cs336_systems.costs.parallelism.forms import FeedForward
from cs336_systems.costs.parallelism.scaling import LLAMA3_70B


@dataclass(frozen=True)
class Ring:
    """Ring collectives played step by step, and the alternate all-reduce that passes whole tensors."""

    world_size: int = 8
    total_mib: int = 1024
    """Size of the whole tensor, MiB."""
    device: str = "h100"
    """Device whose link the seconds are for."""


@dataclass(frozen=True)
class OneLayer:
    """One feed-forward layer and what it runs on."""

    device: str = "h100"
    world_size: int = 8
    tokens: int = 32_768
    """Tokens of the global batch."""
    d_model: int = 8192
    d_ff: int = 28_672
    n_matrices: int = 3
    """3 for SwiGLU, 2 for the layer of the scaling book."""
    large_rings: bool = False
    """Take (n-1)/n for 1, as the scaling book does."""

    @property
    def layer(self) -> FeedForward:
        return FeedForward(self.d_model, self.d_ff, self.n_matrices)

    def caption(self, egress: float) -> str:
        return (
            f"One layer {self.d_model} x {self.d_ff} of {self.n_matrices} matrices, {self.tokens:,} tokens on "
            f"{self.world_size} x {self.device}, W = {egress / 1e9:g} GB/s egress per device"
        )


@dataclass(frozen=True)
class Forms(OneLayer):
    """Data parallel, FSDP and tensor parallel: FLOPs, bytes, seconds and the largest number of devices."""


@dataclass(frozen=True)
class Mesh(OneLayer):
    """FSDP and tensor parallelism together: the best split, by closed form and by trying all, and the largest mesh."""

    world_size: int = 256
    tokens: int = 2**20


@dataclass(frozen=True)
class Accounting:
    """The 4D question about XXL: memory, the FSDP degree that fits, and the batch that keeps 16 x 4 devices busy."""

    fsdp: int = 16
    tp: int = 4
    fsdp_axes: int = 2
    """M_x: axes of the torus that carry FSDP."""
    tp_axes: int = 1
    """M_y: axes of the torus that carry tensor parallelism."""
    tokens: int = 0
    """Tokens per device whose activations count for the FSDP degree."""


@dataclass(frozen=True)
class Pipeline:
    """Bubble and activations of four pipeline schedules, simulated operation by operation."""

    stages: int = 4
    microbatches: int = 8
    chunks: int = 2
    """Chunks per stage of the interleaved schedule."""
    figure: Path | None = None
    """PNG to draw."""


@dataclass(frozen=True)
class Scaling:
    """Where FSDP of a 70B model stops scaling, and the remedy for each of the four ways in which it can."""

    device: str = "h100"
    parameters: int = LLAMA3_70B.n_parameters
    batch: int = 2**22
    """Tokens of the global batch."""
    context_length: int = 8192
    most_devices: int = 8192
    figure: Path | None = None
    """PNG to draw."""


@dataclass(frozen=True)
class Failures:
    """Time between failures against nodes, and the checkpoint interval that wastes least."""

    nodes: tuple[int, ...] = (8, 64, 512, 2048)
    per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS
    save: float = 60.0
    """Seconds that training stops for a checkpoint."""
    restart: float = 300.0
    """Seconds from a failure until training runs again."""
    figure: Path | None = None
    """PNG to draw."""


@dataclass(frozen=True)
class Devices:
    """The presets, with their sources."""


QUESTIONS = (Ring, Forms, Mesh, Accounting, Pipeline, Scaling, Failures, Devices)
