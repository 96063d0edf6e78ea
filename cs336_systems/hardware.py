"""Published peaks of each known device, with their sources, and the lookup that finds a device by name.

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
    hardware = hardware_named("h100-sxm")  # as people type it
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MATMUL_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")

TERA = 1e12
GB_PER_S = 1e9
MIB, GIB = 1024**2, 1024**3

# Per direction, as datasheets state it; 128b/130b encoding takes 1.5 % of it and packet headers some more
# (pinned copies reach 55.5 GB/s on an H200).
PCIE_GEN4_X16 = 32 * GB_PER_S
PCIE_GEN5_X16 = 64 * GB_PER_S


@dataclass(frozen=True)
class CardClass:
    """The machine that a class of cards is put into, and how attention runs on them."""

    memory_channels: int
    """Channels of the host's memory that copies of one card use."""
    attention_forward: float
    attention_backward: float
    """Factors of attention's rates beside those of the first class."""


DATA_CENTRE = "data centre"
KINDS = {
    DATA_CENTRE: CardClass(8, 1.0, 1.0),
    "data centre without WGMMA": CardClass(8, 0.81, 0.52),
    "workstation": CardClass(4, 0.81, 0.52),
    "consumer": CardClass(2, 0.81, 0.52),
}
"""Classes of cards. The first has tensor cores that run beside their warps' other work (WGMMA, from Hopper on), for
which FlashAttention-3 and this suite's ``hopper`` are written; on the others attention is FlashAttention-2's. Their
factors are fitted on the RTX 3090's tenth of ml_dataflow's cells (``answers/ml_dataflow.py``)."""

_DDR4, _DDR5, _COPIED = 25.6 * GB_PER_S, 44.8 * GB_PER_S, 0.73
"""Bytes/s of a channel of the host's memory, DDR4-3200 beside PCIe 4 and DDR5-5600 beside what is faster, and the share
that copies get of it (fitted on the RTX 3090's tenth)."""

POWER_SLOPE, ENERGY = 0.3, {"fp8": 0.6}
"""Watts that a card needs beyond its power for each TFLOP/s of its bf16 peak, and the energy of a FLOP in fp8 beside
one in bf16. ml_dataflow's tenths of an H100 and an RTX 3090 alone would say 0.36, llm.q's of an H100 and an RTX PRO
6000 0.2; an H200 multiplies 1.3 times as fast in fp8 as these watts would let it at equal energies."""


