"""Predicted peaks of the written-out step against every storage that is alive while it runs.

The step runs on fake tensors, which have sizes and lifetimes but no bytes, through the kernels' own launchers: what
these allocate is alive as well, and only the launch itself is left out.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.attention.flash import backward as flash_backward
from cs336_systems.attention.flash import forward as flash_forward
from cs336_systems.attention.flash import preprocess as flash_preprocess
from cs336_systems.attention.hopper import backward as hopper_backward
from cs336_systems.attention.hopper import forward as hopper_forward
from cs336_systems.attention.hopper import host as hopper_host
from cs336_systems.attention.hopper import passes as hopper_passes
from cs336_systems.blocks import BlockOps, write_out
from cs336_systems.blocks.attention import _through
from cs336_systems.config import PRECISIONS, ModelConfig
from cs336_systems.costs.kept import LEVELS, SWITCHES
from cs336_systems.costs.written_out import NORM_PROGRAMS, computed_again, written_out_peak
from cs336_systems.kernels import linear_cross_entropy, rms_norm, swiglu
from cs336_systems.model import TransformerLM

from .test_memory import LiveBytes

GIB = 1024**3

PLAIN = ModelConfig("plain", d_model=128, d_ff=352, n_layers=3, n_heads=2, vocab_size=500, context_length=300)
CONFIGS = {
    "plain": PLAIN,
    "grouped-biases": replace(PLAIN, n_heads=4, n_kv_heads=2, qkv_bias=True),
    "wide-vocabulary": replace(PLAIN, vocab_size=50_000, n_layers=2),
    "many-layers": replace(PLAIN, n_layers=9),
}
KEEPS = (*LEVELS, *(f"all-{switch}" for switch in SWITCHES), "products-residual", "all-residual-ffn", "products-attention-ffn")
CHUNK = 256


@pytest.fixture
def unlaunched(monkeypatch):
    """Launchers that allocate and do not launch, on devices that Triton does not know."""
    modules = (rms_norm, swiglu, linear_cross_entropy, flash_forward, flash_backward, flash_preprocess)
    for module in (*modules, hopper_forward, hopper_backward, hopper_passes):
        monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    for module in (rms_norm, swiglu, linear_cross_entropy):
        monkeypatch.setattr(module, "check_runnable", lambda *args: None)
    monkeypatch.setattr(rms_norm, "INTERPRETED_PROGRAMS", NORM_PROGRAMS)
    monkeypatch.setattr(rms_norm, "rms_norm_forward", rms_norm_forward)
    monkeypatch.setattr(rms_norm, "rms_norm_backward", rms_norm_backward)
    monkeypatch.setattr(linear_cross_entropy, "linear_cross_entropy_op", linear_cross_entropy_op)
    for name in ("descriptor", "counter", "section_heads"):
        monkeypatch.setattr(hopper_host, name, lambda *args: None)
    monkeypatch.setattr(hopper_host, "copyable", lambda x: x)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "n_multiprocessors", lambda device: 132)


def rms_norm_forward(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm.launch_forward(x, None, gain, eps)[1:]


def rms_norm_backward(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor, dresidual: Tensor | None = None):
    return rms_norm.launch_backward(dy, x, gain, rstd, dresidual, None)


def swiglu_backward(dz: Tensor, gate_up: Tensor, *, with_product: bool) -> tuple[Tensor, Tensor | None]:
    dgate_up, z = swiglu._backward_results(dz, gate_up, with_product)
    return dgate_up, z if with_product else None


def linear_cross_entropy_op(x, weight, targets, denominator, grad_weight, accumulate, wants_dx, *rest):
    *_, chunk = rest
    losses, dx, lse = linear_cross_entropy.in_chunks(
        x, weight, targets, grad_weight, accumulate, wants_dx, chunk, lambda *args: None
    )
    return losses.sum(), dx, lse


ATTENTIONS = {
    "flash": _through(flash_forward.launch_forward, flash_backward.launch_backward),
    "hopper": _through(hopper_forward.launch_forward, hopper_backward.launch_backward),
}


def unlaunched_ops(attention: str) -> BlockOps:
    return BlockOps(
        rms_norm_forward=rms_norm_forward,
        add_rms_norm_forward=rms_norm.launch_forward,
        rms_norm_backward=rms_norm_backward,
        swiglu_forward=swiglu._product_like,
        swiglu_backward=swiglu_backward,
        rotate_=lambda *args, **kwargs: None,
        **ATTENTIONS[attention],
    )


def alive_at_peak(
    config: ModelConfig, batch_size: int, seq_len: int, precision: str, mode: str, keep: str, attention: str
) -> tuple[int, int]:
    """Peak of live bytes of forward, or of forward and backward; token ids and targets left out."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with FakeTensorMode(), LiveBytes() as live:
        model = TransformerLM(config, dtype=dtype)
        write_out(model, unlaunched_ops(attention), keep)
        ids, targets = (torch.zeros(batch_size, seq_len, dtype=torch.int64) for _ in range(2))
        live.peak = live.now

        def loss() -> Tensor:
            x = model.ops.stack(list(model.layers), model.token_embeddings(ids), *model.rotary(seq_len))
            normed = rms_norm.rms_norm(x, model.ln_final.weight, config.rms_norm_eps)
            return linear_cross_entropy.linear_cross_entropy(normed, model.lm_head.weight, targets, chunk=CHUNK)

        with torch.set_grad_enabled(mode != "forward"):
            value = loss()
        if mode != "forward":
            value.backward()
        return live.peak - 2 * 8 * ids.numel()


@pytest.mark.parametrize("keep", KEEPS)
def test_peak_is_what_is_alive(unlaunched, keep):
    for config in CONFIGS.values():
      for attention in ("hopper", "flash"):
       for precision in ("bf16", "fp32"):
        for mode in ("forward", "backward"):
         alive = alive_at_peak(config, 2, 300, precision, mode, keep, attention)
         peak = written_out_peak(config, 2, 300, PRECISIONS[precision], mode, keep=keep, chunk=CHUNK, attention=attention, device_type="cpu")
         print(config.name, attention, precision, mode, peak.n_bytes - alive, peak.n_bytes, peak.moment)
