"""Evaluate a trained model on held-out data: loss with its standard error, perplexity and bits per byte, by source.

    uv run scripts/evaluate.py runs/notes --data data/notes-bpe4096
    uv run scripts/evaluate.py runs/notes --data data/notes-bpe4096 data/web-bpe4096 --all
    uv run scripts/evaluate.py Qwen2.5-0.5B/ --data data/notes-Qwen2.5-0.5B --context-length 2048
    uv run scripts/evaluate.py runs/notes --tasks arc_easy          # by lm-eval; scores are added to the run's log

Bits per byte compare models with different tokenizers; conversations, of which answers alone are targets, have none.
The last line is one JSON object.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cs336_systems.declared import sign_refusal
from cs336_systems.report.command_line import ModelOptions, complain, exit_with, parse

NAME = "evaluate"


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """Scores of a trained model on held-out data."""

    data: tuple[Path, ...] = ()
    """Folders written by tokenize_data.py with the model's tokenizer, each scored by itself."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval (--extra evaluation): names, or YAML files of one task each. A run's log gets the scores."""
    all: bool = False
    """Evaluate every checkpoint of the run."""
    split: Literal["evaluation", "train"] = "evaluation"
    """Which part of the data."""
    sequences: int | None = None
    """How many sequences of each source, and examples of each task, from the first on; None takes all."""
    context_length: int | None = None
    """Tokens of a sequence; by default the model's context, at most 4,096."""
    batch_size: int = 8
    """Sequences at a time."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, evaluate, print; returns the exit code."""
    options = parse(EvaluateOptions, arguments, __doc__)
    try:
        return _evaluate(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)


def _evaluate(options: EvaluateOptions) -> int:
    for name in ("sequences", "context_length", "batch_size"):
        if refusal := sign_refusal(name, getattr(options, name), "positive"):
            raise ValueError(refusal)
    options.check_device()
    if not (options.data or options.tasks):
        raise ValueError("nothing to evaluate on: give --data or --tasks")

    import pandas as pd

    from cs336_systems.distributed.checkpoint import complete_checkpoints
    from cs336_systems.pretraining.dataset import Dataset
    from cs336_systems.report.tables import Table, show

    paths = complete_checkpoints(options.model) if options.all else [options.model]
    if not paths:
        raise ValueError(f"--all needs the folder of a run with complete checkpoints, {options.model} has none")
    datasets = [Dataset.open(folder) for folder in options.data]
    started = time.perf_counter()
    rows = [row for path in paths for row in _rows(options, path, datasets)]
    for data, said in {row["data"]: row["conversations"] for row in rows if "conversations" in row}.items():
        print(f"{NAME}: {data}: {said}", file=sys.stderr)
    shown = [
        {"step": "-" if row["step"] is None else f"{row['step']:,}", "data": row["data"]}
        | {"loss": f"{_shown(row['loss'], '.4f')} ± {_shown(row['standard_error'], '.4f')}"}
        | {"perplexity": _shown(row["perplexity"], ".2f"), "bits per byte": _shown(row["bits_per_byte"], ".4f")}
        | {"targets": f"{row['targets']:,}"}
        for row in rows
    ]
    if shown:
        what = "held-out" if options.split == "evaluation" else "training"
        show(Table(f"{options.model} on {what} data", pd.DataFrame(shown)), "auto")
    line: dict[str, Any] = {"command": NAME, "model": str(options.model), "split": options.split, "scores": rows}
    if options.tasks:
        line["tasks"] = {str(path): _of_tasks(options, path) for path in paths}
    print(json.dumps(line | {"s": round(time.perf_counter() - started, 2)}))
    return 0


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _of_tasks(options: EvaluateOptions, path: Path) -> dict[str, dict[str, float]]:
    """Score one model on tasks, show the scores, and add them to its run's log if there is one; by task, then name."""
    from tempfile import TemporaryDirectory

    import pandas as pd

    from cs336_systems.pretraining.checkpoint import is_checkpoint, load_weights
    from cs336_systems.pretraining.export import export_saved
    from cs336_systems.pretraining.run_log import LOG, LogFile
    from cs336_systems.pretraining.run_records import TaskScores
    from cs336_systems.pretraining.tasks import score_tasks
    from cs336_systems.report.tables import Table, digits, show

    how: dict[str, Any] = {name: getattr(options, name) for name in ("batch_size", "device", "dtype")}
    with TemporaryDirectory() as folder:
        step, exported = None, path
        if not (path / "config.json").exists():
            saved = load_weights(path, tell=partial(complain, NAME))
            step, exported = saved.step, export_saved(Path(folder) / "hf", saved).folder
        scores = score_tasks(exported, options.tasks, limit=options.sequences, **how)
    numbers = [
        {"task": task, "score": name, "value": digits(value)}
        for task, of in scores.items()
        for name, value in of.items()
    ]
    show(Table(f"{path} by lm-eval", pd.DataFrame(numbers)), "auto")
    log = (path.resolve().parent if is_checkpoint(path) else path) / LOG
    if step is not None and log.exists():
        file = LogFile(log)
        file.write(TaskScores(step, scores))
        file.close()
    return scores


def _rows(options: EvaluateOptions, path: Path, datasets: list[Any]) -> list[dict[str, Any]]:
    """The scores of one model on each source."""
    from cs336_systems.pretraining.conversations import Conversations
    from cs336_systems.pretraining.evaluation import check_tokens, score
    from cs336_systems.pretraining.loader import Sequences

    trained = options.load(NAME, path)
    config, rows = trained.model.config, []
    length = options.context_length or min(config.context_length, 4096)
    if length > config.context_length:
        raise ValueError(f"--context-length {length} is beyond the model's context of {config.context_length}")
    for dataset in datasets:
        check_tokens(dataset, trained.tokenizer, path)
        stream = getattr(dataset, options.split)
        if stream is None:
            raise ValueError(f"{dataset.folder} has no tokens for {options.split}")
        kind = Conversations if dataset.chat else Sequences
        sequences = kind(stream, length, config.vocab_size, options.device)
        scores = score(trained.model, sequences, options.batch_size, options.sequences)
        of = dataset.manifest["splits"][options.split]
        row: dict[str, Any] = {"step": trained.step, "data": str(dataset.folder), "loss": scores.loss}
        row |= {"standard_error": scores.standard_error, "perplexity": scores.perplexity}
        row["bits_per_byte"] = None if dataset.chat else scores.bits_per_byte(of["tokens"], of["bytes"])
        row |= {"targets": scores.n_targets, "sequences": scores.n_sequences}
        row |= {"conversations": sequences.said} if isinstance(sequences, Conversations) else {}
        rows.append(
            {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in row.items()}
        )
    return rows


if __name__ == "__main__":
    exit_with(NAME, main, left="nothing was written")