@dataclass(frozen=True)
class Hardware:
    """Published peaks of one device. None means: the device has no such unit, or no document says."""

    name: str
    """The name in reports, e.g. "H100 SXM"."""

    device_names: tuple[str, ...]
    """The exact strings by which `torch.cuda.get_device_name` and NVML call this device."""

    peak_flops: Mapping[str, float] = field(hash=False)
    """Name in `MATMUL_DTYPES` -> dense FLOP/s with FP32 accumulation; absent if unpublished. See `peak`."""

    memory_bytes: int | None
    """Capacity in bytes, without what ECC takes of GDDR6. The "80 GB" of a datasheet are 80 GiB; firmware keeps some of
    it, so this is an upper bound: ask the driver for what is left."""

    memory_bytes_per_s: float | None
    """Device memory bandwidth in bytes/s, reads and writes together."""

    link_bytes_per_s: float | None
    """NVLink of one GPU, all links together, in bytes/s per direction."""

    host_link_bytes_per_s: float | None
    """PCIe between device and host, in bytes/s per direction."""

    datasheet: str | None
    """URL of the NVIDIA document that the figures are from."""

    kind: str | None = None
    """The class of the card, one of ``KINDS``."""

    watts: float | None = None
    """Board power, as the datasheet has it: what products may draw."""

    nvlink_joins: int = 8
    """GPUs of a host that NVLink joins: two by the bridge that PCIe cards need, all behind an SXM board's NVSwitch."""

    @property
    def is_hopper(self) -> bool:
        """Whether it has compute capability 9.0, which ``--attention hopper`` is written for."""
        return self.name.startswith(("H100", "H200"))

    @property
    def may_be_hopper(self) -> bool:
        """Whether it ``is_hopper``, or is described by its figures as a card of that class, so that nobody knows."""
        return self.is_hopper or (self.kind == DATA_CENTRE and not self.device_names)

    def copies_reach(self, n_gpus: int) -> bool:
        """Whether so many GPUs of a host can write each other's memory: GeForce cards only over NVLink.

        Source: https://github.com/NVIDIA/nccl/issues/1127 (of the RTX 4090; later GeForce cards are taken to be alike).
        """
        return self.kind != "consumer" or (bool(self.link_bytes_per_s) and n_gpus <= self.nvlink_joins)

    @property
    def host_memory_bytes_per_s(self) -> float | None:
        """Bytes/s of the host's memory for copies, in a machine that such cards are put into; None if unknown."""
        if self.kind is None or self.host_link_bytes_per_s is None:
            return None
        channel = _DDR4 if self.host_link_bytes_per_s <= PCIE_GEN4_X16 else _DDR5
        return _COPIED * KINDS[self.kind].memory_channels * channel

    def sustained_flops(self, dtype: str) -> float | None:
        """FLOP/s that the card's power allows in large products of ``dtype``; None where no peak is published.

        Of the peak P it allows 1 / (1 + e P / W), W watts, e the energy of a FLOP beside what the rest of the card
        draws: ``POWER_SLOPE``. A card without published power is taken to have 1 W for each TFLOP/s in bf16.
        """
        peak = self.peak(dtype)
        if peak is None:
            return None
        watts = self.watts or (self.peak("bf16") or peak) / TERA
        return peak / (1 + POWER_SLOPE * ENERGY.get(dtype, 1.0) * peak / TERA / watts)

    def peak(self, dtype: str) -> float | None:
        """Dense matmul FLOP/s of `dtype`, None where none is published; ValueError for any other name."""
        if dtype not in MATMUL_DTYPES:
            raise ValueError(f"no matmul dtype {dtype!r}; allowed: {', '.join(MATMUL_DTYPES)}")
        return self.peak_flops.get(dtype)

    def peaks(self, dtype: str) -> tuple[float, float]:
        """Dense matmul FLOP/s of `dtype`, and bytes/s of memory; ValueError where one is not published."""
        flops_per_s = self.peak(dtype)
        if flops_per_s is None or self.memory_bytes_per_s is None:
            raise ValueError(f"no peaks are published for {self.name}, {dtype}")
        return flops_per_s, self.memory_bytes_per_s


def _gpu(
    name: str,
    device_names: tuple[str, ...],
    tflops: tuple[float, ...],
    gib: float,
    gb_per_s: float,
    link_gb_per_s: float | None,
    pcie_gen: int,
    watts: float,
    kind: str,
    datasheet: str,
    nvlink_joins: int = 8,
) -> Hardware:
    """A GPU in its datasheet's units; TFLOP/s are those of fp32, tf32, fp16 and bf16 alike, and fp8 if it has that."""
    fp32, tf32, half, *fp8 = (value * TERA for value in tflops)
    return Hardware(
        name,
        tuple(f"NVIDIA {device_name}" for device_name in device_names),
        {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half} | ({"fp8": fp8[0]} if fp8 else {}),
        int(gib * GIB),
        gb_per_s * GB_PER_S,
        None if link_gb_per_s is None else link_gb_per_s * GB_PER_S,
        {4: PCIE_GEN4_X16, 5: PCIE_GEN5_X16}[pcie_gen],
        datasheet,
        kind,
        watts,
        nvlink_joins,
    )


_A100 = (19.5, 156, 312)  # SXM and PCIe alike; fp8 came with Hopper
_GH100_SXM = (66.9, 494.7, 989.4, 1978.9)

_DC, _OLD_DC, _WS, _PC = KINDS

