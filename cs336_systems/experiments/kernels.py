"""How fast is each fused kernel, against plain PyTorch, others' kernels and a copy?

``kernel_subjects.py`` says on what each kernel is measured, beside which formula, and which bytes must move;
``kernel_peers.py`` in which configurations peers run; ``kernel_measure.py`` measures. A kernel takes a function in the
first and its name in ``KERNELS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_systems.config import resolve_size
from cs336_systems.declared import option, options_of
from cs336_systems.experiments.driver import Experiment, measured_by, one_stage, presented
from cs336_systems.experiments.options import RunOptions, every
from cs336_systems.experiments.peers import Peer
from cs336_systems.report.results import MAIN, Column, ResultTable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

KERNELS = (
    *("rms_norm", "add_rms_norm", "swiglu", "rotary"),
    *("cross_entropy", "linear_cross_entropy", "adamw", "grad_norm", "column_sums"),
    *("absmax", "quantize", "quantize.transposed", "quantize_blocks"),
    *("rms_norm_quantize", "swiglu_quantize", "transpose_bytes"),
)
"""Kernels of the package; ``quantize.transposed`` also writes the transposed copy."""

LOSSES = ("cross_entropy", "linear_cross_entropy")
"""Kernels that take long beside their launches, and some of whose peers wait for the device. The bound of the second,
the head and loss, is FLOPs and not bytes."""

PEERS = {
    "torch": ("rms_norm", "adamw", "grad_norm"),
    "torch-foreach": ("adamw",),
    "quack": ("rms_norm", "add_rms_norm", "cross_entropy", "linear_cross_entropy"),
    "liger": ("rms_norm", "add_rms_norm", "swiglu", "rotary", "cross_entropy", "linear_cross_entropy"),
    "liger-large-chunks": ("linear_cross_entropy",),
    "liger-cute": ("rms_norm", "cross_entropy", "linear_cross_entropy"),
    "cut-cross-entropy": ("linear_cross_entropy",),
}
"""By name, the kernels that a peer has."""

HOWS = ("ours", "eager", "compiled", *PEERS)


@dataclass(frozen=True)
class KernelCell(Peer):
    """One kernel computed in one way at one shape; the fields are columns."""

    device: str
    kernel: str = option("", "Kernels to measure; by default all.", values=KERNELS, asked=KERNELS)
    dtype: str = option("bf16", "Dtype of the tensors.", values=("fp32", "bf16"))
    rows: int = option(16384, "Numbers of tokens.", sign="positive")
    width: int = option(
        0,
        "Elements per row, instead of the widths of --size: for swiglu those of its output, for rotary those of all "
        "query heads together, 128 each. For cross_entropy those of --vocabulary stand.",
        asked=(),
        sign="positive",
    )
    vocabulary: int = option(151_936, "Words of cross_entropy and linear_cross_entropy.", sign="positive")
    how: str = option(
        "ours",
        "ours; eager and compiled, the formula in plain PyTorch; torch, its own fused kernel, and torch-foreach; "
        "quack; liger, and liger-cute in CuTe DSL; for the head and loss also Liger's in larger chunks, and Apple's "
        "cut cross entropy with all gradients.",
        values=HOWS,
        asked=HOWS,
    )
    n_samples: int = option(
        50, "Recorded samples of forward and of backward.", several=False, flag="samples", sign="positive"
    )
    seed: int = 0

    def __str__(self) -> str:
        words = f" x {self.vocabulary}" if self.kernel == "linear_cross_entropy" else ""
        return f"{self.kernel} {self.how} {self.dtype} {self.rows} x {self.width}{words}"


@dataclass(frozen=True)
class Asked(RunOptions):
    """How fast is each fused kernel?"""

    size: tuple[str, ...] = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama3-8b", "qwen2.5-14b")
    """Models whose widths are measured: d_ff for swiglu, d_model for the others."""


CPU = {
    **{"how": ("ours", "eager"), "dtype": ("fp32",), "rows": (1024,), "size": ("qwen2.5-0.5b",), "samples": 10},
    "vocabulary": (1000,),
}
"""Defaults there, where compiling takes half a minute."""
Options: Any = options_of(KernelCell, Asked, cpu=CPU)


def make_cells(options: Any) -> list[KernelCell]:
    """The grid, ways of computing the same next to each other; a peer that has no such kernel is left out.

    Raises:
        ValueError: an unknown size, or peers that have none of the kernels.
    """
    cells = [
        cell
        for kernel in options.kernel
        for shape in shapes(kernel, options)
        for cell in every(KernelCell, options, kernel=[kernel], **shape)
        if kernel in PEERS.get(cell.how, KERNELS)
    ]
    if not cells:
        raise ValueError(f"--how {' '.join(options.how)} has no --kernel {' '.join(options.kernel)}")
    return cells


def shapes(kernel: str, options: Any) -> list[dict[str, Sequence[int]]]:
    """The widths of a kernel and, for each of them, the vocabularies, which others than losses do not have."""
    if kernel == "cross_entropy":
        return [{"width": [n_words], "vocabulary": [n_words]} for n_words in options.vocabulary]
    words = options.vocabulary if kernel in LOSSES else [KernelCell.vocabulary]
    return [{"width": options.width or widths(kernel, options.size), "vocabulary": words}]


def widths(kernel: str, sizes: Sequence[str]) -> list[int]:
    """Elements per row of a kernel in models, each once, from narrow to wide."""
    configs = [resolve_size(size) for size in sizes]
    return sorted({config.d_ff if kernel.startswith("swiglu") else config.d_model for config in configs})


KERNEL_TABLE = ResultTable(
    settings=("gpu", "device", "kernel", "dtype", "rows", "width", "vocabulary", "how", "n_samples"),
    always=("kernel", "how"),
    labels={"n_samples": "samples"},
    columns=(
        Column("forward ms", "forward", spread=True, rank=MAIN),
        Column("forward GB/s", "forward_bandwidth", ",.0f", rank=2, note="least bytes to read and write / time"),
        Column("forward % of copy", "forward_copy_share", ".0f", note="GB/s / a large copy's in the same process"),
        Column(
            *("forward extra GiB", "forward_extra", ".2f"),
            rank=2,
            note="peak memory of a call beyond its inputs and outputs",
            optional=True,
        ),
        Column("backward ms", "backward", spread=True, rank=MAIN),
        Column("backward GB/s", "backward_bandwidth", ",.0f", rank=2),
        Column("backward % of copy", "backward_copy_share", ".0f"),
        Column("error", lambda line: line.largest("error_out"), ".1e", note="relative Frobenius norm against fp64"),
        Column(
            "gradients' error", lambda line: line.largest("error_grad"), ".1e", note="largest error of any gradient"
        ),
    ),
)


def shares_figure(rows: pd.DataFrame) -> Figure | None:
    """A panel for each pass of each kernel whose bound is memory: % of a copy's bandwidth by width, a line for a way.

    Where the rows hold several dtypes or numbers of rows, the one with the most points is drawn.
    """
    from cs336_systems.harness.runs import newest
    from cs336_systems.report.figures import lines

    rows = rows[rows["kernel"].isin(set(KERNELS) - set(LOSSES))]
    cells = newest(rows, [name for name in KERNEL_TABLE.settings if name in rows])
    shares = cells[(cells["status"] == "ok") & cells["metric"].str.endswith("_copy_share")]
    for setting in ("gpu", "dtype", "rows"):
        shares = shares[shares[setting].isin(shares[setting].mode().tail(1))]
    if shares.empty:
        return None
    shares = shares.assign(
        place=shares["kernel"].map(KERNELS.index),
        panel=shares["kernel"] + "\n" + shares["metric"].str.removesuffix("_copy_share"),
        words=shares["width"].map("{:,}".format),
    ).sort_values(["place", "metric", "width"], ascending=[True, False, True], kind="stable")
    figure, axes = lines(shares, x="words", colour="how", panel="panel", width=2.3, height=2.4, most=7, sharey=True)
    for title, panel in axes.items():
        panel.axhline(100, color="0.6", linestyle="--", linewidth=1)
        panel.set_ylim(bottom=0)
        panel.set_title(title, fontsize=9)
    figure.supylabel("% of a copy's bandwidth", fontsize=10)
    figure.supxlabel("width, elements per row", fontsize=10)
    first = shares.iloc[0]
    where = first["gpu"] or first["device"]
    figure.suptitle(f"Fused kernels on {where}: {first['rows']:,} rows, {first['dtype']}", fontsize=11)
    return figure


EXPERIMENT = Experiment(
    "benchmark_kernels",
    KernelCell,
    make_cells,
    one_stage(measured_by("kernel_measure"), share=lambda cell: cell.device),
    presented(KERNEL_TABLE.of, {"": shares_figure}),
    ("forward", "forward_copy_share", "forward_extra", "backward", "backward_copy_share"),
    options=Options,
)
