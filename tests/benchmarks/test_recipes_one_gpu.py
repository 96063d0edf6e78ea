"""Recipes for one GPU, scripts/measure_*.sh: their parts' commands parse, and compare what they should."""

import math
import os
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import HANDOUT_SIZES, resolve_size
from cs336_systems.experiments import model
from cs336_systems.experiments.attention import cells as attention
from cs336_systems.experiments.blocks import cells as blocks
from cs336_systems.experiments.fp8 import cells as fp8
from cs336_systems.experiments.kernels import cells as kernels
from cs336_systems.experiments.learning import cells as learning
from cs336_systems.experiments.profile import cells as profile
from cs336_systems.experiments.training import cells as training
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


@pytest.mark.parametrize("part", PARTS)
def test_no_part_measures_a_cell_twice(part, tmp_path):
    for cells in grids(ATTENTION, tmp_path, part).values():
        assert cells and len(set(cells)) == len(cells)


def test_kernels_and_blocks_are_measured_at_the_shapes_of_the_models(tmp_path):
    found = grids(KERNELS, tmp_path, *KERNEL_PARTS)
    assert set(found) == {"kernels", "fused", "fused-steps", "fused-steps-products", "llama-steps"}
    assert all(len(set(cells)) == len(cells) for cells in found.values())
    assert {cell.kernel for cell in found["kernels"]} == {*kernels.KERNELS} - {"weighted_sum"}
    assert {cell.how for cell in found["kernels"]} == {"ours", "eager", "compiled", *kernels.PEERS}
    assert {cell.dtype for cell in found["kernels"]} == {"bf16"}
    assert all(cell.n_samples >= (20 if cell.kernel in kernels.BY_FLOPS else 50) for cell in found["kernels"])
    norms = [cell for cell in found["kernels"] if cell.kernel == "rms_norm"]
    assert {cell.rows for cell in norms} == {4096, 16_384, 65_536}
    assert {cell.width for cell in norms} == {896, 1536, 2048, 3584, 4096, 5120}
    head = [cell for cell in found["kernels"] if cell.kernel == "linear_cross_entropy" and cell.rows == 32_768]
    assert {cell.width for cell in head} == {4096}
    single = [cell for cell in found["fused"] if cell.attention == "hopper"]
    assert {(cell.size, cell.batch_size, cell.context_length) for cell in single} == {
        ("leaderboard-8b", 1, 32_768),
        ("llama3-8b", 2, 8192),
        *((f"qwen2.5-{size}", batch, 1024) for size, batch in (("0.5b", 32), ("1.5b", 16), ("3b", 8), ("7b", 4))),
    }
    ways: dict[tuple, set] = {(cell.shape, cell.repeat): set() for cell in single}
    for cell in single:
        ways[cell.shape, cell.repeat].add(cell.how)
    assert all({"compiled", "input", "attention", "products", "all"} <= hows for hows in ways.values())
    turns = Counter(replace(cell, repeat=0) for cell in found["fused"])
    assert all(cell.steps * n >= 30 for cell, n in turns.items())


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


def test_steps_of_8b_stand_beside_the_compiled_reference_and_the_accumulated_one_keeps_all(tmp_path):
    found = grids(KERNELS, tmp_path, "llama-steps", "accumulate")
    assert [(cell.kernels, cell.keep, cell.compile, cell.mode) for cell in found["llama-steps"]] == [
        ("fused", "all", "off", "backward"),
        ("fused", "products", "off", "backward"),
        ("reference", "autograd", "on", "backward"),
    ]
    (accumulated,) = found["fused-steps"]
    assert (accumulated.keep, accumulated.accumulate, accumulated.mode) == ("all", 16, "step")
    assert {(c.size, c.batch_size, c.context_length) for c in (*found["llama-steps"], accumulated)} == {
        ("llama3-8b", 1, 8192)
    }


