"""Export a training checkpoint as a Hugging Face folder: config, weights, tokenizer; for transformers, lm-eval, vLLM.

    uv run scripts/export.py runs/stdlib                            # the newest checkpoint: runs/stdlib/hf-STEP
    uv run scripts/export.py runs/stdlib/step-00000200 --out models/stdlib
    uv run scripts/export.py runs/lora --adapter                    # adapters alone, for peft: runs/lora/adapter-STEP

Adapters (train.py --lora-rank) are merged into the weights that they were trained beside, unless --adapter is given.

Needs one process and no GPU, however many ranks trained. The folder appears only when it is complete.
"""

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from cs336_systems.report.command_line import cli, complain, exit_with

NAME = "export"


@dataclass(frozen=True)
class ExportOptions:
    """A checkpoint to a Hugging Face folder."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run, whose newest complete checkpoint is taken, or one of its checkpoints."""
    out: Path | None = None
    """New folder; by default RUN/hf-STEP, or RUN/adapter-STEP."""
    adapter: bool = False
    """Export the adapters alone, as peft's folder, of a run that trains adapters."""
    replace: bool = False
    """Also replace another model's folder. An earlier export is replaced anyway, if no other files were added to it."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, export, say what came of it; returns the exit code."""
    options = cli(ExportOptions, arguments, __doc__)
    try:
        return _export(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)


def _export(options: ExportOptions) -> int:
    from cs336_systems.pretraining.checkpoint import load_weights
    from cs336_systems.pretraining.export import check_target, export_saved

    started = time.perf_counter()
    if options.adapter and options.replace:
        raise ValueError("--replace is for whole models, not with --adapter: name another --out")
    if options.adapter:
        return _export_adapter(options, started)
    if options.out is not None:
        check_target(options.out, options.replace)  # before anything long
    saved = load_weights(options.checkpoint, tell=partial(complain, NAME))
    config, out = saved.model.config, options.out or saved.model.tokenizer.parent / f"hf-{saved.step}"
    exported = export_saved(out, saved, replace=options.replace)
    dtype_name, n_bytes = str(exported.dtype).removeprefix("torch."), config.n_parameters * exported.dtype.itemsize
    print(
        f"{exported.folder}: {config.name} at step {saved.step:,}, {config.n_parameters:,} parameters in {dtype_name}, "
        f"{n_bytes / 2**20:,.1f} MiB"
    )
    for note in exported.notes:
        print(f"note: {note}")
    line = {"command": NAME, "out": str(exported.folder), "step": saved.step, "dtype": dtype_name}
    line |= {"parameters": config.n_parameters, "bytes": n_bytes, "files": list(exported.files)}
    print(json.dumps(line | {"s": round(time.perf_counter() - started, 2)}))
    return 0


def _export_adapter(options: ExportOptions, started: float) -> int:
    from cs336_systems.pretraining.adapters import export_adapter
    from cs336_systems.pretraining.checkpoint import load_weights

    saved = load_weights(options.checkpoint, merge=False, tell=partial(complain, NAME))
    if (adapters := saved.model.adapters) is None:
        raise ValueError(f"--adapter is for runs with --lora-rank, and {options.checkpoint} trains all weights")
    out = options.out or saved.model.tokenizer.parent / f"adapter-{saved.step}"
    files = export_adapter(out, saved.adapters, adapters)
    n = sum(tensor.numel() for tensor in saved.adapters.values())
    print(f"{out}: adapters of {adapters.lora} at step {saved.step:,}, {n:,} parameters, for {adapters.base}")
    line = {"command": NAME, "out": str(out), "step": saved.step, "parameters": n, "files": files}
    print(json.dumps(line | {"s": round(time.perf_counter() - started, 2)}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main, left="nothing was written")
