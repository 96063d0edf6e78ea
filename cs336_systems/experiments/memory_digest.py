"""A memory profile, digested: three CSVs, a picture, and the main figures as metrics, for one case in one mode.

    metrics = write_memory_digest(case, mode="step", out=Path("profiles/memory"), raw=Path("profiles/raw"))

What the peak is made of (``-peak.csv``), every allocation with the line that asked for it (``-allocations.csv``), and
what one Transformer block keeps for backward and leaves behind as gradients (``-residuals.csv``).
Without CUDA there is no allocator to watch, and only the block is accounted for. Run it in a process of its own, as the
sweep does: it assembles the whole model.
"""

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_systems.blocks import WrittenOutBlock, block_ops, block_products
from cs336_systems.case import TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.experiments.profile import memory_stem
from cs336_systems.hardware import GIB, MIB
from cs336_systems.harness.memory import is_predictable, predicted_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.model import ModelOps, TransformerBlock
from cs336_systems.profiling.memory import (
    CATEGORIES,
    OTHER,
    Allocation,
    MemoryHistory,
    MemoryProfile,
    Moment,
    profile_memory,
)
from cs336_systems.profiling.residuals import ACTIVATION, GRADIENT, block_residuals
from cs336_systems.report.figures import save
from cs336_systems.training import check_supported
from cs336_systems.training.assemble import case_ops

COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999"), strict=True))
_UNITS = {"GiB": GIB, "MiB": MIB, "KiB": 1024}
_NARROW = 0.06
"""Share of the width below which a phase has its name written upright."""
_LEAST_SHARE = 1e-3
"""Categories that never hold this share of the peak are left out: they are thinner than a line."""


def write_memory_digest(case: TrainingCase, mode: str, out: Path, raw: Path) -> list[Metric]:
    """Profile, account, and write ``memory-<case>``'s CSVs and picture to ``out``, the snapshot to ``raw``.

    Raises:
        ValueError: something in the case is unknown or unsupported on its device.
        OSError: a folder cannot be written to.
    """
    name, device = memory_stem(case, mode), torch.device(case.device)
    out.mkdir(parents=True, exist_ok=True)
    check_supported(case, device)
    profile = profile_memory(case, mode, raw / f"{name}.pickle") if device.type == "cuda" else None
    gc.collect()
    block = account_block(case)
    frames, metrics = {"residuals": block}, list[Metric]()
    if profile is not None:
        where = torch.cuda.get_device_name(device)
        save(timeline_figure(profile.history, f"{case}, mode {mode}, on {where}"), out / f"{name}.png")
        frames |= {"peak": peak_frame(profile), "allocations": allocation_frame(profile.history)}
        metrics += peak_metrics(profile)
    for kind, frame in frames.items():
        frame.to_csv(out / f"{name}-{kind}.csv", index=False, float_format="%.6g")
    mib = block.groupby("kind")["mib"].sum()
    for name, kind in (("eager_block_activations_mib", ACTIVATION), ("block_gradients_mib", GRADIENT)):
        metrics.append(Metric(name, "MiB", [float(mib[kind])]))
    return metrics


def account_block(case: TrainingCase) -> pd.DataFrame:
    """The tensors that one block keeps, and its gradients, at the case's batch and context.

    There is no checkpointing between blocks.
    """
    arguments = (*case.work, case.precision, torch.device(case.device))
    account = partial(block_residuals, *arguments, ops=case_ops(case))
    return account(make=partial(_written_out_block, case)) if case.written_out else account()


def _written_out_block(case: TrainingCase, config: ModelConfig, _: ModelOps, **placement: Any) -> TransformerBlock:
    products = block_products(case.kernels, case.recipe)
    return WrittenOutBlock(config, block_ops(case.kernels, case.attention), case.keep, products=products, **placement)


def peak_metrics(profile: MemoryProfile) -> list[Metric]:
    """The peak, its prediction, its parts, and whether memory ran out."""
    found: dict[str, int] = {"peak_gib": profile.peak_allocated_bytes}
    if is_predictable(profile.case):
        found["predicted_peak_gib"] = predicted_bytes(profile.case, profile.mode)
    for category, n_bytes in profile.history.peak().by_category.items():
        found[f"peak_{category.replace(' ', '_')}_gib"] = n_bytes
    metrics = [Metric(name, "GiB", [n_bytes / GIB]) for name, n_bytes in found.items()]
    return metrics + [Metric("out_of_memory", "passes", [1.0])] * bool(profile.out_of_memory)


