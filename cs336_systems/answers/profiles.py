"""Tables and numbers about where the time of a step goes, from the digests of ``profile_model.py``.

Traces are too large to commit; their digests hold every kernel by pass and every range (CSV), so that one table can
compare the sizes and lengths that each page looks at alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cs336_systems.answers.committed import NotMeasured, caption, cells
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.attention_stages import attention_stages
from cs336_systems.harness.runs import newest
from cs336_systems.profiling.ranges import SCORES, SOFTMAX, VALUES
from cs336_systems.profiling.traces.kernels import CLASSES, MATMUL, short_name
from cs336_systems.report.tables import Table, digits

_FORWARD, _BACKWARD_TOO = "inference forward", "forward + backward"
_PASSES = (_FORWARD, _BACKWARD_TOO, "full step")
"""What digests call the passes."""

_CELL = ["size", "context_length", "dtype"]


def kernel_share(kernels: pd.DataFrame, passes: str, size: str, context: int, kernel_class: str = MATMUL) -> float:
    """Of a class of kernels in the summed time of a pass."""
    own = _of_pass(kernels, passes, size, context)
    return kernel_ms(own, passes, size, context, kernel_class) / float(own["total_ms"].sum())


def kernel_ms(kernels: pd.DataFrame, passes: str, size: str, context: int, kernel_class: str) -> float:
    """Summed time of a class of kernels in a pass."""
    own = _of_pass(kernels, passes, size, context)
    return float(own[own["kernel_class"] == kernel_class]["total_ms"].sum())


@dataclass(frozen=True)
class TopKernel:
    """The kernel with the most time in a pass."""

    name: str
    kernel_class: str
    share: float
    runs: float
    ms: float


def top_kernel(kernels: pd.DataFrame, passes: str, size: str, context: int) -> TopKernel:
    """The leader of one pass; its share is of the summed time, its runs are per step."""
    return _leader(_of_pass(kernels, passes, size, context))


def _leader(kernels_of_pass: pd.DataFrame) -> TopKernel:
    top = kernels_of_pass.sort_values("total_ms").iloc[-1]
    share, runs, ms = top["share_percent"] / 100, top["count"], top["total_ms"]
    return TopKernel(short_name(top["name"]), top["kernel_class"], float(share), float(runs), float(ms))


def _of_pass(kernels: pd.DataFrame, passes: str, size: str, context: int) -> pd.DataFrame:
    own = kernels[(kernels["size"] == size) & (kernels["context_length"] == context) & (kernels["passes"] == passes)]
    if own.empty:
        raise NotMeasured(f"no digest holds {passes} of {size} at context {context}")
    return own


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of attention's forward, all layers: softmax and the two products, and the copies and casts in each.

    Digests of before copies were told apart do not hold these; they are NaN then.
    """

    softmax: float
    softmax_copies: float
    products: float
    product_copies: float

    @property
    def ratio(self) -> float:
        """Products over softmax, as their ranges say, copies included."""
        return self.products / self.softmax

    @property
    def ratio_without_copies(self) -> float:
        return (self.products - self.product_copies) / (self.softmax - self.softmax_copies)


def stage_times(ranges: pd.DataFrame) -> StageTimes:
    """Of the ranges of one forward.

    Raises:
        NotMeasured: they hold no stages, as attention is fused or compiled.
    """
    spent = ranges.groupby("range")[["summed_ms"]].sum()
    if SOFTMAX not in spent.index:
        raise NotMeasured("no range holds attention's softmax")
    copies = ranges.reindex(columns=["range", "copies_ms"]).groupby("range")["copies_ms"].sum(min_count=1)
    found = [frame[SOFTMAX] for frame in (spent["summed_ms"], copies)]
    products = [frame[SCORES] + frame[VALUES] for frame in (spent["summed_ms"], copies)]
    return StageTimes(*found, *products)


def products_over_softmax(ranges: pd.DataFrame) -> float:
    """Time of attention's two products over that of its softmax, in one forward, copies and casts included."""
    return stage_times(ranges).ratio


def attention_work(what: str, size: str, context: int, dtype: str = "fp32") -> float:
    """The two products of attention's forward over its softmax: in FLOPs, or in least bytes."""
    config = MODEL_SIZES[size].at_context(context)
    stages = attention_stages(config, 4, context, PRECISIONS[dtype].on("cuda"), "forward")
    products, softmax = (stages.scores_matmul, stages.values_matmul), stages.softmax
    if what == "flops":
        return sum(stage.flops for stage in products) / softmax.flops
    return sum(stage.n_bytes for stage in products) / softmax.n_bytes


def _label(cell: Mapping[str, Any] | pd.Series) -> dict[str, Any]:
    return {"size": cell["size"], "context": cell["context_length"], "dtype": cell["dtype"]}


