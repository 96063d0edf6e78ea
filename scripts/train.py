"""Train a language model, evaluate and save it, draw the run, and export weights that Hugging Face loads.

    uv run scripts/train.py                              # on a CPU the size tiny, on Python's standard library
    uv run scripts/train.py --size qwen2.5-0.5b --data data/web --out runs/web --total-batch-tokens 524288
    uv run scripts/train.py --init Qwen2.5-0.5B/ --data data/notes-Qwen2.5-0.5B --out runs/notes --learning-rate 1e-5
    uv run scripts/train.py --data data/web=0.7 data/code=0.3 --out runs/mixed
    uv run scripts/train.py --config runs/web.toml --steps 2000
    uv run scripts/train.py --print-config > run.toml
    torchrun --nproc-per-node 8 scripts/train.py --zero 1 --out runs/eight
    uv run scripts/train.py --replicas 2 --agree every-step                                 # replicas that may die
    uv run scripts/train.py --size llama3-8b --context-length 8192 --device-gib 24 --host-gib 75   # one GPU, streamed

The text is Python's standard library unless --data names another. The same command again resumes from the newest
checkpoint in --out. On a GPU the run takes the --batch-size, --keep and --offload that are predicted to be fastest,
unless one of them is given; the tokens of a step stay the same. After Ctrl-C, SIGTERM or SIGHUP (a closed terminal) the
command finishes the step, saves and exits, with code 130 or 0; a second Ctrl-C ends it at once. A file for --config
FILE.toml sets options, which those on the command line override; the command prints such a file with --print-config.
With --print-memory it prints the predicted memory on device and host. With --print-plan it says what the run should
cost on the card of --gpu, which need not be here: what fits, the fastest choices, tokens/s, days, energy; --gpus,
--device-gib, --host-gib (of all ranks), --run-tokens 100B, --price-per-gpu-hour and --picture FILE say more. In all
three cases it trains nothing.

    uv run scripts/train.py --print-plan --gpu rtx-4090 --host-gib 60 --size llama3-8b --context-length 8192
"""

import argparse
import gc
import json
import os
import sys
import time
import tomllib
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from cs336_systems.config import did_you_mean
from cs336_systems.declared import flag
from cs336_systems.pretraining.options import CHOSEN, TrainOptions
from cs336_systems.pretraining.plan_options import PRINT_PLAN, Asked
from cs336_systems.pretraining.replica_options import check_lighthouse, require_torchft
from cs336_systems.pretraining.run_refusals import ALTERNATIVES
from cs336_systems.pretraining.stop_requests import Outcome
from cs336_systems.refusals import refusal
from cs336_systems.report import command_line
from cs336_systems.report.command_line import INTERRUPTED, complain, exit_with

NAME = "train"
_PRINT, _PRINT_MEMORY = "--print-config", "--print-memory"
_GOES_ON = "the same command goes on from the newest checkpoint, if there is one"
_OF_PLANS = {flag(each.name) for each in fields(Asked)} - {"--host-gib"}


