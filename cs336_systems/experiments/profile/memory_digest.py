"""The digest of a memory profile: one Markdown page, three CSVs and two timelines, for one case in one mode.

    write_memory_digest(case, mode="step", out=Path("profiles/memory"), raw=Path("profiles/raw"))

The page answers what the peak is and what it is made of, which allocations are the largest and which line asked for
them, what one Transformer block keeps for backward, eager and compiled, and how many bytes of gradients its backward
pass leaves. Without CUDA there is no allocator to watch: the page then holds the accounting of the block alone, and
says so. Run it in a process of its own, as the sweep does: it assembles the whole model.
"""

import functools
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cs336_systems.blocks import WrittenOutBlock, block_ops, block_products
from cs336_systems.case import COMPILED, TrainingCase
from cs336_systems.config import ModelConfig
from cs336_systems.costs.activations import block_saved_tensors, total_bytes
from cs336_systems.costs.kept import kept_tensors
from cs336_systems.experiments.profile import memory_tables as tables
from cs336_systems.experiments.profile.memory_blocks import draw_allocations
from cs336_systems.experiments.profile.memory_tables import GIB, MIB, BlockAccount
from cs336_systems.experiments.profile.memory_timeline import draw_memory_timeline
from cs336_systems.harness.provenance import host_name
from cs336_systems.model import ModelOps, TransformerBlock
from cs336_systems.profiling.memory_history import MemoryHistory
from cs336_systems.profiling.memory_profile import MemoryProfile, profile_memory
from cs336_systems.profiling.places import short_place
from cs336_systems.profiling.residuals import PARAMETER_COPY, block_residuals
from cs336_systems.training import check_supported
from cs336_systems.training.assemble import case_ops

NEEDS_CUDA = (
    "**Without a GPU.** The timeline, the peak and the largest allocations need CUDA's caching allocator; this page "
    "holds what one block keeps for its backward pass."
)

_STACKS = 3
_STACK_FRAMES = 12
_MODULE_CALLS = (" _call_impl", " _wrapped_call_impl")
"""Frames of ``nn.Module`` between a module's caller and its ``forward``; two for each, and they say nothing."""


@dataclass(frozen=True)
class MemoryDigest:
    """The page, and its main figures by name with their unit at the end (``peak_gib``, ``activations_gib``, ...)."""

    page: Path
    figures: dict[str, float]


def write_memory_digest(case: TrainingCase, mode: str, out: Path, raw: Path, *, compiled: bool = True) -> MemoryDigest:
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
        allocations = tables.allocation_frame(profile.history)
        tables.peak_frame(profile).to_csv(out / f"{name}-peak.csv", index=False, float_format="%.6g")
        allocations.to_csv(out / f"{name}-allocations.csv", index=False, float_format="%.6g")
    tables.residual_frame(accounts).to_csv(out / f"{name}-residuals.csv", index=False, float_format="%.6g")
    page = out / f"{name}.md"
    page.write_text(digest(case, mode, profile, accounts, where))
    return MemoryDigest(page, main_figures(profile, accounts))


def draw_history(history: MemoryHistory, out: Path, name: str, title: str) -> list[Path]:
    """The two pictures of a snapshot: memory alive by category, and each allocation by itself.

    Raises:
        OSError: a picture cannot be written.
    """
    by_category, by_allocation = out / f"{name}.png", out / f"{name}-active.png"
    draw_memory_timeline(history, by_category, title)
    draw_allocations(history, by_allocation, title)
    return [by_category, by_allocation]


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


def digest(
    case: TrainingCase, mode: str, profile: MemoryProfile | None, accounts: list[BlockAccount], where: str
) -> str:
    """The page as Markdown."""
    name, config, eager = profile_name(case, mode), case.config, accounts[0].block
    parts = [f"# {heading(case, mode)}: where the memory goes", f"{where}, torch {torch.__version__}."]
    if profile is None:
        parts.append(NEEDS_CUDA)
    else:
        parts += _profile_parts(profile, name)
    residual = case.batch_size * config.context_length * config.d_model * case.precision.parameter_bytes
    parts += [
        "## The residual stream",
        f"One activation between blocks: {case.batch_size} x {config.context_length} x {config.d_model} elements of "
        f"{case.precision.parameter_bytes} bytes = **{residual / MIB:.2f} MiB**.",
        "## What one block keeps for backward",
        tables.kept_table(accounts).markdown(),
    ]
    if case.written_out or case.attention == "reference":
        if case.written_out:
            fused = case.kernels != "reference"
            listed = kept_tensors(*case.work, case.precision, case.keep, case.recipe, fused=fused)
        else:
            listed = block_saved_tensors(*case.work, case.precision.on(torch.device(case.device).type))
        parts.append(f"Predicted for the eager block: {total_bytes(listed) / MIB:,.2f} MiB.")
    for account in accounts:
        parts += [tables.largest_table(account).markdown(), tables.norm_sentence(account)]
    parts += [
        "## Gradients of one block",
        tables.gradient_table(eager).markdown(),
        f"Going backward through one eager block frees {eager.activation_mib:,.1f} MiB of activations (and "
        f"{eager.mib(PARAMETER_COPY):,.1f} MiB of parameters' copies) and leaves {eager.gradient_mib:,.1f} MiB of "
        "gradients.",
        f"Every tensor: `{name}-residuals.csv`.",
    ]
    return "\n\n".join(parts) + "\n"


def _profile_parts(profile: MemoryProfile, name: str) -> list[str]:
    parts = [f"![memory alive, by category]({name}.png)", f"![memory alive, each allocation]({name}-active.png)"]
    if profile.out_of_memory:
        parts.append(f"**Out of memory.** The pass ended early: {profile.out_of_memory.splitlines()[0]}")
    parts += ["## The peak", tables.peak_table(profile).markdown(), tables.phase_table(profile.history).markdown()]
    parts += ["## Largest allocations", tables.allocation_table(profile.history).markdown()]
    shown: set[tuple[str, ...]] = set()
    for allocation in sorted(profile.history.allocations, key=lambda allocation: -allocation.n_bytes):
        if allocation.stack and allocation.stack not in shown and len(shown) < _STACKS:
            shown.add(allocation.stack)
            places = [place for place in allocation.stack if not place.endswith(_MODULE_CALLS)]
            stack = "\n".join(map(short_place, places[:_STACK_FRAMES]))
            parts.append(f"Stack of {allocation.n_bytes / MIB:,.2f} MiB in {allocation.phase}:\n\n```\n{stack}\n```")
    return [
        *parts,
        f"All of them: `{name}-allocations.csv`; the snapshot for pytorch.org/memory_viz: `{profile.path.name}`.",
    ]
