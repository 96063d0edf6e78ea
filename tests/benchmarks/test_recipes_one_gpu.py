"""Recipes for one GPU, scripts/measure_*.sh: their parts' commands parse, and compare what they should."""

import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import resolve_size
from cs336_systems.experiments import attention, blocks, fp8, kernels, learning, model, profile, training
from cs336_systems.harness.record import read_rows
from cs336_systems.report.command_line import parse
from tests.benchmarks.commands import ROOT

ATTENTION, FP8, KERNELS, MODELS, PROFILES, TRAINING = (
    ROOT / "scripts" / f"measure_{name}.sh"
    for name in ("attention", "fp8", "kernels", "models", "profiles", "training")
)
QUESTIONS = {
    "benchmark_attention": attention,
    "benchmark_blocks": blocks,
    "benchmark_fp8": fp8,
    "benchmark_kernels": kernels,
    "benchmark_learning": learning,
    "benchmark_model": model,
    "benchmark_training": training,
    "profile_model": profile,
}
PARTS = re.findall(r"^#   ([a-z0-9-]+)  +\d+  ", ATTENTION.read_text(), re.MULTILINE)
KERNEL_PARTS = re.findall(r"^#   ([a-z0-9-]+)  +\d+  ", KERNELS.read_text(), re.MULTILINE)
FP8_PARTS = re.findall(r"^#   ([a-z0-9-]+)  +\d+  ", FP8.read_text(), re.MULTILINE)
MODEL_PARTS = re.findall(r"^#   ([a-z0-9-]+)  +\d+(?:  |$)", MODELS.read_text(), re.MULTILINE)
TRAINING_SECONDS = dict(re.findall(r"^#   ([a-z0-9.-]+)  +(\d+)  ", TRAINING.read_text(), re.MULTILINE))
TRAINING_PARTS = list(TRAINING_SECONDS)
CLOCKS = {"harness", "do-bench"}


def grids(script: Path, folder: Path, *parts: str, **environment: str) -> dict[str, list]:
    """The cells of each folder that the parts would write to."""
    done = subprocess.run(
        [str(script), str(folder), *parts],
        env=os.environ | {"PYTHON": "echo"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list] = {}
    for line in done.stdout.splitlines():
        benchmark, *arguments = line.split()
        cells = QUESTIONS[Path(benchmark).stem]
        options = parse(cells.Options, ["--device", "cuda", *arguments], None)
        if getattr(options, "world_size", ()) is None:
            options = replace(options, world_size=(1,))  # as the driver says of one GPU
        found.setdefault(options.out.name, []).extend(cells.make_cells(options))
    return found


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        *((ATTENTION, PARTS), (FP8, FP8_PARTS), (KERNELS, KERNEL_PARTS), (MODELS, MODEL_PARTS)),
        (TRAINING, TRAINING_PARTS),
    ],
)
def test_the_head_names_every_part(script, parts):
    branches = re.findall(r"^    ([a-z0-9][a-z0-9.|-]*)\)$", script.read_text(), re.MULTILINE)
    assert sorted(parts) == sorted(part for branch in branches for part in branch.split("|"))


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        *((ATTENTION, PARTS), (FP8, FP8_PARTS), (KERNELS, KERNEL_PARTS), (TRAINING, TRAINING_PARTS)),
        (MODELS, [part for part in MODEL_PARTS if part != "harness"]),
        (PROFILES, ["nsys", "nsys-autocast", "memory", "quantization"]),
    ],
)
def test_no_part_measures_a_cell_twice(script, parts, tmp_path):
    for part in parts:
        for cells in grids(script, tmp_path, part).values():
            assert cells and len(set(cells)) == len(cells), part


def test_whole_steps_take_turns_with_the_compiled_reference(tmp_path):
    for folder, keep in (("fused-steps", "all"), ("fused-steps-products", "products")):
        found = grids(KERNELS, tmp_path, "steps", "steps-products")[folder]
        ways: dict[tuple, list] = {(cell.size, cell.batch_size, cell.repeat): [] for cell in found}
        for cell in found:
            assert (cell.mode, cell.context_length, cell.dtype, cell.attention) == ("backward", 1024, "bf16", "hopper")
            ways[cell.size, cell.batch_size, cell.repeat].append((cell.kernels, cell.keep, cell.compile))
        assert list(ways) == [
            (f"qwen2.5-{size}", batch, repeat)
            for size, batch in (("0.5b", 32), ("1.5b", 16), ("3b", 8), ("7b", 4))
            for repeat in range(2)
        ]
        turn = [("fused", keep, "off"), ("reference", "autograd", "on")]
        assert all(hows == (turn[::-1] if repeat else turn) for (_, _, repeat), hows in ways.items())


