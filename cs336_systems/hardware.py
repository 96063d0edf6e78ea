"""What it runs on: the published peaks of each device, cited, and the lookup that finds them by name.

A measured time means little until it stands beside the least time the device could have needed. That bound
comes from here: matmul FLOP/s per dtype, memory bytes/s, link bytes/s. `costs/` divides by these numbers and
the reports print the quotient (MFU, share of bandwidth), so each entry names its NVIDIA document.

Conventions
- Dense peaks. NVIDIA's headline tensor figures assume 2:4 structured sparsity, which no dense training step
  has; where a datasheet prints only the sparse figure, half of it stands here.
- FP32 accumulation, which is what torch's matmuls ask for. GeForce cards run fp16, bf16 and fp8 at half rate
  with it; their whitepapers print both rates and the lower one stands here. ("fp8" with a reduced-precision
  accumulator, e.g. `use_fast_accum=True`, may exceed that peak on those cards.)
- "fp32" is the CUDA-core rate with TF32 off; "tf32" is the tensor-core rate of the same torch dtype.
- Rates are in SI units (1 TFLOP/s = 1e12 FLOP/s, 1 GB/s = 1e9 byte/s); capacities in bytes. Links are quoted
  per direction: half of the "bidirectional" figure that datasheets print.

Limits
- A peak assumes the rated boost clock. Under its power limit a data-centre card stays below it (an H200
  reaches 70 to 80 % in large bf16 matmuls), and a GeForce card that boosts above its rating may pass it.
  Reports therefore print a ceiling measured in the same run beside these numbers; this file holds only what
  is published.
- Names are compared whole. "NVIDIA L40" is not an L4, a laptop RTX 4090 is not an RTX 4090, a MIG slice is
  not the card it was cut from. An unknown device is None, never someone else's peak, and a share of an
  unknown peak is left out of the report, not guessed.
- A CPU has no such datasheet: its rate depends on core count, vector width, clock and the BLAS in use. The
  "CPU" entry exists so that code can ask one question of every device; all its peaks are None and the
  ceilings measured in the run stand in for them. Any CPU's model name is an unknown device.

Use
    hardware = find_hardware(torch.cuda.get_device_name())  # or the name NVML gives; "cpu" for the host
    peak = hardware.peak("bf16") if hardware else None  # FLOP/s or None
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MATMUL_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")

TERA = 1e12
GB_PER_S = 1e9
GIB = 1024**3

# Per direction, as datasheets state it; 128b/130b encoding takes 1.5 % of it and packet headers some more
# (pinned copies reach 55.5 GB/s on an H200).
PCIE_GEN4_X16 = 32 * GB_PER_S
PCIE_GEN5_X16 = 64 * GB_PER_S


@dataclass(frozen=True)
class Hardware:
    """Published peaks of one device. None means: the device has no such unit, or no document says."""

    name: str
    """What reports call it, e.g. "H100 SXM"."""

    device_names: tuple[str, ...]
    """The exact strings by which `torch.cuda.get_device_name` and NVML call this device."""

    peak_flops: Mapping[str, float] = field(hash=False)
    """Name in `MATMUL_DTYPES` -> dense FLOP/s with FP32 accumulation; absent if unpublished. See `peak`."""

    memory_bytes: int | None
    """Capacity in bytes. The "80 GB" of a datasheet are 80 GiB; firmware (and ECC on GDDR6, one sixteenth)
    keeps some of it, so this is an upper bound: ask the driver for what is left."""

    memory_bytes_per_s: float | None
    """Device memory bandwidth in bytes/s, reads and writes together."""

    link_bytes_per_s: float | None
    """NVLink of one GPU, all links together, in bytes/s per direction. On PCIe cards it needs a bridge and
    reaches one neighbour only; on SXM boards it reaches every GPU behind the NVSwitch."""

    host_link_bytes_per_s: float | None
    """PCIe between device and host, in bytes/s per direction."""

    datasheet: str | None
    """URL of the NVIDIA document that the figures are from."""

    def __post_init__(self) -> None:
        unknown = set(self.peak_flops) - set(MATMUL_DTYPES)
        assert not unknown, f"{self.name}: peak_flops has {sorted(unknown)}, known are {MATMUL_DTYPES}"

    def peak(self, dtype: str) -> float | None:
        """Dense matmul FLOP/s of `dtype`, None where none is published; ValueError for any other name."""
        if dtype not in MATMUL_DTYPES:
            raise ValueError(f"no matmul dtype {dtype!r}; allowed: {', '.join(MATMUL_DTYPES)}")
        return self.peak_flops.get(dtype)


def _peaks(**tflops: float) -> dict[str, float]:
    """TFLOP/s by dtype name -> FLOP/s by dtype name."""
    return {dtype: value * TERA for dtype, value in tflops.items()}


_A100_PEAKS = _peaks(fp32=19.5, tf32=156, fp16=312, bf16=312)  # SXM and PCIe alike; fp8 came with Hopper
_GH100_SXM_PEAKS = _peaks(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9)

_A100_80GB_DATASHEET = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_HOPPER_WHITEPAPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"

HARDWARE: tuple[Hardware, ...] = (
    Hardware(
        name="A100 40GB",  # SXM and PCIe: every figure below is the same
        device_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        peak_flops=_A100_PEAKS,
        memory_bytes=40 * GIB,
        memory_bytes_per_s=1555 * GB_PER_S,
        link_bytes_per_s=300 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet=("https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"),
    ),
    Hardware(
        name="A100 SXM 80GB",
        device_names=("NVIDIA A100-SXM4-80GB",),
        peak_flops=_A100_PEAKS,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=2039 * GB_PER_S,
        link_bytes_per_s=300 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet=_A100_80GB_DATASHEET,
    ),
    Hardware(
        name="A100 PCIe 80GB",
        device_names=("NVIDIA A100 80GB PCIe",),
        peak_flops=_A100_PEAKS,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=1935 * GB_PER_S,
        link_bytes_per_s=300 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet=_A100_80GB_DATASHEET,
    ),
    Hardware(
        name="H100 SXM",
        device_names=("NVIDIA H100 80GB HBM3",),
        peak_flops=_GH100_SXM_PEAKS,
        memory_bytes=80 * GIB,
        memory_bytes_per_s=3350 * GB_PER_S,
        link_bytes_per_s=450 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN5_X16,
        datasheet=_HOPPER_WHITEPAPER,  # the datasheet has the same figures, sparse and rounded
    ),
    Hardware(
        name="H100 PCIe",
        device_names=("NVIDIA H100 PCIe",),
        peak_flops=_peaks(fp32=51.2, tf32=378, fp16=756, bf16=756, fp8=1513),
        memory_bytes=80 * GIB,
        memory_bytes_per_s=2039 * GB_PER_S,  # whitepaper; the datasheet rounds to 2 TB/s
        link_bytes_per_s=300 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN5_X16,
        datasheet=_HOPPER_WHITEPAPER,
    ),
    Hardware(
        name="H200",  # the SXM board; "NVIDIA H200 NVL" is a slower PCIe card
        device_names=("NVIDIA H200",),
        # The datasheet prints these sparse and rounded (bf16 1,979); chip and clocks are the H100 SXM's, so
        # the whitepaper's unrounded figures hold.
        peak_flops=_GH100_SXM_PEAKS,
        memory_bytes=141 * GIB,
        memory_bytes_per_s=4800 * GB_PER_S,
        link_bytes_per_s=450 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN5_X16,
        datasheet="https://www.nvidia.com/en-us/data-center/h200/",
    ),
    Hardware(
        name="B200",
        device_names=("NVIDIA B200",),
        # The datasheet's HGX B200 column, halved because sparse. It rounds tf32 to 2.2 PFLOP/s sparse; half
        # of bf16, as on A100 and H100, is 1125. fp32: the datasheet's 75; the 2024 brief announced 80,
        # but 148 SMs x 128 cores x 2 x 1.965 GHz is 74.5.
        peak_flops=_peaks(fp32=75, tf32=1125, fp16=2250, bf16=2250, fp8=4500),
        # Announced as 192 GB and 8 TB/s; the datasheet of the shipping part says 180 GB and 7.7 TB/s, and
        # drivers report a 7680-bit bus at 3996 MHz, which is 7.67.
        memory_bytes=180 * GIB,
        memory_bytes_per_s=7700 * GB_PER_S,
        link_bytes_per_s=900 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN5_X16,  # datasheet; the technical brief announced Gen6
        datasheet="https://resources.nvidia.com/en-us-blackwell-architecture/datasheet",
    ),
    Hardware(
        name="L4",
        device_names=("NVIDIA L4",),
        peak_flops=_peaks(fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5),  # printed sparse: 120, 242, 485
        memory_bytes=24 * GIB,
        memory_bytes_per_s=300 * GB_PER_S,
        link_bytes_per_s=None,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet="https://www.nvidia.com/en-us/data-center/l4/",
    ),
    Hardware(
        name="L40S",
        device_names=("NVIDIA L40S",),
        # As printed. Its bf16 pair is 362.05 dense | 733 sparse: the dense one is 2 x the L40's 181.05, while
        # clocks (142 SMs x 1024 FLOP x 2.52 GHz) and half of 733 both give 366.4: shares read 1.2 % high.
        peak_flops=_peaks(fp32=91.6, tf32=183, fp16=362.05, bf16=362.05, fp8=733),
        memory_bytes=48 * GIB,
        memory_bytes_per_s=864 * GB_PER_S,
        link_bytes_per_s=None,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
    ),
    Hardware(
        name="RTX 3090",
        device_names=("NVIDIA GeForce RTX 3090",),
        peak_flops=_peaks(fp32=35.6, tf32=35.6, fp16=71, bf16=71),
        memory_bytes=24 * GIB,
        memory_bytes_per_s=936 * GB_PER_S,
        link_bytes_per_s=56.25 * GB_PER_S,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
    ),
    Hardware(
        name="RTX 4090",
        device_names=("NVIDIA GeForce RTX 4090",),
        peak_flops=_peaks(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),  # fp8 corrected in v2.02
        memory_bytes=24 * GIB,
        memory_bytes_per_s=1008 * GB_PER_S,
        link_bytes_per_s=None,
        host_link_bytes_per_s=PCIE_GEN4_X16,
        datasheet="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    Hardware(
        name="RTX 5090",
        device_names=("NVIDIA GeForce RTX 5090",),
        peak_flops=_peaks(fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419),
        memory_bytes=32 * GIB,
        memory_bytes_per_s=1792 * GB_PER_S,
        link_bytes_per_s=None,
        host_link_bytes_per_s=PCIE_GEN5_X16,
        datasheet=(
            "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
        ),
    ),
    Hardware(
        name="RTX PRO 6000 Blackwell",
        # The 600 W Workstation Edition only: the Server and Max-Q Editions run at other clocks, and no dense
        # figure per dtype was found for them. A professional card: FP32 accumulation runs at full rate.
        # fp32 is the whitepaper's; the datasheet says 125.
        device_names=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        peak_flops=_peaks(fp32=126.0, tf32=251.9, fp16=503.8, bf16=503.8, fp8=1007.6),
        memory_bytes=96 * GIB,
        memory_bytes_per_s=1792 * GB_PER_S,
        link_bytes_per_s=None,
        host_link_bytes_per_s=PCIE_GEN5_X16,
        datasheet=(
            "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
            "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
        ),
    ),
    Hardware(
        name="CPU",
        device_names=("cpu",),
        peak_flops={},
        memory_bytes=None,
        memory_bytes_per_s=None,
        link_bytes_per_s=None,
        host_link_bytes_per_s=None,
        datasheet=None,
    ),
)


def find_hardware(device_name: str) -> Hardware | None:
    """The entry whose `device_names` holds exactly `device_name`; None for every other device."""
    return next((hardware for hardware in HARDWARE if device_name in hardware.device_names), None)
