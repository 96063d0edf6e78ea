"""Blocks and quoted numbers about attention by itself, from the parts of ``scripts/measure_attention.sh``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from cs336_systems.answers.committed import Committed
from cs336_systems.answers.quotes import Term
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.experiments.attention.figure import draw_scaling
from cs336_systems.experiments.attention.table import (
    PASSES,
    account_table,
    attention_table,
    comparison_table,
    length_table,
    tile_table,
    time_of,
    time_over,
)
from cs336_systems.experiments.model.table import step_table
from cs336_systems.harness.runs import median_of
from cs336_systems.report.tables import Table, digits

GIB = 2**30
PLAIN, COMPILED = "reference", "reference-compiled"
FIRST_TOO_LARGE = AttentionWork(8, 1, 1, 65_536, 65_536, 16, causal=False)
"""The smallest configuration of the handout's grid, its lengths carried on, that cannot fit."""

OUT_OF_MEMORY = AttentionWork(8, 1, 1, 32_768, 32_768, 16, causal=False)
"""The smallest that ran out of memory, eager."""


def blocks(committed: Committed) -> dict[str, Callable[[], str]]:
    """Tables by the names of their markers."""

    def rows(part: str) -> pd.DataFrame:
        return committed.rows(f"attention-{part}", "benchmark_attention")

    def flash() -> pd.DataFrame:
        return pd.concat([rows("flash-bf16"), rows("flash-fp32")])

    return {
        "attention-training": lambda: attention_table(rows("training")).markdown(),
        "attention-comparison": lambda: comparison_table(rows("training")).markdown(),
        "attention-comparison-hopper": lambda: comparison_table(rows("training"), "hopper").markdown(),
        "attention-pytorch": lambda: attention_table(rows("pytorch")).markdown(),
        "attention-account": lambda: account_table(FIRST_TOO_LARGE, bytes_per_element=4).markdown(),
        "attention-variants": lambda: attention_table(rows("variants")).markdown(),
        "attention-tiles": lambda: tile_table(rows("tiles"), most=3).markdown(),
        "attention-flash-both": lambda: length_table(flash(), "both").markdown(),
        "attention-flash-forward": lambda: length_table(flash(), "forward").markdown(),
        "attention-flash-tflops": lambda: length_table(flash(), "both_tflops").markdown(),
        "attention-flash-memory": lambda: length_table(flash(), "peak_memory").markdown(),
        "attention-flash-error": lambda: length_table(flash(), "error_dq").markdown(),
        "attention-model": lambda: step_table(committed.rows("attention-model")).markdown(),
        "attention-account-measured": lambda: account_table(OUT_OF_MEMORY, bytes_per_element=4).markdown(),
        "pytorch-attention": lambda: materialised_table(rows("pytorch")).markdown(),
        "compiled-attention": lambda: compiled_table(rows("pytorch")).markdown(),
        "flash-bf16": lambda: flash_table(rows("flash-bf16")).markdown(),
        "flash-fp32": lambda: flash_table(rows("flash-fp32")).markdown(),
        "flash-leaderboard": lambda: comparison_table(_leaderboard(rows("training")), "hopper").markdown(),
    }


def terms(committed: Committed) -> dict[str, Term]:
    """Numbers that prose quotes, by the first word of the quote."""

    def rows(part: str) -> pd.DataFrame:
        return committed.rows(f"attention-{part}", "benchmark_attention")

    def attention(part: str, metric: str, impl: str, d_head: str, length: str) -> float:
        own = rows(part)
        own = own[(own["impl"] == impl) & (own["d_head"] == int(d_head)) & (own["length"] == int(length))]
        return median_of(own, metric)

    def leaderboard(metric: str, impl: str) -> float:
        return time_of(_leaderboard(rows("training")), metric, impl)

    def leaderboard_over(metric: str, impl: str, ours: str) -> float:
        return time_over(_leaderboard(rows("training")), metric, impl, ours)

    def flash_wins(dtype: str, d_head: str) -> float:
        """The least length from which flash is faster than materialised attention, forward and backward."""
        own = rows(f"flash-{dtype}")
        own = own[(own["d_head"] == int(d_head)) & (own["metric"] == "both")]
        times = own.pivot_table(index="length", columns="impl", values="median", aggfunc="last")
        slower = times.index[~(times["flash"] < times[PLAIN])]
        longer = times.index[times.index > slower.max()] if len(slower) else times.index
        return float(longer.min()) if len(longer) else float("inf")

    def flash_speedup(dtype: str, which: str) -> float:
        """Materialised attention over flash, forward and backward, over all shapes."""
        own = rows(f"flash-{dtype}")
        own = own[own["metric"] == "both"]
        times = own.pivot_table(index=["d_head", "length"], columns="impl", values="median", aggfunc="last")
        ratios = times[PLAIN] / times["flash"]
        return float({"least": ratios.min(), "most": ratios.max()}[which])

    def account(what: str, length: str = "65536") -> float:
        work = replace(FIRST_TOO_LARGE, n_queries=int(length), n_keys=int(length))
        n_bytes = {
            "scores": work.n_scores * 4,
            "eager": work.materialised_bytes(4),
            "compiled": work.materialised_bytes(4, compiled=True),
            "tiled": work.tiled_bytes(4),
        }
        return n_bytes[what] / GIB

    def attention_model(metric: str, size: str, impl: str) -> float:
        own = committed.rows("attention-model")
        return median_of(own[(own["size"] == size) & (own["attention"] == impl)], metric)

    return {
        "attention": Term(attention),
        "attention-leaderboard": Term(leaderboard),
        "attention-leaderboard-over": Term(leaderboard_over, ".2f"),
        "flash-wins-from": Term(flash_wins, ",.0f"),
        "flash-speedup": Term(flash_speedup),
        "attention-account": Term(account),
        "attention-model": Term(attention_model),
    }


