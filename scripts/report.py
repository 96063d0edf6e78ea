"""Render every table and figure of README.md and profiles/ from the committed rows.

uv run scripts/report.py            # rewrite what is stale
uv run scripts/report.py --check    # write nothing; exit code 1 names what is stale (tables only: PNGs vary)
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from cs336_systems.config import HANDOUT_SIZES
from cs336_systems.costs.attention import AttentionWork
from cs336_systems.hardware import find_hardware
from cs336_systems.measurement.record import read_rows
from cs336_systems.report.attention import account_table, attention_table, comparison_table, length_table, tile_table
from cs336_systems.report.attention_figures import draw_scaling
from cs336_systems.report.figures import draw_step_figure
from cs336_systems.report.markers import render
from cs336_systems.report.tables import CEILING, Table, median_of, read_model_rows, step_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiles" / "results" / "h200"
DOCUMENTS = (ROOT / "README.md", ROOT / "profiles" / "h200.md", ROOT / "profiles" / "attention.md")
FIGURES = {
    ROOT / "profiles" / "figures" / "h200_grid.png": ("grid",),
    ROOT / "profiles" / "figures" / "h200_context_512.png": ("context-512", "compiled"),
}
"""Each figure and the parts whose rows it shows."""

EARLIER_WORK = {
    ("small", "forward"): "45.3 ± 0.8",
    ("small", "backward"): "90.6",
    ("2.7b", "forward"): "876",
    ("2.7b", "backward"): "1822",
}
"""Milliseconds in fp32 at batch 4, context 512 that an earlier solution of the assignment gave for an older GPU."""


@functools.cache
def rows_of(part: str, benchmark: str = "benchmark_model") -> pd.DataFrame:
    """The committed rows of one part of scripts/measure_models.sh."""
    read = read_model_rows if benchmark == "benchmark_model" else read_rows
    plain = RESULTS / part / f"{benchmark}.csv"
    return read(plain if plain.exists() else plain.with_suffix(".csv.gz"))


def attention_rows(part: str) -> pd.DataFrame:
    """The committed rows of one part of scripts/measure_attention.sh."""
    return rows_of(f"attention-{part}", "benchmark_attention")


def flash_rows() -> pd.DataFrame:
    """Both halves of the flash grid."""
    return pd.concat([attention_rows("flash-bf16"), attention_rows("flash-fp32")])


def context_512_table() -> str:
    """Whole steps at context 512 in every dtype."""
    rows = rows_of("context-512")
    return step_table(_sorted(rows[rows["mode"] == "step"])).markdown()


def forward_table() -> str:
    """Forward without gradients at context 512."""
    rows = rows_of("context-512")
    return step_table(_sorted(rows[rows["mode"] == "forward"])).markdown()


def compiled_table() -> str:
    """Whole steps at context 512, eager and compiled blocks in one run."""
    return step_table(rows_of("compiled")).markdown()


def grid_table() -> str:
    """Whole steps at every size and context length."""
    return step_table(rows_of("grid")).markdown()


def optimizers_table() -> str:
    """AdamW written out beside torch's fused kernel."""
    return step_table(rows_of("optimizers")).markdown()


def earlier_work_table() -> str:
    """Our forward and backward beside what was reported for an older GPU."""
    rows = rows_of("context-512")
    rows = rows[(rows["dtype"] == "fp32") & (rows["mode"] == "step") & (rows["variant"] == "eager")]
    lines = []
    for (size, phase), theirs in EARLIER_WORK.items():
        row = rows[(rows["size"] == size) & (rows["metric"] == phase)].iloc[0]
        ratio = float(theirs.split()[0]) / row["median"]
        lines.append(
            {"size": size, "phase": phase, "older GPU, ms": theirs}
            | {"H200, ms (mean ± std)": f"{row['mean']:.1f} ± {row['std']:.1f}", "older / H200": f"{ratio:.1f}"}
        )
    return Table("Batch 4, context 512, fp32, eager.", pd.DataFrame(lines)).markdown()


