"""scripts/measure_distributed.sh: every part's commands parse and are under the measuring conditions that it states."""

import importlib
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.experiments.ranked import Effort
from cs336_systems.report.command_line import parse
from scripts import run_benchmarks
from tests.benchmarks.commands import ROOT

SCRIPT = ROOT / "scripts" / "measure_distributed.sh"
PARTS = re.findall(r"^#   ([a-z0-9-]+)  +\d+(?:  |$)", SCRIPT.read_text(), re.MULTILINE)
QUESTIONS = {"ddp": "data_parallel", "sharded_optimizer": "sharded_optimizer", "fsdp": "fully_sharded"}
IN_ONE_ROUND = ("traces", "ddp-one-rank", "ddp-ctas8", "leaderboard", "leaderboard-four")
"""Parts whose times are not those by which ours and torch's are compared, or whose steps take seconds."""
SHORT_COMMANDS = {("leaderboard", 0), ("leaderboard-four", 1), ("leaderboard-four", 2)}
"""Which of a part's commands makes five steps after two."""
LONG_ROUNDS = ("ddp-autocast", "ddp-host", "fsdp-leaderboard")
"""Parts whose steps scatter, or get faster for longer than five."""
IN_FEW_STEPS = ("fsdp-leaderboard", "leaderboard-losses", "leaderboard-masters", "leaderboard-fp8")
"""Whose steps take seconds."""


def launches(folder: Path, *parts: str) -> list[str]:
    """What the launcher is given, a line each with tabs between words."""
    launcher = folder / "launcher"
    launcher.write_text('#!/bin/sh\nprintf "%s\\t" "$@"; echo\n')
    launcher.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "RANKS"}
    done = subprocess.run(
        [str(SCRIPT), str(folder), *parts],
        env=environment | {"TORCHRUN": str(launcher)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def commands(part: str, folder: Path) -> list[tuple[int, str, list[str]]]:
    """(ranks, question, arguments) of each command that the part would run."""
    found = []
    for line in launches(folder, part):
        _, _, ranks, script, *launched = line.rstrip("\t").split("\t")
        assert script == "scripts/run_benchmarks.py"
        for path, *arguments in run_benchmarks.commands(launched):
            found.append((int(ranks), Path(path).stem.removeprefix("benchmark_"), arguments))
    return found


def grid(question: str, ranks: int, arguments: list[str]) -> tuple[list, Effort]:
    """The cells, and what is asked of them."""
    module = importlib.import_module(f"cs336_systems.experiments.{QUESTIONS[question]}")
    options = parse(module.Options, ["--device", "cuda", *arguments], None)
    return module.make_cells(replace(options, world_size=(ranks,))), Effort.of(options)


def test_the_head_names_every_part():
    branches = re.findall(r"^    ([a-z][a-z0-9 |-]*)\)$", SCRIPT.read_text(), re.MULTILINE)
    assert sorted(PARTS) == sorted(part for branch in branches for part in branch.split(" | "))


@pytest.mark.parametrize("part", [part for part in PARTS if part != "collectives"])
def test_each_part_times_ten_steps_after_five_in_rounds(part, tmp_path):
    for number, (ranks, question, arguments) in enumerate(commands(part, tmp_path)):
        cells, effort = grid(question, ranks, arguments)
        rounds = sorted({cell.repeat for cell in cells})
        by_scale = part in ("ddp-four", "ddp-four-ctas", "fsdp-four") and ranks < 4  # what scaling is told by
        if part not in IN_ONE_ROUND and not by_scale and len({cell.variant for cell in cells}) > 1:
            assert rounds == [0, 1], shlex.join(arguments)
        if part == "traces":
            assert effort.trace is not None
            continue
        beside = 2 if question == "sharded_optimizer" else 0  # steps in which memory is read
        taken = {(effort.warmup(cell) + beside, cell.steps) for cell in cells}
        short = part in IN_FEW_STEPS or (part, number) in SHORT_COMMANDS
        if part in LONG_ROUNDS or rounds == [0]:
            assert taken == {(2, 5) if short else (5, 10)}
        else:
            assert taken == {(5, 5), (2, 5)}


def test_parts_that_are_named_together_share_a_launch_unless_they_differ_in_it(tmp_path):
    assert len(launches(tmp_path, "ddp", "sharded-optimizer", "fsdp")) == 1
    assert len(launches(tmp_path, "ddp", "ddp-ctas8", "fsdp", "ddp-one-rank", "ddp-xl")) == 3
    assert len(launches(tmp_path, "leaderboard", "leaderboard-attempts", "leaderboard-fp8")) == 4
    assert len(launches(tmp_path, "ddp", "fsdp-more")) == 2  # recordings slow the host, and bf16 steps wait for it


def test_an_unknown_part_is_named(tmp_path):
    done = subprocess.run([str(SCRIPT), str(tmp_path), "everything"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown part 'everything'" in done.stderr
