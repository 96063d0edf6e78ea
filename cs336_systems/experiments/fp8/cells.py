"""Options of ``benchmark_fp8.py``, and its grid. Imports no torch."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from cs336_systems.config import WRITTEN_OUT_ATTENTIONS, ModelConfig, Recipe
from cs336_systems.costs.kept import kept_names
from cs336_systems.experiments.options import RunOptions, cell_of, resolved_sizes

Part = Literal["product", "block"]
RecipeName = Literal["stored", "e4m3", "e4m3-e5m2", "e4m3-row", "e4m3-block"]
Product = Literal["qkv", "output", "gate_up", "down"]
How = Literal[
    "stored",
    "e4m3",
    "e4m3-e5m2",
    "e4m3-row",
    "e4m3-block",
    "compiled",
    "torchao-tensorwise",
    "torchao-rowwise",
]

RECIPES = {
    "stored": Recipe(),
    "e4m3": Recipe("e4m3"),
    "e4m3-e5m2": Recipe("e4m3", "e5m2"),
    "e4m3-row": Recipe("e4m3", scaling="row"),
    "e4m3-block": Recipe("e4m3", scaling="block"),
}
"""Ours; the other ways are torch's."""


@dataclass(frozen=True)
class Options(RunOptions):
    """What do matrix products in fp8 gain, and what does quantizing cost?"""

    CPU_DEFAULTS: ClassVar = {
        **{"size": ("tiny",), "context_length": (128,), "batch_size": (1,), "dtype": "fp32", "attention": "reference"},
        **{"how": tuple(RECIPES)[:3], "warmup": 1, "steps": 3, "repeat": 1},  # compiling takes half a minute there
    }

    part: tuple[Part, ...] = get_args(Part)
    """product: forward and backward of each matrix product of a block by itself; block: of a whole block."""
    product: tuple[Product, ...] = get_args(Product)
    """Matrix products for the part product: q | k | v, attention's output, gate | up, down."""
    size: tuple[str, ...] = ("llama3-8b",)
    """Named model sizes, whose blocks are measured."""
    context_length: tuple[int, ...] = (8192,)
    """Tokens per sequence."""
    batch_size: tuple[int, ...] = (2,)
    """Sequences per batch."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Dtype of weights and activations; a CPU emulates fp8 in either."""
    attention: Literal["reference", "flash", "hopper"] = "hopper"
    """Attention of the blocks; reference: all operations in plain PyTorch, else fused kernels (but for compiled
    blocks)."""
    keep: str = "products"
    """What this suite's blocks keep for backward."""
    how: tuple[How, ...] = get_args(How)
    """This suite's: stored, products in --dtype; e4m3 with one scale per tensor, also with gradients in e5m2, with
    scales by row, or by block. Torch's, compiled: in --dtype, and torchao's float8 with one scale per tensor or row."""
    warmup: int = 5
    """Unrecorded runs of forward and backward before the recorded ones."""
    steps: int = 20
    """Recorded runs of forward and backward."""
    repeat: int = 2
    """How often each shape is measured, all variants in turns in one process, every second time in reverse order."""


@dataclass(frozen=True)
class Fp8Cell:
    """One product or one block of a shape, computed in one way; the fields are columns."""

    device: str
    part: str
    product: str
    """Empty for a block."""
    size: str
    batch_size: int
    context_length: int
    dtype: str
    attention: str
    keep: str
    how: str
    warmup: int
    steps: int
    repeat: int
    seed: int

    @property
    def variant(self) -> str:
        return self.how

    @property
    def recipe(self) -> Recipe | None:
        """Of our ways."""
        return RECIPES.get(self.how)

    @property
    def shape(self) -> "Fp8Cell":
        """The cell without what takes turns."""
        return replace(self, how="", repeat=0)

    @property
    def config(self) -> ModelConfig:
        from cs336_systems.config import resolve_size

        return resolve_size(self.size).at_context(self.context_length)

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context_length

    def __str__(self) -> str:
        what = f"{self.part} {self.product}".strip()
        return f"{what} of {self.size} {self.batch_size} x {self.context_length} {self.how}"


def product_shape(config: ModelConfig, product: str) -> tuple[int, int]:
    """(outputs, inputs) of a product's weight."""
    return {
        "qkv": (config.d_qkv, config.d_model),
        "output": (config.d_model, config.d_model),
        "gate_up": (2 * config.d_ff, config.d_model),
        "down": (config.d_model, config.d_ff),
    }[product]


def make_cells(options: Options) -> list[Fp8Cell]:
    """The grid: at each shape all ways in turns.

    Raises:
        ValueError: a value that no cell can have.
    """
    assert options.attention in WRITTEN_OUT_ATTENTIONS
    kept_names(options.keep)
    if options.attention != "reference" and options.device != "cuda":
        raise ValueError(f"--attention {options.attention} needs --device cuda, got {options.device}")
    if "product" not in options.part and options.product != get_args(Product):
        raise ValueError(f"--product {' '.join(options.product)} is of --part product, which is not asked for")
    sizes = resolved_sizes(options.size, options.context_length)
    parts = [(part, product) for part in options.part for product in (options.product if part == "product" else ("",))]
    cells = []
    for size, context, batch, (part, product) in itertools.product(
        sizes, options.context_length, options.batch_size, parts
    ):
        own = {"size": size, "context_length": context, "batch_size": batch, "part": part, "product": product}
        for repeat in range(options.repeat):
            hows = options.how[:: -1 if repeat % 2 else 1]
            cells += [cell_of(Fp8Cell, options, how=how, repeat=repeat, **own) for how in hows]
    for cell in cells:
        odd = [n for n in (cell.tokens, cell.config.d_model, cell.config.d_kv, cell.config.d_ff) if n % 16]
        if odd and cell.how not in ("stored", "compiled"):
            raise ValueError(f"--how {cell.how}: products in fp8 take sizes that 16 divides, {cell} has {odd[0]}")
    return cells