def memory_table() -> str:
    """Predicted against measured peak memory, by size and mode, over the eager cells of grid and context-512."""
    rows = pd.concat([rows_of("grid"), rows_of("context-512")])
    keys = ["size", "dtype", "mode", "context_length"]
    peaks = rows[rows["metric"].isin(["peak_memory", "predicted_peak_memory"]) & (rows["variant"] == "eager")]
    wide = peaks.pivot_table(index=keys, columns="metric", values="median", aggfunc="last", sort=False).reset_index()
    wide["error"] = 100 * (wide["predicted_peak_memory"] / wide["peak_memory"] - 1)
    lines = []
    for size in HANDOUT_SIZES:
        for mode in ("forward", "step"):
            cells = wide[(wide["size"] == size) & (wide["mode"] == mode)]
            if cells.empty:
                continue
            worst = cells.iloc[cells["error"].abs().argmax()]
            lines.append(
                {
                    "size": size,
                    "mode": mode,
                    "cells": len(cells),
                    "measured GiB": f"{cells['peak_memory'].min():.3g} to {cells['peak_memory'].max():.3g}",
                    "mean error %": f"{cells['error'].mean():+.1f}",
                    "worst error %": f"{worst['error']:+.1f} ({worst['dtype']}, context {worst['context_length']})",
                }
            )
    return Table("", pd.DataFrame(lines)).markdown()


def warmup_table() -> str:
    """First recorded step and the rest, for 0, 1, 2 and 5 warm-up steps."""
    rows = rows_of("warmup")
    lines = []
    for _, row in rows[rows["metric"] == "step"].iterrows():
        first, rest = row["samples"][0], pd.Series(row["samples"][1:])
        lines.append(
            {
                "size": row["size"],
                "warm-up steps": row["warmup"],
                "first recorded step, ms": f"{first:.1f}",
                "other nine, ms (mean ± std)": f"{rest.mean():.1f} ± {rest.std():.2f}",
                "mean ± std of all ten, ms": f"{row['mean']:.1f} ± {row['std']:.1f}",
                "median, ms": f"{row['median']:.1f}",
            }
        )
    return Table("Whole steps, batch 4, context 512, fp32.", pd.DataFrame(lines)).markdown()


def harness_table() -> str:
    """Our clock beside do_bench and the command's overhead, one column for each run of the part."""
    rows = rows_of("harness", "benchmark_harness")
    runs = [rows[rows["commit"] == commit] for commit in rows["commit"].unique()]
    lines = []
    for subject in rows["subject"].unique():
        of_subject = [run[run["subject"] == subject] for run in runs]
        if (of_subject[0]["metric"] == "do_bench").any():
            lines.append(
                {"kernel": subject, "do_bench, ms": f"{median_of(of_subject[0], 'do_bench'):.4f}"}
                | {f"time_kernel / do_bench, run {i + 1}": _spread(run) for i, run in enumerate(of_subject)}
            )
    spent = [tuple(median_of(run, metric) for metric in ("command", "timed_steps", "overhead")) for run in runs]
    sentences = [
        f"In run {i + 1}, `benchmark_model.py --size small --mode step` took {command:.1f} s, of which {timed:.1f} s "
        f"were timed steps; {overhead:.1f} s went into imports, the ceilings, and starting and filling processes."
        for i, (command, timed, overhead) in enumerate(spent)
    ]
    return "\n\n".join([Table("", pd.DataFrame(lines)).markdown(), *sentences])


def _spread(rows: pd.DataFrame) -> str:
    row = rows[rows["metric"] == "time_kernel_over_do_bench"].iloc[-1]
    return f"{row['median']:.3f} ({row['p10']:.3f}–{row['p90']:.3f})"


def attention_model_table() -> str:
    """Whole training steps under each attention."""
    return step_table(rows_of("attention-model")).markdown()


