"""Blocks and quoted numbers about where the memory of a step goes, and what activation checkpointing does to it.

Peaks and timelines come from the digests of part ``memory`` and from rows of whole steps, each beside its prediction
(``costs/memory.py``); checkpointing policies from the rows of part ``checkpointing``, where there are any.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems.answers.committed import Committed, NotMeasured, cells
from cs336_systems.answers.quotes import PENDING, Term
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.costs.checkpointing import make_plan, runs_again
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.memory import peak_memory
from cs336_systems.experiments.model.cells import CEILING
from cs336_systems.experiments.model.frontier import draw_frontier
from cs336_systems.harness.runs import median_of
from cs336_systems.report.tables import Table, digits

GIB, MIB = 2**30, 2**20
LARGE = "2.7b"
"""The size whose memory both handouts ask for; the 2026 one calls it xl."""

POLICIES = ("none", "full", "every-2", "every-4", "every-8", "first-16", "keep-matmuls", "keep-attention", "recursive")
_CELL = ["size", "context_length", "dtype"]


def blocks(committed: Committed) -> dict[str, Callable[[], str]]:
    """Tables by the names of their markers."""
    return {
        "memory-timelines": lambda: memory_timelines(committed),
        "memory-peaks": lambda: peaks_table(committed).markdown(),
        "memory-largest": lambda: largest_table(_memory_digests(committed, "allocations")).markdown(),
        "block-residuals": lambda: residuals_table(2048).markdown(),
        "checkpointing": lambda: checkpoint_table(committed).markdown(),
        "checkpointing-figure": lambda: _checkpoint_picture(committed),
    }


def terms(committed: Committed) -> dict[str, Term]:
    """Numbers that prose quotes, by the first word of the quote."""

    def saved(what: str, context: str) -> float:
        tensors = block_saved_tensors(MODEL_SIZES[LARGE], 4, int(context), PRECISIONS["fp32"].on("cuda"))
        largest = sorted((tensor.n_bytes for tensor in tensors), reverse=True)
        return {
            "all": total_bytes(tensors) / MIB,
            "five-largest": sum(largest[:5]) / sum(largest),
            "tensors": float(len(tensors)),
            "scores-gib": largest[0] / GIB,
            "input": residual_mib(context),
        }[what]

    def residual_mib(context: str) -> float:
        return 4 * int(context) * MODEL_SIZES[LARGE].d_model * 4 / MIB

    def predicted_peak(mode: str, dtype: str, context: str, checkpoint: str = "none") -> float:
        config = MODEL_SIZES[LARGE].at_context(int(context))
        return peak_memory(config, 4, int(context), PRECISIONS[dtype], mode, checkpoint=checkpoint).n_bytes / GIB

    def checkpointed(metric: str, policy: str, context: str = "2048") -> float:
        rows = committed.rows("checkpointing")
        rows = rows[(rows["checkpoint"] == policy) & (rows["context_length"] == int(context))]
        return median_of(rows, metric)

    def best_segment(context: str) -> float:
        """Blocks per checkpoint that keep least: sqrt(n input / block)."""
        return (MODEL_SIZES[LARGE].n_layers * saved("input", context) / saved("all", context)) ** 0.5

    def recomputed_flops(policy: str, context: str) -> float:
        """More executed FLOPs than without checkpointing, as a share."""
        work = (MODEL_SIZES[LARGE].at_context(int(context)), 4, int(context), "step")
        return hardware_flops(*work, checkpoint=policy) / hardware_flops(*work) - 1

    def recomputed(policy: str) -> float:
        n_layers = MODEL_SIZES[LARGE].n_layers
        return runs_again(make_plan(policy, n_layers))[0] / n_layers

    return {
        "recomputed-flops": Term(recomputed_flops, "%.0f"),
        "saved-by-block": Term(saved),
        "residual-mib": Term(residual_mib, ".0f"),
        "block-gradients-mib": Term(lambda: 4 * MODEL_SIZES[LARGE].n_block_parameters / MIB, ".1f"),
        "predicted-peak": Term(predicted_peak),
        "checkpointed": Term(checkpointed),
        "recomputed": Term(recomputed, "%.0f"),
        "best-segment": Term(best_segment, ".1f"),
    }


def figures(committed: Committed, folder: Path) -> dict[Path, Callable[[Path], object]]:
    """What to call with a figure's path; raises ``NotMeasured`` where the rows are missing."""
    return {_checkpoint_figure(folder): lambda path: draw_frontier(committed.rows("checkpointing"), path)}


def _checkpoint_figure(folder: Path) -> Path:
    return folder / "h200_checkpointing.png"


def _checkpoint_picture(committed: Committed) -> str:
    committed.rows("checkpointing")
    return f"![peak memory against step time of each policy]({_checkpoint_figure(Path('profiles/figures'))})"


def _memory_cells(committed: Committed) -> list[dict[str, Any]]:
    rows = committed.profile_rows("memory")
    return [cell for cell, _ in cells(rows[rows["status"] == "ok"], [*_CELL, "mode"])]


def _memory_name(cell: Mapping[str, Any] | pd.Series) -> str:
    return f"memory-{cell['size']}-b4-c{cell['context_length']}-{cell['dtype']}-{cell['mode']}"


def _memory_digests(committed: Committed, what: str) -> pd.DataFrame:
    found = [
        pd.read_csv(committed.digest("memory", f"{_memory_name(cell)}-{what}.csv")).assign(**cell)
        for cell in _memory_cells(committed)
    ]
    if not found:
        raise NotMeasured("no memory profile succeeded")
    return pd.concat(found)


