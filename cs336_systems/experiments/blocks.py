"""What does a Transformer block cost, written out at each choice of what it keeps, against the compiled one?

At each shape the ways are interleaved in one process, on the same weights and data (``block_measure.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.config import ATTENTIONS, WRITTEN_OUT_ATTENTIONS, ModelConfig, resolve_size
from cs336_systems.costs.kept import LEVELS, kept_names
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.options import every, resolved_sizes
from cs336_systems.experiments.peers import Peer, PeerRun, interleaved
from cs336_systems.report.results import MAIN, Column, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

REFERENCE_BLOCKS = ("eager", "compiled")
"""Ways that run the reference block, whose backward is autograd's."""


@dataclass(frozen=True)
class BlockCell(Peer):
    """Blocks of one shape, run in one way; the fields are columns."""

    device: str
    size: str = option("leaderboard-8b", "Named model sizes, whose blocks are measured.")
    batch_size: int = option(1, "Sequences per batch.", sign="positive")
    context_length: int = option(32_768, "Tokens per sequence.", sign="positive")
    dtype: str = option("bf16", "Dtype of weights and activations.", values=("fp32", "bf16"))
    attention: str = option(
        "hopper",
        "Attention, as for benchmark_model.py. Blocks with a hand-written backward take reference (all operations in "
        "plain PyTorch), flash and hopper (all in fused kernels).",
        values=ATTENTIONS,
    )
    layers: int = option(1, "Number of blocks in sequence, each with its own weights.", sign="positive")
    how: str = option(
        "compiled",
        "The reference block, eager or compiled; or what a block with a hand-written backward keeps: input, attention, "
        "products, all, or a level without some parts, as all-norm-swiglu.",
        asked=("compiled", *LEVELS),
    )
    warmup: int = option(
        5, "Unrecorded runs of forward and backward before the recorded ones.", several=False, sign="not negative"
    )
    steps: int = option(30, "Recorded runs of forward and backward.", several=False, sign="positive")
    repeat: int = 0
    seed: int = 0

    @property
    def config(self) -> ModelConfig:
        return resolve_size(self.size).at_context(self.context_length)

    def __str__(self) -> str:
        blocks = f"{self.layers} blocks of " if self.layers > 1 else ""
        shape = f"{blocks}{self.size} {self.batch_size} x {self.context_length} {self.dtype}"
        return f"{shape} {self.attention} {self.how}"


CPU = {
    **{"size": ("tiny",), "context_length": (128,), "dtype": ("fp32",), "attention": ("reference",)},
    **{"how": ("eager", *LEVELS), "warmup": 1, "steps": 5, "repeat": 1},
}
"""Defaults there, where compiling takes half a minute."""
Options: Any = options_of(BlockCell, PeerRun, cpu=CPU, repeat=3)


def make_cells(options: Any) -> list[BlockCell]:
    """The grid: at each shape all ways interleaved; attention that a written-out block lacks runs in the others alone.

    Raises:
        ValueError: a value that no cell can have, or no way that has the attention.
    """
    for how in options.how:
        if how not in REFERENCE_BLOCKS:
            try:
                kept_names(how)
            except ValueError as error:
                raise ValueError(f"--how {how} is neither {' nor '.join(REFERENCE_BLOCKS)}: {error}") from error
    cells = [
        cell
        for cell in every(BlockCell, options, size=resolved_sizes(options.size, options.context_length))
        if cell.how in REFERENCE_BLOCKS or cell.attention in WRITTEN_OUT_ATTENTIONS
    ]
    if not cells:
        raise ValueError(
            f"--attention {' '.join(options.attention)}: a written-out block has {', '.join(WRITTEN_OUT_ATTENTIONS)}"
        )
    return interleaved(cells, options.repeat)


BLOCK_TABLE = ResultTable(
    settings=(
        *("gpu", "device", "size", "batch_size", "context_length", "dtype", "attention", "layers", "how"),
        *("warmup", "steps"),
    ),
    always=("size", "how"),
    labels={"how": "block"},
    columns=(
        Column("forward ms", "forward"),
        Column("backward ms", "backward"),
        Column("both ms", "step", spread=True, rank=MAIN, note="forward and backward of all layers"),
        Column(
            "/ compiled",
            lambda line: line.repeats_over("step", line.peer(how="compiled")),
            ".3f",
            rank=MAIN,
            note="total time / the compiled block's; median and range over repeats",
        ),
        Column("TFLOP/s", "model_tflops", rank=2, note="model FLOPs, causal"),
        Column(
            "kept GiB",
            "kept",
            ".2f",
            note="kept for backward per block, including its input",
            optional=True,
            little=True,
        ),
        Column("predicted GiB", "kept_predicted", ".2f", rank=2, little=True),
        Column(
            "peak GiB", "peak", ".1f", rank=2, note="including weights and their gradients", optional=True, little=True
        ),
        Column("error", "error_out", ".1e", rank=3, note="relative Frobenius norm against fp64, on a short sequence"),
        Column("dx's error", "error_dx", ".1e", rank=3),
        Column("weights' error", "error_dweight", ".1e", rank=3, note="largest of any weight's gradient"),
    ),
)

_SHAPE = ["gpu", "size", "batch_size", "context_length", "dtype"]


def kept_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each shape: milliseconds by block against GiB that it keeps, a point for each way, named.

    Of several attentions or depths at a shape, the one with the most ways is drawn.
    """
    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import lines

    cells = newest(rows, [name for name in BLOCK_TABLE.settings if name in rows])
    cells = cells[cells["status"] == "ok"]
    points = cells.pivot_table("median", [*_SHAPE, "attention", "layers", "how"], "metric", sort=False)
    points = points.reindex(columns=["step", "kept"]).dropna().reset_index()
    if points.empty:
        return None
    n_ways = points.groupby([*_SHAPE, "attention", "layers"])["how"].transform("size")
    points = points[n_ways == n_ways.groupby([points[name] for name in _SHAPE]).transform("max")]
    shape = (
        points["size"]
        + ", "
        + points["batch_size"].astype(str)
        + " x "
        + points["context_length"].map("{:,} tokens".format)
    )
    backward = points["how"].isin(REFERENCE_BLOCKS).map({True: "reference", False: "hand-written backward"})
    points = points.assign(ms=points["step"] / points["layers"], shape=shape, backward=backward).sort_values("kept")
    figure, axes = lines(points, x="kept", y="ms", colour="backward", panel="shape", width=4.2, height=3.6)
    for title, panel in axes.items():
        own = points[points["shape"] == title]
        for point in own.itertuples():
            side, above = ("right", -13) if point.kept > 0.85 * own["kept"].max() else ("left", 6)
            above = 18 if point.how in REFERENCE_BLOCKS else above  # it and all are neighbours
            panel.annotate(
                point.how, (point.kept, point.ms), (0, above), textcoords="offset points", fontsize=8, ha=side
            )
        panel.set(title=title, xlabel="kept by a block for backward, GiB", ylabel="forward and backward of a block, ms")
        panel.set_xlim(0, 1.12 * own["kept"].max())
        panel.set_ylim(0, 1.15 * own["ms"].max())  # from zero, or a tie would look like a gap
    first = points.iloc[0]
    figure.suptitle(f"Blocks on {first['gpu']}, {first['dtype']}", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    "benchmark_blocks",
    BlockCell,
    make_cells,
    one_stage(measured_by("block_measure", "measure_block"), share=lambda cell: cell.subject),
    presented(BLOCK_TABLE.of, {"": kept_figure}),
    ("forward", "backward", "step", "kept", "peak"),
    options=Options,
)
