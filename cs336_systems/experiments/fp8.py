"""What do matmuls in fp8 gain in a block, and how accurate are gradients? With torchao's float8.

At each shape the ways are interleaved in one process, on the same weights and data. The gradients of a block are
compared, tensor by tensor, with those of fp32 on a short sequence (``block_measure.py``). A CPU emulates fp8: its times
say nothing of a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cs336_systems.config import FP8_QUANTUM, WRITTEN_OUT_ATTENTIONS, ModelConfig, Recipe, resolve_size
from cs336_systems.costs.kept import kept_names
from cs336_systems.declared import like, option, options_of
from cs336_systems.experiments.blocks import BlockCell
from cs336_systems.experiments.driver import Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.options import every, resolved_sizes
from cs336_systems.experiments.peers import Peer, PeerRun, interleaved
from cs336_systems.report.results import MAIN, Column, Line, ResultTable, Spread
from cs336_systems.report.tables import Table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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
    """One block of a shape, computed in one way; the fields are columns."""

    device: str
    part: str = "block"
    """In earlier rows also product: one of the block's matmuls by itself, which ``product`` names."""
    product: str = ""
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
        return f"block of {self.size} {self.batch_size} x {self.context_length} {self.how}"


CPU = {
    **{"size": ("tiny",), "context_length": (128,), "batch_size": (1,), "dtype": "fp32", "attention": "reference"},
    **{"how": tuple(RECIPES)[:3], "warmup": 1, "steps": 3, "repeat": 1},
}
"""Defaults there, where compiling takes half a minute."""
Options: Any = options_of(Fp8Cell, PeerRun, cpu=CPU, repeat=2)


def make_cells(options: Any) -> list[Fp8Cell]:
    """The grid: at each shape all ways interleaved."""
    kept_names(options.keep)
    if options.attention != "reference" and options.device != "cuda":
        raise ValueError(f"--attention {options.attention} needs --device cuda, got {options.device}")
    cells = every(Fp8Cell, options, size=resolved_sizes(options.size, options.context_length))
    for cell in cells:
        config = cell.config
        odd = [n for n in (cell.tokens, config.d_model, config.d_query, config.d_kv, config.d_ff) if n % FP8_QUANTUM]
        if odd and cell.how not in ("stored", "compiled"):
            taken = f"matmuls in fp8 take sizes that {FP8_QUANTUM} divides"
            raise ValueError(f"--how {cell.how}: {taken}, {cell} has {odd[0]}")
    return interleaved(cells, options.repeat)


def _speedup(line: Line) -> Spread | None:
    """The time of the stored way over this one's, turn by turn."""
    stored = line.peer(how="stored")
    return None if stored is None else stored.repeats_over("step", line)


BLOCK_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "dtype", "attention", "keep", "how"),
        *("warmup", "steps"),
    ),
    always=("how",),
    columns=(
        Column("forward ms", "forward"),
        Column("backward ms", "backward"),
        Column("both ms", "step", spread=True, rank=MAIN),
        Column(
            "x", _speedup, ".3f", rank=MAIN, note="speed-up over unquantized products; median and range over repeats"
        ),
        Column("TFLOP/s", "tflops", ".0f", little=True),
        Column(
            "least cosine",
            "least_cosine",
            ".4f",
            note="smallest cosine of any gradient with its fp32 gradient, on a short sequence",
        ),
        Column("mean cosine", "mean_cosine", ".4f"),
        Column("kept GiB", "kept", ".2f", rank=2, optional=True, note="kept for backward", little=True),
        Column("peak GiB", "peak", ".1f", rank=3, optional=True, little=True),
    ),
)


def table(rows: pd.DataFrame) -> Table:
    """A line for each way; above those of a CPU stands that it emulates fp8."""
    found = BLOCK_TABLE.of(rows)
    emulated = "A CPU emulates fp8: these times say nothing of a GPU's. " if "cpu" in set(rows["device"]) else ""
    return replace(found, caption=emulated + found.caption)


def time_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each shape: milliseconds of forward and backward, a bar for each way; None without rows."""
    from cs336_systems.report.figures import OKABE_ITO, panels

    rows = rows[(rows["status"] == "ok") & (rows["part"] == "block")]
    found: dict[str, list[Line]] = {}
    for line in BLOCK_TABLE.lines(rows):
        title = f"{line.settings['size']}, {line.settings['batch_size']} x {line.settings['context_length']} tokens"
        found.setdefault(title, []).append(line)
    if not found:
        return None
    figure, shown = panels(len(found), len(found), 4.2, 0.4 * max(map(len, found.values())) + 1, sharey=True)
    for axes, (title, own) in zip(shown, found.items(), strict=True):
        names = [line.settings["how"] for line in own]
        forward, backward = ([line.median(phase) or 0.0 for line in own] for phase in ("forward", "backward"))
        axes.barh(names, forward, color=OKABE_ITO[0], height=0.7, label="forward")
        axes.barh(names, backward, left=forward, color=OKABE_ITO[5], height=0.7, label="backward")
        axes.set(title=title, xlabel="ms")
    shown[0].invert_yaxis()
    figure.legend(*shown[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(f"A block on {rows.iloc[0]['gpu'] or rows.iloc[0]['device']}", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    "benchmark_fp8",
    Fp8Cell,
    make_cells,
    one_stage(measured_by("block_measure", "measure_fp8"), share=lambda cell: cell.subject),
    presented(table),
    ("forward", "backward", "step", "tflops", "least_cosine", "mean_cosine"),
    options=Options,
)
