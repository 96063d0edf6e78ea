"""Recipes, scripts/measure_*.sh: every part's commands parse, measure no cell twice, interleave what they compare."""

import importlib
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.experiments.attention import MATERIALISED
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.report.command_line import parse
from scripts import run_benchmarks
from scripts.sample import SampleOptions
from tests.benchmarks.commands import ROOT

RECIPES = ("attention", "distributed", "kernels", "models", "parallelism", "profiles", "training")
"""Recipes of benchmarks."""
SOME = {
    "distributed": ("ddp", "sharded-optimizer", "fsdp", "fsdp-gathers", "leaderboard", "leaderboard-fp8"),
    "profiles": ("memory",),
}
"""The parts whose commands are parsed, where all take half a minute, or need nsys."""


def script(recipe):
    return ROOT / "scripts" / f"measure_{recipe}.sh"


def parts(recipe):
    branches = re.findall(r"^    ([a-z0-9][a-z0-9. |-]*)\)$", script(recipe).read_text(), re.MULTILINE)
    return list(dict.fromkeys(part.strip() for branch in branches for part in branch.split("|")))


def printed(recipe, folder, *parts, **environment):
    """The words of each command of the parts, with a program that prints its arguments in place of Python's."""
    program = folder / "program"
    program.write_text('#!/bin/sh\nprintf "%s\\t" "$@"; echo\n')
    program.chmod(0o755)
    given = {name: value for name, value in os.environ.items() if name != "RANKS"} | environment
    given |= {"PYTHON": str(program), "TORCHRUN": str(program)}
    command = [str(script(recipe)), str(folder), *parts]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    return [line.rstrip("\t").split("\t") for line in done.stdout.splitlines()]


def cells_of(recipe, folder, part, **environment):
    """The cells of each benchmark of a part; runs of train.py are checked."""
    found = []
    for words in printed(recipe, folder, part, **environment):
        commands, ranks = [words], 1
        if words[3:4] == ["scripts/run_benchmarks.py"]:
            commands, ranks = run_benchmarks.commands(words[4:]), int(words[2])
        for program, *arguments in commands:
            if program == "scripts/train.py":
                parse(TrainOptions, ["--device", "cuda", *arguments], None).check()
                continue
            module = ".".join((ROOT / program).relative_to(ROOT).with_suffix("").parts)
            experiment = importlib.import_module(module).EXPERIMENT
            device = [] if "--device" in arguments else ["--device", "cuda"]
            options = parse(experiment.options, [*device, *arguments], None)
            if hasattr(options, "world_size"):
                options = replace(options, world_size=options.world_size or (ranks,))  # as the driver says
            found.append(experiment.make_cells(options))
    return found


