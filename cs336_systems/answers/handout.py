"""Numbers and tables that answer the handout's questions and that a pivot of rows cannot: sums with arithmetic beside.

What a block keeps is arithmetic of ``costs/``, time by kernel comes from the digests of ``profile_model.py``, rounding
from the experiments of ``experiments/precision``.
"""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.config import HANDOUT_SIZES, MODEL_SIZES, PRECISIONS
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.costs.attention import AttentionWork, attention_stages
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.experiments import precision
from cs336_systems.profiling.ranges import SCORES, SOFTMAX, VALUES
from cs336_systems.profiling.traces.kernels import CLASSES, MATMUL, short_name
from cs336_systems.report.tables import Table, digits

GIB, MIB = 2**30, 2**20
PREDICTED = "predicted_peak_memory"
"""The peak that was predicted when the row was measured, by the arithmetic of that day."""
LARGE = "2.7b"
"""The size whose memory both handouts ask for; the 2026 one calls it xl."""

_OUT_OF_MEMORY = r"asked for ([\d.]+) GiB of ([\d.]+) GiB, ([\d.]+) GiB in tensors and ([\d.]+) GiB in free pieces"
_PASSES = ("inference forward", "forward + backward", "full step")
"""The names of the passes in digests."""
_CELL = ["size", "context_length", "dtype"]


def handout_attention(length: int, d_head: int) -> AttentionWork:
    """A configuration of the handout's grid: batch 8, one head, not causal."""
    return AttentionWork(8, 1, 1, length, length, d_head, causal=False)


@dataclass(frozen=True)
class KeptByBlock:
    """The bytes that one block of the large model keeps for backward at batch 4 in fp32, by arithmetic."""

    context: int

    @property
    def n_bytes(self) -> list[int]:
        """The bytes of each tensor, the largest first."""
        return sorted((tensor.n_bytes for tensor in _saved(self.context)), reverse=True)

    @property
    def mib(self) -> float:
        return sum(self.n_bytes) / MIB

    @property
    def input_mib(self) -> float:
        """The residual stream between blocks."""
        return 4 * self.context * MODEL_SIZES[LARGE].d_model * 4 / MIB


def _saved(context: int) -> list[Any]:
    config = MODEL_SIZES[LARGE].at_context(context)
    return list(block_saved_tensors(config, 4, context, PRECISIONS["fp32"].on("cuda")))


def residuals_table(context: int, most: int = 5) -> Table:
    """The largest tensors that one block of the large model keeps for backward, by arithmetic."""
    tensors = _saved(context)
    whole = total_bytes(tensors)
    lines = [
        {"tensor": tensor.name, "kept by": tensor.kept_by, "shape": " x ".join(map(str, tensor.shape))}
        | {"MiB": f"{tensor.n_bytes / MIB:,.0f}", "share %": f"{100 * tensor.n_bytes / whole:.1f}"}
        for tensor in sorted(tensors, key=lambda tensor: -tensor.n_bytes)[:most]
    ]
    said = f"One block of {LARGE}, batch 4, context {context}, fp32: {whole / MIB:,.0f} MiB in {len(tensors)} tensors."
    return Table(said, pd.DataFrame(lines))


def ran_out(rows: pd.DataFrame) -> dict[str, float]:
    """GiB that torch's allocator named when it ran out: asked for, of the device, in tensors and in free pieces.

    Raises:
        NotMeasured: no ``oom`` row has such a message.
    """
    said = rows["message"].str.extract(_OUT_OF_MEMORY).dropna().astype(float)
    if said.empty:
        raise NotMeasured("no row says what was asked for when memory ran out")
    return dict(zip(("asked", "device", "in_tensors", "in_pieces"), said.iloc[-1], strict=True))


def recomputed_flops(policy: str, context: int) -> float:
    """By how much checkpointing raises the executed FLOPs of the large model, as a share."""
    work = (MODEL_SIZES[LARGE].at_context(context), 4, context, "step")
    return hardware_flops(*work, checkpoint=policy) / hardware_flops(*work) - 1


