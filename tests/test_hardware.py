"""The hardware table: strict matching, dense peaks, and a few anchors computed by hand elsewhere."""

from dataclasses import replace

import pytest

from cs336_systems.hardware import HARDWARE, KINDS, find_hardware, hardware_named

GPUS = [hardware for hardware in HARDWARE if hardware.name != "CPU"]
GEFORCE = ("RTX 3090", "RTX 4090", "RTX 5090")
NAMED = {hardware.name: hardware for hardware in HARDWARE}


def test_exact_device_names_find_their_entry_and_any_other_device_is_none() -> None:
    found = {
        **{"NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB", "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB"},
        **{"NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H200": "H200", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S"},
        **{"NVIDIA GeForce RTX 4090": "RTX 4090", "cpu": "CPU"},
    }
    assert {name: getattr(find_hardware(name), "name", None) for name in found} == found
    for name in (
        *(
            "",
            "NVIDIA L40",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA H100",
            "NVIDIA H200 NVL",
            "NVIDIA GH200 480GB",
        ),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300X"),
    ):
        assert find_hardware(name) is None, name
    device_names = [device_name for hardware in HARDWARE for device_name in hardware.device_names]
    assert len(set(device_names)) == len(device_names)
    assert len(NAMED) == len(HARDWARE)


@pytest.mark.parametrize("hardware", GPUS, ids=lambda hardware: hardware.name)
def test_peaks_are_dense(hardware) -> None:
    """A sparse figure among dense ones is off by a factor of 2; datasheets round away at most 2.5 % (L40S).

    GeForce cards accumulate in FP32 at half of their rate, so that tf32 equals the CUDA cores' fp32.
    """
    peaks = hardware.peak_flops
    assert peaks["fp16"] == peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.025)
    assert hardware.peak("fp8") is None or peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.025)
    assert (hardware.peak("fp8") is None) == (hardware.name.startswith("A100") or hardware.name == "RTX 3090")
    assert (peaks["tf32"] == peaks["fp32"]) == (hardware.name in GEFORCE)
    assert hardware.datasheet.startswith("https://")


def test_peaks_agree_with_units_times_clock_and_knees() -> None:
    """SMs x dense bf16 FLOP per SM and cycle x boost clock: a second road to the same number."""
    for name, n_sms, flop_per_sm_cycle, boost_hz in [
        ("A100 SXM 80GB", 108, 2048, 1.410e9),
        ("H100 SXM", 132, 4096, 1.830e9),
        ("H100 PCIe", 114, 4096, 1.620e9),
        ("L4", 58, 1024, 2.040e9),
        ("L40S", 142, 1024, 2.520e9),
        ("RTX 3090", 82, 512, 1.695e9),
        ("RTX 4090", 128, 512, 2.520e9),
        ("RTX 5090", 170, 512, 2.407e9),
        ("RTX PRO 6000 Blackwell", 188, 1024, 2.617e9),
    ]:
        assert NAMED[name].peak("bf16") == pytest.approx(n_sms * flop_per_sm_cycle * boost_hz, rel=0.013), name
    for name, flop_per_byte in (("H100 SXM", 295), ("H200", 206), ("B200", 292)):
        assert round(NAMED[name].peak("bf16") / NAMED[name].memory_bytes_per_s) == flop_per_byte


def test_a_name_as_people_type_it_finds_whole_words() -> None:
    assert hardware_named("h200").name == "H200"
    assert hardware_named("A100-sxm-80gb").name == "A100 SXM 80GB"
    assert hardware_named("h100").name == "H100 SXM"
    for name, near in (("h20", "h200"), ("l40", "l40s"), ("a10", "a100"), ("a100-80gb", "a100-sxm-80gb"), ("", "")):
        with pytest.raises(ValueError, match=f"--gpu {name}: .*{near}"):
            hardware_named(name)


def test_every_gpu_sustains_less_than_its_peak_and_more_in_fp8():
    for gpu in (each for each in HARDWARE if each.peak_flops):
        assert gpu.kind in KINDS and gpu.watts and gpu.watts > 50
        share = gpu.sustained_flops("bf16") / gpu.peak("bf16")
        assert 0.5 < share < 1, gpu.name
        assert gpu.sustained_flops("fp8") is None or gpu.sustained_flops("fp8") > 1.5 * gpu.sustained_flops("bf16")
        assert gpu.host_memory_bytes_per_s > 0


def test_power_limits_what_a_card_sustains():
    """An H100 of 700 W has 1.4 TFLOP/s a watt, one of 350 W 2.2: 70 and 61 % of the peak at 0.3 W a TFLOP/s."""
    sxm, pcie = (hardware_named(name) for name in ("h100-sxm", "h100-pcie"))
    assert sxm.sustained_flops("bf16") == pytest.approx(989.4e12 / (1 + 0.3 * 989.4 / 700))
    assert pcie.sustained_flops("bf16") / pcie.peak("bf16") < sxm.sustained_flops("bf16") / sxm.peak("bf16")
    more = replace(sxm, watts=2 * sxm.watts)
    assert more.sustained_flops("bf16") > sxm.sustained_flops("bf16")
    assert find_hardware("cpu").sustained_flops("bf16") is None


def test_a_card_is_described_by_its_figures():
    gpu = hardware_named("peak=165,bandwidth=1008,memory=24,fp8=330,host=32,watts=450,class=consumer")
    assert gpu.peaks("bf16") == (165e12, 1008e9) and gpu.peak("fp8") == 330e12
    assert gpu.memory_bytes == 24 * 2**30 and gpu.link_bytes_per_s is None
    listed = hardware_named("rtx-4090")
    assert gpu.host_memory_bytes_per_s == listed.host_memory_bytes_per_s
    assert gpu.sustained_flops("bf16") == pytest.approx(listed.sustained_flops("bf16"), rel=0.01)
    assert hardware_named("peak=165,bandwidth=1008,memory=24").peak("fp8") is None
    without, one = (hardware_named(f"peak=165,bandwidth=1008,memory=24,fp8=330{w}") for w in ("", ",watts=165"))
    assert [without.sustained_flops(dtype) for dtype in ("bf16", "fp8")] == [
        one.sustained_flops(dtype) for dtype in ("bf16", "fp8")
    ]
    assert hardware_named("NVIDIA H200").name == "H200"
    for text, message in (
        ("peak=165", "say bandwidth and memory, too"),
        ("peak=x,bandwidth=1,memory=1", "peak must be a number above 0, got 'x'"),
        ("peak=1,bandwidth=1,memory=inf", "memory must be a number above 0, got 'inf'"),
        ("peak=1,bandwidth=1,memory=24,memory=25", "memory=25: a figure is given twice"),
        ("peak=1,bandwidth=1,memory=1,class=phone", "class 'phone' is none of data centre"),
    ):
        with pytest.raises(ValueError, match=message):
            hardware_named(text)
