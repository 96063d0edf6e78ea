"""Which attention for these shapes? Time, memory and error of every implementation, and the limit.

Grids: ``pytorch``, the handout's first (batch 8, no head dimension, plain and compiled); ``flash``, its second (batch
1, causal, every implementation); ``training``, the shapes at which training runs; ``variants``, masks and score
modifications, FlexAttention against torch's attention with a dense mask. ``attention_measure.py`` describes how a cell
is measured.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cs336_systems.config import ATTENTIONS
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.declared import flag, option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.peers import Peer, PeerRun, interleaved
from cs336_systems.report.results import MAIN, MISSING, Column, ResultTable
from cs336_systems.report.tables import Table, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MATERIALISED = ("reference", "reference-compiled")
VARIANTS = (
    *("full", "causal", "window 256", "document", "prefix-LM", "document & causal"),
    *("causal & ALiBi", "causal & relative bias", "causal & softcap"),
)
VARIANT_IMPLEMENTATIONS = ("flex", "sdpa-dense-mask")
FLASH_4 = "flash-attn-4"
"""FlashAttention-4 for Hopper, in CuTe DSL, of the package of that name: a peer, which no model here can choose.
FlashAttention-3 is none, as PyPI had no wheel of it for this torch in November 2026."""
SLOW_ON_A_CPU = "reference-compiled"
"""An implementation whose kernels take half a minute to compile there."""
CPU_LENGTHS = (256, 1024)
Clock = Literal["harness", "do-bench", "device"]


@dataclass(frozen=True)
class AttentionCell(Peer):
    """One implementation at one shape; the fields are columns.

    ``heads`` 0 means inputs without a head dimension, ``kv_heads`` 0 as many as ``heads``.
    """

    WAY = "impl"
    device: str
    grid: str = option(
        "pytorch",
        "Sets of shapes, described above.",
        values=("pytorch", "flash", "training", "variants"),
        asked=("pytorch", "flash"),
    )
    impl: str = option(
        "",
        "Implementations; by default those that the grid compares, on a CPU without reference-compiled.",
        values=tuple(dict.fromkeys((*ATTENTIONS, FLASH_4, *VARIANT_IMPLEMENTATIONS))),
        asked=(),
        aliases=("--attention",),
    )
    dtype: str = option(
        "bf16",
        "By default fp32 for pytorch, both for flash, bf16 for training and variants.",
        values=("fp32", "bf16"),
        asked=(),
    )
    d_head: int = option(0, "Only these head dimensions of the grids; by default all.", asked=(), sign="positive")
    length: int = option(0, "Only these sequence lengths of the grids; by default all.", asked=(), sign="positive")
    batch_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    causal: bool = False
    mask: str = ""
    """One of ``VARIANTS``; empty for plain attention, causal or not."""
    clock: Clock = option(
        "harness",
        "Clock of the times: this suite's; triton.testing.do_bench with its own warm-up and repetitions; or device, "
        "this suite's with the GPU waiting until the host has launched all, so that kernels alone are timed.",
    )
    autotune: bool = False
    """A column of rows that are there: earlier commands could search for the tiles of flash."""
    repeat: int = 0
    """The number of this run of the grid."""
    seed: int = 0

    @property
    def work(self) -> AttentionWork:
        heads = self.heads or 1
        sizes = (self.batch_size, heads, self.kv_heads or heads, self.length, self.length, self.d_head)
        return AttentionWork(*sizes, self.causal)

    def __str__(self) -> str:
        heads = f" heads {heads_of(self.heads, self.kv_heads)}" if self.heads else ""
        mask = f" {self.mask}" if self.mask else ""
        clock = f" by {self.clock}" if self.clock != "harness" else ""
        shape = f"batch {self.batch_size}{heads} length {self.length} d {self.d_head}"
        return f"{self.impl}{mask} {self.dtype} {shape}{clock}"


Options: Any = options_of(AttentionCell, PeerRun, cpu={"length": CPU_LENGTHS, "d_head": (64,)})


@dataclass(frozen=True)
class Grid:
    """The implementations that a grid compares by default, and the shapes (batch, heads, kv_heads, length, d_head)."""

    impls: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: list[tuple[int, int, int, int, int]]
    causal: bool
    masks: tuple[str, ...] = ("",)
    allowed: tuple[str, ...] = (*ATTENTIONS, FLASH_4)


GRIDS = {
    "pytorch": Grid(
        MATERIALISED,
        ("fp32",),
        # the handout's five lengths, and on until memory ends
        [(8, 0, 0, n, d) for d in (16, 32, 64, 128) for n in (256, 1024, 4096, 8192, 16_384, 32_768, 65_536)],
        causal=False,
    ),
    "flash": Grid(
        ATTENTIONS,
        ("bf16", "fp32"),
        [(1, 0, 0, 2**power, d) for d in (16, 32, 64, 128) for power in range(7, 17)],
        causal=True,
    ),
    "training": Grid(
        ("flash", "hopper", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", FLASH_4),
        ("bf16",),
        [
            *((1, 16, 0, 16_384, 64), (8, 16, 0, 2048, 64), (32, 14, 0, 1024, 64)),  # the first: 2025's leaderboard
            *((1, 32, 0, 16_384, 128), (4, 32, 0, 4096, 128), (2, 32, 0, 32_768, 128), (1, 64, 8, 16_384, 128)),
        ],
        causal=True,
    ),
    "variants": Grid(
        *(VARIANT_IMPLEMENTATIONS, ("bf16",), [(4, 16, 0, 4096, 64)]),
        causal=False,
        masks=VARIANTS,
        allowed=VARIANT_IMPLEMENTATIONS,
    ),
}


def make_cells(options: Any) -> list[AttentionCell]:
    """The grids, ordered so that cells which can share a process follow each other."""
    if options.device != "cuda" and (gpus := {"do-bench", "device"}.intersection(options.clock)):
        raise ValueError(f"--clock {min(gpus)} times CUDA devices, got --device {options.device}")
    cells = []
    for name in options.grid:
        grid = GRIDS[name]
        usual = [impl for impl in grid.impls if options.device == "cuda" or impl != SLOW_ON_A_CPU]
        impls = [impl for impl in options.impl or usual if impl in grid.allowed]
        for impl, dtype, (batch, heads, kv_heads, length, d_head), mask, clock in itertools.product(
            impls, options.dtype or grid.dtypes, grid.shapes, grid.masks, options.clock
        ):
            if length in (options.length or (length,)) and d_head in (options.d_head or (d_head,)):
                shape = (d_head, length, batch, heads, kv_heads, grid.causal, mask, clock)
                cells.append(AttentionCell(options.device, name, impl, dtype, *shape, seed=options.seed))
    _check_values(options, cells)
    return sorted(interleaved(cells, options.repeat), key=lambda cell: (options.grid.index(cell.grid), cell.dtype))


def _check_values(options: Any, cells: list[AttentionCell]) -> None:
    """Raise ValueError for a length or head dimension that no grid has; the message says which they have."""
    shapes = [shape for name in options.grid for shape in GRIDS[name].shapes]
    for name, index in (("length", 3), ("d_head", 4)):
        there = sorted({shape[index] for shape in shapes})
        if missing := [value for value in getattr(options, name) if value not in there]:
            grids, values = " ".join(options.grid), ", ".join(map(str, there))
            usual = " (a CPU takes 256 and 1024 if not told)" if getattr(options, name) == CPU_LENGTHS else ""
            raise ValueError(f"{flag(name)} {missing[0]}: --grid {grids} has {values}{usual}")
    if not cells:
        raise ValueError(f"no cell of --grid {' '.join(options.grid)} has the values asked for, together")


PASSES = ("forward", "backward", "both")
SETTINGS = (
    *("gpu", "device", "grid", "dtype", "batch_size", "heads", "kv_heads", "d_head", "length", "causal", "mask"),
    *("impl", "clock"),
)
"""Columns that tell one cell from another."""


def by_clock(rows: pd.DataFrame, clock: Clock = "harness") -> pd.DataFrame:
    """The rows whose times one clock took: what is compared."""
    return rows[rows["clock"] == clock]


ATTENTION = ResultTable(
    settings=SETTINGS,
    always=("impl",),
    columns=(
        *(Column(f"{name} ms", name, rank=MAIN if name == "both" else 1) for name in PASSES),
        *(Column(f"{name} TFLOP/s", f"{name}_tflops", rank=1 if name == "both" else 2) for name in PASSES),
        Column("scores seen %", "seen_scores", optional=True, rank=2),
        Column("blocks skipped %", "skipped_blocks", optional=True, rank=2),
        Column("mask GiB", "mask_memory", optional=True, rank=2),
        Column("kept GiB", "kept_for_backward", note="memory kept by forward for backward", rank=2),
        Column("peak GiB", "peak_memory"),
        Column("predicted GiB", "predicted_peak_memory", rank=3),
        Column(
            *("largest error", lambda line: line.largest("error_"), ".1e"),
            rank=2,
            note="largest relative error of output and gradients",
        ),
    ),
)
"""Time, rate, memory and largest error of every cell of ``benchmark_attention.py`` rows; failures as they are."""


def tables(rows: pd.DataFrame) -> list[Table]:
    return [ATTENTION.of(own) for _, own in rows.groupby("grid", sort=False)]


EXPERIMENT = Experiment(
    "benchmark_attention",
    AttentionCell,
    make_cells,
    one_stage(
        measured_by("attention_measure"),
        # More processes would compile anew for each shape. What a cell still holds counts in no later one's peak.
        share=lambda cell: (cell.grid, cell.dtype),
    ),
    presented(tables),
    ("forward", "backward", "both", "both_tflops", "peak_memory"),
    options=Options,
)


_SHAPE = ["batch_size", "heads", "kv_heads", "length", "d_head"]
_ERRORS = {"forward": ("error_o",), "backward": ("error_dq", "error_dk", "error_dv")}


def heads_of(heads: int, kv_heads: int) -> str:
    """Return the query heads, followed by a slash and the key/value heads if these are fewer."""
    return f"{heads}/{kv_heads}" if kv_heads not in (0, heads) else str(heads)


def comparison_table(rows: pd.DataFrame, ours: str = "flash", clock: Clock = "harness", errors: bool = False) -> Table:
    """Return times of ``ours`` for forward, backward and both at each shape, and others' ratios in the same repeats.

    A failed implementation shows its status. With ``errors`` each has a column with its largest error: of the output in
    forward, of the gradients in backward.
    """
    times = _times(rows, _SHAPE, clock)
    over = times.div(times[ours], axis=0).drop(columns=ours).add_suffix(f" / {ours}")
    every = over.assign(own=times[ours]).groupby(level=[*_SHAPE, "metric"], sort=False).median()
    ratios = every.drop(columns="own").map("{:.2f}".format)
    ratios.insert(0, f"{ours} ms", every["own"].map(digits))
    others = by_clock(rows, clock)
    others = others[(others["status"] != "ok") & (others["impl"] != ours)]
    for (impl, *shape), failed in others.groupby(["impl", *_SHAPE], sort=False):
        header, status = f"{impl} / {ours}", failed["status"].iloc[-1]
        before = ratios[header] if header in ratios else [MISSING] * len(ratios)
        ratios[header] = [
            status if cell[:-1] == tuple(shape) and ratio in ("nan", MISSING) else ratio
            for cell, ratio in zip(ratios.index, before, strict=True)
        ]
    if errors:
        found = _newest(rows, _SHAPE, clock)
        passes = {name: found[found["metric"].isin(metrics)] for name, metrics in _ERRORS.items()}
        passes["both"] = found[found["metric"].isin(sum(_ERRORS.values(), ()))]
        for impl in dict.fromkeys(by_clock(rows, clock)["impl"]):
            largest = {
                (*shape, name): value
                for name, own in passes.items()
                for shape, value in own[own["impl"] == impl].groupby(_SHAPE)["median"].max().items()
            }
            ratios[f"{impl} error"] = [f"{largest[cell]:.1e}" if cell in largest else MISSING for cell in ratios.index]
    table = ratios.reset_index()
    table.insert(1, "all_heads", [*map(heads_of, table["heads"], table["kv_heads"])])
    names = {"batch_size": "batch", "all_heads": "heads", "d_head": "d", "metric": "pass"}
    return Table("", table.drop(columns=["heads", "kv_heads"]).rename(columns=names))


def time_over(rows: pd.DataFrame, metric: str, impl: str, ours: str) -> float:
    """The time of ``impl`` over that of ``ours`` in a pass at one shape: the median over the repeats of newest runs.

    Raises:
        KeyError: the rows do not hold them.
    """
    times = _times(rows[rows["metric"] == metric], [])
    return float((times[impl] / times[ours]).median())


def _times(rows: pd.DataFrame, shape: list[str], clock: Clock = "harness") -> pd.DataFrame:
    """Milliseconds by shape, pass and repeat (lines) and implementation (columns), of newest runs."""
    from cs336_systems.harness.runs import repeats

    runs = _newest(rows, shape, clock)
    runs = runs[runs["metric"].isin(PASSES)]
    index = [*shape, "metric", "repeat"]
    return runs.assign(repeat=repeats(runs)).pivot_table("median", index, "impl", sort=False)


def _newest(rows: pd.DataFrame, shape: list[str], clock: Clock) -> pd.DataFrame:
    """The newest run of each implementation's metrics at each shape, of those that were measured."""
    import pandas as pd

    from cs336_systems.harness.runs import newest_run

    own = by_clock(rows, clock)
    own = own[own["status"] == "ok"]
    return pd.concat([newest_run(cell) for _, cell in own.groupby([*shape, "impl", "metric"], sort=False)])


