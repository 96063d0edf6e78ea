"""Export a training checkpoint as a Hugging Face folder: config, weights, tokenizer; for transformers, lm-eval, vLLM.

    uv run scripts/export.py runs/stdlib                            # the newest checkpoint: runs/stdlib/hf-STEP
    uv run scripts/export.py runs/stdlib/step-00000200 --out models/stdlib --dtype bf16

Needs one process and no GPU, however many ranks trained. The folder appears only when it is complete.
"""

import json
import sys
import time

import tyro

from cs336_systems.pretraining.export_options import ExportOptions
from cs336_systems.report.command_line import INTERRUPTED, complain, exit_with

NAME = "export"


def main(arguments: list[str] | None = None) -> int:
    """Parse, export, say what came of it; returns the exit code."""
    options = tyro.cli(ExportOptions, args=arguments, description=__doc__)
    try:
        return _export(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED


def _export(options: ExportOptions) -> int:
    options.check()
    import torch

    from cs336_systems.pretraining.checkpoint import load_weights
    from cs336_systems.pretraining.export import check_target, export

    started = time.perf_counter()
    if options.out is not None:
        check_target(options.out, options.replace)  # before anything long
    checkpoint = load_weights(options.checkpoint)
    for path, reason in checkpoint.skipped.items():
        print(f"{NAME}: {path} is passed over: {reason}", file=sys.stderr)
    run = checkpoint.run
    exported = export(
        options.out or run.tokenizer.parent / f"hf-{checkpoint.step}",
        checkpoint.weights,
        run.config,
        run.tokenizer,
        run.eos_id,
        dtype={"stored": None, "fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype],
        shard_bytes=int(options.shard_gib * 2**30),
        replace=options.replace,
        origin={"checkpoint": str(checkpoint.path), "step": checkpoint.step, "model": run.config.name},
    )
    dtype = str(exported.dtype).removeprefix("torch.")
    print(
        f"{exported.folder}: {run.config.name} at step {checkpoint.step:,}, {exported.n_parameters:,} parameters in "
        f"{dtype}, {exported.n_bytes / 2**20:,.1f} MiB"
    )
    for note in exported.notes:
        print(f"note: {note}")
    line = {"command": NAME, "out": str(exported.folder), "step": checkpoint.step, "dtype": dtype}
    line |= {"parameters": exported.n_parameters, "bytes": exported.n_bytes, "files": list(exported.files)}
    print(json.dumps(line | {"s": round(time.perf_counter() - started, 2)}))
    return 0


if __name__ == "__main__":
    exit_with(NAME, main)
