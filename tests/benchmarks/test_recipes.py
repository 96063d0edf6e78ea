"""scripts/measure_distributed.sh: every part's commands parse and are under the measuring conditions that it states."""

import importlib
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.report.command_line import parse
from tests.benchmarks.commands import ROOT

SCRIPT = ROOT / "scripts" / "measure_distributed.sh"
PARTS = re.findall(r"^#   ([a-z0-9-]+)  +\d+\.\d", SCRIPT.read_text(), re.MULTILINE)
QUESTIONS = {"ddp": "data_parallel", "sharded_optimizer": "sharded_optimizer", "fsdp": "fully_sharded"}
IN_ONE_ROUND = ("traces", "ddp-one-rank", "ddp-ctas8")
"""Parts whose times are not those by which ours and torch's are compared."""
IN_FEW_STEPS = ("fsdp-leaderboard", "leaderboard-losses", "leaderboard-masters", "leaderboard-fp8")
"""Whose steps take seconds."""


def commands(part: str, folder: Path) -> list[tuple[int, str, list[str], str]]:
    """(ranks, question, arguments, NCCL_MAX_CTAS) of each command that the part would run."""
    launcher = folder / "launcher"
    launcher.write_text('#!/bin/sh\nprintf "%s\\t" "${NCCL_MAX_CTAS:-}" "$@"; echo\n')
    launcher.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANKS", "NCCL_MAX_CTAS")}
    done = subprocess.run(
        [str(SCRIPT), str(folder), part],
        env=environment | {"TORCHRUN": str(launcher)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for line in done.stdout.splitlines():
        ctas, _, _, ranks, script, *arguments = line.rstrip("\t").split("\t")
        found.append((int(ranks), Path(script).stem.removeprefix("benchmark_"), arguments, ctas))
    return found


def grid(question: str, ranks: int, arguments: list[str]) -> list:
    module = importlib.import_module(f"cs336_systems.experiments.{QUESTIONS[question]}.cells")
    options = parse(module.Options, ["--device", "cuda", *arguments], None)
    return module.make_cells(replace(options, world_size=(ranks,)))


def test_the_head_names_every_part():
    branches = re.findall(r"^    ([a-z][a-z0-9 |-]*)\)$", SCRIPT.read_text(), re.MULTILINE)
    assert sorted(PARTS) == sorted(part for branch in branches for part in branch.split(" | "))


@pytest.mark.parametrize("part", [part for part in PARTS if part != "collectives"])
def test_each_part_measures_in_rounds_of_ten_steps_after_five(part, tmp_path):
    for number, (ranks, question, arguments, ctas) in enumerate(commands(part, tmp_path)):
        cells = grid(question, ranks, arguments)
        short = part in IN_FEW_STEPS or (part in ("leaderboard", "leaderboard-turns") and number > 0)
        assert {(cell.warmup, cell.steps) for cell in cells} == {(2, 5) if short else (5, 10)}
        assert ctas == ("8" if part == "ddp-ctas8" else "")
        implementations = {cell.variant for cell in cells}
        rounds = {cell.repeat for cell in cells}
        if part not in IN_ONE_ROUND and len(implementations) > 1:
            assert rounds == {0, 1}, shlex.join(arguments)


@pytest.mark.parametrize("part", ["ddp", "sharded-optimizer", "fsdp", "traces"])
def test_the_2026_editions_xl_is_measured_first(part, tmp_path):
    for ranks, question, arguments, _ in commands(part, tmp_path):
        assert {cell.size for cell in grid(question, ranks, arguments)} == {"2.7b"}


def test_an_unknown_part_is_named(tmp_path):
    done = subprocess.run([str(SCRIPT), str(tmp_path), "everything"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown part 'everything'" in done.stderr
