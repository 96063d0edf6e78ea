"""Tables and numbers about where the memory of a step goes, and what activation checkpointing does to it.

Peaks come from rows of whole steps and from the digests of part ``memory``, each beside its prediction
(``costs/memory.py``); checkpointing policies from the rows of part ``checkpointing``.
"""

from dataclasses import dataclass

import pandas as pd

from cs336_systems.answers.committed import NotMeasured, caption, cells
from cs336_systems.answers.rendering import PENDING
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.memory import PARTS, PeakMemory, peak_memory
from cs336_systems.report.tables import Table, digits

GIB, MIB = 2**30, 2**20
LARGE = "2.7b"
"""The size whose memory both handouts ask for; the 2026 one calls it xl."""

POLICIES = ("none", "full", "every-2", "every-4", "every-8", "first-16", "keep-matmuls", "keep-attention", "recursive")
_OUT_OF_MEMORY = r"asked for ([\d.]+) GiB of ([\d.]+) GiB, ([\d.]+) GiB in tensors and ([\d.]+) GiB in free pieces"
_CELL = ["size", "context_length", "dtype"]


@dataclass(frozen=True)
class KeptByBlock:
    """What one block of the large model keeps for backward at batch 4 in fp32, by arithmetic."""

    context: int

    @property
    def n_bytes(self) -> list[int]:
        """Of each tensor, the largest first."""
        config = MODEL_SIZES[LARGE].at_context(self.context)
        tensors = block_saved_tensors(config, 4, self.context, PRECISIONS["fp32"].on("cuda"))
        return sorted((tensor.n_bytes for tensor in tensors), reverse=True)

    @property
    def mib(self) -> float:
        return sum(self.n_bytes) / MIB

    @property
    def input_mib(self) -> float:
        """Of the residual stream between blocks."""
        return 4 * self.context * MODEL_SIZES[LARGE].d_model * 4 / MIB


@dataclass(frozen=True)
class RanOut:
    """What torch's allocator said when it ran out, in GiB."""

    asked: float
    device: float
    """The device's memory."""
    in_tensors: float
    in_pieces: float
    """Held by the allocator in free pieces, each smaller than what was asked for."""


def ran_out(rows: pd.DataFrame) -> RanOut:
    """What the message of an ``oom`` row says, of the last that does.

    Raises:
        NotMeasured: none does.
    """
    said = rows["message"].str.extract(_OUT_OF_MEMORY).dropna().astype(float)
    if said.empty:
        raise NotMeasured("no row says what was asked for when memory ran out")
    return RanOut(*said.iloc[-1])


def peak_of(mode: str, dtype: str, context: int, checkpoint: str = "none") -> PeakMemory:
    """Of the large model at batch 4: how much, at which moment, and what is alive there."""
    config = MODEL_SIZES[LARGE].at_context(context)
    return peak_memory(config, 4, context, PRECISIONS[dtype], mode, checkpoint=checkpoint)


def predicted_peak(mode: str, dtype: str, context: int, checkpoint: str = "none") -> float:
    """Of the large model at batch 4, GiB."""
    return peak_of(mode, dtype, context, checkpoint).n_bytes / GIB


def recomputed_flops(policy: str, context: int) -> float:
    """More executed FLOPs of the large model than without checkpointing, as a share."""
    work = (MODEL_SIZES[LARGE].at_context(context), 4, context, "step")
    return hardware_flops(*work, checkpoint=policy) / hardware_flops(*work) - 1