def peak_frame(profile: MemoryProfile) -> pd.DataFrame:
    """``category, gib, percent`` at the peak; the allocator's rounding makes the sum ``max_memory_allocated``."""
    held = {**profile.history.peak().by_category, "allocator's rounding": profile.rounding_bytes}
    frame = pd.DataFrame({"category": held.keys(), "gib": [n_bytes / GIB for n_bytes in held.values()]})
    return frame.assign(percent=100 * frame["gib"] * GIB / profile.peak_allocated_bytes)


def allocation_frame(history: MemoryHistory) -> pd.DataFrame:
    """Equal allocations as one line: ``mib, made, at_peak, category, phase, what, source``, the largest first."""
    peak = history.peak().event
    groups: dict[tuple, list[Allocation]] = {}
    for allocation in history.allocations:
        what = re.sub(r"\.\d+\.", ".*.", allocation.name)
        key = (allocation.n_bytes, allocation.category, allocation.phase, what, allocation.source)
        groups.setdefault(key, []).append(allocation)
    lines = [
        (n_bytes / MIB, len(group), sum(each.start <= peak < each.end for each in group), *what)
        for (n_bytes, *what), group in groups.items()
    ]
    columns = ["mib", "made", "at_peak", "category", "phase", "what", "source"]
    return pd.DataFrame(lines, columns=columns).sort_values("mib", ascending=False, kind="stable")


def unit_of(peak: Moment) -> tuple[str, int]:
    """The unit in which a peak is shown, and its bytes."""
    return next((found for found in _UNITS.items() if peak.n_bytes >= found[1] / 10), ("KiB", 1024))


def timeline_figure(history: MemoryHistory, title: str) -> Figure:
    """Bytes alive after every event, stacked by category; the legend tells them at the peak.

    The x axis counts allocations and frees, as PyTorch's viewer does: the host makes them ahead of the device, so that
    on a clock a phase is a burst and a wait. Phases are named above. Single allocations are shown by
    pytorch.org/memory_viz, which reads the snapshot.
    """
    live, peak = history.live_bytes(), history.peak()
    unit, scale = unit_of(peak)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots()
    edges = np.arange(history.n_events + 2)
    bottom, handles = np.zeros(history.n_events + 1), list[Patch]()
    for category in (OTHER, *(category for category in CATEGORIES if category != OTHER)):
        if live[category].max() < _LEAST_SHARE * max(1, peak.n_bytes):
            continue
        top, n_bytes = bottom + live[category] / scale, peak.by_category[category]
        axes.stairs(top, edges, baseline=bottom, fill=True, color=COLOURS[category], linewidth=0.5)
        share = f"{n_bytes / scale:.2f} {unit} ({100 * n_bytes / max(1, peak.n_bytes):.0f} %)"
        handles.insert(0, Patch(color=COLOURS[category], label=f"{category}\n{share}"))
        bottom = top
    said: dict[str, Any] = {"title": "at the peak", "alignment": "left", "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside right center", **said)
    axes.set_xlim(0, history.n_events + 1)
    axes.set_ylim(0, 1.16 * peak.n_bytes / scale)
    axes.set_xlabel("allocator events (allocations and frees), in order")
    axes.set_ylabel(f"memory alive (bytes asked for), {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    for phase in history.phases:
        axes.axvline(phase.start, color="black", linewidth=0.8, linestyle=":")
        upright = 90 if phase.end - phase.start < _NARROW * history.n_events else 0
        place, label = ((phase.start + phase.end) / 2, 0.985), phase.name
        above = axes.get_xaxis_transform()
        axes.text(*place, label, transform=above, ha="center", va="top", rotation=upright, fontsize=9)
    at, left = (peak.event + 0.5, peak.n_bytes / scale), peak.event > history.n_events / 2
    axes.plot(*at, marker="v", color="black", markersize=6, clip_on=False)
    bold: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "ha": "right" if left else "left"}
    axes.annotate(f"peak {at[1]:.2f} {unit}", at, (-8 if left else 8, 4), "data", "offset points", **bold)
    return figure
