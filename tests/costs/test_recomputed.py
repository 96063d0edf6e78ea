"""What a block computes a second time, by hand and as it runs."""

from collections import Counter
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.blocks import REFERENCE, BlockGradients, BlockWeights, Saved, backward, forward
from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.kept import LEVELS, kept_names
from cs336_systems.costs.recomputed import recomputed
from cs336_systems.hardware import find_hardware

from ..blocks.cases import LLAMA, block_of, inputs, tables

aten = torch.ops.aten
BF16 = PRECISIONS["bf16"]
CONFIG, TOKENS = resolve_size("leaderboard-8b"), 32_768


def test_what_is_computed_again():
    expected = {
        "input": ("normed1", "qkv", "attended", "residual", "normed2", "gate_up", "product"),
        "attention": ("normed1", "qkv", "residual", "normed2", "gate_up", "product"),
        "products": ("normed1", "normed2", "product"),
        "all": (),
        "products-residual": ("normed1", "residual", "normed2", "product"),
        "all-ffn": ("gate_up", "product"),
    }
    assert {keep: recomputed(CONFIG, 1, TOKENS, BF16, keep).names for keep in expected} == expected


@pytest.mark.parametrize(
    ("keep", "flops_per_token", "streams"),
    [
        ("all", 0, 0),
        ("products", 0, 2 + 2 + 11_008 / 4096),
        ("products-residual", 2 * 4096**2, 2 + 4 + 11_008 / 4096),
        ("attention", 2 * 4096 * (4 * 4096 + 2 * 11_008), 2 + 4 + 4 + 11_008 / 4096),
        ("input", 2 * 4096 * (4 * 4096 + 2 * 11_008 + 32_768), 2 + 4 + 4 + 11_008 / 4096),
    ],
)
def test_its_cost_by_hand(keep, flops_per_token, streams):
    found = recomputed(CONFIG, 1, TOKENS, BF16, keep)
    assert found.flops == TOKENS * flops_per_token
    assert found.traffic_bytes == TOKENS * 2 * 4096 * streams
    seconds = found.flops / 989.4e12 + found.traffic_bytes / 4.8e12
    assert found.seconds(find_hardware("NVIDIA H200"), "bf16") == pytest.approx(seconds)


def test_a_device_without_published_peaks_is_named():
    with pytest.raises(ValueError, match="no peaks are published for CPU, bf16"):
        recomputed(CONFIG, 1, TOKENS, BF16, "input").seconds(find_hardware("cpu"), "bf16")


def run_in_backward(keep: str) -> tuple[Counter, int]:
    """Calls of a block's operations in its backward, and FLOPs of its matrix products."""
    calls: Counter = Counter()

    def counted(name, operation, *arguments, **options):
        calls[name] += 1
        calls["product again"] += bool(options.get("with_product"))
        return operation(*arguments, **options)

    ops = {field.name: partial(counted, field.name, getattr(REFERENCE, field.name)) for field in fields(REFERENCE)}
    parameters = {name: value.detach() for name, value in block_of(LLAMA, torch.float32).named_parameters()}
    weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep))
    x, dy = inputs(LLAMA, 17, torch.float32)
    how = LLAMA, *tables(LLAMA, 17, torch.float32)
    forward(x, weights, saved, REFERENCE, *how)
    with FlopCounterMode(display=False) as counter:
        backward(dy, weights, saved, BlockGradients.empty(parameters, parameters), replace(REFERENCE, **ops), *how)
    products = counter.get_flop_counts()["Global"]
    return calls, sum(n for operation, n in products.items() if operation in (aten.mm, aten.addmm))


@pytest.mark.parametrize("keep", [*LEVELS, "products-residual", "all-ffn", "all-residual", "all-qkv", "all-attention"])
def test_it_is_what_runs(keep):
    found = recomputed(LLAMA, 2, 17, PRECISIONS["fp32"], keep)
    (calls, flops), (_, once) = run_in_backward(keep), run_in_backward("all")
    attention = 2 * 34 * 17 * LLAMA.d_model * ("attended" in found.names)
    assert flops - once == found.flops - attention
    norm2 = "normed2" in found.names and "residual" not in found.names
    assert calls["rms_norm_forward"] == ("normed1" in found.names) + norm2
    assert calls["add_rms_norm_forward"] == ("residual" in found.names)
    assert calls["attention_forward"] == ("attended" in found.names)
    assert calls["rotate_"] == 1 + ("qkv" in found.names)
    assert calls["product again"] == ("product" in found.names)
