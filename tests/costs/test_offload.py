"""What a step keeps in host memory: names and bytes."""

from dataclasses import replace

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.costs.offload import offloaded
from cs336_systems.harness.memory import offloaded_bytes
from cs336_systems.pretraining.options import TrainOptions

CASE = TrainingCase("cuda", "qwen2.5-7b", 16, 1024, "bf16", "flash", optimizer="fused", kernels="fused", keep="input")


def test_bytes_on_the_host():
    assert offloaded(CASE) == frozenset()
    with pytest.raises(ValueError, match="'momentum' in 'm-momentum'"):
        offloaded(replace(CASE, offload="m-momentum"))
    n = resolve_size("qwen2.5-7b").n_parameters
    everything = replace(CASE, master="fp32", offload="master-m-v-gradients-residual")
    assert offloaded_bytes(everything, 1) == {
        **{"m": 2 * n, "v": 2 * n, "master": 4 * n, "gradients": 2 * n},
        "residual": 28 * 16 * 1024 * 3584 * 2,
    }
    options = replace(TrainOptions.default("cuda"), zero=2, offload=("m",), moments="fp32", device="cuda")
    assert offloaded_bytes(options.training_case(resolve_size("qwen2.5-7b"), 4), 4) == {"m": n}
    options = replace(options, zero=0, tensor=4, offload=("m", "residual"), keep="products", batch_size=8)
    part = CASE.config.part(4)
    assert offloaded_bytes(options.training_case(CASE.config, 4), 4) == {
        "m": 4 * part.n_parameters,
        "residual": 28 * 8 * 1024 * part.d_model * 2 // 4,
    }
