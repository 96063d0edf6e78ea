"""Tasks of EleutherAI's lm-eval (0.4) on a Hugging Face folder, as ``export`` writes it.

    scores = score_tasks(folder, ["arc_easy"], batch_size=8, device="cuda", dtype="bf16")
    scores["arc_easy"]["acc"], scores["arc_easy"]["acc_stderr"]

lm-eval runs transformers' model of the folder, and downloads a task's data the first time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def score_tasks(
    folder: Path, tasks: Sequence[str], *, batch_size: int, device: str, dtype: str, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Return each task's scores by name, such as acc and acc_stderr.

    Args:
        tasks: names that lm-eval knows, or YAML files, each named like its only task.
        batch_size: sequences per batch.
        dtype: fp32 or bf16.
        limit: evaluate only this many examples of each task, from the first on; None takes all.

    Raises:
        ValueError: lm-eval is not installed, or does not know a task.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"--tasks needs lm-eval ({error}): uv sync --extra evaluation") from None
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files}) or None)
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(f"lm-eval {lm_eval.__version__} knows no task {unknown[0]!r}")
    found: Mapping[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": _DTYPES[dtype]},
        tasks=names,
        task_manager=manager,
        batch_size=batch_size,
        device=device,
        limit=limit,
    )
    return {task: _numbers(scores) for task, scores in found["results"].items()}


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return scores by name, without the suffix ``,none`` that lm-eval adds to names without a filter."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and "," in name
    }
