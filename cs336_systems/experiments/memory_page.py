"""The page of a memory profile: one Markdown page, three CSVs and two pictures, for one case in one mode.

    write_memory_page(case, mode="step", out=Path("profiles/memory"), raw=Path("profiles/raw"))

The page says what the peak is and what it is made of, which allocations are the largest and which line asked for them,
and what one Transformer block keeps for backward, eager and compiled, and leaves behind as gradients.
Without CUDA there is no allocator to watch: the page then holds the account of the block alone, and says so. Run it in
a process of its own, as the sweep does: it assembles the whole model.
"""

import gc
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from cs336_systems.blocks import WrittenOutBlock, block_ops, block_products
from cs336_systems.case import TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.experiments.memory_figures import draw_history
from cs336_systems.experiments.profile import file_stem
from cs336_systems.hardware import GIB
from cs336_systems.harness.fit import is_predictable, predicted_peak
from cs336_systems.harness.provenance import host_name
from cs336_systems.model import ModelOps, TransformerBlock
from cs336_systems.profiling.memory_history import Allocation, MemoryHistory
from cs336_systems.profiling.memory_profile import MemoryProfile, profile_memory
from cs336_systems.profiling.residuals import ACTIVATION, PARAMETER, PARAMETER_COPY, Residuals, block_residuals
from cs336_systems.report.tables import Table, digits
from cs336_systems.training import check_supported
from cs336_systems.training.assemble import case_ops

MIB = 1024**2

NEEDS_CUDA = (
    "**Without a GPU.** The timeline, the peak and the largest allocations need CUDA's caching allocator; this page "
    "holds what one block keeps for its backward pass."
)

_LARGEST = 10
"""Lines of the table of allocations; the CSV holds all."""


@dataclass(frozen=True)
class BlockAccount:
    """The tensors that one block and one of its norms keep, eager or compiled."""

    variant: str
    block: Residuals
    norm: Residuals


def write_memory_page(
    case: TrainingCase, mode: str, out: Path, raw: Path, *, compiled: bool = True
) -> tuple[Path, dict[str, float]]:
    """Profile, account, and write ``memory-<case>.md``, its CSVs and its pictures to ``out``, the snapshot to ``raw``.

    Args:
        compiled: account for the compiled block, too, which costs its compilation, unless blocks are written out.

    Returns:
        The page, and its main figures by name with their unit at the end (``peak_gib``).

    Raises:
        ValueError: something in the case is unknown or unsupported on its device.
        OSError: a folder cannot be written to.
    """
    name, device = f"memory-{file_stem(case)}-{mode}", torch.device(case.device)
    out.mkdir(parents=True, exist_ok=True)
    check_supported(case, device)
    profile = profile_memory(case, mode, raw / f"{name}.pickle") if device.type == "cuda" else None
    gc.collect()
    if profile is not None:
        torch.cuda.empty_cache()
    variants = [False, True] if compiled and not case.written_out else [False]
    accounts = [account_block(case, compile=compile) for compile in variants]
    where = torch.cuda.get_device_name(device) if profile is not None else host_name()
    frames = {"residuals": residual_frame(accounts)}
    if profile is not None:
        draw_history(profile.history, out, name, f"{case}, mode {mode}, on {where}")
        frames |= {"peak": peak_frame(profile), "allocations": allocation_frame(profile.history)}
    for kind, frame in frames.items():
        frame.to_csv(out / f"{name}-{kind}.csv", index=False, float_format="%.6g")
    page = out / f"{name}.md"
    page.write_text(
        page_text(name, f"{case}, mode {mode}", profile, accounts, where), encoding="utf-8", errors="replace"
    )
    return page, main_figures(profile, accounts)


def account_block(case: TrainingCase, *, compile: bool) -> BlockAccount:
    """Account for one block of the model at the case's batch and context, without checkpointing between blocks."""
    arguments = (*case.work, case.precision, torch.device(case.device))
    account = partial(block_residuals, *arguments, ops=case_ops(case), compile=compile)
    if case.written_out:
        account = partial(account, make=partial(_written_out_block, case))
    return BlockAccount("compiled" if compile else "eager", account(), account(norm_only=True))


def _written_out_block(case: TrainingCase, config: ModelConfig, _: ModelOps, **placement: Any) -> TransformerBlock:
    products = block_products(case.kernels, case.recipe)
    return WrittenOutBlock(config, block_ops(case.kernels, case.attention), case.keep, products=products, **placement)


def main_figures(profile: MemoryProfile | None, accounts: list[BlockAccount]) -> dict[str, float]:
    """The figures of a JSON line or of rows."""
    figures = {}
    if profile is not None:
        figures["peak_gib"] = profile.peak_allocated_bytes / GIB
        for category, n_bytes in profile.history.peak().by_category.items():
            figures[f"peak_{category.replace(' ', '_')}_gib"] = n_bytes / GIB
    for account in accounts:
        figures[f"{account.variant}_block_activations_mib"] = account.block.activation_mib
    figures["block_gradients_mib"] = accounts[0].block.gradient_mib
    return figures


