"""What a step keeps in host memory: names and bytes."""

from dataclasses import replace

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import resolve_size
from cs336_systems.costs.offload import host_bytes, offloaded
from cs336_systems.pretraining.options import TrainOptions

CASE = TrainingCase("cuda", "qwen2.5-7b", 16, 1024, "bf16", "flash", optimizer="fused", kernels="fused", keep="input")


def test_bytes_on_the_host():
    assert offloaded(CASE) == frozenset()
    with pytest.raises(ValueError, match="'momentum' in 'm-momentum'"):
        offloaded(replace(CASE, offload="m-momentum"))
    n = resolve_size("qwen2.5-7b").n_parameters
    everything = replace(CASE, master="fp32", offload="master-m-v-gradients-residual")
    assert host_bytes(everything) == {
        **{"m": 2 * n, "v": 2 * n, "master": 4 * n, "gradients": 2 * n},
        "residual": 28 * 16 * 1024 * 3584 * 2,
    }
    options = replace(TrainOptions.default("cuda"), zero=2, offload=("m",), moments="fp32", device="cuda")
    assert host_bytes(options.training_case(resolve_size("qwen2.5-7b"), 4), 4) == {"m": n}