def peaks_table(steps: pd.DataFrame, watched: pd.DataFrame, pages: pd.DataFrame) -> Table:
    """Peak of forward and of the step of the large model: predicted, and measured where a row says so.

    Args:
        steps: rows of whole models.
        watched: rows of part ``memory``.
        pages: their digests; one of a pass that ended early says so, and its row holds the most alive until then.
    """
    ended = pages[pages["text"].str.contains("**Out of memory.**", regex=False)]
    early = {(page["mode"], page["dtype"], page["context_length"]) for _, page in ended.iterrows()}
    rows = pd.concat([steps, watched])
    rows = rows[(rows["size"] == LARGE) & (rows["metric"].isin(["peak_memory", "peak_gib"]) | (rows["status"] != "ok"))]
    measured: dict[tuple[str, str, int], str] = {}
    for _, row in rows.iterrows():
        key = (row["mode"], row["dtype"], int(row["context_length"]))
        measured[key] = digits(row["median"]) if row["status"] == "ok" else row["status"]
        if row["metric"] == "peak_gib" and key in early:
            measured[key] = f"out of memory at {measured[key]}"
    lines = []
    for context in sorted({context for _, _, context in measured} & {128, 256, 512, 2048}):
        line: dict[str, object] = {"context": context}
        for dtype in ("fp32", "autocast-bf16"):
            for mode in ("forward", "step"):
                found = measured.get((mode, dtype, context), PENDING)
                line[f"{mode} {dtype}"] = f"{found} ({digits(predicted_peak(mode, dtype, context))})"
        lines.append(line)
    said = caption(rows, ["size", "batch_size"], "peak GiB: measured, in brackets predicted")
    return Table(said, pd.DataFrame(lines))


def largest_table(allocations: pd.DataFrame, most: int = 3) -> Table:
    """The largest allocations of each forward pass and the line that asked for them, or the parameter they hold."""
    lines = []
    for values, own in cells(allocations, _CELL):
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


def checkpoint_table(rows: pd.DataFrame) -> Table:
    """Every policy on the model of the rows: predicted peak and recomputation, and what a row measured."""
    first = rows.iloc[0]
    context, batch = int(first["context_length"]), int(first["batch_size"])
    config, precision = MODEL_SIZES[first["size"]].at_context(context), PRECISIONS[first["dtype"]]
    plain = hardware_flops(config, batch, context, "step")
    lines = []
    for policy in dict.fromkeys([*POLICIES, *rows["checkpoint"]]):
        own = rows[rows["checkpoint"] == policy]
        found = own.drop_duplicates("metric", keep="last").set_index("metric")["median"]
        ended = PENDING if own.empty else own["status"].iloc[-1]
        peak = peak_memory(config, batch, context, precision, "step", checkpoint=policy).n_bytes / GIB
        extra = 100 * (hardware_flops(config, batch, context, "step", checkpoint=policy) / plain - 1)
        lines.append(
            {
                "checkpoint": policy,
                "predicted peak GiB": digits(peak),
                "measured peak GiB": digits(found["peak_memory"]) if "peak_memory" in found else ended,
                "more FLOPs %": f"{extra:.1f}",
                "step ms": digits(found["step"]) if "step" in found else ended,
            }
        )
    timed = rows[rows["metric"] == "step"]
    said = caption(timed, ["size", "batch_size", "context_length", "dtype"], "medians of {n} whole steps")
    return Table(said, pd.DataFrame(lines))


def segments_table(rows: pd.DataFrame, dtype: str, context: int = 2048) -> Table:
    """Segments of k blocks of the large model: the predicted peak, where it is, what is alive there, and as measured.

    Args:
        rows: of part ``checkpointing``, of any dtype and context; a segment that none of them has is predicted alone.
    """
    own = rows[(rows["size"] == LARGE) & (rows["dtype"] == dtype) & (rows["context_length"] == context)]
    lines = []
    for k in (1, 2, 4, 8):
        policy = "full" if k == 1 else f"every-{k}"
        peak, found = peak_of("step", dtype, context, policy), own[own["checkpoint"] == policy]
        line: dict[str, object] = {"k": k, "predicted peak GiB": digits(peak.n_bytes / GIB)}
        for metric, label in (("peak_memory", "measured peak GiB"), ("step", "step ms")):
            values = found[found["metric"] == metric]["median"]
            ended = PENDING if found.empty else found["status"].iloc[-1]
            line[label] = digits(values.iloc[-1]) if len(values) else ended
        possible = (part for part in PARTS if part not in ("loss", "gathered parameters"))
        parts = {f"{part} GiB": f"{peak.parts.get(part, 0) / GIB:.2f}" for part in possible}
        lines.append(line | {"at": peak.moment} | parts)
    caption = (
        f"{LARGE}, batch 4, context {context}, {dtype}: a checkpoint for every k blocks. The parts are those of the "
        "predicted peak, at the moment named."
    )
    return Table(caption, pd.DataFrame(lines))