def checkpoint_table(rows: pd.DataFrame) -> Table:
    """Every policy that was measured on the large model: predicted and measured peak, recomputation, time of a step."""
    context, dtype = int(rows["context_length"].iloc[0]), rows["dtype"].iloc[0]
    lines = []
    for policy, own in rows.groupby("checkpoint", sort=False):
        found = own.drop_duplicates("metric", keep="last").set_index("metric")["median"]
        ended = own["status"].iloc[-1]
        lines.append(
            {
                "checkpoint": policy,
                "predicted peak GiB": digits(found[PREDICTED]) if PREDICTED in found else ended,
                "measured peak GiB": digits(found["peak_memory"]) if "peak_memory" in found else ended,
                "more FLOPs %": f"{100 * recomputed_flops(str(policy), context):.1f}",
                "step ms": digits(found["step"]) if "step" in found else ended,
            }
        )
    return Table(f"{LARGE}, batch 4, context {context}, {dtype}; medians of whole steps.", pd.DataFrame(lines))


def memory_errors_table(rows: pd.DataFrame) -> Table:
    """Predicted against measured peak memory, by size and mode."""
    keys = ["size", "dtype", "mode", "context_length"]
    peaks = rows[rows["metric"].isin(["peak_memory", "predicted_peak_memory"])]
    wide = peaks.pivot_table(index=keys, columns="metric", values="median", aggfunc="last", sort=False).reset_index()
    wide["error"] = 100 * (wide["predicted_peak_memory"] / wide["peak_memory"] - 1)
    lines = []
    for size in HANDOUT_SIZES:
        for mode in ("forward", "step"):
            cells = wide[(wide["size"] == size) & (wide["mode"] == mode)]
            if cells.empty:
                continue
            worst, measured = cells.iloc[cells["error"].abs().argmax()], cells["peak_memory"]
            lines.append(
                {"size": size, "mode": mode, "cells": len(cells)}
                | {"measured GiB": f"{measured.min():.3g} to {measured.max():.3g}"}
                | {"mean error %": f"{cells['error'].mean():+.1f}"}
                | {"worst error %": f"{worst['error']:+.1f} ({worst['dtype']}, context {worst['context_length']})"}
            )
    return Table("", pd.DataFrame(lines))


def largest_table(allocations: pd.DataFrame, most: int = 3) -> Table:
    """The largest allocations of each forward pass and the line that asked for them, or the parameter they hold."""
    lines = []
    for values, own in allocations.groupby(_CELL, sort=False):
        for _, row in own.sort_values("mib", ascending=False).head(most).iterrows():
            lines.append(
                dict(zip(("size", "context", "dtype"), values, strict=True))
                | {"MiB each": digits(row["mib"]), "made": row["made"], "alive at the peak": row["at_peak"]}
                | {"category": row["category"], "source": row["what"] if row["phase"] == "before" else row["source"]}
            )
    return Table("The largest allocations of forward.", pd.DataFrame(lines))


def top_kernel(kernels: pd.DataFrame, passes: str, size: str, context: int) -> dict[str, Any]:
    """The name of the kernel with the most time in a pass, its percent of the summed time, and its runs per step."""
    top = _of_pass(kernels, passes, size, context).sort_values("total_ms").iloc[-1]
    return {"name": short_name(top["name"]), "percent": float(top["share_percent"]), "runs": float(top["count"])}


def kernel_share(kernels: pd.DataFrame, passes: str, size: str, context: int, kernel_class: str = MATMUL) -> float:
    """The share of a class of kernels in the summed time of a pass."""
    times = _of_pass(kernels, passes, size, context).groupby("kernel_class")["total_ms"].sum()
    return float(times[kernel_class] / times.sum())


def _of_pass(kernels: pd.DataFrame, passes: str, size: str, context: int) -> pd.DataFrame:
    own = kernels[(kernels["size"] == size) & (kernels["context_length"] == context) & (kernels["passes"] == passes)]
    if own.empty:
        raise NotMeasured(f"no digest holds {passes} of {size} at context {context}")
    return own


def classes_table(kernels: pd.DataFrame) -> Table:
    """The share of GPU time of each class of kernel, by pass."""
    lines = []
    kernels = kernels[kernels["passes"].isin(_PASSES)]
    present = [name for name in CLASSES if (kernels["kernel_class"] == name).any()]
    for values, cell in kernels.groupby([*_CELL, "passes"], sort=False):
        sums = cell.groupby("kernel_class")["total_ms"].sum()
        shares = {f"{name} %": f"{100 * sums.get(name, 0.0) / sums.sum():.1f}" for name in present}
        said = dict(zip(("size", "context", "dtype", "pass"), values, strict=True))
        lines.append(said | {"ms": digits(sums.sum())} | shares)
    return Table("Share of summed GPU time by class of kernel.", pd.DataFrame(lines))


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of attention's forward in all layers: softmax, the two matmuls, and copies and casts in each."""

    softmax: float
    softmax_copies: float
    products: float
    product_copies: float

    @property
    def ratio(self) -> float:
        """Matmuls over softmax, as their ranges say, copies included."""
        return self.products / self.softmax

    @property
    def ratio_without_copies(self) -> float:
        return (self.products - self.product_copies) / (self.softmax - self.softmax_copies)


