"""The figures of the documents, drawn from committed rows and from arithmetic; each file names its source.

Checks do not redraw figures to compare pixels, which depend on library versions. Instead a figure's file holds the hash
of its inputs, and the file's own hash is sealed (``evidence.py``).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.evidence import seal
from cs336_systems.answers.optimizers import optimizers_figure
from cs336_systems.answers.predicted import points, scatter_figure
from cs336_systems.answers.training import llmq_ways, of_bf16_commands
from cs336_systems.costs.parallelism.pipeline import simulate
from cs336_systems.experiments.attention import scaling_figure as attention_figure
from cs336_systems.experiments.blocks import kept_figure
from cs336_systems.experiments.collectives import collectives_figure
from cs336_systems.experiments.diloco import loss_figure
from cs336_systems.experiments.failures import goodput_figure
from cs336_systems.experiments.flops_against_time import shares_figure as families_figure
from cs336_systems.experiments.fp8 import time_figure
from cs336_systems.experiments.kernels import shares_figure
from cs336_systems.experiments.launch_overhead import time_figure as launch_figure
from cs336_systems.experiments.matmul_data import speed_figure
from cs336_systems.experiments.mesh import scaling_figure as mesh_figure
from cs336_systems.experiments.model import frontier_figure, step_figure
from cs336_systems.experiments.roofline_knee import time_figure as chains_figure
from cs336_systems.experiments.streaming import heatmap_figure
from cs336_systems.experiments.training import rates_figure
from cs336_systems.harness.record import EARLIER, unsaid
from cs336_systems.pretraining.run_log import Run
from cs336_systems.ranks import SCHEDULES
from cs336_systems.report.figures import save
from cs336_systems.report.pipelines import pipelines_figure, simulated
from cs336_systems.report.run_figure import run_figure

ON_ONE_HOST = ["reference", "flash", "hopper", "sdpa-cudnn"]
"""Implementations of attention whose newest rows over length were measured on one host; other rows are older."""

FOLDER = "figures"
"""The folder of figures in ``profiles/``."""


@dataclass(frozen=True)
class Drawing:
    """A figure of the documents: the function that draws it, and a function that returns its arguments."""

    draw: Callable[..., Figure | None]
    arguments: Callable[[], tuple[Any, ...]]
    """Returns rows or calculated values; raises ``NotMeasured`` if rows are missing."""

    def source(self) -> str:
        """Return the SHA-256 of the function's name and arguments; a figure's file stores it as ``Source``."""
        found = hashlib.sha256(self.draw.__qualname__.encode())
        for argument in self.arguments():
            found.update(_text(argument).encode())
        return found.hexdigest()

    def write(self, path: Path) -> None:
        """Draw the figure to a file.

        Raises:
            NotMeasured: its rows are missing.
            OSError: the file cannot be written.
        """
        save(self.draw(*self.arguments()), path, Source=self.source())


def _text(argument: Any) -> str:
    """Return the text of an argument that is hashed: a run's records without its path; ``_text_of_rows`` of rows."""
    match argument:
        case pd.DataFrame():
            return _text_of_rows(argument)
        case Run():
            return repr(argument.records)
    return repr(argument)


def _text_of_rows(rows: pd.DataFrame) -> str:
    """Return rows as CSV, without newer columns that have their default in all rows, so that hashes stay valid."""
    marks = ("schema_version", "context_length", "prefetch", "host_gib", "total_batch_tokens", "n_samples")
    defaults = unsaid(marks) | {"kv_heads": EARLIER["d_head"]["kv_heads"]}
    at_default = [name for name, default in defaults.items() if name in rows and (rows[name] == default).all()]
    own = rows.drop(columns=at_default)
    if "cuda" in own:  # a number when committed pictures were drawn
        own["cuda"] = pd.to_numeric(own["cuda"], errors="coerce")
    return own[sorted(own.columns.astype(str))].to_csv(index=False, float_format="%.9g")


