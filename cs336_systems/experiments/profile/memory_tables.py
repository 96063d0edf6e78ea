"""Tables of a memory profile: the peak by category, phases, largest allocations, what a block keeps and its gradients.

``MemoryProfile`` is what was watched on a GPU, ``MemoryHistory`` what its snapshot says; ``BlockAccount`` what one
block keeps for backward, on any device.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cs336_systems.harness.fit import is_predictable, predicted_peak
from cs336_systems.profiling.memory_history import Allocation, MemoryHistory
from cs336_systems.profiling.memory_profile import MemoryProfile
from cs336_systems.profiling.residuals import ACTIVATION, PARAMETER, PARAMETER_COPY, Residuals
from cs336_systems.report.tables import Table, digits

GIB, MIB = 1024**3, 1024**2

_LARGEST = 10


@dataclass(frozen=True)
class BlockAccount:
    """What one block and one of its norms keep, eager or compiled."""

    variant: str
    block: Residuals
    norm: Residuals


def peak_frame(profile: MemoryProfile) -> pd.DataFrame:
    """``category, gib, percent`` at the peak; the allocator's rounding makes the sum ``max_memory_allocated``."""
    held = {**profile.history.peak().by_category, "allocator's rounding": profile.rounding_bytes}
    frame = pd.DataFrame({"category": held.keys(), "gib": [n_bytes / GIB for n_bytes in held.values()]})
    return frame.assign(percent=100 * frame["gib"] * GIB / profile.peak_allocated_bytes)


def peak_table(profile: MemoryProfile) -> Table:
    """What is alive at the peak, beside what was predicted."""
    peak, case = profile.history.peak(), profile.case
    frame = peak_frame(profile).itertuples(index=False, name=None)
    lines = [(category, digits(gib), f"{percent:.1f}") for category, gib, percent in frame]
    lines.append(("max_memory_allocated", digits(profile.peak_allocated_bytes / GIB), "100.0"))
    unwatched = digits(profile.unwatched_peak_bytes / GIB) if profile.unwatched_peak_bytes else "–"
    lines.append(("the same, unwatched", unwatched, ""))
    if is_predictable(case):
        predicted = predicted_peak(case, profile.mode)
        lines.append((f"predicted ({predicted.moment})", digits(predicted.n_bytes / GIB), ""))
    lines.append(("reserved by the process", digits(profile.peak_reserved_bytes / GIB), ""))
    caption = f"Alive at the peak, event {peak.event} of {profile.history.n_events}, in {peak.phase}."
    return Table(caption, pd.DataFrame(lines, columns=["category", "GiB", "%"]))


def phase_table(history: MemoryHistory) -> Table:
    """Each phase: its time under watch, and the most that was alive in it."""
    total = np.sum(list(history.live_bytes().values()), axis=0)
    lines = [
        {
            "phase": phase.name,
            "ms, watched": digits(phase.ms),
            "events": phase.end - phase.start,
            "GiB at its start": digits(total[phase.start - 1] / GIB),
            "most GiB": digits(max(total[phase.start : phase.end]) / GIB),
            "GiB at its end": digits(total[phase.end - 1] / GIB),
        }
        for phase in history.phases
    ]
    return Table("Bytes asked for, by phase.", pd.DataFrame(lines))


def allocation_frame(history: MemoryHistory) -> pd.DataFrame:
    """Equal allocations as one line: ``mib, made, at_peak, category, phase, what, source``, the largest first."""
    peak = history.peak().event
    groups: dict[tuple, list[Allocation]] = {}
    for allocation in history.allocations:
        what = re.sub(r"\.\d+\.", ".*.", allocation.name)
        key = (allocation.n_bytes, allocation.category, allocation.phase, what, allocation.source)
        groups.setdefault(key, []).append(allocation)
    lines = [
        (key[0] / MIB, len(group), sum(allocation.start <= peak < allocation.end for allocation in group), *key[1:])
        for key, group in groups.items()
    ]
    columns = ["mib", "made", "at_peak", "category", "phase", "what", "source"]
    return pd.DataFrame(lines, columns=columns).sort_values("mib", ascending=False, kind="stable")


def allocation_table(history: MemoryHistory) -> Table:
    """The largest of them."""
    frame = allocation_frame(history).head(_LARGEST)
    shown = pd.DataFrame(
        {
            "MiB each": [digits(mib) for mib in frame["mib"]],
            "made": frame["made"],
            "alive at the peak": frame["at_peak"],
            "category": frame["category"],
            "phase": frame["phase"],
            "source": [what or source for what, source in zip(frame["what"], frame["source"], strict=True)],
        }
    )
    return Table("Equal allocations are one line; `*` stands for every block.", shown)


def residual_frame(accounts: list[BlockAccount]) -> pd.DataFrame:
    """Every tensor that the block keeps, and every gradient, by variant."""
    frames = []
    for account in accounts:
        gradients = account.block.gradients.rename(columns={"parameter": "module"}).assign(kind="gradient")
        frames += [frame.assign(variant=account.variant) for frame in (account.block.tensors, gradients)]
    return pd.concat(frames)[["variant", *accounts[0].block.tensors.columns]]


def kept_table(accounts: list[BlockAccount]) -> Table:
    """Totals by kind, eager beside compiled."""
    lines = [
        {
            "variant": account.variant,
            "activations MiB": f"{account.block.activation_mib:,.2f}",
            "tensors": (account.block.tensors["kind"] == ACTIVATION).sum(),
            "parameter copies MiB": f"{account.block.mib(PARAMETER_COPY):,.2f}",
            "parameters saved MiB": f"{account.block.mib(PARAMETER):,.2f}",
        }
        for account in accounts
    ]
    caption = "Storages counted once; parameters are alive anyway, their copies only under autocast."
    return Table(caption, pd.DataFrame(lines))


def largest_table(account: BlockAccount) -> Table:
    """The five activations that take the most."""
    largest = account.block.largest(5)
    places = largest[["module", "source"]].itertuples(index=False)
    shown = pd.DataFrame(
        {
            "MiB": [digits(mib) for mib in largest["mib"]],
            "%": [f"{percent:.1f}" for percent in largest["percent"]],
            "shape": _shapes(largest),
            "dtype": largest["dtype"],
            "kept by": largest["kept_by"],
            "source": [", ".join(filter(None, place)) for place in places],
        }
    )
    together = largest["percent"].sum()
    return Table(f"The five largest of the {account.variant} block, {together:.1f} % of what it keeps.", shown)


def norm_sentence(account: BlockAccount) -> str:
    """How many full-size tensors one RMSNorm by itself keeps."""
    tensors = account.norm.tensors
    full = tensors[(tensors["kind"] == ACTIVATION) & (tensors["mib"] > 0.1 * tensors["mib"].max())]
    saves, storages = int(full["saves"].sum()), len(full)
    return (
        f"One RMSNorm by itself, {account.variant}, saves full-size tensors {saves} time{'s' * (saves > 1)}, in "
        f"{storages} storage{'s' * (storages > 1)}: {account.norm.activation_mib:,.2f} MiB."
    )


def gradient_table(block: Residuals) -> Table:
    """The gradients that backward leaves behind."""
    shown = pd.DataFrame(
        {
            "parameter": block.gradients["parameter"],
            "shape": _shapes(block.gradients),
            "dtype": block.gradients["dtype"],
            "MiB": [digits(mib) for mib in block.gradients["mib"]],
        }
    )
    return Table(f"{block.gradient_mib:,.2f} MiB in all.", shown)


def _shapes(frame: pd.DataFrame) -> list[str]:
    return [" x ".join(map(str, shape)) for shape in frame["shape"]]
