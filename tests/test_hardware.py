"""The hardware table: strict matching, dense peaks, and a few anchors computed by hand elsewhere."""

import dataclasses
import pickle
import subprocess
import sys

import pytest

from cs336_systems.hardware import HARDWARE, MATMUL_DTYPES, Hardware, find_hardware, hardware_named

GPUS = [hardware for hardware in HARDWARE if hardware.name != "CPU"]
GEFORCE = ("RTX 3090", "RTX 4090", "RTX 5090")
DATA_CENTRE_AND_PRO = [hardware for hardware in GPUS if hardware.name not in GEFORCE]


def by_name(name: str) -> Hardware:
    return next(hardware for hardware in HARDWARE if hardware.name == name)


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("cpu", "CPU"),
    ],
)
def test_device_name_finds_its_entry(device_name: str, name: str) -> None:
    hardware = find_hardware(device_name)
    assert hardware is not None and hardware.name == name


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA L40",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 NVL",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX 6000 Ada Generation",
        "AMD Instinct MI300X",
        "AMD EPYC 9654 96-Core Processor",
        "Intel(R) Xeon(R) Platinum 8480C",
        "",
    ],
)
def test_any_other_device_is_none(device_name: str) -> None:
    assert find_hardware(device_name) is None


def test_no_device_name_and_no_report_name_is_used_twice() -> None:
    device_names = [device_name for hardware in HARDWARE for device_name in hardware.device_names]
    assert len(set(device_names)) == len(device_names)
    assert len({hardware.name for hardware in HARDWARE}) == len(HARDWARE)


@pytest.mark.parametrize("hardware", DATA_CENTRE_AND_PRO, ids=lambda hardware: hardware.name)
def test_each_halving_of_the_operand_doubles_the_tensor_peak(hardware: Hardware) -> None:
    # A sparse figure among dense ones breaks this by a factor of 2. The tolerance is what datasheets round
    # away: at most 2.5 % (L40S, see its comment).
    peaks = hardware.peak_flops
    assert peaks["fp16"] == peaks["bf16"]
    assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.025)
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.025)


@pytest.mark.parametrize("name", GEFORCE)
def test_geforce_peaks_are_those_with_fp32_accumulation(name: str) -> None:
    # At the half rate of FP32 accumulation, tf32 equals the CUDA-core fp32 rate, and bf16 is twice that; with
    # FP16 accumulation, or sparse, fp16 would be four times.
    hardware = by_name(name)
    fp32 = hardware.peak_flops["fp32"]
    assert hardware.peak("tf32") == fp32
    assert hardware.peak("bf16") == hardware.peak("fp16") == pytest.approx(2 * fp32, rel=0.005)
    fp8 = hardware.peak("fp8")
    assert fp8 is None if name == "RTX 3090" else fp8 == pytest.approx(4 * fp32, rel=0.005)


def test_peaks_agree_with_units_times_clock() -> None:
    # SMs x dense bf16 FLOP per SM and cycle x boost clock: a second road to the same number.
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
        assert by_name(name).peak("bf16") == pytest.approx(n_sms * flop_per_sm_cycle * boost_hz, rel=0.013), name


@pytest.mark.parametrize(("name", "knee_flop_per_byte"), [("H100 SXM", 295), ("H200", 206), ("B200", 292)])
def test_roofline_knee(name: str, knee_flop_per_byte: int) -> None:
    hardware = by_name(name)
    bf16 = hardware.peak("bf16")
    assert bf16 is not None and hardware.memory_bytes_per_s is not None
    assert round(bf16 / hardware.memory_bytes_per_s) == knee_flop_per_byte


def test_missing_units_are_none() -> None:
    for name in ("A100 40GB", "A100 SXM 80GB", "A100 PCIe 80GB", "RTX 3090"):
        assert by_name(name).peak("fp8") is None
    for name in ("L4", "L40S", "RTX 4090", "RTX 5090", "RTX PRO 6000 Blackwell"):
        assert by_name(name).link_bytes_per_s is None


def test_cpu_has_no_published_peaks() -> None:
    cpu = find_hardware("cpu")
    assert cpu is not None
    assert [cpu.peak(dtype) for dtype in MATMUL_DTYPES] == [None] * len(MATMUL_DTYPES)
    assert cpu.memory_bytes_per_s is None and cpu.host_link_bytes_per_s is None


def test_unknown_dtype_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(ValueError, match=r"'float32'.*fp32, tf32, fp16, bf16, fp8"):
        by_name("H200").peak("float32")


@pytest.mark.parametrize("hardware", GPUS, ids=lambda hardware: hardware.name)
def test_figures_are_complete_and_of_plausible_unit(hardware: Hardware) -> None:
    assert hardware.datasheet is not None and hardware.datasheet.startswith("https://")
    assert hardware.memory_bytes is not None and 20e9 < hardware.memory_bytes < 300e9
    assert hardware.memory_bytes_per_s is not None and 2e11 < hardware.memory_bytes_per_s < 1e13
    assert hardware.host_link_bytes_per_s in (32e9, 64e9)
    assert hardware.link_bytes_per_s is None or hardware.link_bytes_per_s > hardware.host_link_bytes_per_s
    for dtype in ("fp32", "tf32", "fp16", "bf16"):
        peak = hardware.peak(dtype)
        assert peak is not None and 1e13 < peak < 1e16


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
def test_entries_are_frozen_hashable_and_survive_a_process_boundary(hardware: Hardware) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.memory_bytes_per_s = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(hardware) == hash(dataclasses.replace(hardware))
    assert pickle.loads(pickle.dumps(hardware)) == hardware


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, cs336_systems.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_as_people_type_it_finds_whole_words() -> None:
    assert hardware_named("h200").name == "H200"
    assert hardware_named("A100-sxm-80gb").name == "A100 SXM 80GB"
    assert hardware_named("h100").name == "H100 SXM"
    for name, near in (("h20", "h200"), ("l40", "l40s"), ("a10", "a100"), ("a100-80gb", "a100-sxm-80gb"), ("", "")):
        with pytest.raises(ValueError, match=f"--gpu {name}: .*{near}"):
            hardware_named(name)
