"""When does communication take longer than computation? Data, FSDP and tensor parallelism of one feed-forward layer.

Each form divides the same work but sends different tensors: data parallelism and FSDP send weights (or their
gradients), tensor parallelism sends activations. With B tokens in the global batch, a SwiGLU layer of m = 3 matrices
between widths D and F, e bytes per element, and N devices, each device computes and sends (ring collectives of
``costs/communication.py``):

    form             pass      FLOPs       collectives                              bytes sent per device
    data parallel    forward   2 m BDF/N   -                                        0
                     backward  4 m BDF/N   all-reduce of the weight gradients       2 e m DF (N-1)/N
    FSDP             forward   2 m BDF/N   all-gather of weights                    e m DF (N-1)/N
                     backward  4 m BDF/N   all-gather, reduce-scatter of gradients  2 e m DF (N-1)/N
    tensor parallel  forward   2 m BDF/N   all-reduce of the output                 2 e BD (N-1)/N
                     backward  4 m BDF/N   all-reduce of the input's gradient       2 e BD (N-1)/N

Compute takes FLOPs / C seconds, communication bytes / W, and the two overlap, so a pass is communication-bound once the
latter is longer. Since compute is divided by N too, the limits are exact, with N - 1 in place of N:

    data parallel backward, FSDP both ways    N - 1 <= 2 B W / (e C)       tokens per device >= C/W, for two bytes
    tensor parallel forward                   N - 1 <= m F W / (e C)       whatever the batch
    tensor parallel backward                  N - 1 <= 2 m F W / (e C)

W is a device's egress: the bytes per second that it sends. A ring in one direction over NVLink has the link's bandwidth
in one direction (450 GB/s on an H100, half of the advertised 900). A TPU's torus axis has a neighbour on each side and
rings run both ways, so that W is twice the bandwidth of one link, which the scaling book calls bidirectional. The book
approximates (N-1)/N by 1; its limits are lower by one device. Its layer has m = 2 matrices, and gathers activations
before and reduce-scatters them after, which sends as many bytes as an all-reduce.

Tensor parallelism computes, with W1 and W2 sharded by columns, W3 by rows, and index i for a device's shard,

    forward    x1_i = x W1_i,  x2_i = x W2_i,  z_i = f(x1_i) x2_i,  y = all-reduce(z_i W3_i)
    backward   dz_i = dy W3_i^T,  dW3_i = z_i^T dy,  dx2_i = dz_i f(x1_i),  dx1_i = dz_i x2_i f'(x1_i)
               dW1_i = x^T dx1_i,  dW2_i = x^T dx2_i,  dx = all-reduce(dx1_i W1_i^T + dx2_i W2_i^T)

Both terms of dx are added before they are sent: backward has one all-reduce of (B, D), like forward, and twice the
matmuls.

Conventions: CS336 2026 handout, section 8; "How to scale your model", chapter 5
(jax-ml.github.io/scaling-book/training).
Limits: peaks, no latency; attention, embeddings and norms are left out.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cs336_systems.config import check_known
from cs336_systems.costs.communication import cost
from cs336_systems.hardware import GB_PER_S, TERA, Hardware, hardware_named

Form = Literal["data-parallel", "fsdp", "tensor-parallel"]
Pass = Literal["forward", "backward"]

FORMS: tuple[Form, ...] = ("data-parallel", "fsdp", "tensor-parallel")
PASSES: tuple[Pass, ...] = ("forward", "backward")
COLLECTIVES: dict[Form, dict[Pass, tuple[str, ...]]] = {
    "data-parallel": {"forward": (), "backward": ("all_reduce",)},
    "fsdp": {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")},
    "tensor-parallel": {"forward": ("all_reduce",), "backward": ("all_reduce",)},
}
"""The collectives of each pass: on weights or their gradients, and on activations in tensor parallelism."""


BYTES_PER_ELEMENT = 2
"""Bytes per element of weights, gradients and activations that are sent in bf16: e."""

GPUS_PER_HOST, NETWORK_BYTES_PER_S = 8, 50 * GB_PER_S
"""A DGX or HGX server has eight GPUs behind NVSwitches, each with a network card (ConnectX-7) of 400 Gbit/s."""


@dataclass(frozen=True)
class Device:
    """One accelerator in a cluster: what it computes, holds and sends."""

    name: str
    flops_per_s: float
    """Dense bf16 peak, C."""
    memory_bytes: float
    egress_bytes_per_s: float
    """W inside the fast domain: NVLink in one direction; on a TPU both directions of one torus axis."""
    domain_size: int
    """Devices behind one switch, or in one pod."""
    network_bytes_per_s: float
    """Bytes per second that one device sends outside its domain."""

    @classmethod
    def of(cls, name: str, gpu: Hardware, network_bytes_per_s: float = NETWORK_BYTES_PER_S) -> "Device":
        """A GPU in a DGX or HGX server, with its datasheet's rates; the datasheet must give its memory and a link."""
        link = gpu.link_bytes_per_s or gpu.host_link_bytes_per_s
        assert gpu.memory_bytes and link, name
        return cls(name, gpu.peaks("bf16")[0], gpu.memory_bytes, link, GPUS_PER_HOST, network_bytes_per_s)

    def egress(self, world_size: int) -> float:
        """Bytes per second that each device sends in a ring over ``world_size`` devices, W.

        If the ring spans several domains, rings leave a domain through all its network cards. The rate is the smaller
        of one device's link and a domain's cards together.
        """
        if world_size <= self.domain_size:
            return self.egress_bytes_per_s
        return min(self.egress_bytes_per_s, self.domain_size * self.network_bytes_per_s)