def figures(committed: Committed) -> dict[str, Drawing]:
    """Return every figure of the documents, by file name."""
    rows = committed.rows
    timelines = simulated([simulate(name, 4, 8, chunks=2) for name in SCHEDULES])

    def of_rows(draw: Callable[..., Figure | None], *parts: str, **settings: Any) -> Drawing:
        return Drawing(draw, lambda: (rows(*parts, **settings).frame(),))

    return {
        "h200_grid.png": of_rows(step_figure, "grid"),
        "h200_context_512.png": of_rows(step_figure, "context-512"),
        "h200_checkpointing.png": of_rows(frontier_figure, "checkpointing", context_length=2048),
        "h200_collectives.png": of_rows(
            collectives_figure, "collectives", device="cuda", dtype="fp32", collective="all_reduce"
        ),
        "h200_attention_bf16_d64.png": of_rows(attention_figure, "attention-flash-bf16", d_head=64, impl=ON_ONE_HOST),
        "h200_attention_bf16_d128.png": of_rows(attention_figure, "attention-flash-bf16", d_head=128, impl=ON_ONE_HOST),
        "h200_attention_pytorch_d64.png": of_rows(attention_figure, "attention-pytorch", d_head=64),
        "h200_kernels.png": of_rows(shares_figure, "kernels"),
        "h200_blocks.png": of_rows(kept_figure, "fused"),
        **{
            f"h200_streaming_{size}.png": of_rows(heatmap_figure, "streaming-simulated", machine="cpu", size=size)
            for size in ("llama3-1b", "llama3-8b")
        },
        "h200_fp8_time.png": of_rows(time_figure, "fp8"),
        "h200_leak_matmul_data.png": of_rows(speed_figure, "leaks/matmul_data"),
        "h200_leak_roofline_knee.png": of_rows(chains_figure, "leaks/roofline_knee"),
        "h200_leak_launch_overhead.png": of_rows(launch_figure, "leaks/launch_overhead"),
        "h200_leak_flops_against_time.png": of_rows(families_figure, "leaks/flops_against_time"),
        "h200_mesh_two.png": of_rows(mesh_figure, "mesh-tensor", "mesh-context", world_size=[1, 2]),
        "h200_mesh_four.png": of_rows(mesh_figure, "mesh-four"),
        "cpu_failures.png": of_rows(goodput_figure, "replicas/benchmark_failures", machine="cpu"),
        "cpu_diloco.png": of_rows(loss_figure, "replicas/benchmark_diloco", machine="cpu", schedule="cosine"),
        "h200_diloco.png": of_rows(loss_figure, "replicas/benchmark_diloco", total_batch_tokens=131072),
        "h200_training.png": Drawing(
            rates_figure, lambda: (_as_in_tables(rows("training", context_length=1024).frame()), {})
        ),
        "h100_training.png": Drawing(rates_figure, lambda: (rows("training", machine="h100").frame(), llmq_ways())),
        "h200_run_100m.png": Drawing(_run_figure, lambda: ("100m", committed.run("100m"))),
        "h100_optimizers.png": Drawing(optimizers_figure, lambda: _of_optimizers(committed)),
        "predicted_cards.png": Drawing(scatter_figure, lambda: (points(),)),
        "pipeline_schedules.png": Drawing(pipelines_figure, lambda: (timelines,)),
    }


def _as_in_tables(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that the tables use: those in fp8, and in bf16 those of commands without fp8."""
    return pd.concat([of_bf16_commands(rows), rows[rows["recipe"] != "stored"]]).sort_index()


def _of_optimizers(committed: Committed) -> tuple[Any, ...]:
    if not (runs := committed.runs("adamw-", "muon-", machine="h100")):
        raise NotMeasured("runs by several optimizers")
    return tuple(runs), *runs.values()


def _run_figure(name: str, run: Run) -> Figure:
    return run_figure({name: run})


def draw(committed: Committed, profiles: Path) -> list[str]:
    """Draw and seal every figure whose rows exist; return the names of the others."""
    missing, drawn = [], []
    for name, drawing in figures(committed).items():
        try:
            drawing.write(profiles / FOLDER / name)
            drawn.append(profiles / FOLDER / name)
        except NotMeasured:
            missing.append(name)
    seal(profiles, drawn)
    return missing


def stale_figures(committed: Committed, profiles: Path) -> list[str]:
    """Return a sentence for each figure that is missing, outdated, or no longer drawn by anything."""
    known, there = figures(committed), {path.name for path in (profiles / FOLDER).glob("*")}
    found = [f"{FOLDER}/{name}: nothing draws it" for name in there - known.keys()]
    for name, drawing in known.items():
        try:
            source = drawing.source()
        except NotMeasured:
            source = ""
        if source and name not in there:
            found.append(f"{FOLDER}/{name} is missing: scripts/report.py draws it")
        elif name in there and _said(profiles / FOLDER / name) != source:
            found.append(f"{FOLDER}/{name} was drawn from other rows: scripts/report.py draws it anew")
    return sorted(found)


def _said(path: Path) -> str:
    """Return the ``Source`` stored in a figure's file; empty if there is none or the file is no picture."""
    try:
        with Image.open(path) as picture:
            return str(picture.info.get("Source", ""))
    except OSError:
        return ""
