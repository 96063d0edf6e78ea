"""Dtypes under autocast, as the running models show them on a CPU; on a GPU where they differ."""

import json

import pytest
import torch

from cs336_systems.experiments.precision import autocast

CPU = torch.device("cpu")
NARROW = {"fp16": "float16", "bf16": "bfloat16"}


@pytest.fixture
def script():
    return autocast


@pytest.mark.parametrize("dtype", NARROW)
def test_the_toy_model_on_a_cpu(script, dtype):
    found = script.toy_dtypes(CPU, dtype)
    assert [found[name] for name in ("parameters", "loss", "gradients")] == ["float32"] * 3
    assert [found[name] for name in ("first layer, output", "relu, output", "logits")] == [NARROW[dtype]] * 3


@pytest.mark.parametrize("dtype", NARROW)
def test_the_transformer_keeps_its_residual_stream_wide(script, dtype):
    found = script.transformer_dtypes(CPU, dtype)
    for name in ("token embedding", "block.ln1", "block", "ln_final", "log-sum-exp of the logits"):
        assert found[f"{name}, output"] == "float32"
    for name in ("block.attn.q_proj", "block.attn", "block.ffn", "softmax", "products in attention", "silu"):
        assert found[f"{name}, output"] == NARROW[dtype]
    assert (found["parameters"], found["loss"], found["gradients"]) == ("float32",) * 3


def test_dtypes_are_read_not_known(script):
    """Another model shows other dtypes, and one that returns two shows both."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).double(), torch.nn.Identity())
    x = torch.randn(2, 3, dtype=torch.float64)
    found = script.train_once(model, x, x, lambda logits, targets: logits.sum(), {"identity": model[1]}, "bf16")
    assert found["parameters"] == found["gradients"] == "float64"
    seen: dict[str, list[str]] = {}
    for tensor in (torch.zeros(1), torch.zeros(1).half(), torch.zeros(1)):
        script.note(seen, "x", tensor)
    assert seen == {"x": ["float32", "float16"]}


def test_the_command_prints_two_tables_and_json(load_script, capsys):
    assert load_script("scripts/autocast_dtypes.py").main(["--device", "cpu"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert json.loads(last)["dtypes"].keys() == {"The toy model", "The Transformer"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_a_missing_gpu_is_one_sentence(load_script, capsys):
    assert load_script("scripts/autocast_dtypes.py").main(["--device", "cuda"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", NARROW)
def test_cuda_widens_norms_and_softmax(script, dtype):
    assert script.toy_dtypes(torch.device("cuda"), dtype)["LayerNorm, output"] == "float32"
    assert script.transformer_dtypes(torch.device("cuda"), dtype)["softmax, output"] == "float32"
