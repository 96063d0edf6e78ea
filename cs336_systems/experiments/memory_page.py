"""The page of a memory profile: one Markdown page, three CSVs and two pictures, for one case in one mode.

    write_memory_page(case, mode="step", out=Path("profiles/memory"), raw=Path("profiles/raw"))

The page says what the peak is and what it is made of, which allocations are the largest and which line asked for them,
and what one Transformer block keeps for backward, eager and compiled, and leaves behind as gradients.
Without CUDA there is no allocator to watch: the page then holds the account of the block alone, and says so. Run it in
a process of its own, as the sweep does: it assembles the whole model.
"""

import functools
import gc
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from cs336_systems.blocks import WrittenOutBlock, block_ops, block_products
from cs336_systems.case import COMPILED, TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.experiments.memory_figures import draw_history
from cs336_systems.harness.fit import is_predictable, predicted_peak
from cs336_systems.harness.provenance import host_name
from cs336_systems.model import ModelOps, TransformerBlock
from cs336_systems.profiling.memory_history import Allocation, MemoryHistory
from cs336_systems.profiling.memory_profile import MemoryProfile, profile_memory
from cs336_systems.profiling.residuals import ACTIVATION, PARAMETER, PARAMETER_COPY, Residuals, block_residuals
from cs336_systems.report.tables import Table, digits
from cs336_systems.training import check_supported
from cs336_systems.training.assemble import case_ops

GIB, MIB = 1024**3, 1024**2

NEEDS_CUDA = (
    "**Without a GPU.** The timeline, the peak and the largest allocations need CUDA's caching allocator; this page "
    "holds what one block keeps for its backward pass."
)

_LARGEST = 10
"""Lines of the table of allocations; the CSV holds all."""


@dataclass(frozen=True)
class BlockAccount:
    """What one block and one of its norms keep, eager or compiled."""

    variant: str
    block: Residuals
    norm: Residuals


@dataclass(frozen=True)
class MemoryPage:
    """The page, and its main figures by name with their unit at the end (``peak_gib``, ``activations_gib``, ...)."""

    page: Path
    figures: dict[str, float]


def write_memory_page(case: TrainingCase, mode: str, out: Path, raw: Path, *, compiled: bool = True) -> MemoryPage:
    """Profile, account, and write ``memory-<name>.md``, its CSVs and its pictures to ``out``, the snapshot to ``raw``.

    Args:
        compiled: account for the compiled block, too, which costs its compilation, unless blocks are written out.

    Raises:
        ValueError: something in the case is unknown or unsupported on its device.
        OSError: a folder cannot be written to.
    """
    name = profile_name(case, mode)
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(case.device)
    check_supported(case, device)
    profile = profile_memory(case, mode, raw / f"{name}.pickle") if device.type == "cuda" else None
    if profile is not None:
        gc.collect()
        torch.cuda.empty_cache()
    variants = [False, True] if compiled and not case.written_out else [False]
    accounts = [account_block(case, compile=compile) for compile in variants]
    where = torch.cuda.get_device_name(device) if profile is not None else host_name()
    if profile is not None:
        draw_history(profile.history, out, name, f"{heading(case, mode)}, on {where}")
        allocations = allocation_frame(profile.history)
        peak_frame(profile).to_csv(out / f"{name}-peak.csv", index=False, float_format="%.6g")
        allocations.to_csv(out / f"{name}-allocations.csv", index=False, float_format="%.6g")
    residual_frame(accounts).to_csv(out / f"{name}-residuals.csv", index=False, float_format="%.6g")
    page = out / f"{name}.md"
    page.write_text(page_text(case, mode, profile, accounts, where))
    return MemoryPage(page, main_figures(profile, accounts))


def profile_name(case: TrainingCase, mode: str) -> str:
    """The stem of every file of one profile; only what differs from the plain case is named after the precision."""
    shape = [case.config.name, f"b{case.batch_size}", f"c{case.context_length}", case.dtype]
    return "-".join(["memory", *shape, *(extra.replace(" ", "-") for extra in case.extras), mode])


def heading(case: TrainingCase, mode: str) -> str:
    """The case in one line."""
    line = f"{case.config.name}, batch {case.batch_size}, context {case.context_length}, {case.dtype}, mode {mode}"
    attention = f", attention {case.attention}" if case.attention != "reference" else ""
    checkpoint = f", checkpoint {case.checkpoint}" if case.checkpoint != "none" else ""
    keep = f", {case.kernels} kernels, keep {case.keep}" if case.written_out else ""
    return line + attention + (f", {COMPILED[case.compile]}" if case.compiled else "") + checkpoint + keep


def account_block(case: TrainingCase, *, compile: bool) -> BlockAccount:
    """What one block of the model keeps at the case's batch and context; checkpointing, between blocks, left out."""
    arguments = (*case.work, case.precision, torch.device(case.device))
    account = functools.partial(block_residuals, *arguments, ops=case_ops(case), compile=compile)
    if case.written_out:
        account = functools.partial(account, make=functools.partial(_written_out_block, case))
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


def page_text(
    case: TrainingCase, mode: str, profile: MemoryProfile | None, accounts: list[BlockAccount], where: str
) -> str:
    """The page as Markdown."""
    name = profile_name(case, mode)
    parts = [f"# {heading(case, mode)}: where the memory goes", f"{where}, torch {torch.__version__}."]
    if profile is None:
        parts.append(NEEDS_CUDA)
    else:
        parts += [f"![memory alive, by category]({name}.png)", f"![memory alive, each allocation]({name}-active.png)"]
        if profile.out_of_memory:
            parts.append(f"**Out of memory.** The pass ended early: {profile.out_of_memory.splitlines()[0]}")
        tables = peak_table(profile), phase_table(profile.history), allocation_table(profile.history)
        parts += [table.markdown() for table in tables]
        parts.append(
            f"Every allocation: `{name}-allocations.csv`; the snapshot, with stacks, for pytorch.org/memory_viz: "
            f"`{profile.path.name}`."
        )
    parts += [kept_table(accounts).markdown(), *map(norm_sentence, accounts)]
    parts.append(f"Every tensor of the block, with the line that keeps it: `{name}-residuals.csv`.")
    return "\n\n".join(parts) + "\n"


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
    caption = f"The peak: alive at event {peak.event} of {profile.history.n_events}, in {peak.phase}."
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
    """The largest allocations."""
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
    lines = [
        {
            "variant": account.variant,
            "activations MiB": f"{account.block.activation_mib:,.2f}",
            "tensors": (account.block.tensors["kind"] == ACTIVATION).sum(),
            "parameter copies MiB": f"{account.block.mib(PARAMETER_COPY):,.2f}",
            "parameters saved MiB": f"{account.block.mib(PARAMETER):,.2f}",
            "gradients left MiB": f"{account.block.gradient_mib:,.2f}",
        }
        for account in accounts
    ]
    caption = (
        "What one block keeps for backward. Storages are counted once; parameters are alive anyway, their copies only "
        "under autocast."
    )
    return Table(caption, pd.DataFrame(lines))


def norm_sentence(account: BlockAccount) -> str:
    """How many full-size tensors one RMSNorm by itself keeps."""
    tensors = account.norm.tensors
    full = tensors[(tensors["kind"] == ACTIVATION) & (tensors["mib"] > 0.1 * tensors["mib"].max())]
    saves, storages = int(full["saves"].sum()), len(full)
    return (
        f"One RMSNorm by itself, {account.variant}, saves full-size tensors {saves} time{'s' * (saves > 1)}, in "
        f"{storages} storage{'s' * (storages > 1)}: {account.norm.activation_mib:,.2f} MiB."
    )
