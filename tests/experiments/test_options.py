"""What follows from a declared step: options, a grid of cells; and faults told before anything runs."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.declared import like, option, options_in, options_of
from cs336_systems.experiments.options import (
    RankedCase,
    RankedRun,
    TimedCase,
    TrainingRun,
    check_options,
    training_cells,
)
from cs336_systems.ranks import Parallel
from cs336_systems.report.command_line import parse


@dataclass(frozen=True)
class BucketCell(RankedCase):
    bucket_size_mb: float = like(Parallel, "bucket_size_mb")
    colour: str = option("red", "What it looks like.", values=("red", "blue"), aliases=("--color",), words="in {}")


@dataclass(frozen=True)
class Asked(RankedRun):
    """A question."""

    CPU_DEFAULTS: ClassVar = {"batch_size": (2, 8), "steps": 10}
    losses: int = option(0, "Steps before.", sign="not negative")


Options: Any = options_of(BucketCell, Asked, batch_size=(16,), steps=20)
ONE_RANK = replace(Options(), device="cpu", world_size=(1,), size=("tiny",))


def test_each_fault_is_named():
    check_options(Options())
    for name, value, said in (
        *(("batch_size", (), "none"), ("batch_size", (1, -2), "-2"), ("steps", 0, "0"), ("warmup", -1, "-1")),
        *(("bucket_size_mb", (float("nan"),), "nan"), ("later_warmup", -1, "-1"), ("losses", -1, "-1")),
        *(("seed", 2**31, "2147483648"), ("timeout", float("inf"), "inf")),
    ):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*got {said}"):
            check_options(replace(Options(), **{name: value}))


def test_what_no_cell_can_have_is_told_before_anything_runs():
    captured = {"device": "cuda", "cuda_graph": ("on",), "optimizer": ("fused",), "warmup": 3}
    for message, fault in {
        "'magic'": {"attention": ("flash", "magic")},
        "--scaling .*--matmul-dtype is same": {"scaling": ("row",)},
        "--fp8-skip-last": {"fp8_skip_last": 1},
        "'huge'": {"size": ("tiny", "huge")},
        "context": {"context_length": (0,)},
        "every-0": {"checkpoint": ("every-0",)},
        "'autograd-full'": {"keep": ("autograd-full",)},
        "--checkpoint full and --keep autograd-input": {"keep": ("autograd-input",), "checkpoint": ("full",)},
        "optimizer fused needs device cuda, got cpu": {"optimizer": ("reference", "fused")},
        "cuda_graph on needs device cuda": {"world_size": (1, 2), "cuda_graph": ("on",)},
        "step 4, .*--warmup 4 .*3": captured,
    }.items():
        with pytest.raises(ValueError, match=message):
            training_cells(BucketCell, replace(ONE_RANK, **fault))


def test_a_command_line_follows_from_the_fields():
    arguments = ["--device", "cpu", "--bucket-size-mb", "1", "2", "--color", "blue", "--master-weights", "none"]
    arguments += ["--context-length", "8", "16", "--compile", "--repeat", "2", "--losses", "3"]
    options = parse(Options, arguments, None)
    assert (options.bucket_size_mb, options.colour, options.losses, options.warmup) == ((1.0, 2.0), ("blue",), 3, 5)
    assert (options.batch_size, options.optimizer, options.keep) == ((2, 8), ("torch-fused",), None)
    cells = training_cells(BucketCell, replace(options, world_size=(2,), batch_size=(1,), size=("tiny",)))
    assert len(cells) == 2 * 2 * 2
    assert {(cell.compile, cell.optimizer, cell.master, cell.steps) for cell in cells} == {
        ("on", "torch-fused", "none", 10)
    }


def test_every_option_of_a_case_reaches_its_cells():
    """A value for each that is not plain comes back from the grid of one cell."""
    other = {"size": "tiny", "batch_size": 3, "context_length": 64, "dtype": "bf16", "attention": "hopper"}
    other |= {"compile": "off", "checkpoint": "none", "optimizer": "fused", "accumulate": 2, "cuda_graph": "off"}
    other |= {"kernels": "fused", "keep": "all", "master": "fp32", "offload": "m-v", "matmul_dtype": "e4m3"}
    other |= {"matmul_kernels": "library"}
    other |= {"gradient_dtype": "e5m2", "scaling": "row", "fp8_skip_first": 1, "fp8_skip_last": 0}
    assert other.keys() == {each.name for each, _ in options_in(TrainingCase)}
    several = {each.name for each, of in options_in(TrainingCase) if of.several}
    given = {name: (value,) if name in several else value for name, value in other.items()}
    given["master_weights"] = given.pop("master")
    (cell,) = training_cells(TimedCase, options_of(TimedCase, TrainingRun)(device="cuda", **given))
    assert {name: getattr(cell, name) for name in other} == other


def test_kernels_say_what_is_kept_unless_keep_does():
    options = replace(ONE_RANK, device="cuda", attention=("flash",), kernels=("reference", "fused"))

    def kinds(**asked: object) -> list[tuple[str, str, str]]:
        cells = training_cells(BucketCell, replace(options, **asked))
        return [(cell.kernels, cell.keep, cell.checkpoint) for cell in cells]

    assert kinds() == [("reference", "autograd", "none"), ("fused", "products", "none")]
    both = [(kernels, keep, "none") for kernels in ("reference", "fused") for keep in ("input", "all")]
    assert kinds(keep=("input", "all")) == both
    keep = ("autograd", "autograd-every-1", "autograd-after-2", "all")
    found = kinds(kernels=("reference",), keep=keep)
    policies = ["none", "every-1", "first-2", "none"]
    assert found == [("reference", k.split("-")[0], p) for k, p in zip(keep, policies, strict=True)]


def test_recipes_are_a_grid_of_quantized_matmuls_beside_those_that_are_not():
    options = replace(ONE_RANK, matmul_dtype=("same", "e4m3"), fp8_skip_first=1, scaling=("tensor", "row"))
    assert [(cell.keep, str(cell.recipe)) for cell in training_cells(BucketCell, options)] == [
        ("autograd", ""),
        ("products", "e4m3 by tensor skip 1 and 0"),
        ("products", "e4m3 by row skip 1 and 0"),
    ]


def test_the_grid_varies_what_a_question_compares_fastest_and_repeats_it_whole_and_backwards():
    options = replace(ONE_RANK, world_size=(2, 1), dtype=("fp32", "bf16"), repeat=2, compile=())
    own = [{"steps": 1}, {"steps": 2}]
    cells = training_cells(RankedCase, options, inner=own)
    kinds = [(cell.repeat, cell.world_size, cell.dtype, cell.steps) for cell in cells]
    grid = [(w, d, n) for w in (2, 1) for d in ("fp32", "bf16") for n in (1, 2)]
    assert kinds == [(0, *kind) for kind in grid] + [(1, *kind) for kind in reversed(grid)]
    assert {cell.compile for cell in cells} == {"on"}