_CONTENT = "https://www.nvidia.com/content"
_GEFORCE = "https://images.nvidia.com/aem-dam/Solutions/geforce"
_A100_40GB_PDF = f"{_CONTENT}/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"
_A100_80GB_PDF = f"{_A100_40GB_PDF.removesuffix('.pdf')}-us-nvidia-1758950-r4-web.pdf"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_RTX_3090 = f"{_CONTENT}/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_RTX_4090 = f"{_GEFORCE}/ada/nvidia-ada-gpu-architecture.pdf"  # v2.02, which corrected fp8
_RTX_5090 = f"{_GEFORCE}/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_RTX_PRO_NAMES = ("RTX PRO 6000 Blackwell Workstation Edition",)
_RTX_PRO = (
    f"{_CONTENT}/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)

HARDWARE: tuple[Hardware, ...] = (
    # name, names after "NVIDIA", TFLOP/s, GiB, GB/s, link GB/s, PCIe generation, W, class, datasheet
    _gpu("A100 40GB", ("A100-SXM4-40GB",), _A100, 40, 1555, 300, 4, 400, _OLD_DC, _A100_40GB_PDF),
    _gpu("A100 PCIe 40GB", ("A100-PCIE-40GB",), _A100, 40, 1555, 300, 4, 250, _OLD_DC, _A100_40GB_PDF, 2),
    _gpu("A100 SXM 80GB", ("A100-SXM4-80GB",), _A100, 80, 2039, 300, 4, 400, _OLD_DC, _A100_80GB_PDF),
    _gpu("A100 PCIe 80GB", ("A100 80GB PCIe",), _A100, 80, 1935, 300, 4, 300, _OLD_DC, _A100_80GB_PDF, 2),
    # Whitepaper: the SXM datasheet has its figures sparse and rounded, the PCIe card's its memory as 2 TB/s.
    _gpu("H100 SXM", ("H100 80GB HBM3",), _GH100_SXM, 80, 3350, 450, 5, 700, _DC, _HOPPER),
    _gpu("H100 PCIe", ("H100 PCIe",), (51.2, 378, 756, 1513), 80, 2039, 300, 5, 350, _DC, _HOPPER, 2),
    # The SXM board; "NVIDIA H200 NVL" is a slower PCIe card. The datasheet prints peaks sparse and rounded (bf16
    # 1,979); chip and clocks are the H100 SXM's, so the whitepaper's unrounded figures hold.
    _gpu("H200", ("H200",), _GH100_SXM, 141, 4800, 450, 5, 700, _DC, _H200),
    # The datasheet's HGX B200 column, halved because sparse. It rounds tf32 to 2.2 PFLOP/s sparse; half of bf16, as on
    # A100 and H100, is 1125. fp32: the datasheet's 75; the 2024 brief announced 80, but 148 SMs x 128 cores x 2 x 1.965
    # GHz is 74.5. Memory was announced as 192 GB and 8 TB/s; the datasheet of the shipping part says 180 GB and 7.7
    # TB/s, and drivers report a 7680-bit bus at 3996 MHz, which is 7.67. PCIe: the datasheet's; the brief announced
    # Gen6.
    _gpu("B200", ("B200",), (75, 1125, 2250, 4500), 180, 7700, 900, 5, 1000, _DC, _B200),
    # Tensor peaks are printed sparse: 120, 242, 485. Memory is 24 GB less a sixteenth for ECC, which is on by default
    # (drivers report 23,034 MiB); so for the L40S, 48 GB less a sixteenth (46,068 MiB).
    _gpu("L4", ("L4",), (30.3, 60, 121, 242.5), 22.5, 300, None, 4, 72, _OLD_DC, _L4),
    # As printed. Its bf16 pair is 362.05 dense | 733 sparse: the dense one is 2 x the L40's 181.05, while clocks (142
    # SMs x 1024 FLOP x 2.52 GHz) and half of 733 both give 366.4: shares read 1.2 % high.
    _gpu("L40S", ("L40S",), (91.6, 183, 362.05, 733), 45, 864, None, 4, 350, _OLD_DC, _L40S),
    _gpu("RTX 3090", ("GeForce RTX 3090",), (35.6, 35.6, 71), 24, 936, 56.25, 4, 350, _PC, _RTX_3090, 2),
    _gpu("RTX 4090", ("GeForce RTX 4090",), (82.6, 82.6, 165.2, 330.3), 24, 1008, None, 4, 450, _PC, _RTX_4090),
    _gpu("RTX 5090", ("GeForce RTX 5090",), (104.8, 104.8, 209.5, 419), 32, 1792, None, 5, 575, _PC, _RTX_5090),
    # The 600 W Workstation Edition only: the Server and Max-Q Editions run at other clocks, and no dense figure per
    # dtype was found for them. A professional card: FP32 accumulation runs at full rate. fp32 is the whitepaper's; the
    # datasheet says 125.
    _gpu(
        "RTX PRO 6000 Blackwell", _RTX_PRO_NAMES, (126.0, 251.9, 503.8, 1007.6), 96, 1792, None, 5, 600, _WS, _RTX_PRO
    ),
    Hardware("CPU", ("cpu",), {}, None, None, None, None, None),
)


def find_hardware(device_name: str) -> Hardware | None:
    """The entry whose `device_names` holds exactly `device_name`; None for every other device."""
    return next((hardware for hardware in HARDWARE if device_name in hardware.device_names), None)


_DESCRIBED = {"peak": TERA, "bandwidth": GB_PER_S, "memory": GIB, "fp8": TERA, "host": GB_PER_S}
_DESCRIBED |= {"nvlink": GB_PER_S, "watts": 1.0}
"""The properties that can describe a card, and the unit of each: dense TFLOP/s in bf16 and in fp8, GB/s of its memory,
GiB, GB/s of the host link and of NVLink each way, and watts."""
_NEEDED = ("peak", "bandwidth", "memory")


def hardware_described(text: str) -> Hardware:
    """A card by its figures: ``peak=165,bandwidth=1008,memory=24``, and fp8, host, nvlink, watts and class if known.

    Without them it has no fp8, 32 GB/s each way to the host, no NVLink, and 1 W for each TFLOP/s in bf16.

    Raises:
        ValueError: a figure is no number above 0, unknown, missing or given twice, or the class is unknown.
    """
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ValueError(f"--gpu {text}: a figure is given twice")
    kind = given.pop("class", "workstation")
    if kind not in KINDS:
        raise ValueError(f"--gpu {text}: class {kind!r} is none of {', '.join(KINDS)}")
    if unknown := [name for name in given if name not in _DESCRIBED]:
        raise ValueError(f"--gpu {text}: {unknown[0]!r} is none of {', '.join((*_DESCRIBED, 'class'))}")
    if missing := [name for name in _NEEDED if name not in given]:
        raise ValueError(f"--gpu {text}: say {' and '.join(missing)}, too")
    figures: dict[str, float] = {}
    for name, value in given.items():
        try:
            figures[name] = float(value) * _DESCRIBED[name]
        except ValueError:
            figures[name] = 0.0
        if not 0 < figures[name] < math.inf:
            raise ValueError(f"--gpu {text}: {name} must be a number above 0, got {value!r}")
    peaks = {"bf16": figures["peak"]} | ({"fp8": figures["fp8"]} if "fp8" in figures else {})
    memory, links = int(figures["memory"]), (figures.get("nvlink"), figures.get("host", PCIE_GEN4_X16))
    return Hardware(text, (), peaks, memory, figures["bandwidth"], *links, None, kind, figures.get("watts"))


def hardware_named(name: str) -> Hardware:
    """The first GPU whose name here begins with these words, whatever their case, with spaces or hyphens between them;
    the one that its driver calls so; or the one that figures describe.

    Raises:
        ValueError: no such GPU; the message has the nearest names, and all that are known.
    """
    if "=" in name:
        return hardware_described(name)
    if (exact := find_hardware(name)) is not None and exact.peak_flops:
        return exact
    words = name.lower().replace("-", " ").split()
    gpus = {hardware.name.lower().replace(" ", "-"): hardware for hardware in HARDWARE if hardware.peak_flops}
    for known, hardware in gpus.items():
        if words and known.split("-")[: len(words)] == words:
            return hardware
    near = " or ".join(difflib.get_close_matches(name.lower(), gpus, n=3))
    known = f"{f'did you mean {near}? ' if near else ''}known are {', '.join(gpus)}"
    raise ValueError(f"--gpu {name}: {known}; or figures, as in peak=165,bandwidth=1008,memory=24")