DEVICES: dict[str, Device] = {
    # Servers: https://www.nvidia.com/en-us/data-center/dgx-h100/, and the pages of dgx-h200 and dgx-b200.
    **{name: Device.of(name, hardware_named(name)) for name in ("h100", "h200", "b200")},
    # C and W as both CS336 handouts and chapter 5 of the scaling book take them (Google publishes 459 TFLOP/s and 4,800
    # Gbit/s of links per chip: 1e11 bytes/s for each of six); memory is Google's 95 GB; a pod has 16 x 20 x 28 chips,
    # and 25 GB/s per host of four leave it (https://cloud.google.com/tpu/docs/v5p,
    # https://jax-ml.github.io/scaling-book/tpus).
    "tpu-v5p": Device("tpu-v5p", 460 * TERA, 95e9, 2 * 9e10, 8960, 25 * GB_PER_S / 4),
}


def find_device(name: str) -> Device:
    """A preset by name; ValueError for any other."""
    check_known("device", name, DEVICES)
    return DEVICES[name]


def check_positive(of: object, *names: str) -> None:
    """Raise ValueError, with name and value, if one of these fields is not positive."""
    for name in names:
        if not getattr(of, name) > 0:
            raise ValueError(f"{name} must be positive, got {getattr(of, name)}")


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer: matrices between two widths; ValueError for a size that is not positive."""

    d_model: int
    d_ff: int
    n_matrices: int = 3
    """3 for SwiGLU (the 2026 handout), 2 for an up- and a down-projection (the scaling book, the 2025 handout)."""

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "d_ff", "n_matrices")

    @property
    def n_parameters(self) -> int:
        return self.n_matrices * self.d_model * self.d_ff

    @property
    def weight_bytes(self) -> int:
        return self.n_parameters * BYTES_PER_ELEMENT

    def activation_bytes(self, tokens: float) -> float:
        """Bytes of the layer's input, or of its output."""
        return tokens * self.d_model * BYTES_PER_ELEMENT

    def flops(self, tokens: float, which: Pass) -> float:
        """Matmul FLOPs of all devices together; backward has two matmuls for each of forward's."""
        return (2 if which == "forward" else 4) * self.n_parameters * tokens


@dataclass(frozen=True)
class PassCost:
    """One pass of one layer on one device."""

    flops: float
    sent_bytes: float
    """Bytes that the device sends for its collectives, as ``costs/communication.py`` counts them."""

    def compute_s(self, device: Device) -> float:
        return self.flops / device.flops_per_s

    def communication_s(self, egress_bytes_per_s: float) -> float:
        return self.sent_bytes / egress_bytes_per_s


def pass_cost(form: Form, layer: FeedForward, tokens: float, world_size: int, which: Pass) -> PassCost:
    """The FLOPs and bytes of one device in one pass of ``layer`` over a global batch of ``tokens``.

    Raises:
        ValueError: no such form or pass, no devices, or no tokens.
    """
    check_known("form", form, FORMS, " of parallelism")
    check_known("pass", which, PASSES)
    if world_size < 1:
        raise ValueError(f"world size must be positive, got {world_size}")
    if not tokens > 0:
        raise ValueError(f"tokens must be positive, got {tokens}")
    total = layer.activation_bytes(tokens) if form == "tensor-parallel" else layer.weight_bytes
    sent = sum(cost(name, world_size, total).wire_bytes for name in COLLECTIVES[form][which])
    return PassCost(layer.flops(tokens, which) / world_size, sent)


def largest_world(
    form: Form, layer: FeedForward, tokens: float, which: Pass, flops_per_s: float, egress_bytes_per_s: float
) -> float:
    """The most devices with which computation hides communication, for a fixed global batch; infinite if none is sent.

    Raises:
        ValueError: no such form or pass.
    """
    check_known("form", form, FORMS, " of parallelism")
    check_known("pass", which, PASSES)
    intensity = BYTES_PER_ELEMENT * flops_per_s / egress_bytes_per_s
    if not COLLECTIVES[form][which]:
        return math.inf
    if form == "tensor-parallel":
        return 1 + layer.n_matrices * layer.d_ff / intensity * (1 if which == "forward" else 2)
    return 1 + 2 * tokens / intensity
