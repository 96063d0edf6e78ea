"""How fast does a run train? Steady tokens/s of train.py's trainer, and of transformers, with Liger or torchao too.

    uv run benchmarks/benchmark_training.py                                      # a tiny model on a CPU, five seconds
    uv run benchmarks/benchmark_training.py --size qwen2.5-0.5b --batch-size 32 --keep all --out results/
    uv run benchmarks/benchmark_training.py --print-plan --gpu rtx-pro-6000 --size qwen2.5-7b

With --print-plan nothing is run: it says what each size should cost on a card, as train.py does.

Tokens are random, as only speed is measured. The first steps, which compile, allocate and capture, are left out. Each
run has a process of its own; on an H200 it takes a minute and a half, at 7B four minutes.
"""

import sys
from dataclasses import replace

from cs336_systems.declared import flag
from cs336_systems.experiments.driver import command
from cs336_systems.experiments.training import EXPERIMENT, Options, TrainingRunCell, make_cells
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.plan_options import PRINT_PLAN
from cs336_systems.report.command_line import complain, exit_with, flags_in, parse


def main(arguments: list[str] | None = None) -> int:
    """Measure, or plan where that is asked for; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if PRINT_PLAN not in given:
        return command(EXPERIMENT, __doc__)(arguments)
    from cs336_systems.report.card_plan import plan_asked

    try:
        return plan_asked(given, _runs, EXPERIMENT.name)
    except (ValueError, OSError) as error:
        return complain(EXPERIMENT.name, error)


def _runs(arguments: list[str]) -> list[TrainOptions]:
    """The runs of the trainer, once for each size; ValueError for --world-size, which a plan has as --gpus."""
    if "--world-size" in flags_in(arguments):
        raise ValueError(f"{PRINT_PLAN} takes --gpus, not --world-size")
    cells: list[TrainingRunCell] = make_cells(
        replace(parse(Options, arguments, __doc__), how=("ours",), world_size=(1,))
    )
    names = ("steps", "evaluate_every", "save_every", "export", "attention", "cuda_graph")
    usual = {name: getattr(TrainOptions, name) for name in names if flag(name) not in flags_in(arguments)}
    return list({cell.size: replace(cell.train_options, **usual) for cell in reversed(cells)}.values())[::-1]


if __name__ == "__main__":
    exit_with(EXPERIMENT.name, main)