def page_text(name: str, heading: str, profile: MemoryProfile | None, accounts: list[BlockAccount], where: str) -> str:
    """The page as Markdown; its files beside it begin with ``name``."""
    parts = [f"# {heading}: where the memory goes", f"{where}, torch {torch.__version__}."]
    if profile is None:
        parts.append(NEEDS_CUDA)
    else:
        parts += [f"![memory alive, by category]({name}.png)", f"![memory alive, each allocation]({name}-active.png)"]
        if profile.out_of_memory:
            parts.append(f"**Out of memory.** The pass ended early: {profile.out_of_memory.splitlines()[0]}")
        tables = peak_table(profile), phase_table(profile.history), allocation_table(profile.history)
        parts += [table.markdown() for table in tables]
        snapshot = f"the snapshot, with stacks, for pytorch.org/memory_viz: `{profile.path.name}`"
        parts.append(f"Every allocation: `{name}-allocations.csv`; {snapshot}.")
    parts += [kept_table(accounts).markdown(), *map(_norm_sentence, accounts)]
    parts.append(f"Every tensor of the block, with the line that keeps it: `{name}-residuals.csv`.")
    return "\n\n".join(parts) + "\n"


def peak_frame(profile: MemoryProfile) -> pd.DataFrame:
    """``category, gib, percent`` at the peak; the allocator's rounding makes the sum ``max_memory_allocated``."""
    held = {**profile.history.peak().by_category, "allocator's rounding": profile.rounding_bytes}
    frame = pd.DataFrame({"category": held.keys(), "gib": [n_bytes / GIB for n_bytes in held.values()]})
    return frame.assign(percent=100 * frame["gib"] * GIB / profile.peak_allocated_bytes)


def peak_table(profile: MemoryProfile) -> Table:
    """The bytes alive at the peak by category, beside the prediction."""
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
    caption = f"The peak: alive at event {peak.event} of {profile.history.n_events}, in {peak.phase}."
    return Table(caption, pd.DataFrame(lines, columns=["category", "GiB", "%"]))


def phase_table(history: MemoryHistory) -> Table:
    """Each phase: its time under watch, and the most that was alive in it."""
    total = np.sum(list(history.live_bytes().values()), axis=0) / GIB
    lines = []
    for phase in history.phases:
        alive = total[phase.start - 1], max(total[phase.start : phase.end]), total[phase.end - 1]
        lines.append((phase.name, digits(phase.ms), phase.end - phase.start, *map(digits, alive)))
    columns = ["phase", "ms, watched", "events", "GiB at its start", "most GiB", "GiB at its end"]
    return Table("Bytes asked for, by phase.", pd.DataFrame(lines, columns=columns))


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


def allocation_table(history: MemoryHistory) -> Table:
    """The largest allocations."""
    frame = allocation_frame(history).head(_LARGEST)
    shown = frame[["made", "at_peak", "category", "phase"]].rename(columns={"at_peak": "alive at the peak"})
    shown.insert(0, "MiB each", frame["mib"].map(digits))
    shown["source"] = frame["what"].where(frame["what"] != "", frame["source"])
    return Table("The largest allocations. Equal ones are one line; `*` stands for every block.", shown)


def residual_frame(accounts: list[BlockAccount]) -> pd.DataFrame:
    """Every tensor that the block keeps, and every gradient, by variant."""
    frames = []
    for account in accounts:
        gradients = account.block.gradients.rename(columns={"parameter": "module"}).assign(kind="gradient")
        frames += [frame.assign(variant=account.variant) for frame in (account.block.tensors, gradients)]
    return pd.concat(frames)[["variant", *accounts[0].block.tensors.columns]]


def kept_table(accounts: list[BlockAccount]) -> Table:
    """Totals by kind, eager beside compiled."""
    lines = []
    for account in accounts:
        block, n_tensors = account.block, (account.block.tensors["kind"] == ACTIVATION).sum()
        beside = (block.mib(PARAMETER_COPY), block.mib(PARAMETER), block.gradient_mib)
        shown = [f"{mib:,.2f}" for mib in beside]
        lines.append((account.variant, f"{block.activation_mib:,.2f}", n_tensors, *shown))
    columns = ["variant", "activations MiB", "tensors"]
    columns += ["parameter copies MiB", "parameters saved MiB", "gradients left MiB"]
    caption = (
        "What one block keeps for backward. Storages are counted once; parameters are alive anyway, their copies only "
        "under autocast."
    )
    return Table(caption, pd.DataFrame(lines, columns=columns))


def _norm_sentence(account: BlockAccount) -> str:
    """How many full-size tensors one RMSNorm by itself keeps."""
    tensors = account.norm.tensors
    full = tensors[(tensors["kind"] == ACTIVATION) & (tensors["mib"] > 0.1 * tensors["mib"].max())]
    saves, storages = int(full["saves"].sum()), len(full)
    return (
        f"One RMSNorm by itself, {account.variant}, saves full-size tensors {saves} time{'s' * (saves > 1)}, in "
        f"{storages} storage{'s' * (storages > 1)}: {account.norm.activation_mib:,.2f} MiB."
    )
