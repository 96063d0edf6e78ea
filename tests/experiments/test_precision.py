"""Sums in low precision against numpy's, and dtypes under autocast as the running models show them."""

import json

import numpy as np
import pytest
import torch

from cs336_systems.experiments import precision
from cs336_systems.experiments.precision import DTYPES, kahan, pairwise, spacing, sums, toy_dtypes, transformer_dtypes

CPU = torch.device("cpu")
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


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("n", [1000, 10_000])
def test_the_remedies_repair_narrow_accumulators(lines, n, dtype):
    errors = [abs(lines[n, how, dtype, dtype]["relative_error"]) for how in ("in order", "Kahan", "pairwise")]
    assert max(errors[1:]) < errors[0] / 10 or errors[0] < 1e-2
    assert max(errors[1] / 2, errors[2]) <= torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
def test_pairwise_and_kahan_lose_nothing_in_fp64(n):
    term = torch.tensor(0.01, dtype=torch.float64)
    for method in (pairwise, kahan):
        assert method(n, term, torch.float64).total == pytest.approx(n * 0.01, rel=1e-15)


def test_a_narrow_total_gets_stuck_where_half_a_spacing_exceeds_the_term(lines):
    for n, dtype in ((1000, "bf16"), (10_000, "bf16"), (10_000, "fp16")):
        line = lines[n, "in order", dtype, dtype]
        assert spacing(line["result"], DTYPES[dtype]) / 2 > 0.01
        assert line["explanation"].startswith("stuck since term ")
    assert not lines[1000, "in order", "fp16", "fp16"]["explanation"].startswith("stuck")
    for dtype in (np.float16, np.float32):
        ours = torch.from_numpy(np.zeros(0, dtype)).dtype
        for value in (1.0, 3.7, 10.0, 100.0, 0.01):
            assert spacing(float(dtype(value)), ours) == float(np.spacing(dtype(value)))


def test_sums_from_the_command_line(load_script, capsys):
    main = load_script("scripts/mixed_precision_accumulation.py").main
    assert main(["--terms", "10"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert len(json.loads(last)["sums"]) == len(precision.EXPERIMENTS)
    assert sum(line.startswith("|") for line in table) == len(precision.EXPERIMENTS) + 2
    for arguments in (["--terms", "0"], ["--term", "1e-9"], ["--term", "1000"], ["--term", "nan"]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("dtype", NARROW)
def test_dtypes_under_autocast_on_a_cpu(dtype):
    toy, transformer = toy_dtypes(CPU, dtype), transformer_dtypes(CPU, dtype)
    for found in (toy, transformer):
        assert [found[name] for name in ("parameters", "loss", "gradients")] == ["float32"] * 3
    assert [toy[name] for name in ("first layer, output", "relu, output", "logits")] == [NARROW[dtype]] * 3
    for name in ("token embedding", "block.ln1", "block", "ln_final", "log-sum-exp of the logits"):
        assert transformer[f"{name}, output"] == "float32"
    for name in ("block.attn.q_proj", "block.attn", "block.ffn", "softmax", "products in attention", "silu"):
        assert transformer[f"{name}, output"] == NARROW[dtype]


def test_dtypes_are_read_not_known():
    """Another model shows other dtypes, and one that returns two shows both."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).double(), torch.nn.Identity())
    x = torch.randn(2, 3, dtype=torch.float64)
    found = precision.train_once(model, x, x, lambda logits, targets: logits.sum(), {"identity": model[1]}, "bf16")
    assert found["parameters"] == found["gradients"] == "float64"
    seen: dict[str, list[str]] = {}
    for tensor in (torch.zeros(1), torch.zeros(1).half(), torch.zeros(1)):
        precision.note(seen, "x", tensor)
    assert seen == {"x": ["float32", "float16"]}


def test_autocast_from_the_command_line(load_script, capsys):
    main = load_script("scripts/autocast_dtypes.py").main
    assert main(["--device", "cpu"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert json.loads(last)["dtypes"].keys() == {"The toy model", "The Transformer"}
    if not torch.cuda.is_available():
        assert main(["--device", "cuda"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", NARROW)
def test_cuda_widens_norms_and_softmax(dtype):
    assert toy_dtypes(torch.device("cuda"), dtype)["LayerNorm, output"] == "float32"
    assert transformer_dtypes(torch.device("cuda"), dtype)["softmax, output"] == "float32"
