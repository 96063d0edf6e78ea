"""The least time of each part of a step, by hand for the leaderboard's."""

from dataclasses import replace

import pytest

from cs336_systems.config import PRECISIONS, resolve_size
from cs336_systems.costs.flops import hardware_flops
from cs336_systems.costs.step_bounds import least_ms
from cs336_systems.hardware import find_hardware

H200 = find_hardware("NVIDIA H200")
CONFIG, TOKENS = resolve_size("leaderboard-8b"), 32_768
BF16 = PRECISIONS["bf16"]


def test_products_and_attention_are_what_a_step_executes_that_keeps_all():
    least = least_ms(CONFIG, 1, TOKENS, BF16, H200)
    multiplied = sum(ms for (_, kind), ms in least.items() if kind in ("products", "attention"))
    executed = hardware_flops(CONFIG, 1, TOKENS, "step", attention="flash", keep="all")
    assert multiplied == pytest.approx(1e3 * executed / 989.4e12)


def test_leaderboard_by_hand():
    least = least_ms(CONFIG, 1, TOKENS, BF16, H200, n_shards=2)
    layer, head = 2 * TOKENS * 202_375_168, 2 * TOKENS * 4096 * 151_936
    assert least["forward", "products"] == pytest.approx((34 * layer + 3 * head) / 989.4e9, rel=1e-3)
    assert least["backward", "attention"] == pytest.approx(2.5 * 34 * 2 * TOKENS**2 * 4096 / 989.4e9)
    assert least["optimizer", "optimizer"] == pytest.approx(7 * 8_125_698_048 / 4800e6)
    per_token = 34 * (6 * 4096 + 4 * 4096 + 3 * 11_008) + 4 * 4096 + 2 * 151_936
    assert least["forward", "elementwise"] == pytest.approx(2 * TOKENS * per_token / 4800e6)
    per_token = 34 * (5 * 11_008 + 12 * 4096) + 4 * 4096
    assert least["backward", "elementwise"] == pytest.approx(2 * (TOKENS * per_token + 151_936 * 4096) / 4800e6)


def test_unpublished_peaks_bound_nothing():
    with pytest.raises(ValueError, match="no peaks are published for CPU, bf16"):
        least_ms(CONFIG, 1, 8, BF16, find_hardware("cpu"))
    with pytest.raises(ValueError, match="no peaks are published for H200, fp8"):
        least_ms(CONFIG, 1, 8, replace(BF16, matmul_dtype="fp8"), replace(H200, peak_flops={}))
