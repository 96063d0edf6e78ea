"""scripts/measure_models.sh and measure_profiles.sh: what the parts that answer a question by grid would measure."""

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.config import HANDOUT_SIZES
from cs336_systems.report.command_line import parse
from tests.benchmarks.commands import ROOT

QUESTIONS = {"benchmark_model": "model", "profile_model": "profile"}


def cells_of(recipe: str, part: str, folder: Path, **environment: str) -> list[Any]:
    """The cells of every command that the part would run on a GPU."""
    launcher = folder / "launcher"
    launcher.write_text('#!/bin/sh\nprintf "%s\\t" "$@"; echo\n')
    launcher.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("SIZES", "LENGTHS")}
    done = subprocess.run(
        [str(ROOT / "scripts" / f"{recipe}.sh"), str(folder), part],
        env=inherited | {"PYTHON": str(launcher)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for line in done.stdout.splitlines():
        script, *arguments = line.rstrip("\t").split("\t")
        module = importlib.import_module(f"cs336_systems.experiments.{QUESTIONS[Path(script).stem]}.cells")
        found += module.make_cells(parse(module.Options, ["--device", "cuda", *arguments], None))
    return found


def test_segments_are_measured_in_fp32_as_the_argument_is(tmp_path):
    cells = cells_of("measure_models", "checkpointing", tmp_path)
    fp32 = [cell for cell in cells if cell.dtype == "fp32"]
    assert [cell.checkpoint for cell in fp32] == ["none", "full", "every-2", "every-4", "every-8"]
    assert {(cell.size, cell.context_length) for cell in fp32} == {("2.7b", 2048)}
    assert {(cell.mode, cell.steps) for cell in cells} == {("step", 10)}


def test_nsys_records_what_both_editions_ask_for_also_in_pieces(tmp_path):
    cells = cells_of("measure_profiles", "nsys", tmp_path)
    asked = {(size, context) for size in HANDOUT_SIZES if size != "10b" for context in (128, 256, 512, 1024, 2048)}
    assert {(cell.size, cell.context_length) for cell in cells} == asked
    piece = cells_of("measure_profiles", "nsys", tmp_path, SIZES="small xl", LENGTHS="256")
    assert {(cell.size, cell.context_length) for cell in piece} == {("small", 256), ("xl", 256)}


@pytest.mark.parametrize("part", ["nsys-autocast", "kineto", "memory"])
def test_other_digests_are_recorded_in_both_modes(part, tmp_path):
    assert {cell.mode for cell in cells_of("measure_profiles", part, tmp_path)} == {"forward", "step"}
