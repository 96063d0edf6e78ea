"""Numbers and tables for the handout's questions that a pivot of rows cannot give.

The tensors that a block keeps are computed by ``costs/``, the largest allocations come from the digests of
``profile_model.py``, and rounding errors from ``experiments/precision.py``.
"""

import pandas as pd
import torch

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.config import MODEL_SIZES, PRECISIONS
from cs336_systems.costs.attention import AttentionWork, attention_stages
from cs336_systems.costs.memory import SavedTensor, block_saved_tensors, total_bytes
from cs336_systems.experiments import precision
from cs336_systems.hardware import MIB
from cs336_systems.report.tables import Table, digits
from cs336_systems.training.precision import DTYPES

LARGE = "2.7b"
"""The size whose memory both handouts ask about; the 2026 handout calls it xl."""

_OUT_OF_MEMORY = r"asked for ([\d.]+) GiB of ([\d.]+) GiB, ([\d.]+) GiB in tensors and ([\d.]+) GiB in free pieces"
_CELL = ["size", "context_length", "dtype"]


def handout_attention(length: int, d_head: int) -> AttentionWork:
    """Return a configuration of the handout's grid: batch 8, one head, not causal."""
    return AttentionWork(8, 1, 1, length, length, d_head, causal=False)


def kept_by_block(context: int) -> list[SavedTensor]:
    """Return the tensors that one block of the large model saves for backward at batch 4 in fp32, largest first."""
    config = MODEL_SIZES[LARGE].at_context(context)
    tensors = block_saved_tensors(config, 4, context, PRECISIONS["fp32"])
    return sorted(tensors, key=lambda tensor: -tensor.n_bytes)


def residuals_table(context: int, most: int = 5) -> Table:
    """Return a table of the ``most`` largest tensors of ``kept_by_block``."""
    tensors = kept_by_block(context)
    whole = total_bytes(tensors)
    lines = [
        {"tensor": tensor.name, "kept by": tensor.kept_by, "shape": " x ".join(map(str, tensor.shape))}
        | {"MiB": f"{tensor.n_bytes / MIB:,.0f}", "share %": f"{100 * tensor.n_bytes / whole:.1f}"}
        for tensor in tensors[:most]
    ]
    said = f"One block of {LARGE}, batch 4, context {context}, fp32: {whole / MIB:,.0f} MiB in {len(tensors)} tensors."
    return Table(said, pd.DataFrame(lines))


def ran_out(rows: pd.DataFrame) -> dict[str, float]:
    """Return GiB from torch's out-of-memory message: requested, of the device, in tensors, and in free pieces.

    Raises:
        NotMeasured: no ``oom`` row has such a message.
    """
    said = rows["message"].str.extract(_OUT_OF_MEMORY).dropna().astype(float)
    if said.empty:
        raise NotMeasured("no row says what was asked for when memory ran out")
    return dict(zip(("asked", "device", "in_tensors", "in_pieces"), said.iloc[-1], strict=True))


def largest_table(allocations: pd.DataFrame, most: int = 3) -> Table:
    """Return a table of each forward pass's largest allocations, with the code line or the parameter they are for."""
    ordered = allocations.sort_values("mib", ascending=False, kind="stable")
    largest = ordered.groupby(_CELL).head(most).sort_values(_CELL, kind="stable")
    shown = largest.rename(columns={"context_length": "context", "at_peak": "alive at the peak"})
    shown["MiB each"] = largest["mib"].map(digits)
    shown["source"] = largest["what"].where(largest["phase"] == "before", largest["source"])
    columns = ["size", "context", "dtype", "MiB each", "made", "alive at the peak", "category", "source"]
    return Table("The largest allocations of forward.", shown[columns])


def attention_work(what: str, size: str, context: int) -> float:
    """Return the ratio of attention's two forward matmuls to its softmax, fp32: in FLOPs, or least bytes
    (``n_bytes``)."""
    config = MODEL_SIZES[size].at_context(context)
    matmul, softmax = attention_stages(config, 4, context, PRECISIONS["fp32"], "forward")
    return float(2 * getattr(matmul, what) / getattr(softmax, what))


def sums_table() -> Table:
    """Return a table of the handout's four sums of a thousand times 0.01."""
    frame = precision.sums((1000,)).head(4)  # the first experiments are the handout's
    frame = frame.assign(
        result=[f"{value:.7g}" for value in frame["result"]],
        relative_error=[f"{value:+.1e}" for value in frame["relative_error"]],
    )
    names = {"relative_error": "relative error", "dtype": "dtype of terms"}
    return Table("1,000 times 0.01; exact: 10.", frame.drop(columns=["terms", "exact"]).rename(columns=names))


def accumulated(accumulator: str, dtype: str, terms: int) -> str:
    """Return the sum of ``terms`` times 0.01, added one after the other, to seven digits."""
    term = torch.tensor(0.01, dtype=DTYPES[dtype])
    return f"{precision.in_order(terms, term, DTYPES[accumulator]):.7g}"


def toy_table() -> Table:
    """Return a table of dtypes in the handout's toy model, with layer norm and loss, under CUDA's autocast."""
    found = {name: precision.toy_dtypes("pretended-cuda", DTYPES[name]) for name in ("fp16", "bf16")}
    lines = [{"tensor": tensor} | {name: found[name][tensor] for name in found} for tensor in found["fp16"]]
    return Table("The toy model by the rules of CUDA's autocast.", pd.DataFrame(lines))
