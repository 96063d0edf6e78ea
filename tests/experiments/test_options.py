"""What options must be: each fault is one sentence that names the flag and the value."""

import importlib
from dataclasses import dataclass, fields, replace
from typing import ClassVar, get_args

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.experiments.options import (
    Compile,
    RankedCase,
    RankedOptions,
    TimedCase,
    TrainingOptions,
    check_options,
    resolved_sizes,
    small_defaults_note,
    training_cells,
)


@dataclass(frozen=True)
class Options(RankedOptions):
    CPU_DEFAULTS: ClassVar = {"batch_size": (2, 8), "steps": 10}
    device: str = "cpu"
    batch_size: tuple[int, ...] = (16,)
    steps: int = 20
    bucket_size_mb: tuple[float, ...] = (25.0,)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"batch_size": ()}, "--batch-size needs at least one value, got none"),
        ({"batch_size": (1, -2)}, "--batch-size must be positive, got -2"),
        ({"accumulate": (1, 0)}, "--accumulate must be positive, got 0"),
        ({"accumulate": ()}, "--accumulate needs at least one value, got none"),
        ({"cuda_graph": ()}, "--cuda-graph needs at least one value, got none"),
        ({"steps": 0}, "--steps must be positive, got 0"),
        ({"bucket_size_mb": (float("nan"),)}, "--bucket-size-mb must be positive, got nan"),
        ({"warmup": -1}, "--warmup must not be negative, got -1"),
        ({"warmup": (1, -1)}, "--warmup must not be negative, got -1"),
        ({"seed": 2**31}, r"--seed must lie in 0..2\^31-1, got 2147483648"),
        ({"timeout": float("inf")}, r"--timeout must be positive and at most 1e\+06 seconds, got inf"),
    ],
)
def test_each_fault_is_named(fault, message):
    check_options(Options())
    with pytest.raises(ValueError, match=message):
        check_options(replace(Options(), **fault))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"attention": ("flash", "magic")}, "--attention magic: known are reference"),
        ({"scaling": ("row",)}, "--scaling is for quantized products, and --matmul-dtype is same"),
        ({"fp8_skip_last": 1}, "--fp8-skip-last is for quantized products"),
        ({"size": ("tiny", "huge")}, "unknown model size 'huge'"),
        ({"checkpoint": ("every-0",)}, "every-0"),
        ({"device": "cpu", "optimizer": ("reference", "fused")}, "--optimizer fused needs --device cuda, got cpu"),
    ],
)
def test_each_unknown_name_is_told(fault, message):
    with pytest.raises(ValueError, match=message):
        training_cells(RankedCase, replace(Options(), world_size=(1,), **fault))


@dataclass(frozen=True)
class OneRank(TrainingOptions):
    device: str = "cuda"
    optimizer: tuple[str, ...] = ("fused",)
    cuda_graph: tuple[str, ...] = ("off", "on")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"device": "cpu", "optimizer": ("torch-fused",)}, "a CUDA graph needs device cuda, got cpu"),
        ({"optimizer": ("fused", "reference")}, "optimizer reference counts steps on the host, .*: use torch-fused or"),
        ({"dtype": ("bf16", "autocast-fp16")}, "loss scaling of autocast-fp16 decides on the host"),
        ({"warmup": 3}, "captures step 4, in --warmup 4 or more, got 3"),
    ],
)
def test_what_a_cuda_graph_cannot_hold_is_told_before_anything_runs(fault, message):
    cells = training_cells(TimedCase, OneRank())
    assert [(cell.cuda_graph, cell.extras) for cell in cells] == [("off", ["fused"]), ("on", ["fused", "CUDA graph"])]
    with pytest.raises(ValueError, match=f"^--cuda-graph on:? {message}"):
        training_cells(TimedCase, replace(OneRank(), **fault))


@pytest.mark.parametrize(("question", "own"), [("data_parallel", "ddp"), ("sharded_optimizer", "sharding")])
def test_no_ranks_share_a_cuda_graph(question, own):
    cells = importlib.import_module(f"cs336_systems.experiments.{question}.cells")
    options = replace(cells.Options(), world_size=(2,), optimizer=("fused",), cuda_graph=("on",))
    with pytest.raises(ValueError, match="--cuda-graph on: ranks agree through the host on what they send"):
        cells.make_cells(replace(options, **{own: getattr(options, own)[-1:]}))


def test_a_profile_is_that_of_one_micro_batch_uncaptured():
    cells = importlib.import_module("cs336_systems.experiments.profile.cells")
    with pytest.raises(ValueError, match="a profile is that of one micro-batch, got --accumulate 1 2"):
        cells.make_cells(cells.Options(accumulate=(1, 2)))
    with pytest.raises(ValueError, match="--cuda-graph on: a captured step has no phases or modules"):
        cells.make_cells(cells.Options(optimizer=("fused",), cuda_graph=("on",)))


