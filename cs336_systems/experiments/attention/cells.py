"""Options of ``benchmark_attention.py``, and its grids of shapes. Imports no torch."""

import itertools
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import tyro

from cs336_systems.config import ATTENTIONS
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.experiments.options import RunOptions

MATERIALISED = ("reference", "reference-compiled")
VARIANTS = (
    *("full", "causal", "window 256", "document", "prefix-LM", "document & causal"),
    *("causal & ALiBi", "causal & relative bias", "causal & softcap"),
)
VARIANT_IMPLEMENTATIONS = ("flex", "sdpa-dense-mask")
KNOWN = tuple(dict.fromkeys(ATTENTIONS + VARIANT_IMPLEMENTATIONS))
SLOW_ON_A_CPU = "reference-compiled"
"""Its kernels take half a minute to compile there."""

TRAINING_SHAPES = (
    (1, 16, 16_384, 64),
    (1, 32, 16_384, 128),
    (4, 32, 4096, 128),
    (8, 16, 2048, 64),
    (2, 32, 32_768, 128),
)
"""(batch, heads, length, d_head); the first is the 2025 leaderboard's."""

VARIANT_SHAPE = (4, 16, 4096, 64)
CPU_LENGTHS = (256, 1024)
Clock = Literal["harness", "do-bench"]


@dataclass(frozen=True)
class Options(RunOptions):
    """Which attention for these shapes?"""

    CPU_DEFAULTS: ClassVar = {"length": CPU_LENGTHS, "d_head": (64,)}
    timeout: float = 300.0
    grid: tuple[Literal["pytorch", "flash", "training", "variants"], ...] = ("pytorch", "flash")
    """Sets of shapes; see above."""
    impl: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--attention"])] = ()
    """Implementations; by default those that the grid compares, on a CPU without reference-compiled."""
    length: tuple[int, ...] = ()
    """Only these sequence lengths of the grids; by default all."""
    d_head: tuple[int, ...] = ()
    """Only these head dimensions of the grids; by default all."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ()
    """By default fp32 for pytorch, both for flash, bf16 for training and variants."""
    clock: tuple[Clock, ...] = ("harness",)
    """Clock of the times: this suite's, or triton.testing.do_bench with its own warm-up and repetitions."""
    autotune: bool = False
    """Search the tiles of flash again at each shape, list them, and measure with the fastest."""
    repeat: int = 1
    """How often the whole grid is run, so that the implementations are measured in turns at each shape."""


@dataclass(frozen=True)
class AttentionCell:
    """One implementation at one shape; ``heads`` 0 means inputs without a head dimension. The fields are columns."""

    device: str
    grid: str
    impl: str
    dtype: str
    d_head: int
    length: int
    batch_size: int
    heads: int
    causal: bool
    mask: str
    """One of ``VARIANTS``; empty for plain attention, causal or not."""
    clock: Clock
    autotune: bool
    """Whether to search the tiles of flash first."""
    repeat: int
    """Which run of the grid this is."""
    seed: int

    @property
    def variant(self) -> str:
        return self.impl

    @property
    def work(self) -> AttentionWork:
        heads = self.heads or 1
        return AttentionWork(self.batch_size, heads, heads, self.length, self.length, self.d_head, self.causal)

    def __str__(self) -> str:
        heads = f" heads {self.heads}" if self.heads else ""
        mask = f" {self.mask}" if self.mask else ""
        clock = f" by {self.clock}" if self.clock != "harness" else ""
        shape = f"batch {self.batch_size}{heads} length {self.length} d {self.d_head}"
        return f"{self.impl}{mask} {self.dtype} {shape}{clock}"


@dataclass(frozen=True)
class Grid:
    """What a grid compares by default, and at which (batch, heads, length, d_head)."""

    impls: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: list[tuple[int, int, int, int]]
    causal: bool
    masks: tuple[str, ...] = ("",)
    allowed: tuple[str, ...] = ATTENTIONS


GRIDS = {
    "pytorch": Grid(
        MATERIALISED,
        ("fp32",),
        # the handout's five lengths, and on until memory ends
        [(8, 0, n, d) for d in (16, 32, 64, 128) for n in (256, 1024, 4096, 8192, 16_384, 32_768, 65_536)],
        causal=False,
    ),
    "flash": Grid(
        ATTENTIONS,
        ("bf16", "fp32"),
        [(1, 0, 2**power, d) for d in (16, 32, 64, 128) for power in range(7, 17)],
        causal=True,
    ),
    "training": Grid(
        ("flash", "hopper", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex"),
        ("bf16",),
        sorted(TRAINING_SHAPES, key=lambda shape: shape[3]),
        causal=True,
    ),
    "variants": Grid(
        VARIANT_IMPLEMENTATIONS,
        ("bf16",),
        [VARIANT_SHAPE],
        causal=False,
        masks=VARIANTS,
        allowed=VARIANT_IMPLEMENTATIONS,
    ),
}


def make_cells(options: Options) -> list[AttentionCell]:
    """The grids, ordered so that cells which can share a process follow each other.

    Raises:
        ValueError: a value that no cell can have.
    """
    for impl in options.impl:
        if impl not in KNOWN:
            raise ValueError(f"--impl {impl}: known are {', '.join(KNOWN)}")
    if options.device != "cuda" and "do-bench" in options.clock:
        raise ValueError(f"--clock do-bench: triton's do_bench times CUDA devices, got --device {options.device}")
    if options.autotune and options.repeat > 1:
        raise ValueError(f"--autotune searches once, got --repeat {options.repeat}")
    cells = []
    for name in options.grid:
        grid = GRIDS[name]
        usual = [impl for impl in grid.impls if options.device == "cuda" or impl != SLOW_ON_A_CPU]
        impls = [impl for impl in options.impl or usual if impl in grid.allowed]
        for impl, dtype, (batch, heads, length, d_head), mask, clock in itertools.product(
            impls, options.dtype or grid.dtypes, grid.shapes, grid.masks, options.clock
        ):
            if length in (options.length or (length,)) and d_head in (options.d_head or (d_head,)):
                shape = (d_head, length, batch, heads, grid.causal, mask, clock)
                tuned = options.autotune and impl == "flash"
                cells.append(AttentionCell(options.device, name, impl, dtype, *shape, tuned, 0, options.seed))
    if not cells:
        lengths = f", with lengths {', '.join(map(str, options.length))}" if options.length else ""
        raise ValueError(
            f"no cell of --grid {' '.join(options.grid)} has the values asked for{lengths} (a CPU takes "
            f"{' and '.join(map(str, CPU_LENGTHS))} unless --length says more; training and variants have longer ones)"
        )
    return cells if options.repeat == 1 else _in_turns(cells, options.repeat)


def _in_turns(cells: list[AttentionCell], n_repeats: int) -> list[AttentionCell]:
    """Cells that differ in nothing but the implementation follow each other, each time with another one first."""
    peers: dict[AttentionCell, list[AttentionCell]] = {}
    for cell in cells:
        peers.setdefault(replace(cell, impl=""), []).append(cell)
    return [
        replace(group[(repeat + turn) % len(group)], repeat=repeat)
        for repeat in range(n_repeats)
        for group in peers.values()
        for turn in range(len(group))
    ]
