"""Sums in low precision against numpy's, and dtypes under autocast as the running model shows them."""

import json

import numpy as np
import pytest
import torch

from cs336_systems.experiments.precision import EXPERIMENTS, sums, toy_dtypes
from cs336_systems.training.precision import DTYPES

NARROW = {"fp16": "float16", "bf16": "bfloat16"}


@pytest.fixture(scope="module")
def lines():
    return {(r["terms"], r["how"], r["accumulator"], r["dtype"]): r for r in sums().to_dict("records")}


def test_the_handouts_four_sums(lines):
    """As numpy adds them, whose scalars round after every addition."""
    numpy_dtypes = {"fp32": np.float32, "fp16": np.float16}
    for accumulator, term in (("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16")):
        total = numpy_dtypes[accumulator](0)
        for _ in range(1000):
            total = numpy_dtypes[accumulator](total + numpy_dtypes[accumulator](numpy_dtypes[term](0.01)))
        assert lines[1000, "in order", accumulator, term]["result"] == float(total)
    as_is, cast = lines[1000, "in order", "fp32", "fp16"], lines[1000, "in order, terms cast up", "fp32", "fp16"]
    assert cast["result"] == as_is["result"] == pytest.approx(10.00214, abs=1e-5)


def test_a_narrow_total_gets_stuck_where_half_a_spacing_exceeds_the_term(lines):
    """At 4 the numbers of bf16 lie 1/32 apart, at 32 those of fp16."""
    for dtype, stuck in (("bf16", 4.0), ("fp16", 32.0)):
        assert lines[10_000, "in order", dtype, dtype]["result"] == stuck


def test_sums_from_the_command_line(load_script, capsys):
    main = load_script("scripts/mixed_precision_accumulation.py").main
    assert main(["--terms", "10"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert len(json.loads(last)["sums"]) == len(EXPERIMENTS)
    assert sum(line.startswith("|") for line in table) == len(EXPERIMENTS) + 2
    for arguments in (["--terms", "0"], ["--term", "1e-9"], ["--term", "nan"]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("dtype", NARROW)
def test_dtypes_under_autocast_are_those_of_the_device(dtype):
    for device, norm in (("cpu", NARROW[dtype]), ("pretended-cuda", "float32")):
        found = toy_dtypes(device, DTYPES[dtype])
        assert [found[name] for name in ("parameters", "loss", "gradients")] == ["float32"] * 3
        assert [found[name] for name in ("first layer, output", "relu, output", "logits")] == [NARROW[dtype]] * 3
        assert found["LayerNorm, output"] == norm
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW)
def test_a_gpu_has_the_dtypes_of_the_pretended_one(dtype):
    assert toy_dtypes("cuda", DTYPES[dtype]) == toy_dtypes("pretended-cuda", DTYPES[dtype])
