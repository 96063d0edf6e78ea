"""Train a model twice, by our trainer and by a plain loop over transformers' model, and compare the losses.

    uv run scripts/compare_with_transformers.py                                     # tiny, on a CPU; 100M on a GPU
    uv run scripts/compare_with_transformers.py --steps 2000 --total-batch-tokens 131072 --out runs/compared

Options are those of train.py, except what the plain loop lacks: z-loss, walltime, several ranks. Both
begin with the same weights and see the same tokens in the same order. The plain loop has fp32 parameters and torch's
AdamW. If the losses on held-out tokens differ by more than one percent, the exit code is 1. --out receives a folder for
each run; plot_run.py draws them together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_systems.declared import flag
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.report.command_line import cli, complain, exit_with, flags_in, n_gpus

if TYPE_CHECKING:
    from cs336_systems.distributed.process_group import Rank
    from cs336_systems.pretraining.preparation import PreparedRun
    from cs336_systems.pretraining.run_log import RunLog

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
        words = sys.argv[1:] if arguments is None else arguments
        options = cli(TrainOptions, words, __doc__, default=defaults).settled(flags_in(words))
        options.check()
        return _compare(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)


def _compare(options: TrainOptions) -> int:
    from cs336_systems.distributed.process_group import joined
    from cs336_systems.pretraining.checkpoint import ModelOfRun
    from cs336_systems.pretraining.export import export
    from cs336_systems.pretraining.preparation import prepare
    from cs336_systems.pretraining.run_log import LOG, LogFile, RunLog, read_run
    from cs336_systems.pretraining.run_records import Evaluation
    from cs336_systems.pretraining.trainer import train
    from cs336_systems.report.run_console import RunConsole

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"the other run is of one rank, got {os.environ['WORLD_SIZE']}")
    if options.optimizer == "muon":
        raise ValueError("--optimizer muon is what the other run does not have: it updates by AdamW")
    for name in ("z_loss", "walltime", "lora_rank", "agree", "resume_from"):
        if value := getattr(options, name):
            raise ValueError(f"{flag(name)} {value} is what the other run does not have")
    folder = options.out
    if folder.exists():
        raise ValueError(f"{folder} is there: both runs begin from the beginning, name another")
    ours = replace(options, out=folder / "ours", evaluate_every=options.evaluate_every or 10**9)
    with joined(options.device) as rank:
        prepared = prepare(ours, rank)
        with prepared.loader:
            data, weights = prepared.dataset, dict(prepared.step.model.named_parameters())
            export(folder / "initial", weights, ModelOfRun(prepared.case.config, data.tokenizer, data.eos_id))
            console = RunConsole(options.log_every)
            with RunLog(LogFile(folder / "transformers" / LOG), console) as log:
                theirs = _train_theirs(prepared, folder / "initial", rank, log)
        train(ours, rank, RunConsole(options.log_every))
    evaluation = read_run(ours.out / LOG).last(Evaluation)
    assert evaluation is not None
    off = 100 * (evaluation.loss / theirs - 1)
    print(f"{evaluation.loss:.4f} by ours and {theirs:.4f} by transformers, {off:+.3f} %, on held-out tokens")
    figures = {"ours": round(evaluation.loss, 6), "transformers": round(theirs, 6), "off_percent": round(off, 4)}
    print(json.dumps({"command": NAME, "out": str(folder), "steps": prepared.n_steps} | figures))
    return 0 if abs(off) <= BOUND_PERCENT else 1


def _train_theirs(prepared: PreparedRun, weights: Path, rank: Rank, log: RunLog) -> float:
    """The whole run with fp32 parameters, matmuls in bf16 where ours has them; returns the loss on held-out tokens.

    Args:
        prepared: our run, for its data, learning rate and shape; its model is not used.
        weights: a Hugging Face folder.
    """
    import torch

    from cs336_systems.config import PRECISIONS
    from cs336_systems.pretraining.loader import evaluate
    from cs336_systems.pretraining.peer import peer_model, peer_optimizer, peer_step
    from cs336_systems.pretraining.preparation import describe_device
    from cs336_systems.pretraining.run_records import End, Evaluation, LoggedStep, Model, Session
    from cs336_systems.training.step import TrainStep

    options, config = prepared.options, prepared.case.config
    if prepared.evaluation is None:
        raise ValueError(f"{prepared.dataset.folder} holds out nothing to compare losses on")
    dtype = options.dtype if options.dtype in ("fp32", "tf32") else "autocast-bf16"
    model = peer_model(config, rank.device, torch.float32, liger=False, weights=weights)
    optimizer = peer_optimizer(model, options)
    log.write(Session({"model": "transformers", "dtype": dtype}, {}, prepared.n_steps))
    log.write(describe_device(rank))
    log.write(Model(f"{config.name}, transformers", config.n_parameters, config.context_length))
    for step in range(prepared.n_steps):
        began, rate = time.perf_counter(), prepared.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        values = peer_step(model, optimizer, next(prepared.loader), options, dtype)
        loss, norm = (value.item() for value in values)
        log.write(LoggedStep(step, time.perf_counter() - began, prepared.tokens_per_step, loss, norm, rate))
    began, limit = time.perf_counter(), options.evaluation_sequences
    plain = TrainStep(model, optimizer, PRECISIONS[dtype], None)
    loss, tokens = evaluate(plain, prepared.evaluation, rank, options.batch_size, limit)
    log.write(Evaluation(prepared.n_steps, loss, tokens, time.perf_counter() - began))
    log.write(End(prepared.n_steps, "done"))
    return loss


if __name__ == "__main__":
    exit_with(NAME, main)