def attention_account() -> str:
    """The smallest configuration of the handout's grid, carried on, that does not fit."""
    return account_table(AttentionWork(8, 1, 1, 65_536, 65_536, 16, causal=False), bytes_per_element=4).markdown()


def scaling_figures() -> dict[Path, pd.DataFrame]:
    """Figures of attention against length, and the rows that they show."""
    folder = ROOT / "profiles" / "figures"
    bf16, pytorch = attention_rows("flash-bf16"), attention_rows("pytorch")
    return {
        folder / "h200_attention_bf16_d64.png": bf16[bf16["d_head"] == 64],
        folder / "h200_attention_bf16_d128.png": bf16[bf16["d_head"] == 128],
        folder / "h200_attention_pytorch_d64.png": pytorch[pytorch["d_head"] == 64],
    }


def ceilings_table() -> str:
    """The ceilings that each dtype's cells stand beside."""
    rows = rows_of("context-512")
    rows = rows[rows["variant"] == CEILING].drop_duplicates(["dtype", "metric"], keep="first")
    lines = [
        {"dtype": dtype}
        | {
            "matmul 8192, TFLOP/s": f"{median_of(group, 'matmul_ceiling'):.1f}",
            "copy, read + write, GB/s": f"{median_of(group, 'copy_ceiling'):,.0f}",
        }
        for dtype, group in rows.groupby("dtype", sort=False)
    ]
    return Table("", pd.DataFrame(lines)).markdown()


def findings() -> str:
    """What the rows say, in sentences whose numbers are read from them."""
    rows = rows_of("context-512")

    def value(metric: str, size: str, dtype: str, rows: pd.DataFrame = rows) -> float:
        cell = rows[(rows["size"] == size) & (rows["dtype"] == dtype)]
        return median_of(cell[cell["mode"] == "step"], metric)

    small, large = ("small", "2.7b")
    speedups = [value("step", size, "fp32") / value("step", size, "autocast-bf16") for size in (small, large)]
    passes = [
        (value("forward", size, "fp32") + value("backward", size, "fp32"))
        / (value("forward", size, "autocast-bf16") + value("backward", size, "autocast-bf16"))
        for size in (small, large)
    ]
    ratios = [value("backward", size, "fp32") / value("forward", size, "fp32") for size in HANDOUT_SIZES[:5]]
    optimizer = value("optimizer", large, "autocast-bf16") / value("step", large, "autocast-bf16")
    repeated = rows_of("compiled")
    repeated = repeated[repeated["dtype"] == "autocast-bf16"]
    repeats = repeated[repeated["metric"] == "step"].groupby(["size", "compile"])["median"].median()
    compiled = [repeats[size, "off"] / repeats[size, "on"] for size in (small, large)]
    fused = rows_of("optimizers")
    fused = fused[fused["size"] == large]
    fusing = median_of(fused[fused["optimizer"] == "reference"], "optimizer") / median_of(
        fused[fused["optimizer"] == "torch-fused"], "optimizer"
    )
    grid = rows_of("grid")
    grid = grid[(grid["size"] == small) & (grid["dtype"] == "autocast-bf16")]
    flat = [median_of(grid[grid["context_length"] == context], "step") for context in (128, 512)]
    mfu = {dtype: [value("mfu", size, dtype) for size in (small, large)] for dtype in ("fp32", "autocast-bf16")}
    h200 = find_hardware("NVIDIA H200")
    assert h200 is not None
    peaks = (h200.peak("bf16") or 0) / (h200.peak("fp32") or 1)
    lines = (
        f"Backward takes {min(ratios):.2f} to {max(ratios):.2f} times as long as forward in fp32; the FLOPs say 2.",
        f"fp32 keeps its units busy: MFU grows from {mfu['fp32'][0]:.0f} % (small) to {mfu['fp32'][1]:.0f} % (2.7b), "
        f"which is {value('matmul_ceiling_share', large, 'fp32'):.0f} % of the matmul ceiling of the same run.",
        f"bf16 autocast speeds forward and backward up {passes[0]:.1f} (small) to {passes[1]:.1f} times (2.7b) and the "
        f"step {speedups[0]:.1f} to {speedups[1]:.1f} times, though its peak is {peaks:.0f} times higher: MFU falls to "
        f"{mfu['autocast-bf16'][0]:.0f} and {mfu['autocast-bf16'][1]:.0f} %. In the small model work does not set the "
        f"time: four times the tokens (context 512 for 128) take {flat[1]:.0f} ms instead of {flat[0]:.0f}, which "
        f"points to launches (an inference; a profile will tell).",
        f"The optimizer multiplies no matrices, so it does not shrink with the dtype: {100 * optimizer:.0f} % of the "
        f"2.7b autocast step. Torch's fused kernel is {fusing:.1f} times as fast as the formula written out.",
        f"Compiling the blocks makes the autocast step {compiled[0]:.1f} (small) and {compiled[1]:.1f} times (2.7b) as "
        f"fast, medians of three interleaved processes.",
    )
    return "\n".join(f"- {line}" for line in lines)


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """By model size, eager before compiled; otherwise in the order measured."""
    order = {size: i for i, size in enumerate(HANDOUT_SIZES)}
    return rows.sort_values(["size", "compile"], key=lambda c: c.map(order) if c.name == "size" else c, kind="stable")


