"""Options of ``benchmark_blocks.py``, and its grid. Imports no torch."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from cs336_systems.config import ATTENTIONS, WRITTEN_OUT_ATTENTIONS, ModelConfig, resolve_size
from cs336_systems.costs.kept import LEVELS, kept_names
from cs336_systems.experiments.options import RunOptions, cell_of, resolved_sizes

REFERENCE_BLOCKS = ("eager", "compiled")
"""Ways that run the reference block, whose backward is autograd's."""


@dataclass(frozen=True)
class Options(RunOptions):
    """What does a block cost, written out and compiled?"""

    CPU_DEFAULTS: ClassVar = {
        "size": ("tiny",),
        "context_length": (128,),
        "dtype": ("fp32",),
        "attention": ("reference",),
        "how": ("eager", *LEVELS),  # compiling takes half a minute there
        "warmup": 1,
        "steps": 5,
        "repeat": 1,
    }

    size: tuple[str, ...] = ("leaderboard-8b",)
    """Named model sizes, whose blocks are measured."""
    context_length: tuple[int, ...] = (32_768,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (1,)
    """Sequences per batch."""
    dtype: tuple[Literal["fp32", "bf16"], ...] = ("bf16",)
    """Dtype of weights and activations."""
    attention: tuple[str, ...] = ("hopper",)
    """Implementations, as for benchmark_model.py; written-out blocks have reference (all operations in plain PyTorch),
    flash and hopper (all in fused kernels)."""
    how: tuple[str, ...] = ("compiled", *LEVELS)
    """The reference block, eager or compiled; or what a written-out block keeps for backward: input, attention,
    products, all, or a level without some parts, as all-norm-swiglu."""
    layers: tuple[int, ...] = (1,)
    """Number of blocks in sequence, each with its own weights."""
    warmup: int = 5
    """Unrecorded runs of forward and backward before the recorded ones."""
    steps: int = 30
    """Recorded runs of forward and backward."""
    repeat: int = 3
    """How often each shape is measured, all variants in turns in one process, every second time in reverse order."""


@dataclass(frozen=True)
class BlockCell:
    """Blocks of one shape, run in one way; the fields are columns."""

    device: str
    size: str
    batch_size: int
    context_length: int
    dtype: str
    attention: str
    layers: int
    how: str
    warmup: int
    steps: int
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.how

    @property
    def shape(self) -> "BlockCell":
        """The cell without what takes turns."""
        return replace(self, how="", repeat=0)

    @property
    def config(self) -> ModelConfig:
        return resolve_size(self.size).at_context(self.context_length)

    def __str__(self) -> str:
        blocks = f"{self.layers} blocks of " if self.layers > 1 else ""
        shape = f"{blocks}{self.size} {self.batch_size} x {self.context_length} {self.dtype}"
        return f"{shape} {self.attention} {self.how}"


def make_cells(options: Options) -> list[BlockCell]:
    """The grid: at each shape all ways in turns; attention that a written-out block lacks runs in the others alone.

    Raises:
        ValueError: a value that no cell can have, or no way that has the attention.
    """
    for name in options.attention:
        if name not in ATTENTIONS:
            raise ValueError(f"--attention {name}: known are {', '.join(ATTENTIONS)}")
    for how in options.how:
        if how not in REFERENCE_BLOCKS:
            try:
                kept_names(how)
            except ValueError as error:
                raise ValueError(f"--how {how} is neither {' nor '.join(REFERENCE_BLOCKS)}: {error}") from error
    sizes = resolved_sizes(options.size, options.context_length)
    shapes = itertools.product(
        sizes, options.context_length, options.batch_size, options.dtype, options.attention, options.layers
    )
    cells = []
    for size, context_length, batch_size, dtype, attention, layers in shapes:
        own = {"size": size, "context_length": context_length, "batch_size": batch_size, "dtype": dtype}
        own |= {"attention": attention, "layers": layers}
        hows = [how for how in options.how if how in REFERENCE_BLOCKS or attention in WRITTEN_OUT_ATTENTIONS]
        turns = (hows, hows[::-1])
        cells += [
            cell_of(BlockCell, options, how=how, repeat=repeat, **own)
            for repeat in range(options.repeat)
            for how in turns[repeat % 2]
        ]
    if not cells:
        raise ValueError(
            f"--attention {' '.join(options.attention)}: a written-out block has {', '.join(WRITTEN_OUT_ATTENTIONS)}"
        )
    return cells
