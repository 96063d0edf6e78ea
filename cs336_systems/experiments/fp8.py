"""What do matmuls in fp8 gain, what does quantizing cost, and how accurate are gradients? With torchao's float8.

At each shape the ways are interleaved in one process, on the same weights and data. The gradients of a block are
compared, tensor by tensor, with those of fp32 on a short sequence (``block_measure.py``). A CPU emulates fp8: its times
say nothing of a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cs336_systems.config import WRITTEN_OUT_ATTENTIONS, ModelConfig, Recipe, resolve_size
from cs336_systems.costs.kept import kept_names
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.blocks import BlockCell
from cs336_systems.experiments.driver import Experiment, one_stage, presented
from cs336_systems.experiments.options import every, resolved_sizes
from cs336_systems.experiments.peers import Peer, PeerRun, interleaved
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from cs336_systems.harness.record import Metric
    from cs336_systems.report.tables import Table

PARTS = ("product", "block")
PRODUCTS = ("qkv", "output", "gate_up", "down")

RECIPES = {
    "stored": Recipe(),
    "e4m3": Recipe("e4m3"),
    "e4m3-e5m2": Recipe("e4m3", "e5m2"),
    "e4m3-row": Recipe("e4m3", scaling="row"),
    "e4m3-block": Recipe("e4m3", scaling="block"),
}
"""This suite's ways; the others are torch's."""
HOWS = (*RECIPES, "compiled", "torchao-tensorwise", "torchao-rowwise")


@dataclass(frozen=True)
class Fp8Cell(Peer):
    """One matmul or one block of a shape, computed in one way; the fields are columns."""

    device: str
    part: str = option(
        "block",
        "product: forward and backward of each matmul of a block by itself; block: of a whole block.",
        values=PARTS,
        asked=PARTS,
    )
    product: str = option(
        "",
        "Matmuls for the part product: q | k | v, attention's output, gate | up, down. Empty in rows of a block.",
        values=PRODUCTS,
        asked=PRODUCTS,
    )
    size: str = like(BlockCell, "size", plain="llama3-8b")
    batch_size: int = like(BlockCell, "batch_size", plain=2)
    context_length: int = like(BlockCell, "context_length", plain=8192)
    dtype: str = like(
        BlockCell, "dtype", help="Dtype of weights and activations; a CPU emulates fp8 in either.", several=False
    )
    attention: str = option(
        "hopper",
        "Attention of the blocks. With reference, our blocks run all operations in plain PyTorch, else in fused "
        "kernels.",
        values=WRITTEN_OUT_ATTENTIONS,
        several=False,
    )
    keep: str = option("products", "What this suite's blocks keep for backward.", several=False)
    how: str = option(
        "stored",
        "This suite's: stored, matmuls in --dtype; e4m3 with one scale per tensor, also with gradients in e5m2, with "
        "scales by row, or by block. Torch's, compiled: in --dtype, and torchao's float8 with one scale per tensor or "
        "row.",
        values=HOWS,
        asked=HOWS,
    )
    warmup: int = like(BlockCell, "warmup")
    steps: int = like(BlockCell, "steps", plain=20)
    repeat: int = 0
    seed: int = 0

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of one of this suite's ways."""
        return RECIPES.get(self.how)

    @property
    def config(self) -> ModelConfig:
        return resolve_size(self.size).at_context(self.context_length)

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context_length

    def __str__(self) -> str:
        what = f"{self.part} {self.product}".strip()
        return f"{what} of {self.size} {self.batch_size} x {self.context_length} {self.how}"


CPU = {
    **{"size": ("tiny",), "context_length": (128,), "batch_size": (1,), "dtype": "fp32", "attention": "reference"},
    **{"how": tuple(RECIPES)[:3], "warmup": 1, "steps": 3, "repeat": 1},
}
"""Defaults there, where compiling takes half a minute."""
Options: Any = options_of(Fp8Cell, PeerRun, cpu=CPU, repeat=2)


def product_shape(config: ModelConfig, product: str) -> tuple[int, int]:
    """(outputs, inputs) of a product's weight."""
    return {
        "qkv": (config.d_qkv, config.d_model),
        "output": (config.d_model, config.d_query),
        "gate_up": (2 * config.d_ff, config.d_model),
        "down": (config.d_model, config.d_ff),
    }[product]


def make_cells(options: Any) -> list[Fp8Cell]:
    """The grid: at each shape all ways interleaved.

    Raises:
        ValueError: a value that no cell can have.
    """
    kept_names(options.keep)
    if options.attention != "reference" and options.device != "cuda":
        raise ValueError(f"--attention {options.attention} needs --device cuda, got {options.device}")
    grid = every(Fp8Cell, options, size=resolved_sizes(options.size, options.context_length))
    cells = list(dict.fromkeys(replace(cell, product="") if cell.part == "block" else cell for cell in grid))
    for cell in cells:
        config = cell.config
        odd = [n for n in (cell.tokens, config.d_model, config.d_query, config.d_kv, config.d_ff) if n % 16]
        if odd and cell.how not in ("stored", "compiled"):
            raise ValueError(f"--how {cell.how}: matmuls in fp8 take sizes that 16 divides, {cell} has {odd[0]}")
    return interleaved(cells, options.repeat)