def test_micro_batches_are_told_and_counted():
    cells = training_cells(
        TimedCase, replace(TrainingOptions(), size=("tiny",), context_length=(8,), accumulate=(1, 4))
    )
    assert [cell.tokens_per_step for cell in cells] == [4 * 8, 4 * 4 * 8]
    assert [cell.extras for cell in cells] == [[], ["4 micro-batches"]]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"keep": ("produkts",)}, "unknown level 'produkts' in what to keep, 'produkts': did you mean 'products'"),
        ({"keep": ("autogard",)}, "unknown level 'autogard' in what to keep, 'autogard': did you mean 'autograd'"),
        ({"keep": ("all-nrom",)}, "unknown switch 'nrom' in what to keep, 'all-nrom': did you mean 'norm'"),
        ({"kernels": ("fused",)}, "kernels fused need device cuda, got cpu: Triton kernels run on GPUs"),
        ({"kernels": ("fuse",), "keep": ("all",)}, "unknown kernels 'fuse': did you mean 'fused'"),
        (
            {"device": "cuda", "kernels": ("fused",), "keep": ("autograd",)},
            "kernels fused with keep autograd: they need a backward written out, input, attention, products, all",
        ),
        (
            {"device": "cuda", "kernels": ("fused",)},
            "kernels fused with attention reference: its backward must be .*, which flash, hopper have",
        ),
        (
            {"keep": ("all",), "attention": ("sdpa-flash",)},
            "keep all with attention sdpa-flash: its backward must be .*, which reference, flash, hopper have",
        ),
        (
            {"keep": ("autograd", "all"), "dtype": ("autocast-bf16",)},
            "keep all with dtype autocast-bf16: written-out blocks run in one dtype, fp32, tf32 or bf16",
        ),
        (
            {"keep": ("all",), "compile": ()},
            "keep all with compile on: written-out blocks are not compiled, only keep autograd is",
        ),
        (
            {"keep": ("all",), "checkpoint": ("every-2",)},
            "keep all with checkpoint every-2: both say what runs again in backward, give one of them",
        ),
    ],
)
def test_kernels_and_what_is_kept_are_refused_where_no_step_has_them(fault, message):
    options = replace(Options(), world_size=(1,), size=("tiny",))
    with pytest.raises(ValueError, match=message):
        training_cells(RankedCase, replace(options, **fault))


def test_kernels_say_what_is_kept_unless_keep_does():
    options = replace(Options(), world_size=(1,), device="cuda", attention=("flash",), kernels=("reference", "fused"))
    kinds = [(cell.kernels, cell.keep) for cell in training_cells(RankedCase, options)]
    assert kinds == [("reference", "autograd"), ("fused", "products")]
    kinds = [(cell.kernels, cell.keep) for cell in training_cells(RankedCase, replace(options, keep=("input", "all")))]
    assert kinds == [(kernels, keep) for kernels in ("reference", "fused") for keep in ("input", "all")]


def test_recipes_are_a_grid_of_quantized_products_beside_those_that_are_not():
    options = replace(Options(), world_size=(1,), size=("tiny",), matmul_dtype=("same", "e4m3"), fp8_skip_first=1)
    options = replace(options, gradient_dtype=("e4m3", "e5m2"), scaling=("tensor", "row"))
    cells = training_cells(RankedCase, options)
    assert [(cell.keep, str(cell.recipe)) for cell in cells] == [
        ("autograd", ""),
        ("products", "e4m3 by tensor skip 1 and 0"),
        ("products", "e4m3 by row skip 1 and 0"),
        ("products", "e4m3 gradients e5m2 by tensor skip 1 and 0"),
        ("products", "e4m3 gradients e5m2 by row skip 1 and 0"),
    ]
    assert [cell.fp8_skip_first for cell in cells] == [0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="e4m3 quantizes none of 2 blocks: the first 2 and the last 0 are skipped"):
        training_cells(RankedCase, replace(options, fp8_skip_first=2))


def test_kernels_and_what_is_kept_are_named():
    assert TrainingCase(size="tiny", kernels="fused", keep="all-norm").extras == ["fused kernels", "keep all-norm"]
    assert [TrainingCase(keep=keep).written_out for keep in ("autograd", "input")] == [False, True]


def test_sizes_are_known_by_their_one_name_and_contexts_fit_them():
    assert resolved_sizes(["xl-2026"], [128]) == ["2.7b"]
    with pytest.raises(ValueError, match="context"):
        resolved_sizes(["tiny"], [0])


def test_every_field_of_a_training_case_is_an_option():
    """A new one is written in two places next to each other, and reaches every benchmark and every row."""
    options = {field.name for field in fields(TrainingOptions)}
    renamed = {"master": "master_weights"}  # torchrun takes --master for options of its own
    assert {renamed.get(field.name, field.name) for field in fields(TrainingCase)} <= options


def test_the_grid_varies_what_a_question_compares_fastest_and_repeats_it_whole_and_backwards():
    options = replace(Options(), world_size=(2, 1), dtype=("fp32", "bf16"), repeat=2, compile=())
    own = [{"steps": 1}, {"steps": 2}]
    cells = training_cells(RankedCase, options, inner=own)
    kinds = [(cell.repeat, cell.world_size, cell.dtype, cell.steps) for cell in cells]
    grid = [(w, d, n) for w in (2, 1) for d in ("fp32", "bf16") for n in (1, 2)]
    assert kinds == [(0, *kind) for kind in grid] + [(1, *kind) for kind in reversed(grid)]
    assert {cell.compile for cell in cells} == {"on"}


def test_ways_to_compile_are_told_apart_in_words():
    words = [TrainingCase(size="tiny", compile=how).extras for how in get_args(Compile)]
    assert words == [[], ["compiled"], ["whole model compiled"]]
    assert [TrainingCase(compile=how).compiled for how in ("", *get_args(Compile))] == [False, False, True, True]


def test_the_note_names_what_stands_at_the_smaller_default():
    note = small_defaults_note(replace(Options.default("cpu"), steps=5))
    assert note == "On a CPU the defaults shrink: --batch-size 2 8 (on a GPU 16)."
    assert small_defaults_note(replace(Options.default("cpu"), batch_size=(1,), steps=5)) == ""
    assert small_defaults_note(replace(Options.default("cuda"), device="cuda")) == ""


@pytest.mark.parametrize("question", ["data_parallel", "sharded_optimizer", "fully_sharded"])
def test_steps_of_several_gpus_are_timed_ten_times_after_five(question):
    options = importlib.import_module(f"cs336_systems.experiments.{question}.cells").Options.default("cuda")
    assert (options.warmup, options.steps) == (5, 10)
