"""The bounds of a token and of each part of a step, by hand, against MFU and against executed FLOPs."""

from dataclasses import replace

import pytest

from cs336_systems.config import MODEL_SIZES, PRECISIONS, Lora, resolve_size
from cs336_systems.costs.flops import hardware_flops, model_flops
from cs336_systems.costs.speed_of_light import least_ms, speed_of_light
from cs336_systems.hardware import find_hardware

QWEN = MODEL_SIZES["qwen2.5-0.5b"]
H200, A100 = find_hardware("NVIDIA H200"), find_hardware("NVIDIA A100-SXM4-80GB")
LEADERBOARD, TOKENS = resolve_size("leaderboard-8b"), 32_768
BF16 = PRECISIONS["bf16"]


def test_parts_are_the_formulas_written_out():
    light = speed_of_light(QWEN, 1024, H200, block_dtype="fp8")
    block = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    flops = {"blocks": 6 * 24 * block, "attention": 6 * 24 * 896 * 1024, "head": 6 * 151_936 * 896}
    peaks = {"blocks": 1978.9e12, "attention": 989.4e12, "head": 989.4e12}
    assert {name: part.flops_per_token for name, part in light.parts.items()} == flops
    for name, part in light.parts.items():
        assert part.seconds_per_token == pytest.approx(flops[name] / peaks[name])
    assert light.seconds_per_token == pytest.approx(sum(flops[name] / peaks[name] for name in flops))
    eight = speed_of_light(QWEN, 1024, H200, block_dtype="fp8", n_devices=8)
    assert light.seconds_per_token == pytest.approx(8 * eight.seconds_per_token)
    some = speed_of_light(QWEN, 1024, H200, block_dtype="fp8", n_stored_blocks=6)
    assert some.parts["stored blocks"].flops_per_token == flops["blocks"] / 4
    stored = flops["blocks"] / 4 / 989.4e12 + 3 * flops["blocks"] / 4 / 1978.9e12
    assert some.seconds_per_token == pytest.approx(stored + (flops["attention"] + flops["head"]) / 989.4e12)


def test_in_one_dtype_the_share_is_mfu():
    tokens, seconds = 16 * 1024, 0.123
    mfu = model_flops(QWEN, 16, 1024, "step") / seconds / H200.peak("bf16")
    assert speed_of_light(QWEN, 1024, H200).share(tokens / seconds) == pytest.approx(mfu)


@pytest.mark.parametrize("hardware", [None, find_hardware("cpu"), A100])
def test_where_a_peak_is_unknown_so_is_the_time(hardware):
    light = speed_of_light(QWEN, 1024, hardware, block_dtype="fp8")
    assert light.parts["head"].flops_per_token > 0
    assert light.parts["blocks"].seconds_per_token is light.seconds_per_token is light.share(1e5) is None
    assert (light.parts["head"].seconds_per_token is not None) == (hardware is A100)


def test_frozen_weights_take_two_products_and_adapters_three():
    whole, adapted = (speed_of_light(QWEN, 1024, H200, lora=lora) for lora in (None, Lora(16, 32.0)))
    for name, part in whole.parts.items():
        share = 1 if name == "attention" else 2 / 3
        assert adapted.parts[name].flops_per_token == pytest.approx(share * part.flops_per_token)
    rows_and_columns = 3 * 896 + 896 + 2 * 128 + 2 * 896 + 2 * (896 + 4864) + 4864 + 896
    assert adapted.parts["adapters"].flops_per_token == 6 * 24 * 16 * rows_and_columns
    assert adapted.seconds_per_token == pytest.approx(sum(p.seconds_per_token for p in adapted.parts.values()))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'fp4'"):
        speed_of_light(QWEN, 1024, H200, block_dtype="fp4")
    with pytest.raises(ValueError, match="got 0"):
        speed_of_light(QWEN, 1024, H200, n_devices=0)
    with pytest.raises(ValueError, match="CPU, bf16"):
        least_ms(LEADERBOARD, 1, 8, BF16, find_hardware("cpu"))
    with pytest.raises(ValueError, match="H200, fp8"):
        least_ms(LEADERBOARD, 1, 8, replace(BF16, matmul_dtype="fp8"), replace(H200, peak_flops={}))


def test_least_times_of_the_leaderboards_step_by_hand():
    least = least_ms(LEADERBOARD, 1, TOKENS, BF16, H200, n_shards=2)
    multiplied = sum(ms for (_, kind), ms in least.items() if kind in ("products", "attention"))
    executed = hardware_flops(LEADERBOARD, 1, TOKENS, "step", attention="flash", keep="all")
    assert multiplied == pytest.approx(1e3 * executed / 989.4e12)
    layer, head = 2 * TOKENS * 202_375_168, 2 * TOKENS * 4096 * 151_936
    assert least["forward", "products"] == pytest.approx((34 * layer + 3 * head) / 989.4e9, rel=1e-3)
    assert least["backward", "attention"] == pytest.approx(2.5 * 34 * 2 * TOKENS**2 * 4096 / 989.4e9)
    assert least["optimizer", "optimizer"] == pytest.approx(7 * 8_125_698_048 / 4800e6)
    per_token = 34 * (6 * 4096 + 4 * 4096 + 3 * 11_008) + 4 * 4096 + 2 * 151_936
    assert least["forward", "elementwise"] == pytest.approx(2 * TOKENS * per_token / 4800e6)
    per_token = 34 * (5 * 11_008 + 12 * 4096) + 4 * 4096
    assert least["backward", "elementwise"] == pytest.approx(2 * (TOKENS * per_token + 151_936 * 4096) / 4800e6)