def measure(cell: Fp8Cell) -> list[Metric]:
    """Time and rate of one matmul or block, and the cosines of a block's gradients."""
    from cs336_systems.experiments.block_measure import measure_fp8

    return measure_fp8(cell)


_SETTINGS = ("gpu", "device", "size", "batch_size", "context_length", "dtype")


def _speedup(line: Line) -> Spread | None:
    """The time of the stored way over this one's, turn by turn."""
    stored = line.peer(how="stored")
    return None if stored is None else stored.repeats_over("step", line)


_SPEEDUP = Column("x", _speedup, ".3f", rank=MAIN, note="times as fast as stored, of several turns median and range")

PRODUCT_TABLE = ResultTable(
    settings=(*_SETTINGS, "product", "how", "warmup", "steps"),
    always=("product", "how"),
    columns=(
        Column("quantize x ms", "quantize_x", optional=True, note="absmax, and both quantized copies"),
        Column("forward ms", "forward"),
        Column("quantize dy ms", "quantize_dy", optional=True),
        Column("backward ms", "backward", note="both products"),
        Column("all ms", "step", spread=True, rank=MAIN),
        _SPEEDUP,
        Column("TFLOP/s", "tflops", ".0f", little=True),
    ),
)

BLOCK_TABLE = ResultTable(
    settings=(*_SETTINGS, "attention", "keep", "how", "warmup", "steps"),
    always=("how",),
    columns=(
        Column("forward ms", "forward"),
        Column("backward ms", "backward"),
        Column("both ms", "step", spread=True, rank=MAIN),
        _SPEEDUP,
        Column("TFLOP/s", "tflops", ".0f", little=True),
        Column("least cosine", "least_cosine", ".4f", note="of a gradient with that of fp32, on a short sequence"),
        Column("mean cosine", "mean_cosine", ".4f"),
        Column("kept GiB", "kept", ".2f", rank=2, optional=True, note="for backward"),
        Column("peak GiB", "peak", ".1f", rank=3, optional=True),
    ),
)


def tables(rows: pd.DataFrame) -> Iterator[Table]:
    """The matmuls, then the blocks."""
    for part, of_part in (("product", PRODUCT_TABLE), ("block", BLOCK_TABLE)):
        if len(own := rows[rows["part"] == part]):
            table = of_part.of(own)
            emulated = "A CPU emulates fp8: these times say nothing of a GPU's. " if "cpu" in set(own["device"]) else ""
            yield replace(table, caption=emulated + table.caption)


_PHASES = {"forward": 0, "backward": 5, "quantize_x": 1, "quantize_dy": 4}
"""The colour of each phase; in a block quantization is inside forward and backward."""


def time_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each block and each product: milliseconds of its phases, a bar for each way; None without rows."""
    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import OKABE_ITO, panels

    settings = [name for name in (*_SETTINGS, "attention", "keep", "part", "product", "how") if name in rows]
    cells = newest(rows, settings)
    cells = cells[(cells["status"] == "ok") & cells["metric"].isin(_PHASES)].sort_values("part", kind="stable")
    if cells.empty:
        return None
    tokens = (cells["batch_size"] * cells["context_length"]).map("{:,} tokens".format)
    what = cells["product"].where(cells["part"] == "product", "block")
    found = list(cells.groupby(what + "\n" + cells["size"] + ", " + tokens, sort=False))
    figure, shown = panels(len(found), len(found), 2.6, 0.4 * cells["how"].nunique() + 1, sharey=True)
    for axes, (title, own) in zip(shown, found, strict=True):
        ms = own.pivot_table("median", "how", "metric", sort=False).reindex(columns=list(_PHASES)).fillna(0.0)
        left = ms.cumsum(axis=1) - ms
        for phase, colour in _PHASES.items():
            axes.barh(ms.index, ms[phase], left=left[phase], color=OKABE_ITO[colour], height=0.7, label=phase)
        axes.set(title=title, xlabel="ms")
    shown[0].invert_yaxis()
    figure.legend(*shown[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    first = cells.iloc[0]
    figure.suptitle(f"On {first['gpu'] or first['device']}", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    "benchmark_fp8",
    Fp8Cell,
    make_cells,
    one_stage(measure, share=lambda cell: cell.subject),
    presented(tables),
    ("forward", "backward", "step", "tflops", "least_cosine", "mean_cosine"),
    options=Options,
)
