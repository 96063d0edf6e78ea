"""Sums in low precision: the handout's four, the remedies, and what is said about them."""

import json
import math

import numpy as np
import pytest
import torch

from cs336_systems.experiments.precision import accumulation
from cs336_systems.experiments.precision.options import SumOptions


@pytest.fixture
def script():
    return accumulation


@pytest.fixture
def sums(script):
    frame = script.run(SumOptions())
    return {(r["terms"], r["how"], r["accumulator"], r["dtype"]): r for r in frame.to_dict("records")}


def test_the_handouts_four_sums(sums):
    """As numpy adds them, whose scalars round after every addition."""
    numpy_dtypes = {"fp32": np.float32, "fp16": np.float16}
    for accumulator, term in (("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16")):
        total = numpy_dtypes[accumulator](0)
        for _ in range(1000):
            total = numpy_dtypes[accumulator](total + numpy_dtypes[accumulator](numpy_dtypes[term](0.01)))
        assert sums[1000, "in order", accumulator, term]["result"] == float(total)
    as_is, cast = sums[1000, "in order", "fp32", "fp16"], sums[1000, "in order, terms cast up", "fp32", "fp16"]
    assert cast["result"] == as_is["result"] == pytest.approx(10.00214, abs=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("n", [1000, 10_000])
def test_the_remedies_repair_narrow_accumulators(script, sums, n, dtype):
    plain, kahan, pairwise = (
        abs(sums[n, how, dtype, dtype]["relative_error"]) for how in ("in order", "Kahan", "pairwise")
    )
    assert max(kahan, pairwise) < plain / 10 or plain < 1e-2
    assert pairwise <= torch.finfo(script.DTYPES[dtype]).eps
    assert kahan <= 2 * torch.finfo(script.DTYPES[dtype]).eps


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
def test_pairwise_and_kahan_lose_nothing_in_fp64(script, n):
    term = torch.tensor(0.01, dtype=torch.float64)
    for method in (script.pairwise, script.kahan):
        assert method(n, term, torch.float64).total == pytest.approx(n * 0.01, rel=1e-15)


def test_a_narrow_total_gets_stuck_where_half_a_spacing_exceeds_the_term(script, sums):
    for n, dtype in ((1000, "bf16"), (10_000, "bf16"), (10_000, "fp16")):
        total = sums[n, "in order", dtype, dtype]["result"]
        assert script.spacing(total, script.DTYPES[dtype]) / 2 > 0.01
        assert sums[n, "in order", dtype, dtype]["explanation"].startswith("stuck since term ")
    assert not sums[1000, "in order", "fp16", "fp16"]["explanation"].startswith("stuck")


@pytest.mark.parametrize("value", [1.0, 3.7, 10.0, 100.0, 0.01])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_spacing_is_numpys(script, value, dtype):
    torch_dtype = {np.float16: torch.float16, np.float32: torch.float32}[dtype]
    assert script.spacing(float(dtype(value)), torch_dtype) == float(np.spacing(dtype(value)))


def test_every_line_is_explained_and_finite(sums):
    assert len(sums) == 20
    for line in sums.values():
        assert line["explanation"] and math.isfinite(line["result"])


def test_the_last_line_is_json_and_the_table_markdown(script, load_script, capsys):
    assert load_script("scripts/mixed_precision_accumulation.py").main(["--terms", "10"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert len(json.loads(last)["sums"]) == len(script.EXPERIMENTS)
    assert sum(line.startswith("|") for line in table) == len(script.EXPERIMENTS) + 2


@pytest.mark.parametrize("arguments", [["--terms", "0"], ["--term", "1e-9"], ["--term", "1000"], ["--term", "nan"]])
def test_bad_input_is_one_sentence(load_script, capsys, arguments):
    assert load_script("scripts/mixed_precision_accumulation.py").main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
