"""What a step keeps in host memory: names, where it cannot, bytes there, and what the device then has at its peak."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cs336_systems.blocks import host_inputs
from cs336_systems.case import TrainingCase
from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.offload import host_bytes, offloaded
from cs336_systems.costs.written_out import written_out_peak
from cs336_systems.kernels.host_memory import Slab
from cs336_systems.pretraining.options import TrainOptions
from tests.live_bytes import LiveBytes

from .test_written_out import CONFIGS
from .unlaunched import CHUNK, leave_out_launches, unlaunched_model

GIB = 2**30
CASE = TrainingCase("cuda", "qwen2.5-7b", 16, 1024, "bf16", "flash", optimizer="fused", kernels="fused", keep="input")
BF16 = PRECISIONS["bf16"]


def test_names():
    assert offloaded(CASE) == frozenset()
    assert offloaded(replace(CASE, offload="v-residual-m")) == {"m", "v", "residual"}
    with pytest.raises(ValueError, match="unknown offload 'momentum' in 'm-momentum': known are m, v, master"):
        offloaded(replace(CASE, offload="m-momentum"))
    assert replace(CASE, master="fp32", offload="m").extras[-2:] == ["masters in fp32", "offload m"]


def test_bytes_on_the_host():
    n = resolve_size("qwen2.5-7b").n_parameters
    everything = replace(CASE, master="fp32", offload="master-m-v-gradients-residual")
    assert host_bytes(everything) == {
        **{"m": 2 * n, "v": 2 * n, "master": 4 * n, "gradients": 2 * n},
        "residual": 28 * 16 * 1024 * 3584 * 2,
    }
    options = replace(TrainOptions.default("cuda"), zero=2, offload=("m",), moments="fp32", device="cuda")
    assert host_bytes(options.training_case(resolve_size("qwen2.5-7b"), 4), 4) == {"m": n}


@pytest.mark.parametrize(
    ("size", "seq_len", "keep"), [("deep", 300, "input"), ("deep", 64, "all"), ("tied", 300, "input")]
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_inputs_on_the_host_leave_what_is_predicted(size, seq_len, keep, micro_batches, monkeypatch):
    config = CONFIGS[size]
    leave_out_launches(monkeypatch)
    monkeypatch.setattr(host_inputs, "host_slab", lambda n, device: Slab(torch.empty(n, dtype=torch.uint8)))
    with FakeTensorMode(), LiveBytes() as live:
        model = unlaunched_model(config, "bf16", keep, "flash", inputs_on_host=True)
        ids, targets = (torch.zeros(2, seq_len, dtype=torch.int64) for _ in range(2))
        for _ in range(micro_batches):
            live.peak = live.now
            model(ids, targets).backward()
    how = {"chunk": CHUNK, "attention": "flash", "device_type": "cpu", "accumulates": micro_batches > 1}
    peak = written_out_peak(config, 2, seq_len, BF16, "backward", keep=keep, away=("residual",), **how)
    on_host = config.n_layers * 2 * seq_len * config.d_model * 2
    assert 0 <= live.peak - 2 * 8 * ids.numel() - on_host - peak.n_bytes <= 32


def test_states_and_gradients_on_the_host_leave_the_device():
    config = resolve_size("qwen2.5-7b")

    def peak(**how):
        return written_out_peak(config, 16, 1024, BF16, "step", keep="input", chunk=8192, attention="flash", **how)

    n, here = config.n_parameters, peak()
    assert here.parts["optimizer state"] == pytest.approx(4 * n, rel=0.01)
    moments = peak(away=("m", "v"))
    assert "optimizer state" not in moments.parts
    assert here.n_bytes - moments.n_bytes == pytest.approx(4 * n, rel=0.01)
    gradients = peak(away=("m", "v", "gradients"))
    assert gradients.parts.get("gradients", 0) < 3 * GIB
    assert gradients.moments["optimizer"] - peak(away=("m", "v", "gradients"), states={}).moments["optimizer"] == (
        3 * 2**25 * 4
    )
    several = peak(away=("m", "v", "gradients"), accumulates=True)
    assert gradients.n_bytes <= several.n_bytes < gradients.n_bytes + 2 * GIB
    with pytest.raises(ValueError, match="gradients that accumulate over 2 shards, or on the host, are not predicted"):
        peak(away=("gradients",), n_shards=2)


def test_activations_do_not_grow_with_depth():
    config = resolve_size("qwen2.5-7b")
    found = []
    for n_layers in (14, 28, 56):
        how = {"keep": "input", "chunk": 8192, "attention": "flash", "away": ("residual", "m", "v", "gradients")}
        peak = written_out_peak(replace(config, n_layers=n_layers), 16, 1024, BF16, "step", **how)
        found.append(peak.n_bytes - peak.parts["parameters"])
    assert found[2] - found[0] < 0.02 * found[0]  # statistics of norms