BLOCKS = {
    "h200-findings": findings,
    "h200-context-512": context_512_table,
    "h200-forward": forward_table,
    "h200-compiled": compiled_table,
    "h200-grid": grid_table,
    "h200-optimizers": optimizers_table,
    "h200-earlier-work": earlier_work_table,
    "h200-memory": memory_table,
    "h200-warmup": warmup_table,
    "h200-harness": harness_table,
    "h200-ceilings": ceilings_table,
    "attention-training": lambda: attention_table(attention_rows("training")).markdown(),
    "attention-comparison": lambda: comparison_table(attention_rows("training")).markdown(),
    "attention-pytorch": lambda: attention_table(attention_rows("pytorch")).markdown(),
    "attention-account": attention_account,
    "attention-variants": lambda: attention_table(attention_rows("variants")).markdown(),
    "attention-tiles": lambda: tile_table(attention_rows("tiles"), most=3).markdown(),
    "attention-flash-both": lambda: length_table(flash_rows(), "both").markdown(),
    "attention-flash-forward": lambda: length_table(flash_rows(), "forward").markdown(),
    "attention-flash-tflops": lambda: length_table(flash_rows(), "both_tflops").markdown(),
    "attention-flash-memory": lambda: length_table(flash_rows(), "peak_memory").markdown(),
    "attention-flash-error": lambda: length_table(flash_rows(), "error_dq").markdown(),
    "attention-model": attention_model_table,
}


@dataclass(frozen=True)
class Options:
    """Render every table and figure from the committed rows."""

    check: bool = False
    """Write nothing; fail if a table is stale."""


def main() -> int:
    """Render, or compare."""
    options = tyro.cli(Options, description=__doc__)
    stale = []
    for document in DOCUMENTS:
        text = document.read_text()
        rendered = render(text, BLOCKS)
        if rendered != text:
            stale.append(str(document.relative_to(ROOT)))
            if not options.check:
                document.write_text(rendered)
    if options.check:
        if stale:
            print(f"stale: {', '.join(stale)}; run scripts/report.py", file=sys.stderr)
        return 1 if stale else 0
    for path, parts in FIGURES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_step_figure(pd.concat([rows_of(part) for part in parts]), path)
    for path, rows in scaling_figures().items():
        draw_scaling(rows, path)
    print(f"rendered {', '.join(stale) or 'nothing: all tables were current'}; drew the figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