def test_eager_and_compiled_attention_take_turns_until_memory_ends(tmp_path):
    ((folder, cells),) = grids(ATTENTION, tmp_path, "pytorch").items()
    assert folder == "attention-pytorch"
    assert {cell.length for cell in cells} == {shape[2] for shape in attention.GRIDS["pytorch"].shapes}
    in_turns = [cell for cell in cells if cell.length <= 16_384]
    for first, second in zip(in_turns[::2], in_turns[1::2], strict=True):
        assert {first.impl, second.impl} == set(attention.MATERIALISED)
        assert (first.length, first.d_head, first.repeat) == (second.length, second.d_head, second.repeat)
    assert {cell.repeat for cell in in_turns} == {0, 1}


@pytest.mark.parametrize("worlds", [(1, 2), (1, 2, 4)])
def test_ranks_are_measured_beside_one_gpu_in_bf16_and_fp8(worlds, tmp_path):
    parts = [part for part in TRAINING_PARTS if part.startswith("ranks")]
    (cells,) = grids(TRAINING, tmp_path, *parts, RANKS=" ".join(map(str, worlds))).values()
    assert len(set(cells)) == len(cells)
    together = ((1, "collectives", "off"), (3, "collectives", "off"), (3, "copies", "off"))
    assert {(cell.size, cell.recipe, cell.world_size, cell.zero, cell.gather_by, cell.apart) for cell in cells} == {
        (f"qwen2.5-{size}", recipe, world, *way)
        for size in ("0.5b", "1.5b", "7b")
        for recipe in ("stored", "e4m3")
        for world in worlds
        for way in ((*together, (0, "collectives", "on")) if world > 1 else ((0, "collectives", "off"),))
    }
    alike = {replace(cell, recipe="", zero=0, gather_by="collectives", apart="", world_size=1) for cell in cells}
    assert sorted(cell.size for cell in alike) == ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"]


@pytest.mark.parametrize("size", ["0.5b", "1.5b", "3b", "7b"])
def test_runs_in_fp8_are_measured_beside_bf16_and_torchaos_in_one_command(size, tmp_path):
    (cells,) = grids(TRAINING, tmp_path, f"torchao-{size}").values()
    assert {cell.size for cell in cells} == {f"qwen2.5-{size}"}
    assert [(cell.how, cell.recipe) for cell in cells] == [
        *(("ours", "stored"), ("ours", "e4m3")),
        *(("torchao-tensorwise", "e4m3-e5m2"), ("torchao-rowwise", "e4m3-row")),
    ]
    own = {"how": "", "recipe": "", "library": ""}
    of_ours = {"kernels": "", "keep": "", "attention": "", "cuda_graph": ""}
    assert len({replace(cell, **own, **of_ours) for cell in cells}) == 1
    quantized = grids(TRAINING, tmp_path, f"fp8-{size}")["training"][-1]
    assert quantized == replace(cells[1], total_batch_tokens=2**19, batch_size=quantized.batch_size)
    assert quantized.batch_size == cells[1].batch_size * (2 if size in ("1.5b", "3b") else 1)
    assert min(cell.seconds for cell in cells) >= 60


@pytest.mark.parametrize("part", TRAINING_PARTS)
def test_the_head_says_how_long_runs_take_and_none_takes_ten_minutes(part, tmp_path):
    stated = int(TRAINING_SECONDS[part])
    by_arithmetic = sum(map(seconds, *grids(TRAINING, tmp_path, part).values()))
    assert stated == pytest.approx(by_arithmetic, rel=0.1)
    assert max(stated, by_arithmetic) < 600


def seconds(cell: training.TrainingRunCell) -> float:
    """Of a run, as the head says, at the rates of committed steps, ours or compiled."""
    ours = cell.how == "ours"
    rows = read_rows(ROOT / "profiles" / "results" / "h200" / "fused-steps" / "benchmark_model.csv")
    rows = rows[(rows["metric"] == "tokens_per_s") & (rows["mode"] == "backward") & (rows["size"] == cell.size)]
    rate = rows["median"][rows["kernels"] == ("fused" if ours else "reference")].median()
    step = cell.total_batch_tokens / (rate * cell.world_size)
    # ours makes three steps more once it is asked to end, one step into the recorded ones at the earliest
    n_steps = cell.warmup + max(4 if ours else 1, math.ceil(cell.seconds / step))
    whole_model = 3 * resolve_size(cell.size).n_layers
    compiling = 0 if ours else whole_model if cell.how == "transformers" else 30
    return 15 + compiling + n_steps * step
