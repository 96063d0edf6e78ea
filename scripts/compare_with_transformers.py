"""Train a model twice, by our trainer and by a plain loop over transformers' model, and compare what was learned.

    uv run scripts/compare_with_transformers.py                                     # tiny, on a CPU; 100M on a GPU
    uv run scripts/compare_with_transformers.py --steps 2000 --total-batch-tokens 131072 --out runs/compared

Options are those of train.py, except what the plain loop lacks: z-loss, walltime, skipped steps, several ranks. Both
begin with the same weights and see the same tokens in the same order; the plain loop has fp32 parameters and torch's
AdamW. If the losses on held-out tokens differ by more than one percent, the exit code is 1. --out receives a folder for
each run; plot_run.py draws them together.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import tyro

from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.report.command_line import complain, exit_with, n_gpus

NAME = "compare_with_transformers"
BOUND_PERCENT = 1.0
_DEFAULTS = {"out": Path("runs/compared"), "walltime": None, "save_every": 10**9, "log_every": 50}


def main(arguments: list[str] | None = None) -> int:
    """Parse, train twice, compare; returns the exit code."""
    device = "cuda" if n_gpus() else "cpu"
    defaults = replace(TrainOptions.default(device), **_DEFAULTS)  # type: ignore[arg-type]
    if device == "cuda":
        defaults = replace(defaults, size="qwen-100m")
    try:
        options = tyro.cli(TrainOptions, args=arguments, default=defaults, description=__doc__).settled()
        options.check()
        return _compare(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)


def _compare(options: TrainOptions) -> int:
    from cs336_systems.distributed.process_group import joined
    from cs336_systems.pretraining.export import export
    from cs336_systems.pretraining.peer import train_peer
    from cs336_systems.pretraining.preparation import prepare
    from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog
    from cs336_systems.pretraining.run_reader import read_run
    from cs336_systems.pretraining.run_records import Evaluation
    from cs336_systems.pretraining.trainer import train
    from cs336_systems.report.run_console import RunConsole

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"the other run is of one rank, got {os.environ['WORLD_SIZE']}")
    for name in ("z_loss", "walltime", "skip_nonfinite"):
        if value := getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} {value} is what the other run does not have")
    folder = options.out
    if folder.exists():
        raise ValueError(f"{folder} is there: both runs begin from the beginning, name another")
    ours = replace(options, out=folder / "ours", evaluate_every=options.evaluate_every or 10**9)
    with joined(options.device) as rank:
        prepared = prepare(ours, rank)
        with prepared.loader:
            data, model = prepared.dataset, prepared.step.model
            export(folder / "initial", dict(model.named_parameters()), prepared.config, data.tokenizer, data.eos_id)
            console = RunConsole(options.log_every)
            with RunLog(LogFile.open(folder / "transformers" / LOG, resume=False), console) as log:
                theirs = train_peer(prepared, folder / "initial", rank, log)
        train(ours, rank, RunConsole(options.log_every))
    evaluation = read_run(ours.out / LOG).last(Evaluation)
    assert evaluation is not None
    off = 100 * (evaluation.loss / theirs - 1)
    print(f"{evaluation.loss:.4f} by ours and {theirs:.4f} by transformers, {off:+.3f} %, on held-out tokens")
    figures = {"ours": round(evaluation.loss, 6), "transformers": round(theirs, 6), "off_percent": round(off, 4)}
    print(json.dumps({"command": NAME, "out": str(folder), "steps": prepared.n_steps} | figures))
    return 0 if abs(off) <= BOUND_PERCENT else 1


if __name__ == "__main__":
    exit_with(NAME, main)