def main(arguments: list[str] | None = None) -> int:
    """Parse, train, draw, export, say what came of it; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if {PRINT_PLAN, _PRINT, _PRINT_MEMORY} & set(given) and os.environ.get("RANK", "0") != "0":
        return 0  # the first rank prints for all
    try:
        if PRINT_PLAN in given:
            return _print_plan(given)
        if early := sorted(command_line.flags_in(given) & _OF_PLANS):
            raise ValueError(f"{early[0]} is for {PRINT_PLAN}")
        options = parse([one for one in given if one not in (_PRINT, _PRINT_MEMORY)])
        if not given and options.device == "cpu":
            options = replace(options, walltime=options.CPU_WALLTIME)
        options.check()
        if _PRINT in given:
            print(to_toml(options))
            return 0
        if _PRINT_MEMORY in given:
            _print_memory(options)
            return 0
        return _train(options)
    except (ValueError, OSError) as error:
        return complain(NAME, error)
    except RuntimeError as error:
        from cs336_systems.distributed.process_group import is_peer_lost

        if not is_peer_lost(error):
            raise
        rank, fault = os.environ.get("RANK", "0"), str(error).partition("\n")[0]
        complain(NAME, f"rank {rank} has lost another rank; {_GOES_ON}: {fault}", every_rank=True)
        return 1
    except KeyboardInterrupt:
        complain(NAME, f"interrupted; {_GOES_ON}")
        return INTERRUPTED


def parse(arguments: list[str]) -> TrainOptions:
    """Defaults of the device that is named, else found; over them the file's options; over these the command line's."""
    words = with_file(arguments)
    try:
        options = command_line.parse(TrainOptions, words, __doc__).settled(command_line.flags_in(words))
    except SystemExit as ended:
        if ended.code and "--config" in command_line.flags_in(arguments):
            complain(NAME, "that may stand in the file of --config")
        raise
    given = command_line.flags_in(words)
    named = [option for option in map(flag, CHOSEN) if option in given]
    if options.choose_fastest and named:
        raise ValueError(f"--choose-fastest chooses {named[0]}: give one of them")
    free = not named and not given & {"--choose-fastest", "--no-choose-fastest"}
    by_default = free and options.device == "cuda" and not options.capped and not options.agree
    return replace(options, choose_fastest=True) if by_default else options


def with_file(arguments: list[str]) -> list[str]:
    """The arguments, behind those of the file that ``--config`` names, which they override.

    A file has a line for each option, named as on the command line (dashes or underscores): ``learning-rate = 3e-4``;
    ``"none"`` for an option that is not to be set.

    Raises:
        ValueError: no file is named after ``--config``, or several are; it is not TOML; or an option is unknown.
        OSError: it cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        raise ValueError("--config needs a file") from None
    if len(given.config) > 1:
        raise ValueError("--config is given twice: one file has all options")
    # An option that is set to None overrides nothing.
    set_here = [word for word, then in pairwise([*rest, ""]) if "None" not in (then, word.partition("=")[2])]
    typed = command_line.flags_in(set_here)
    overridden = {other for pair in ALTERNATIVES for one, other in (pair, pair[::-1]) if flag(one) in typed}
    return [*(argument for path in given.config for argument in _options_in(path, overridden)), *rest]


