"""What a hand-written block is told to keep, what that comes to, and what it then recomputes as it runs."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.blocks import REFERENCE, BlockGradients, BlockWeights, Saved, backward, forward
from cs336_systems.blocks.ops import OPERATIONS
from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.kept import KEPT, LEVELS, SWITCHES, bytes_kept, keep_of_blocks, kept_names, recomputed
from cs336_systems.hardware import find_hardware

from ..blocks.cases import LLAMA, block_of, inputs, tables

aten = torch.ops.aten
BF16 = PRECISIONS["bf16"]
CONFIG, TOKENS = resolve_size("leaderboard-8b"), 32_768


def test_levels_hold_the_ones_before_and_switches_drop_what_they_name():
    names = [set(kept_names(level)) for level in LEVELS]
    assert all(less < more for less, more in pairwise(names))
    assert names[0] == {"x", "rstd1", "rstd2"}
    assert names[-1] == {row.name for row in KEPT}
    for switch in SWITCHES:
        assert set(kept_names(f"all-{switch}")) < names[-1]
    assert kept_names("all-" + "-".join(SWITCHES)) == kept_names("input")
    assert kept_names("all-norm-swiglu") == kept_names("products")
    assert kept_names("products-qkv-residual-ffn") == kept_names("attention")


def test_blocks_may_keep_different_things():
    assert keep_of_blocks("products", 3) == ("products",) * 3
    assert keep_of_blocks("2xall+1xproducts-ffn+input", 5) == ("all", "all", "products-ffn", "input", "input")


@pytest.mark.parametrize(
    ("keep", "named"),
    [
        ("product", "'product'.* 'products'"),
        ("autograd-input", "'autograd-input': a case names"),
        ("all-norms", "'norms'.* 'norm'"),
        ("", "''"),
        ("all-", "''"),
        ("all+products", "'all'"),
        ("0xall+products", "'0xall'"),
        ("2xall+3xproducts", "'3xproducts'"),
        ("2xall+2xinput+products", "none of 4 blocks"),
    ],
)
def test_unknown_names_and_bad_counts_are_refused(keep, named):
    with pytest.raises(ValueError, match=named):
        keep_of_blocks(keep, 4)
    with pytest.raises(ValueError, match="autocast-bf16"):
        bytes_kept(resolve_size("tiny"), 1, 8, PRECISIONS["autocast-bf16"], "all")


@pytest.mark.parametrize(
    ("keep", "widths_of_d", "widths_of_ffn", "flops_per_token", "streams"),
    [
        ("all", 8, 3, 0, 0),
        ("products", 6, 2, 0, 2 + 2 + 11_008 / 4096),
        ("attention", 2, 0, 2 * 4096 * (4 * 4096 + 2 * 11_008), 2 + 4 + 4 + 11_008 / 4096),
        ("input", 1, 0, 2 * 4096 * (4 * 4096 + 2 * 11_008 + 32_768), 2 + 4 + 4 + 11_008 / 4096),
    ],
)
def test_bytes_and_recomputation_by_hand(keep, widths_of_d, widths_of_ffn, flops_per_token, streams):
    """Streams as wide as the model and as the feed-forward, and statistics in fp32."""
    per_token = 2 * (widths_of_d * 4096 + widths_of_ffn * 11_008)
    per_token += 4 * (2 + (CONFIG.n_heads if keep != "input" else 0))
    assert bytes_kept(CONFIG, 1, TOKENS, BF16, keep) == TOKENS * per_token
    found = recomputed(CONFIG, 1, TOKENS, BF16, keep)
    assert found.flops == TOKENS * flops_per_token
    assert found.traffic_bytes == TOKENS * 2 * 4096 * streams
    seconds = found.flops / 989.4e12 + found.traffic_bytes / 4.8e12
    assert found.seconds(find_hardware("NVIDIA H200"), "bf16") == pytest.approx(seconds)
    with pytest.raises(ValueError, match="CPU, bf16"):
        found.seconds(find_hardware("cpu"), "bf16")


def run_in_backward(keep: str) -> tuple[Counter, int]:
    """Calls of a block's operations in its backward, and FLOPs of its matmuls."""
    calls: Counter = Counter()

    def counted(name, operation, *arguments, **options):
        calls[name] += 1
        calls["recomputed product"] += bool(options.get("with_product"))
        return operation(*arguments, **options)

    ops = {name: partial(counted, name, getattr(REFERENCE, name)) for name in OPERATIONS}
    parameters = {name: value.detach() for name, value in block_of(LLAMA, torch.float32).named_parameters()}
    weights, saved = BlockWeights.of(parameters), Saved(kept_names(keep))
    x, dy = inputs(LLAMA, 17, torch.float32)
    how = LLAMA, *tables(LLAMA, 17, torch.float32)
    forward(x, weights, saved, REFERENCE, *how)
    with FlopCounterMode(display=False) as counter:
        backward(dy, weights, saved, BlockGradients.empty(parameters, parameters), replace(REFERENCE, **ops), *how)
    products = counter.get_flop_counts()["Global"]
    return calls, sum(n for operation, n in products.items() if operation in (aten.mm, aten.addmm))


@pytest.mark.parametrize("keep", [*LEVELS, "products-residual", "all-ffn", "all-qkv", "all-attention"])
def test_what_is_recomputed_is_what_runs(keep):
    found, kept = recomputed(LLAMA, 2, 17, PRECISIONS["fp32"], keep), kept_names(keep)
    (calls, flops), (_, once) = run_in_backward(keep), run_in_backward("all")
    attention = 2 * 34 * 17 * LLAMA.d_model * ("attended" not in kept)
    assert flops - once == found.flops - attention
    norm2 = "normed2" not in kept and "residual" in kept
    assert calls["rms_norm_forward"] == ("normed1" not in kept) + norm2
    assert calls["add_rms_norm_forward"] == ("residual" not in kept)
    assert calls["attention_forward"] == ("attended" not in kept)
    assert calls["rotate_"] == 1 + ("qkv" not in kept)
    assert calls["recomputed product"] == ("product" not in kept)