def figures(committed: Committed, folder: Path) -> dict[Path, Callable[[Path], object]]:
    """What to call with a figure's path: attention against length."""

    def drawing(part: str, d_head: int) -> Callable[[Path], object]:
        def draw(path: Path) -> None:
            rows = committed.rows(f"attention-{part}", "benchmark_attention")
            draw_scaling(rows[rows["d_head"] == d_head], path)

        return draw

    return {
        folder / "h200_attention_bf16_d64.png": drawing("flash-bf16", 64),
        folder / "h200_attention_bf16_d128.png": drawing("flash-bf16", 128),
        folder / "h200_attention_pytorch_d64.png": drawing("pytorch", 64),
    }


def _leaderboard(rows: pd.DataFrame) -> pd.DataFrame:
    """The shape of the 2025 leaderboard: one sequence of 16,384 tokens, 16 heads of 64, bf16, causal."""
    shape = {"batch_size": 1, "heads": 16, "length": 16_384, "d_head": 64}
    for name, value in shape.items():
        rows = rows[rows[name] == value]
    return rows


def materialised_table(rows: pd.DataFrame) -> Table:
    """The handout's grid: forward, backward, what forward keeps, the peak; and how a cell ended that did not run."""
    lines = []
    for (d_head, length), own in rows[rows["impl"] == PLAIN].groupby(["d_head", "length"], sort=True):
        found = own.set_index("metric")["median"]
        line = {"d": d_head, "length": f"{length:,}"}
        for label, metric in (
            ("forward ms", "forward"),
            ("backward ms", "backward"),
            ("kept for backward GiB", "kept_for_backward"),
            ("peak GiB", "peak_memory"),
        ):
            line[label] = digits(found[metric]) if metric in found else "–"
        lines.append(line | {"status": own["status"].iloc[-1]})
    return Table("Batch 8, one head, fp32, not causal; medians of 100 passes.", pd.DataFrame(lines))


def compiled_table(rows: pd.DataFrame) -> Table:
    """The same grid eager and compiled."""
    return _sided(rows, (PLAIN, COMPILED), ("forward", "backward"), "Batch 8, one head, fp32, not causal; ms.")


def flash_table(rows: pd.DataFrame) -> Table:
    """Our kernels beside materialised PyTorch attention: forward, backward and both, and the ratio of both."""
    caption = f"Batch 1, one head, causal, {rows['dtype'].iloc[0]}; ms."
    return _sided(rows, (PLAIN, "flash"), PASSES, caption)


def _sided(rows: pd.DataFrame, impls: tuple[str, str], passes: tuple[str, ...], caption: str) -> Table:
    lines = []
    for (d_head, length), own in rows.groupby(["d_head", "length"], sort=True):
        line = {"d": d_head, "length": f"{length:,}"}
        for name in passes:
            found = own[own["metric"] == name].groupby("impl")["median"].last()
            ended = own.groupby("impl")["status"].last()
            for impl in impls:
                line[f"{name} {impl}"] = digits(found[impl]) if impl in found else ended.get(impl, "not measured")
            both = all(impl in found for impl in impls)
            line[f"{name} ratio"] = f"{found[impls[0]] / found[impls[1]]:.2f}" if both else "–"
        lines.append(line)
    return Table(f"{caption} Ratio: {impls[0]} over {impls[1]}.", pd.DataFrame(lines))
