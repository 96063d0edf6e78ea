"""The bound of a token against the formulas written out, and against MFU where one dtype multiplies everything."""

import pytest

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.flops import model_flops
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.hardware import find_hardware

QWEN = MODEL_SIZES["qwen2.5-0.5b"]
H200, A100 = find_hardware("NVIDIA H200"), find_hardware("NVIDIA A100-SXM4-80GB")


def test_parts_are_the_formulas_written_out():
    light = speed_of_light(QWEN, 1024, H200, block_dtype="fp8")
    block = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    flops = {"blocks": 6 * 24 * block, "attention": 6 * 24 * 896 * 1024, "head": 6 * 151_936 * 896}
    peaks = {"blocks": 1978.9e12, "attention": 989.4e12, "head": 989.4e12}
    assert {name: part.flops_per_token for name, part in light.parts.items()} == flops
    assert {name: part.dtype for name, part in light.parts.items()} == {
        "blocks": "fp8",
        "attention": "bf16",
        "head": "bf16",
    }
    for name, part in light.parts.items():
        assert part.seconds_per_token == pytest.approx(flops[name] / peaks[name])
    assert light.seconds_per_token == pytest.approx(sum(flops[name] / peaks[name] for name in flops))


def test_in_one_dtype_the_share_is_mfu():
    tokens, seconds = 16 * 1024, 0.123
    mfu = model_flops(QWEN, 16, 1024, "step") / seconds / H200.peak("bf16")
    assert speed_of_light(QWEN, 1024, H200).share(tokens / seconds) == pytest.approx(mfu)


@pytest.mark.parametrize(("block_dtype", "tokens_per_s", "percent"), [("bf16", 150_000, 46.9), ("fp8", 164_000, 33.6)])
def test_shares_that_another_trainer_reports_of_an_h100(block_dtype, tokens_per_s, percent):
    """Of Qwen2.5-0.5B; it counts the same parts, so the same rates are the same shares to a part in 30."""
    light = speed_of_light(QWEN, 1024, find_hardware("NVIDIA H100 80GB HBM3"), block_dtype=block_dtype)
    assert 100 * light.share(tokens_per_s) == pytest.approx(percent, rel=0.03)


def test_devices_divide_the_time():
    one, eight = (speed_of_light(QWEN, 1024, H200, n_devices=n) for n in (1, 8))
    assert one.seconds_per_token == pytest.approx(8 * eight.seconds_per_token)


@pytest.mark.parametrize("hardware", [None, find_hardware("cpu")])
def test_without_published_peaks_the_operations_are_counted_and_the_times_unknown(hardware):
    light = speed_of_light(QWEN, 1024, hardware)
    assert light.parts["head"].flops_per_token > 0
    assert {part.seconds_per_token for part in light.parts.values()} == {None}
    assert light.seconds_per_token is None
    assert light.share(1e5) is None


def test_a_device_without_fp8_bounds_the_other_parts_alone():
    light = speed_of_light(QWEN, 1024, A100, block_dtype="fp8")
    assert light.parts["blocks"].seconds_per_token is None
    assert light.parts["head"].seconds_per_token is not None
    assert light.seconds_per_token is None


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="no matmul dtype 'fp4'"):
        speed_of_light(QWEN, 1024, H200, block_dtype="fp4")
    with pytest.raises(ValueError, match="n_devices must be positive, got 0"):
        speed_of_light(QWEN, 1024, H200, n_devices=0)


def test_blocks_that_a_recipe_skips_are_a_part_at_the_models_peak():
    whole, some = (speed_of_light(QWEN, 1024, H200, block_dtype="fp8", n_stored_blocks=n) for n in (0, 6))
    assert some.parts["stored blocks"].dtype == "bf16"
    assert some.parts["stored blocks"].flops_per_token == whole.parts["blocks"].flops_per_token / 4
    each = whole.parts["blocks"].seconds_per_token / 24
    assert some.seconds_per_token - whole.seconds_per_token == pytest.approx(6 * each * (1978.9 / 989.4 - 1))