def stage_times(ranges: pd.DataFrame) -> StageTimes:
    """The stages of one forward; copies are NaN in digests that do not tell them apart.

    Raises:
        NotMeasured: the ranges hold no stages, as attention is fused or compiled.
    """
    spent = ranges.groupby("range")[["summed_ms"]].sum()
    if SOFTMAX not in spent.index:
        raise NotMeasured("no range holds attention's softmax")
    copies = ranges.reindex(columns=["range", "copies_ms"]).groupby("range")["copies_ms"].sum(min_count=1)
    found = [frame[SOFTMAX] for frame in (spent["summed_ms"], copies)]
    products = [frame[SCORES] + frame[VALUES] for frame in (spent["summed_ms"], copies)]
    return StageTimes(*found, *products)


def attention_work(what: str, size: str, context: int, dtype: str = "fp32") -> float:
    """The two matmuls of attention's forward over its softmax: in FLOPs, or in least bytes (``n_bytes``)."""
    config = MODEL_SIZES[size].at_context(context)
    stages = attention_stages(config, 4, context, PRECISIONS[dtype].on("cuda"), "forward")
    matmuls = sum(getattr(stage, what) for stage in (stages.scores_matmul, stages.values_matmul))
    return float(matmuls / getattr(stages.softmax, what))


def stages_table(ranges: pd.DataFrame) -> Table:
    """Softmax beside the two matmuls of attention in forward: time, and ratios of time, FLOPs and least bytes."""
    lines = []
    for _, cell in ranges.groupby(_CELL, sort=False):
        size, dtype, context = (
            str(cell["size"].iloc[0]),
            str(cell["dtype"].iloc[0]),
            int(cell["context_length"].iloc[0]),
        )
        try:
            spent = stage_times(cell)
        except NotMeasured:
            continue
        lines.append(
            {"size": size, "context": context, "dtype": dtype}
            | {"softmax ms": digits(spent.softmax), "its casts ms": _or_dash(spent.softmax_copies)}
            | {"two matmuls ms": digits(spent.products), "their copies and casts ms": _or_dash(spent.product_copies)}
            | {"matmuls / softmax: time": f"{spent.ratio:.2f}", "without copies": _or_dash(spent.ratio_without_copies)}
            | {"FLOPs": f"{attention_work('flops', size, context, dtype):.1f}"}
            | {"bytes": f"{attention_work('n_bytes', size, context, dtype):.2f}"}
        )
    return Table("Attention in forward, all layers.", pd.DataFrame(lines))


def _or_dash(value: float) -> str:
    return "–" if math.isnan(value) else digits(value)


def sums_table() -> Table:
    """The handout's four sums of a thousand hundredths."""
    frame = precision.sums((1000,)).head(4)  # the first experiments are the handout's
    frame = frame.assign(
        result=[f"{value:.7g}" for value in frame["result"]],
        relative_error=[f"{value:+.1e}" for value in frame["relative_error"]],
    )
    names = {"relative_error": "relative error", "dtype": "dtype of terms"}
    return Table("1,000 times 0.01; exact: 10.", frame.drop(columns=["terms", "exact"]).rename(columns=names))


def accumulated(accumulator: str, dtype: str, terms: int) -> str:
    """A sum of hundredths in order, to seven digits."""
    term = torch.tensor(0.01, dtype=precision.DTYPES[dtype])
    return f"{precision.in_order(terms, term, precision.DTYPES[accumulator]).total:.7g}"


def toy_table() -> Table:
    """Dtypes of the handout's toy model under CUDA's autocast, with its layer norm and the loss."""
    found = {name: precision.toy_dtypes("pretended-cuda", precision.DTYPES[name]) for name in ("fp16", "bf16")}
    lines = [{"tensor": tensor} | {name: found[name][tensor] for name in found} for tensor in found["fp16"]]
    return Table("The toy model under CUDA's autocast.", pd.DataFrame(lines))
