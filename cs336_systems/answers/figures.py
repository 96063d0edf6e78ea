"""The figures of the documents, drawn from committed rows and from arithmetic."""

from collections.abc import Callable
from pathlib import Path

from cs336_systems.answers import arithmetic
from cs336_systems.answers.committed import Committed, NotMeasured
from cs336_systems.answers.vocabulary import LEAKS
from cs336_systems.costs.parallelism.pipeline import SCHEDULES
from cs336_systems.experiments.attention.figure import scaling_figure as attention_figure
from cs336_systems.experiments.collectives.table import collectives_figure
from cs336_systems.experiments.leaks.findings import findings_figure
from cs336_systems.experiments.model.figure import step_figure
from cs336_systems.experiments.model.frontier import frontier_figure
from cs336_systems.experiments.model.speedups import speedups_figure
from cs336_systems.experiments.parallelism.figures import goodput_figure, scaling_figure
from cs336_systems.experiments.parallelism.pipeline_figure import pipelines_figure
from cs336_systems.experiments.sharded_optimizer.table import memory_figure
from cs336_systems.report.figures import save

NODES = (8, 64, 512, 2048)


def figures(committed: Committed) -> dict[str, Callable[[Path], object]]:
    """What to call with the path of each figure; raises ``NotMeasured`` where its rows are missing."""
    rows = committed.rows
    all_reduce = rows("collectives", device="cuda", dtype="fp32", collective="all_reduce")
    jobs = [(n, arithmetic.job(n)) for n in NODES]
    labelled = [(f"{n:,} nodes, M = {job.mtbf_s / 3600:.3g} h", job) for n, job in jobs]
    timelines = [arithmetic.schedule(name, 4, 8) for name in SCHEDULES]
    found: dict[str, Callable[[Path], object]] = {
        "h200_grid.png": lambda path: save(step_figure(rows("grid").frame()), path),
        "h200_context_512.png": lambda path: save(step_figure(rows("context-512", "compiled").frame()), path),
        "h200_mixed_precision.png": lambda path: save(speedups_figure(rows("context-512").frame()), path),
        "h200_checkpointing.png": lambda path: save(frontier_figure(rows("checkpointing").frame()), path),
        # Worlds of two and four were measured on two hosts of the same GPU, and are one figure.
        "h200_collectives.png": lambda path: save(collectives_figure(all_reduce.frame().assign(host="")), path),
        "h200_sharded_optimizer.png": lambda path: save(memory_figure(rows("sharded-optimizer").frame()), path),
        "pipeline_schedules.png": lambda path: save(pipelines_figure(timelines), path),
        "fsdp_scaling.png": lambda path: save(scaling_figure(arithmetic.WORKLOAD, arithmetic.H100, 8192), path),
        "goodput.png": lambda path: save(goodput_figure(labelled), path),
    }
    for name, part, d_head in (("bf16", "flash-bf16", 64), ("bf16", "flash-bf16", 128), ("pytorch", "pytorch", 64)):
        found[f"h200_attention_{name}_d{d_head}.png"] = _attention(committed, part, d_head)
    return found | {f"h200_leak_{name}.png": _leak(committed, name) for name in LEAKS}


def _attention(committed: Committed, part: str, d_head: int) -> Callable[[Path], object]:
    return lambda path: save(attention_figure(committed.rows(f"attention-{part}", d_head=d_head).frame()), path)


def _leak(committed: Committed, name: str) -> Callable[[Path], object]:
    return lambda path: save(findings_figure(LEAKS[name](committed.rows(f"leaks/{name}", status="ok").frame())), path)


def draw(committed: Committed, folder: Path) -> list[str]:
    """Draw every figure whose rows are there; the names of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, drawing in figures(committed).items():
        try:
            drawing(folder / name)
        except NotMeasured:
            missing.append(name)
    return missing
