"""Evaluate a trained model on held-out data: loss with its standard error, perplexity and bits per byte, by source.

    uv run scripts/evaluate.py runs/notes --data data/notes-bpe4096
    uv run scripts/evaluate.py runs/notes --data data/notes-bpe4096 data/web-bpe4096 --all
    uv run scripts/evaluate.py Qwen2.5-0.5B/ --data data/notes-Qwen2.5-0.5B --context-length 2048

Bits per byte compare models with different tokenizers; conversations, of which answers alone are targets, have none.
The last line is one JSON object.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import tyro

from cs336_systems.report.command_line import INTERRUPTED, complain, exit_with, n_gpus, parse

NAME = "evaluate"


@dataclass(frozen=True)
class EvaluateOptions:
    """Scores of a trained model on held-out data."""

    model: tyro.conf.Positional[Path]
    """Folder of a run, whose newest complete checkpoint is taken; one of its checkpoints; or a Hugging Face folder."""
    data: tuple[Path, ...]
    """Folders written by tokenize_data.py with the model's tokenizer, each scored by itself."""
    all: bool = False
    """Evaluate every checkpoint of the run."""
    split: Literal["evaluation", "train"] = "evaluation"
    """Which part of the data."""
    sequences: int | None = None
    """Number of first sequences of each source; None takes all."""
    context_length: int | None = None
    """Tokens of a sequence; by default the model's context, at most 4,096."""
    batch_size: int = 8
    """Sequences at a time."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the model computes."""

    @classmethod
    def default(cls, device: str) -> Self:
        """The defaults on a device: bf16 on a GPU, fp32 on a CPU."""
        missing: Any = tyro.MISSING
        return cls(missing, missing, device=device, dtype="bf16" if device == "cuda" else "fp32")  # type: ignore


def main(arguments: list[str] | None = None) -> int:
    """Parse, evaluate, print; returns the exit code."""
    options = parse(EvaluateOptions, arguments, __doc__)
    try:
        return _evaluate(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _evaluate(options: EvaluateOptions) -> int:
    for name in ("sequences", "context_length", "batch_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")
    if options.device == "cuda" and not n_gpus():
        raise ValueError("--device cuda needs a GPU, and there is none")

    import pandas as pd

    from cs336_systems.distributed.checkpoint import complete_checkpoints
    from cs336_systems.pretraining.dataset import Dataset
    from cs336_systems.report.tables import Table, show

    paths = complete_checkpoints(options.model) if options.all else [options.model]
    if not paths:
        raise ValueError(f"{options.model} has no complete checkpoint")
    datasets = [Dataset.open(folder) for folder in options.data]
    started = time.perf_counter()
    rows = [row for path in paths for row in _rows(options, path, datasets)]
    shown = [
        {"step": "-" if row["step"] is None else f"{row['step']:,}", "data": row["data"]}
        | {"loss": f"{row['loss']:.4f} ± {row['standard_error']:.4f}", "perplexity": f"{row['perplexity']:.2f}"}
        | {"bits per byte": "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"}
        | {"targets": f"{row['targets']:,}"}
        for row in rows
    ]
    show(Table(f"{options.model} on held-out data", pd.DataFrame(shown)), "auto")
    line = {"command": NAME, "model": str(options.model), "scores": rows}
    print(json.dumps(line | {"s": round(time.perf_counter() - started, 2)}))
    return 0


def _rows(options: EvaluateOptions, path: Path, datasets: list[Any]) -> list[dict[str, Any]]:
    """The scores of one model on each source."""
    import torch

    from cs336_systems.pretraining.checkpoint import load_trained
    from cs336_systems.pretraining.conversations import Conversations
    from cs336_systems.pretraining.evaluation import check_tokens, score
    from cs336_systems.pretraining.loader import Sequences

    trained = load_trained(
        path, device=options.device, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    )
    for skipped, reason in trained.skipped.items():
        print(f"{NAME}: {skipped} is passed over: {reason}", file=sys.stderr)
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
        rows.append(
            {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in row.items()}
        )
    return rows


if __name__ == "__main__":
    exit_with(NAME, main)