def forward_table(rows: pd.DataFrame) -> Table:
    """Forward without gradients by the harness's clock and by the profiler, the newest run of each size and context."""
    lines = []
    for values, cell in cells(newest(rows, _CELL), _CELL):
        found = cell.set_index("metric")["median"]
        if "unprofiled_forward" not in found:
            lines.append(_label(values) | {"status": f"{cell['status'].iloc[-1]}: {cell['message'].iloc[-1]}"})
            continue
        lines.append(
            _label(values)
            | {
                "harness ms": digits(found["unprofiled_forward"]),
                "while recording ms": digits(found["recorded_forward"]),
                "GPU busy ms": digits(found["busy"]),
                "busy / harness": f"{found['busy'] / found['unprofiled_forward']:.3f}",
                "kernels": f"{found['operations']:.0f}",
                "status": "ok",
            }
        )
    said = caption(rows, ["batch_size"], "forward without gradients")
    return Table(said, pd.DataFrame(lines).fillna("–"))


def top_kernels_table(kernels: pd.DataFrame) -> Table:
    """The kernel with the largest share of forward and of forward and backward, how often it runs, and its share."""
    lines = []
    for values, cell in cells(kernels, _CELL):
        for label in (_FORWARD, _BACKWARD_TOO):
            own = cell[cell["passes"] == label]
            if own.empty:
                continue
            top = _leader(own)
            lines.append(
                _label(values)
                | {"pass": label, "kernel": top.name, "class": top.kernel_class}
                | {"times per step": f"{top.runs:g}", "ms": digits(top.ms), "share %": f"{100 * top.share:.1f}"}
            )
    return Table("The kernel with the most GPU time in forward, and in forward and backward.", pd.DataFrame(lines))


def classes_table(kernels: pd.DataFrame) -> Table:
    """Share of GPU time by class of kernel, in each of ``_PASSES``."""
    lines = []
    kernels = kernels[kernels["passes"].isin(_PASSES)]
    present = [name for name in CLASSES if (kernels["kernel_class"] == name).any()]
    for values, cell in cells(kernels, [*_CELL, "passes"]):
        sums = cell.groupby("kernel_class")["total_ms"].sum()
        shares = {f"{name} %": f"{100 * sums.get(name, 0.0) / sums.sum():.1f}" for name in present}
        lines.append(_label(values) | {"pass": values["passes"], "ms": digits(sums.sum())} | shares)
    return Table("Share of summed GPU time by class of kernel.", pd.DataFrame(lines))


def other_kernels_table(kernels: pd.DataFrame, least_percent: float = 2.0) -> Table:
    """Kernels of inference that multiply no matrices and take more than a small share."""
    own = kernels[(kernels["passes"] == _FORWARD) & (kernels["kernel_class"] != MATMUL)]
    own = own[own["share_percent"] >= least_percent]
    lines = [
        _label(row)
        | {"kernel": short_name(row["name"]), "class": row["kernel_class"], "times per step": f"{row['count']:g}"}
        | {"ms": digits(row["total_ms"]), "share %": f"{row['share_percent']:.1f}"}
        for _, row in own.iterrows()
    ]
    caption = (
        f"Forward without gradients: kernels that are no matrix products, from {least_percent:g} % of the time on."
    )
    return Table(caption, pd.DataFrame(lines))


def stages_table(ranges: pd.DataFrame) -> Table:
    """Softmax beside the two products of attention in forward: time, executed FLOPs, least bytes, as ratios too.

    Copies and casts have columns of their own if any digest tells them apart.
    """
    lines = []
    told = "copies_ms" in ranges and ranges["copies_ms"].notna().any()
    for values, cell in cells(ranges, [*_CELL, "batch_size"]):
        try:
            spent = stage_times(cell)
        except NotMeasured:
            continue
        context, precision = values["context_length"], PRECISIONS[values["dtype"]].on("cuda")
        config = MODEL_SIZES[values["size"]].at_context(context)
        work = attention_stages(config, values["batch_size"], context, precision, "forward")
        products = (work.scores_matmul, work.values_matmul)
        flops = sum(stage.flops for stage in products)
        n_bytes = sum(stage.n_bytes for stage in products)
        line = _label(values) | {"softmax ms": digits(spent.softmax)}
        line |= {"its casts ms": _or_dash(digits, spent.softmax_copies)} if told else {}
        line |= {"two products ms": digits(spent.products)}
        line |= {"their copies and casts ms": _or_dash(digits, spent.product_copies)} if told else {}
        line |= {"products / softmax: time": f"{spent.ratio:.2f}"}
        line |= {"without copies": _or_dash("{:.2f}".format, spent.ratio_without_copies)} if told else {}
        line |= {"FLOPs": f"{flops / work.softmax.flops:.1f}", "bytes": f"{n_bytes / work.softmax.n_bytes:.2f}"}
        lines.append(line)
    return Table("Attention in forward, all layers.", pd.DataFrame(lines))


def _or_dash(form: Callable[[float], str], value: float) -> str:
    return "–" if math.isnan(value) else form(value)
