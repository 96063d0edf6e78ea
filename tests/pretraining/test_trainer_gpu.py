"""Ten steps of the trainer on a GPU, in bf16 and fused kernels: what saves memory or launches changes no bit."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.run_records import Evaluation
from cs336_systems.pretraining.trainer import train
from tests.pretraining.trained import assert_equal_weights, losses_and_norms, write_chat, write_dataset

pytestmark = pytest.mark.gpu

SMALL = {"size": "small", "context_length": 512, "batch_size": 4, "accumulate": 2, "steps": 10, "warmup_steps": 2}
SMALL |= {"evaluate_every": None, "save_every": 10, "log_every": 50, "export": False}
SMALL |= {"attention": "hopper", "deterministic": True, "keep": "products"}
WAYS = {
    **{f"keep {level}": {"keep": level} for level in ("input", "attention", "all", "all-norm-swiglu")},
    **{f"offload {part}": {"offload": (part,)} for part in ("m", "v", "gradients")},
    "offload residual": {"offload": ("residual",), "keep": "input"},
    "offload all": {"offload": ("m", "v", "gradients", "residual"), "keep": "input"},
    "graph": {"cuda_graph": "on"},
}


@pytest.mark.parametrize("fp8", [{}, {"matmul_dtype": "e4m3"}], ids=["bf16", "e4m3"])
def test_ten_steps_have_the_same_bits_every_way(fp8, tmp_path):
    write_dataset(tmp_path / "data", 50_000, 5_000)
    plain = replace(TrainOptions.default("cuda"), data=tmp_path / "data", out=tmp_path / "plain", **SMALL, **fp8)
    with joined("cuda") as rank:
        for name, how in {"plain": {}, **WAYS}.items():
            train(replace(plain, out=tmp_path / name, **how), rank)
    expected = losses_and_norms(tmp_path / "plain")
    states = read_run(tmp_path / "plain" / LOG).gpu
    assert states["step"].tolist() == [0] and states["sm_mhz"][0] > 100 and states["memory_used_bytes"][0] > 0
    others = {name: losses_and_norms(tmp_path / name) == expected for name in WAYS}
    assert len(expected) == 10 and expected[-1][0] < expected[0][0] and all(others.values()), others
    for name in WAYS:
        assert_equal_weights(tmp_path / name, tmp_path / "plain")


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_are_learned_alike_with_and_without_logits_of_ignored_rows(packing, tmp_path):
    """A CUDA graph and the loss of whole logits have those of every row; accumulated, evaluated, in fp32."""
    write_chat(tmp_path / "data", [40 + 37 * i % 400 for i in range(200)], (300, 90, 200))
    how = SMALL | {"dtype": "fp32", "attention": "flash", "packing": packing, "evaluate_every": 5, "save_every": None}
    plain = replace(TrainOptions.default("cuda"), data=tmp_path / "data", **how)
    ways = {"plain": {}, "graph": {"cuda_graph": "on"}, "whole": {"keep": "autograd", "kernels": "reference"}}
    with joined("cuda") as rank:
        for name, way in ways.items():
            train(replace(plain, out=tmp_path / name, **way), rank)
    courses = {name: torch.tensor(losses_and_norms(tmp_path / name)) for name in ways}
    evaluated = {name: [each.loss for each in read_run(tmp_path / name / LOG).all(Evaluation)] for name in ways}
    for name in ("graph", "whole"):
        torch.testing.assert_close(courses[name], courses["plain"], rtol=1e-3, atol=0)
        assert evaluated[name] == pytest.approx(evaluated["plain"], rel=1e-3) and len(evaluated[name]) == 3