def memory_timelines(committed: Committed) -> str:
    """Pictures of the forward pass and of the training step that were recorded in fp32."""
    pictures = []
    for cell in sorted(_memory_cells(committed), key=lambda cell: cell["context_length"]):
        if cell["dtype"] == "fp32":
            path = committed.digest("memory", f"{_memory_name(cell)}.png")
            what = "{size}, context {context_length}, {dtype}, {mode}".format(**cell)
            pictures.append(f"![{what}](profiles/digests/{'/'.join(path.parts[-3:])})")
    return "\n\n".join(pictures)


def peaks_table(committed: Committed) -> Table:
    """Peak of forward and of the step of the large model: predicted, and measured where a row says so."""
    measured: dict[tuple[str, str, int], str] = {}
    for metric, rows in (
        ("peak_memory", committed.rows("grid")),
        ("peak_memory", committed.rows("context-512")),
        ("peak_memory", committed.rows("memory-256")),
        ("peak_gib", _profiled_memory(committed)),
    ):
        own = rows[rows["size"] == LARGE]
        for _, row in own[(own["metric"] == metric) | (own["status"] != "ok")].iterrows():
            key = (row["mode"], row["dtype"], int(row["context_length"]))
            measured[key] = digits(row["median"]) if row["status"] == "ok" else row["status"]
            if metric == "peak_gib" and _ran_out(committed, row):
                measured[key] = f"out of memory at {measured[key]}"
    lines = []
    for context in (128, 256, 512, 2048):
        line: dict[str, object] = {"context": context}
        for dtype in ("fp32", "autocast-bf16"):
            for mode in ("forward", "step"):
                config = MODEL_SIZES[LARGE].at_context(context)
                predicted = peak_memory(config, 4, context, PRECISIONS[dtype], mode).n_bytes / GIB
                found = measured.get((mode, dtype, context), PENDING)
                line[f"{mode} {dtype}"] = f"{found} ({digits(predicted)})"
        lines.append(line)
    return Table(f"{LARGE}, batch 4, peak GiB: measured, in brackets predicted.", pd.DataFrame(lines))


def _ran_out(committed: Committed, row: pd.Series) -> bool:
    """Whether a watched pass ended early; its row then holds the most that was alive until then."""
    page = committed.digest("memory", f"{_memory_name(row)}.md")
    return "**Out of memory.**" in page.read_text()


def _profiled_memory(committed: Committed) -> pd.DataFrame:
    try:
        return committed.profile_rows("memory")
    except NotMeasured:
        return pd.DataFrame(columns=["size", "metric", "status"])


def largest_table(allocations: pd.DataFrame, most: int = 3) -> Table:
    """The largest allocations of each forward pass and the line that asked for them, or the parameter they hold."""
    lines = []
    forward = allocations[allocations["mode"] == "forward"]
    for values, own in cells(forward, _CELL):
        for _, row in own.sort_values("mib", ascending=False).head(most).iterrows():
            lines.append(
                {"size": values["size"], "context": values["context_length"], "dtype": values["dtype"]}
                | {"MiB each": digits(row["mib"]), "made": row["made"], "alive at the peak": row["at_peak"]}
                | {"category": row["category"], "source": row["what"] if row["phase"] == "before" else row["source"]}
            )
    return Table("The largest allocations of forward.", pd.DataFrame(lines))


def residuals_table(context: int, most: int = 5) -> Table:
    """What one block of the large model keeps for backward, the largest tensors, by arithmetic."""
    config = MODEL_SIZES[LARGE].at_context(context)
    tensors = block_saved_tensors(config, 4, context, PRECISIONS["fp32"].on("cuda"))
    whole = total_bytes(tensors)
    lines = [
        {
            "tensor": tensor.name,
            "kept by": tensor.kept_by,
            "shape": " x ".join(map(str, tensor.shape)),
            "MiB": f"{tensor.n_bytes / MIB:,.0f}",
            "share %": f"{100 * tensor.n_bytes / whole:.1f}",
        }
        for tensor in sorted(tensors, key=lambda tensor: -tensor.n_bytes)[:most]
    ]
    caption = (
        f"One block of {LARGE}, batch 4, context {context}, fp32: {whole / MIB:,.0f} MiB in {len(tensors)} tensors."
    )
    return Table(caption, pd.DataFrame(lines))


def checkpoint_table(committed: Committed, context: int = 2048, dtype: str = "autocast-bf16") -> Table:
    """Every policy on the large model: predicted peak and recomputation, and what a row measured."""
    config, precision = MODEL_SIZES[LARGE].at_context(context), PRECISIONS[dtype]
    try:
        rows = committed.rows("checkpointing")
        rows = rows[(rows["context_length"] == context) & (rows["variant"] != CEILING) & (rows["dtype"] == dtype)]
    except NotMeasured:
        rows = pd.DataFrame(columns=["checkpoint", "metric", "median", "status"])
    plain = hardware_flops(config, 4, context, "step")
    lines = []
    for policy in dict.fromkeys([*POLICIES, *rows["checkpoint"]]):
        own = rows[rows["checkpoint"] == policy]
        found = own.drop_duplicates("metric", keep="last").set_index("metric")["median"]
        ended = PENDING if own.empty else own["status"].iloc[-1]
        peak = peak_memory(config, 4, context, precision, "step", checkpoint=policy).n_bytes / GIB
        extra = 100 * (hardware_flops(config, 4, context, "step", checkpoint=policy) / plain - 1)
        lines.append(
            {
                "checkpoint": policy,
                "predicted peak GiB": digits(peak),
                "measured peak GiB": digits(found["peak_memory"]) if "peak_memory" in found else ended,
                "more FLOPs %": f"{extra:.1f}",
                "step ms": digits(found["step"]) if "step" in found else ended,
            }
        )
    return Table(f"{LARGE}, batch 4, context {context}, {dtype}, whole steps.", pd.DataFrame(lines))
