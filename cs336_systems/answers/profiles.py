"""Blocks and quoted numbers about where the time of a step goes, from the digests of ``profile_model.py``.

Traces are too large to commit; their digests hold every kernel by pass and every range (CSV), so that one table can
compare the sizes and lengths that each page looks at alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from cs336_systems.answers.committed import Committed, NotMeasured, cells
from cs336_systems.answers.quotes import Term
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.attention_stages import attention_stages
from cs336_systems.harness.runs import median_of
from cs336_systems.profiling.ranges import SCORES, SOFTMAX, VALUES
from cs336_systems.profiling.traces.kernels import CLASSES, MATMUL, short_name
from cs336_systems.report.tables import Table, digits

_PASSES = {"inference": "inference forward", "forward-backward": "forward + backward", "step": "full step"}
"""Words of a quote, and what digests call the pass."""

_CELL = ["size", "context_length", "dtype"]


def blocks(committed: Committed) -> dict[str, Callable[[], str]]:
    """Tables by the names of their markers."""
    rows = committed.profile_rows
    return {
        "nsys-forward": lambda: forward_table(rows("nsys")).markdown(),
        "nsys-kernels": lambda: top_kernels_table(_digests(committed, "nsys", "kernels")).markdown(),
        "nsys-classes": lambda: classes_table(_digests(committed, "nsys", "kernels")).markdown(),
        "nsys-autocast-classes": lambda: classes_table(_digests(committed, "nsys-autocast", "kernels")).markdown(),
        "nsys-other-kernels": lambda: other_kernels_table(_digests(committed, "nsys", "kernels")).markdown(),
        "nsys-stages": lambda: stages_table(_digests(committed, "nsys", "ranges")).markdown(),
        "nsys-autocast-stages": lambda: stages_table(_digests(committed, "nsys-autocast", "ranges")).markdown(),
    }


def terms(committed: Committed) -> dict[str, Term]:
    """Numbers that prose quotes, by the first word of the quote."""

    def profiled(part: str, metric: str, size: str, context: str, mode: str, dtype: str = "fp32") -> float:
        rows = committed.profile_rows(part)
        cell = (rows["size"] == size) & (rows["context_length"] == int(context)) & (rows["mode"] == mode)
        return median_of(rows[cell & (rows["dtype"] == dtype)], metric)

    def kernels_of(part: str, passes: str, size: str, context: str) -> pd.DataFrame:
        own = _digests(committed, part, "kernels")
        return own[(own["size"] == size) & (own["context_length"] == int(context)) & (own["passes"] == _PASSES[passes])]

    def kernel_share(part: str, passes: str, kernel_class: str, size: str, context: str) -> float:
        """Of a class of kernels in the summed time of a pass."""
        own = kernels_of(part, passes, size, context)
        return float(own[own["kernel_class"] == kernel_class]["total_ms"].sum() / own["total_ms"].sum())

    def top_kernel(part: str, passes: str, size: str, context: str) -> float:
        """How often the kernel with the most time runs in a pass."""
        return float(kernels_of(part, passes, size, context).sort_values("total_ms")["count"].iloc[-1])

    def products_over_softmax(part: str, size: str, context: str) -> float:
        """Time of attention's two products over that of its softmax, in forward."""
        own = _digests(committed, part, "ranges")
        own = own[(own["size"] == size) & (own["context_length"] == int(context)) & (own["mode"] == "forward")]
        spent = own.groupby("range")["summed_ms"].sum()
        return float((spent[SCORES] + spent[VALUES]) / spent[SOFTMAX])

    def attention_work(what: str, size: str, context: str, dtype: str = "fp32") -> float:
        """The two products of attention's forward over its softmax: in FLOPs, or in least bytes."""
        config = MODEL_SIZES[size].at_context(int(context))
        stages = attention_stages(config, 4, int(context), PRECISIONS[dtype].on("cuda"), "forward")
        products, softmax = (stages.scores_matmul, stages.values_matmul), stages.softmax
        if what == "flops":
            return sum(stage.flops for stage in products) / softmax.flops
        return sum(stage.n_bytes for stage in products) / softmax.n_bytes

    return {
        "profiled": Term(profiled),
        "kernel-share": Term(kernel_share, "%.0f"),
        "top-kernel-runs": Term(top_kernel, ".0f"),
        "products-over-softmax": Term(products_over_softmax, ".1f"),
        "attention-work": Term(attention_work),
    }