@pytest.mark.parametrize("recipe", [*RECIPES, "runs", "streaming"])
def test_an_unknown_part_is_named_and_the_head_names_the_others(recipe, tmp_path):
    done = subprocess.run([str(script(recipe)), str(tmp_path), "everything"], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown part 'everything'" in done.stderr
    if recipe in RECIPES and recipe != "profiles":
        named = re.findall(r"^#   ([a-z0-9.-]+)  +(?:CPU|\d+)(?:  |$)", script(recipe).read_text(), re.MULTILINE)
        assert sorted(named) == sorted(parts(recipe))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_command_measures_a_cell_twice(recipe, tmp_path):
    for part in SOME.get(recipe) or parts(recipe):
        for cells in cells_of(recipe, tmp_path, part):
            assert cells and len(set(cells)) == len(cells), part


def test_ways_that_are_compared_follow_each_other(tmp_path):
    turn = [("fused", "products", "off"), ("reference", "autograd", "on")]
    for cells in cells_of("kernels", tmp_path, "steps-products"):
        assert [(cell.kernels, cell.keep, cell.compile) for cell in cells] == [*turn, *turn[::-1]]
    interleaved, *beyond = cells_of("attention", tmp_path, "pytorch")
    for first, second in zip(interleaved[::2], interleaved[1::2], strict=True):
        assert {first.impl, second.impl} == set(MATERIALISED)
        assert (first.length, first.d_head, first.repeat) == (second.length, second.d_head, second.repeat)
    assert {cell.impl for cells in beyond for cell in cells} == {"reference"}
    (cells,) = cells_of("training", tmp_path, "torchao-7b")
    assert [(cell.how, cell.recipe) for cell in cells] == [
        *(("ours", "stored"), ("ours", "e4m3")),
        *(("torchao-tensorwise", "e4m3-e5m2"), ("torchao-rowwise", "e4m3-row")),
    ]


def test_kernels_are_measured_beside_the_best_peers_at_their_published_shapes(tmp_path):
    (cells,) = cells_of("attention", tmp_path, "peers")
    shapes = {(each.batch_size, each.heads, each.kv_heads, each.length, each.d_head) for each in cells}
    assert shapes >= {(1, 64, 8, 16_384, 128), (4, 32, 0, 4096, 128), (8, 16, 0, 2048, 64), (32, 14, 0, 1024, 64)}
    ways = {"flash", "hopper", "sdpa-cudnn", "flash-attn-4"}
    assert {(each.impl, each.clock) for each in cells} == {
        (way, clock) for way in ways for clock in ("harness", "device")
    }
    (cells,) = cells_of("kernels", tmp_path, "peers-head")
    assert {(each.rows, each.width, each.vocabulary) for each in cells} == {(8192, 4096, 131_072)}
    assert {"ours", "quack", "liger-cute"} < {each.how for each in cells}
    norms, losses = cells_of("kernels", tmp_path, "peers")
    assert {"quack", "liger-cute"} < {each.how for each in norms if each.kernel == "rms_norm"}
    assert {"torch", "torch-foreach", "compiled"} < {each.how for each in norms if each.kernel == "adamw"}
    assert {(each.kernel, each.rows, each.width) for each in losses} == {("cross_entropy", 8192, 131_072)}


@pytest.mark.parametrize("worlds", ["1 2", "1 2 4"])
def test_ranks_are_measured_beside_one_gpu_in_bf16_and_fp8(worlds, tmp_path):
    for part in (part for part in parts("training") if part.startswith("ranks")):
        for cells in cells_of("training", tmp_path, part, RANKS=worlds):
            assert {cell.world_size for cell in cells} <= set(map(int, worlds.split()))
            one = {replace(cell, world_size=1, zero=0, gather_by="collectives", apart="off") for cell in cells}
            assert one <= set(cells), part


def test_parts_that_are_named_together_share_a_launch_unless_they_differ_in_it(tmp_path):
    for together, launches in (("ddp sharded-optimizer fsdp", 1), ("ddp ddp-ctas8 fsdp ddp-one-rank ddp-xl", 3)):
        assert len(printed("distributed", tmp_path, *together.split())) == launches


def test_runs_are_trained_compared_and_sampled(tmp_path):
    by_optimizer = [f"adamw-400-{rate}" for rate in ("6e-4", "2e-3", "6e-3")]
    by_optimizer += [f"muon-{steps}-{rate}" for steps in (400, 300) for rate in ("2e-3", "6e-3", "2e-2")]
    for run in ("100m", "compared/ours", "compared/transformers", *by_optimizer):
        (tmp_path / "work" / run).mkdir(parents=True)
        (tmp_path / "work" / run / "log.jsonl").touch()
    found = {}
    for program, *arguments in printed("runs", tmp_path, *parts("runs"), WORK=str(tmp_path / "work")):
        found.setdefault(Path(program).stem, []).append(arguments)
    assert len(found["sample"]) == 3
    for arguments in [*found["train"], *found["compare_with_transformers"]]:
        options = parse(TrainOptions, ["--device", "cuda", *arguments], None)
        assert options.total_batch_tokens == (65_536 if options.out.name in by_optimizer else 131_072)
    for arguments in found["sample"]:
        parse(SampleOptions, arguments, None)