def test_eager_and_compiled_attention_take_turns_until_memory_ends(tmp_path):
    ((folder, cells),) = grids(ATTENTION, tmp_path, "pytorch").items()
    assert folder == "attention-pytorch"
    assert {cell.length for cell in cells} == {shape[2] for shape in attention.GRIDS["pytorch"].shapes}
    in_turns = [cell for cell in cells if cell.length <= 16_384]
    for first, second in zip(in_turns[::2], in_turns[1::2], strict=True):
        assert {first.impl, second.impl} == set(attention.MATERIALISED)
        assert (first.length, first.d_head, first.repeat) == (second.length, second.d_head, second.repeat)
    assert {cell.repeat for cell in in_turns} == {0, 1}


def test_the_short_part_holds_what_the_documents_name(tmp_path):
    short = grids(ATTENTION, tmp_path, "flash")
    whole = grids(ATTENTION, tmp_path, "flash-bf16", "flash-fp32")
    assert set(short) == set(whole) == {"attention-flash-bf16", "attention-flash-fp32"}
    assert all(set(cells) < set(whole[folder]) for folder, cells in short.items())
    shapes = {shape[2:] for shape in attention.GRIDS["flash"].shapes}
    for cells in short.values():
        for impl in ("reference", "flash"):
            own = [cell for cell in cells if cell.impl == impl]
            assert {(cell.length, cell.d_head) for cell in own if cell.clock == "harness"} == shapes
            assert {cell.clock for cell in own if cell.d_head == 64} == CLOCKS
    hopper = [cell for cell in short["attention-flash-bf16"] if cell.impl == "hopper"]
    assert {(cell.length, cell.d_head) for cell in hopper} == {shape for shape in shapes if shape[1] >= 64}


def test_the_whole_grid_has_every_implementation_and_do_bench_for_ours(tmp_path):
    for cells in grids(ATTENTION, tmp_path, "flash-bf16", "flash-fp32").values():
        assert {cell.impl for cell in cells} == set(attention.GRIDS["flash"].impls)
        assert {cell.impl for cell in cells if cell.clock == "do-bench"} == {"reference", "flash", "hopper"}


def test_blocks_of_every_size_and_whole_models_are_compiled_beside_eager_ones(tmp_path):
    ((_, cells),) = grids(MODELS, tmp_path, "compiled").items()
    assert {cell.size for cell in cells} == set(HANDOUT_SIZES)
    assert set(ways_to_compile(cells).values()) == {("off", "on")}
    ((folder, cells),) = grids(MODELS, tmp_path, "whole-model", SIZES="small xl").items()
    assert folder == "whole-model"
    assert {cell.size for cell in cells} == {"small", "xl"}
    assert set(ways_to_compile(cells).values()) == {("off", "on", "whole-model")}
    assert {cell.repeat for cell in cells} == {0, 1}


def ways_to_compile(cells: list) -> dict[tuple, tuple[str, ...]]:
    ways: dict[tuple, tuple[str, ...]] = {}
    for cell in cells:
        case = (cell.dtype, cell.size, cell.repeat)
        ways[case] = tuple(sorted({*ways.get(case, ()), cell.compile}))
    return ways


def test_segments_are_measured_in_fp32_as_the_argument_is(tmp_path):
    ((folder, cells),) = grids(MODELS, tmp_path, "checkpointing-fp32").items()
    assert folder == "checkpointing"
    assert {cell.checkpoint for cell in cells} == {"none", "full", "every-2", "every-4", "every-8"}
    assert {(cell.size, cell.context_length, cell.dtype, cell.mode) for cell in cells} == {
        ("2.7b", 2048, "fp32", "step")
    }
    ((_, cells),) = grids(MODELS, tmp_path, "checkpointing", "checkpointing-1024").items()
    assert {(cell.mode, cell.steps) for cell in cells} == {("step", 10)}


def test_nsys_records_what_both_editions_ask_for_also_in_pieces(tmp_path):
    whole = grids(PROFILES, tmp_path, "nsys")["nsys"]
    asked = {(size, context) for size in HANDOUT_SIZES if size != "10b" for context in (128, 256, 512, 1024, 2048)}
    assert {(cell.size, cell.context_length) for cell in whole} == asked
    piece = grids(PROFILES, tmp_path, "nsys", SIZES="small xl", LENGTHS="256")["nsys"]
    assert {(cell.size, cell.context_length) for cell in piece} == {("small", 256), ("xl", 256)}


