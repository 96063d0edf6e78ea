"""Ten steps of the trainer on a GPU, in bf16 and fused kernels: what saves memory or launches changes no bit."""

from dataclasses import replace

import pytest
import torch

from cs336_systems.distributed.process_group import joined
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import LOG, read_run
from cs336_systems.pretraining.trainer import train
from tests.pretraining.test_trainer import assert_equal_weights
from tests.pretraining.trained import losses_and_norms, write_dataset

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

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