def _options_in(path: Path, overridden: Collection[str]) -> list[str]:
    """The options of a file as arguments, but for those that are ``overridden``."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    hints = {name.replace("_", "-"): hint for name, hint in get_type_hints(TrainOptions).items()}
    found = []
    for name, value in content.items():
        name = name.replace("_", "-")
        if name not in hints:
            nearest = {"lr": "did you mean learning-rate? "}.get(name) or did_you_mean(name, hints)
            raise ValueError(f"{path}: unknown option {name!r}: {nearest}see --help")
        if flag(name) in found or flag(f"no-{name}") in found:
            raise ValueError(f"{path}: option {name} is there twice, with dashes and with underscores")
        if isinstance(value, bool) != (hints[name] is bool):
            fault = "is not true or false" if hints[name] is bool else "cannot be true or false"
            raise ValueError(f"{path}: {name} {fault}, got {json.dumps(value, default=str)}")
        if name.replace("-", "_") in overridden:
            continue
        if isinstance(value, bool):
            found.append(flag(name) if value else flag(f"no-{name}"))
        else:
            unset = value == "none" and type(None) in get_args(hints[name])
            values = [None] if unset else value if isinstance(value, list) else [value]
            found += [flag(name), *map(str, values)]
    return found


def to_toml(options: TrainOptions) -> str:
    """TOML with a line for each option, but for those that the run chooses; TOML spells the values as JSON does."""
    names = [field.name for field in fields(options) if not (options.choose_fastest and field.name in CHOSEN)]
    values = {name.replace("_", "-"): getattr(options, name) for name in names}
    lines = ((name, "none" if value is None else value) for name, value in values.items())
    return "\n".join(f"{name} = {json.dumps(value, default=str, ensure_ascii=False)}" for name, value in lines)


def _print_plan(given: list[str]) -> int:
    from cs336_systems.report.card_plan import plan_asked

    if not {"-h", "--help"}.isdisjoint(given):
        parse(["--help"])  # prints and exits; the text above says what a plan's own options are

    def run(arguments: list[str]) -> list[TrainOptions]:
        options = parse(arguments)
        # Micro-batches that were not given are all tried, and so must not divide the step.
        (options if flag("batch_size") in command_line.flags_in(arguments) else replace(options, batch_size=1)).check()
        return [options]

    return plan_asked(with_file(given), run, NAME, command_line.flags_in(given))


def _print_memory(options: TrainOptions) -> None:
    """Print the predicted memory of each rank that a launcher has started, with the vocabulary of --data if given."""
    import torch

    from cs336_systems.pretraining.capped import caps_of, chooser, planned_for, planned_segments
    from cs336_systems.pretraining.checkpoint import goes_on_from
    from cs336_systems.pretraining.choice import Choice, attention_on, choose_fastest
    from cs336_systems.pretraining.dataset import Dataset
    from cs336_systems.pretraining.preparation import config_of, predicted_segments
    from cs336_systems.pretraining.sources import sources_of
    from cs336_systems.report.run_console import memory_table
    from cs336_systems.report.tables import show
    from cs336_systems.streaming.explain import explanation

    sources = sources_of(options.data)
    config = config_of(options, Dataset.open(sources[0].folder) if sources else None)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available() and options.device == "cuda":
        options = replace(options, attention=attention_on(torch.device("cuda"), options, config))
    if options.choose_fastest and torch.cuda.is_available():
        origin = goes_on_from(options.out, options.resume_from)
        chosen = choose_fastest(options, config, torch.device("cuda"), world_size, origin)
        options = chosen.of(options) if isinstance(chosen, Choice) else options
        print(f"With {chosen}." if isinstance(chosen, Choice) else f"Nothing was chosen: {chosen}.")
    elif options.choose_fastest:
        print("On a GPU the run chooses --batch-size, --keep and --offload; this is for their defaults.")
    case = options.training_case(config, 1 if options.capped else world_size)
    if reason := refusal(case):
        raise ValueError(reason)
    print(planned_for(options))
    if options.capped:
        device = torch.device(options.device)
        choose = chooser(options, case, device)
        choices = choose([caps_of(options, case, device)] * world_size)
        again = (lambda caps: choose([caps])[0]) if world_size == 1 else None
        for choice in choices:
            print(*explanation(choice, again), sep="\n")
        fullest = max(choices, key=lambda choice: sum(choice.device_parts.values()))
        segments = planned_segments(fullest, copies=options.save_every is not None)
    else:
        there = options.device == "cuda" and torch.cuda.is_available()
        segments = predicted_segments(case, torch.cuda.get_device_properties(0).total_memory if there else None)
    print()
    show(memory_table(segments), "auto")


def _train_replicas(options: TrainOptions) -> int:
    """Start the replicas here, then draw, export and say what came of it."""
    from cs336_systems.pretraining.replicas import train_replicas
    from cs336_systems.report.run_console import RunConsole

    started = time.perf_counter()
    print(f"{options.replicas} replicas start, which takes a while; lines come from the first one alive", flush=True)
    ended = train_replicas(options, partial(RunConsole, options.log_every))
    reason, complaint = ended.outcome.reason, ended.outcome.complaint
    if not ended.trained:
        complain(NAME, f"{complaint or f'{reason} before a replica trained'}; {_GOES_ON}")
        return INTERRUPTED if reason == "interrupted" else int(complaint is not None)
    if complaint:
        complain(NAME, complaint)
    return _conclude(options, ended.outcome, [options.out / f"replica-{name}" for name in ended.logs], started)


def _train(options: TrainOptions) -> int:
    if not options.agree and (world_size := os.environ.get("WORLD_SIZE", "1")).isdecimal():
        options.data_ranks(int(world_size))  # a mesh of other ranks is refused before torch is imported, in seconds
    if options.lighthouse is not None:
        check_lighthouse(options.lighthouse)
    if options.agree:
        require_torchft()
    import torch

    from cs336_systems.distributed.process_group import joined, launched
    from cs336_systems.pretraining.agreement import Agreement, FirstAlone, agreement_of
    from cs336_systems.pretraining.trainer import NonFiniteStep, RankAlone, train
    from cs336_systems.report.run_console import RunConsole

    if options.agree and options.lighthouse is None:
        if launched():
            raise ValueError(
                f"--agree {options.agree} under torchrun is one replica: --lighthouse and --replica say which"
            )
        return _train_replicas(options)
    started = time.perf_counter()
    with joined(options.device) as rank:
        try:
            agreement = Agreement()
            if options.lighthouse is not None and options.replica is not None:
                agreement = agreement_of(options, rank, options.lighthouse, options.replica)
            console = FirstAlone(RunConsole(options.log_every), agreement)
            outcome = train(options, rank, console, agreement=agreement)
        except RankAlone as error:
            return complain(NAME, error, every_rank=True)
        except NonFiniteStep:  # which the console has said
            return 1
        except torch.OutOfMemoryError as error:
            fault = str(error).partition(". ")[0]
            remedy = "earlier checkpoints are kept: take a smaller --batch-size, or --keep less"
            complain(NAME, f"{fault}; {remedy}", every_rank=True)
            return 1
    return _conclude(options, outcome, [] if rank.rank else [agreement.folder(options.out)], started)


def _conclude(options: TrainOptions, outcome: Outcome, logs: list[Path], started: float) -> int:
    """Draw those logs that are there, export the model, and say what came of it; returns the exit code."""
    code = INTERRUPTED if outcome.reason == "interrupted" else int(outcome.complaint is not None)
    if not (logs := [log for log in logs if log.exists()]):
        return code
    from cs336_systems.report.run_figure import read_runs, summary

    line: dict[str, Any] = {"command": NAME, "out": str(options.out)}
    draw = partial(_draw, options.out, logs)
    made = {"picture": (draw, f"loss, norm, learning rate and throughput of {outcome.steps:,} steps")}
    if options.export and outcome.reason in ("done", "walltime", "no gain") and not code:
        export = partial(_export, options.out, outcome.best_step)
        made["exported"] = (export, "the model for Hugging Face")
    for name, (make, what) in made.items():
        try:
            line[name] = str(make())
        except (ValueError, OSError) as error:  # what was learned is saved
            code = code or 1
            complain(NAME, error)
        else:
            print(f"{line[name]}: {what}")
    if outcome.reason != "done":
        limits = {"walltime": f"--walltime {options.walltime} s has passed; ", "no gain": "the loss falls no more; "}
        more = "a larger --stop-after-no-gain" if outcome.reason == "no gain" else "the same command"
        then = f"{more} goes on from step {outcome.steps:,}"
        if options.save_every is None:
            then = f"the same command begins at step {outcome.first_step:,} again, as it keeps no checkpoint"
        elif outcome.complaint:
            then = _GOES_ON
        print(f"{options.out}: {limits.get(outcome.reason, '')}{then}")
    summaries = map(summary, read_runs(logs).values())
    line |= max(summaries, key=lambda figures: figures["steps"])
    line |= {"reason": outcome.reason, "resumed_at": outcome.first_step}
    line |= {"complaint": outcome.complaint} if outcome.complaint else {}
    print(json.dumps(line | {"s": round(time.perf_counter() - started, 2)}))
    return code


def _draw(folder: Path, logs: list[Path]) -> Path:
    from cs336_systems.pretraining.run_log import LOG
    from cs336_systems.report.figures import save
    from cs336_systems.report.run_figure import read_runs, run_figure

    picture = (folder / LOG).with_suffix(".png")
    save(run_figure(read_runs(logs)), picture)
    return picture


def _export(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest."""
    from cs336_systems.distributed.checkpoint_folder import name_of
    from cs336_systems.pretraining.checkpoint import load_weights
    from cs336_systems.pretraining.export import export_saved

    gc.collect()  # slabs of a streamed step, which refers to itself
    saved = load_weights(folder if step is None else folder / name_of(step))
    return export_saved(folder / f"hf-{saved.step}", saved).folder


if __name__ == "__main__":
    exit_with(NAME, main)