def test_every_digest_is_recorded_in_both_modes(tmp_path):
    parts = ("nsys", "nsys-autocast", "memory")
    for part, cells in grids(PROFILES, tmp_path, *parts).items():
        assert {cell.mode for cell in cells} == {"forward", "step"}, part


def test_the_step_that_quantizes_is_profiled_as_the_trainer_makes_it_beside_bf16(tmp_path):
    stored, quantized = grids(PROFILES, tmp_path, "quantization")["quantization"]
    assert (stored.matmul_dtype, quantized.matmul_dtype) == ("same", "e4m3")
    assert replace(quantized, matmul_dtype="same") == stored
    assert (stored.size, stored.mode, stored.optimizer, stored.keep) == ("qwen2.5-7b", "step", "fused", "products")


def test_runs_are_measured_beside_the_peer_at_the_tokens_of_the_goals(tmp_path):
    found = grids(TRAINING, tmp_path, *(part for part in TRAINING_PARTS if not part.startswith(("fp8", "torchao"))))
    assert list(found) == ["training", "training-2"]
    assert all(len(set(cells)) == len(cells) for cells in found.values())
    cells = found["training"]
    assert {(cell.context_length, cell.total_batch_tokens, cell.dtype) for cell in cells} == {(1024, 524_288, "bf16")}
    assert min(cell.seconds for cell in cells) >= 60
    assert {cell.data for cell in cells} == {"random tokens"}
    ways: dict[tuple, set] = {}
    for cell in cells:
        ways.setdefault((cell.size, cell.batch_size), set()).add(cell.how)
    assert [size for size, _ in ways] == [f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b")]
    assert all(hows == {"ours", "transformers", "transformers-liger"} for hows in ways.values())


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


def test_runs_in_fp8_are_measured_beside_those_in_bf16_where_these_fit(tmp_path):
    (cells,) = grids(TRAINING, tmp_path, *(part for part in TRAINING_PARTS if part.startswith("fp8"))).values()
    assert {(cell.total_batch_tokens, cell.dtype, cell.how) for cell in cells} == {(524_288, "bf16", "ours")}
    assert min(cell.seconds for cell in cells) >= 60
    both = ["stored", "e4m3"]
    assert [(cell.size, cell.recipe) for cell in cells] == [
        *(("qwen2.5-0.5b", recipe) for recipe in both),
        *(("qwen2.5-1.5b", "e4m3"), ("qwen2.5-3b", "e4m3")),
        *(("qwen2.5-7b", recipe) for recipe in both),
    ]
    alike = [replace(cell, recipe="") for cell in cells]
    assert alike[0] == alike[1] and alike[4] == alike[5]


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


def test_products_in_fp8_are_measured_beside_stored_ones_and_learn_the_same_tokens(tmp_path):
    found = grids(FP8, tmp_path, *FP8_PARTS)
    assert set(found) == {*FP8_PARTS}
    ways: dict[tuple, set] = {}
    for cell in found["fp8"]:
        ways.setdefault((cell.part, cell.product, cell.repeat), set()).add(cell.how)
    assert all({*fp8.RECIPES, "compiled", "torchao-tensorwise", "torchao-rowwise"} == hows for hows in ways.values())
    for part, device in (("learning", "cuda"), ("learning-emulated", "cpu")):
        seeds: dict[str, list] = {}
        for cell in found[part]:
            seeds.setdefault(cell.recipe, []).append(cell.seed)
        assert set(seeds) == set(fp8.RECIPES) and set(map(tuple, seeds.values())) == {(0, 1, 2)}
        assert {cell.device for cell in found[part]} == {device}
        assert len({replace(cell, recipe="", seed=0, repeat=0) for cell in found[part]}) == 1