def account_table(work: AttentionWork, bytes_per_element: int) -> Table:
    """The bytes of materialised attention at its peak, tensor by tensor, eager and compiled."""
    scores, inputs = work.n_scores * bytes_per_element, work.tensor_bytes(bytes_per_element)
    eager, compiled = (work.materialised_bytes(bytes_per_element, compiled=how) for how in (False, True))
    lines = [
        ("one score matrix", scores, scores),
        ("score matrices at the height of backward", 4 * scores, 2 * scores),
        ("q, k, v, o and their gradients", inputs, inputs),
        ("scaled queries, mask", eager - 4 * scores - inputs, compiled - 2 * scores - inputs),
        ("all", eager, compiled),
    ]
    lines_gib = [(what, digits(a / 2**30), digits(b / 2**30)) for what, a, b in lines]
    shape = f"Batch {work.batch_size}, {work.heads} head, length {work.n_queries:,}, d {work.d_head}; GiB."
    return Table.of(shape, ("tensor", "eager", "compiled"), lines_gib)


_PANELS = {"both": "forward and backward, ms (median)", "kept_for_backward": "kept by forward for backward, GiB"}


def scaling_figure(rows: pd.DataFrame) -> Figure | None:
    """Milliseconds of forward and backward, and GiB kept between them, against length.

    Args:
        rows: of ``benchmark_attention.py``, all of one dtype, batch, number of heads and head dimension.

    Raises:
        ValueError: rows of several dtypes or shapes.
    """
    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import lines

    settings = ["gpu", "device", "dtype", "batch_size", "heads", "d_head", "causal"]
    cells = newest(by_clock(rows), [*settings, "length", "impl"])
    ran = cells[(cells["status"] == "ok") & cells["metric"].isin(_PANELS)].sort_values(["metric", "length"])
    if ran.empty:
        return None
    if len(shapes := ran[settings].drop_duplicates()) > 1:
        raise ValueError(f"a figure of attention against length takes one shape, got {shapes.to_dict('records')}")
    figure, axes = lines(ran, x="length", colour="impl", panel="metric", log="xy")
    for metric, panel in axes.items():
        panel.set_ylabel(_PANELS[metric])
    ended = cells[cells["status"].isin(("oom", "predicted-oom"))].groupby("impl", sort=False)["length"].min()
    said = ", ".join(f"{impl} from {length:,}" for impl, length in ended.items())
    figure.supxlabel("sequence length, tokens" + (f"\n(no memory for {said})" if said else ""), fontsize=10)
    first = ran.iloc[0]
    heads, causal = f", {first['heads']} heads" * bool(first["heads"]), ", causal" * bool(first["causal"])
    shape = f"batch {first['batch_size']}{heads}, d {first['d_head']}, {first['dtype']}{causal}"
    figure.suptitle(f"Attention on {first['gpu'] or first['device']}: {shape}", fontsize=11)
    return figure