def _digests(committed: Committed, part: str, what: str) -> pd.DataFrame:
    """``what`` (kernels or ranges) of every digest of a part, one below the other, with the cell's columns."""
    found = []
    rows = committed.profile_rows(part)
    for cell, _ in cells(rows[rows["status"] == "ok"], ["profiler", "batch_size", *_CELL]):
        stem = "{size}-b{batch_size}-c{context_length}-{dtype}-{profiler}".format(**cell)
        found.append(pd.read_csv(committed.digest(part, f"{stem}-{what}.csv")).assign(**cell))
    if not found:
        raise NotMeasured(f"no profile of part {part} succeeded")
    return _sorted(pd.concat(found))


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """By size, then context; equal ones in the order in which they came."""
    order = {name: place for place, name in enumerate(MODEL_SIZES)}
    return rows.sort_values(
        ["size", "context_length"], key=lambda x: x.map(order) if x.name == "size" else x, kind="stable"
    )


def _label(cell: Mapping[str, Any] | pd.Series) -> dict[str, Any]:
    return {"size": cell["size"], "context": cell["context_length"], "dtype": cell["dtype"]}


def forward_table(rows: pd.DataFrame) -> Table:
    """Forward without gradients by the harness's clock and by the profiler, a line per size and context."""
    lines = []
    for values, cell in cells(_sorted(rows[rows["mode"] == "forward"]), _CELL):
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
    return Table("Forward without gradients, batch 4.", pd.DataFrame(lines).fillna("–"))


def top_kernels_table(kernels: pd.DataFrame) -> Table:
    """The kernel with the largest share of forward and of forward and backward, how often it runs, and its share."""
    lines = []
    for values, cell in cells(kernels, _CELL):
        for label in (_PASSES["inference"], _PASSES["forward-backward"]):
            own = cell[cell["passes"] == label]
            if own.empty:
                continue
            top = own.sort_values("total_ms").iloc[-1]
            lines.append(
                _label(values)
                | {"pass": label, "kernel": short_name(top["name"]), "class": top["kernel_class"]}
                | {"times per step": f"{top['count']:g}", "ms": digits(top["total_ms"])}
                | {"share %": f"{top['share_percent']:.1f}"}
            )
    return Table("The kernel with the most GPU time in forward, and in forward and backward.", pd.DataFrame(lines))


def classes_table(kernels: pd.DataFrame) -> Table:
    """Share of GPU time by class of kernel, in each of ``_PASSES``."""
    lines = []
    kernels = kernels[kernels["passes"].isin(_PASSES.values())]
    present = [name for name in CLASSES if (kernels["kernel_class"] == name).any()]
    for values, cell in cells(kernels, [*_CELL, "passes"]):
        sums = cell.groupby("kernel_class")["total_ms"].sum()
        shares = {f"{name} %": f"{100 * sums.get(name, 0.0) / sums.sum():.1f}" for name in present}
        lines.append(_label(values) | {"pass": values["passes"], "ms": digits(sums.sum())} | shares)
    return Table("Share of summed GPU time by class of kernel.", pd.DataFrame(lines))


def other_kernels_table(kernels: pd.DataFrame, least_percent: float = 2.0) -> Table:
    """Kernels of inference that multiply no matrices and take more than a small share."""
    own = kernels[(kernels["passes"] == "inference forward") & (kernels["kernel_class"] != MATMUL)]
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
    """Softmax beside the two products of attention in forward: time, executed FLOPs, least bytes, as ratios too."""
    lines = []
    forward = ranges[ranges["mode"] == "forward"]
    for values, cell in cells(forward, [*_CELL, "batch_size"]):
        spent = cell.groupby("range")["summed_ms"].sum()
        if SOFTMAX not in spent:
            continue
        context, precision = values["context_length"], PRECISIONS[values["dtype"]].on("cuda")
        config = MODEL_SIZES[values["size"]].at_context(context)
        work = attention_stages(config, values["batch_size"], context, precision, "forward")
        products = (work.scores_matmul, work.values_matmul)
        ms, flops = spent[SCORES] + spent[VALUES], sum(stage.flops for stage in products)
        n_bytes = sum(stage.n_bytes for stage in products)
        lines.append(
            _label(values)
            | {"softmax ms": digits(spent[SOFTMAX]), "two products ms": digits(ms)}
            | {"products / softmax: time": f"{ms / spent[SOFTMAX]:.2f}"}
            | {"FLOPs": f"{flops / work.softmax.flops:.1f}", "bytes": f"{n_bytes / work.softmax.n_bytes:.2f}"}
        )
    return Table("Attention in forward, all layers.", pd.DataFrame(lines))
