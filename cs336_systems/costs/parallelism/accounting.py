"""The 4D accounting question: where does a 220-billion-parameter stack of feed-forward layers fit, and when is it busy?

XXL is d_model 16384, d_ff 53248, 126 blocks, each two matrices without a nonlinearity worth storing (CS336 2025
handout, section 2.4; the shape is Llama-3 405B's). Master weights, accumulated gradients and AdamW's two moments are
FP32: 16 bytes per parameter. What forward keeps for backward is BF16: per token the input of each matrix, 2 (d_model +
d_ff) bytes a block.

Where states and half of the activations (every second layer's) are cut over N devices and the rest is not, a device
holds

    (16 P + A / 2) / N + A / 2

with A the activations of the tokens at hand. Gathered weights, workspaces and fragmentation come on top. A device is
busy in forward if ``costs/parallelism/mesh.py`` says so: there stand both conventions, collectives of the two axes at
the same time or one after another, and rings of n against n - 1. "GB" is 1e9 bytes; the H100's 80 GB are 80 GiB, so
both counts are given.
"""

import math
from dataclasses import dataclass, replace

from cs336_systems.costs.parallelism.forms import Device, FeedForward
from cs336_systems.costs.parallelism.mesh import Network, least_tokens, least_tokens_per_device


@dataclass(frozen=True)
class FeedForwardStack:
    """Blocks of one feed-forward layer each, and how many bytes its states take.

    Raises:
        ValueError: no blocks.
    """

    layer: FeedForward
    n_blocks: int
    state_bytes_per_parameter: int = 16
    """FP32 master weight, gradient and two moments."""

    def __post_init__(self) -> None:
        if self.n_blocks < 1:
            raise ValueError(f"number of blocks must be positive, got {self.n_blocks}")

    @property
    def n_parameters(self) -> int:
        return self.n_blocks * self.layer.n_parameters

    @property
    def state_bytes(self) -> int:
        return self.n_parameters * self.state_bytes_per_parameter

    @property
    def activation_bytes_per_token(self) -> int:
        """Inputs of every matrix: of d_model into those that go up, of d_ff into the one that comes down.

        The up-projections of a gated layer share their input, and their outputs are kept besides.
        """
        inputs = self.layer.d_model + self.layer.d_ff
        gated = (self.layer.n_matrices - 1) * self.layer.d_ff if self.layer.n_matrices > 2 else 0
        return self.n_blocks * self.layer.bytes_per_element * (inputs + gated)

    def device_bytes(self, n_devices: int, tokens: float = 0.0) -> float:
        """Bytes per device with states and half of the activations of ``tokens`` cut over ``n_devices``.

        Raises:
            ValueError: no devices, or negative tokens.
        """
        if n_devices < 1:
            raise ValueError(f"number of devices must be positive, got {n_devices}")
        half = self._half_of_activations(tokens)
        return (self.state_bytes + half) / n_devices + half

    def least_devices(self, memory_bytes: float, tokens: float = 0.0) -> int:
        """Fewest devices of which each holds its part.

        Raises:
            ValueError: as ``device_bytes``; or the activations that are not cut fill a device by themselves.
        """
        half = self._half_of_activations(tokens)
        room = memory_bytes - half
        if room <= 0:
            raise ValueError(f"activations of {tokens:g} tokens leave nothing of {memory_bytes:g} bytes per device")
        return max(1, math.ceil((self.state_bytes + half) / room))

    def _half_of_activations(self, tokens: float) -> float:
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        return tokens * self.activation_bytes_per_token / 2


XXL = FeedForwardStack(FeedForward(16_384, 53_248, n_matrices=2), n_blocks=126)


def torus_network(device: Device, fsdp_axes: int, tp_axes: int, *, overlapping: bool, large_rings: bool) -> Network:
    """A mesh on a torus, M_x and M_y of whose axes carry FSDP and tensor parallelism.

    Raises:
        ValueError: no axis for one of them.
    """
    egress = device.egress_bytes_per_s
    return Network(device.flops_per_s, fsdp_axes * egress, tp_axes * egress, overlapping, large_rings)


@dataclass(frozen=True)
class MeshThreshold:
    """Tokens from which the forward pass on a mesh is bound by compute."""

    fsdp: int
    tp: int
    tokens: float
    """Global batch; infinite if the tensor-parallel axis is too long for any."""

    @property
    def tokens_per_device(self) -> float:
        return self.tokens / (self.fsdp * self.tp)


def thresholds(layer: FeedForward, n_devices: int, network: Network) -> list[MeshThreshold]:
    """Every whole mesh of so many devices, from all FSDP to all tensor parallel: what cutting otherwise saves.

    Raises:
        ValueError: no devices.
    """
    if n_devices < 1:
        raise ValueError(f"number of devices must be positive, got {n_devices}")
    splits = [(n_devices // y, y) for y in range(1, n_devices + 1) if n_devices % y == 0]
    return [MeshThreshold(x, y, least_tokens(layer, x, y, network)) for x, y in splits]


def smaller_batches(layer: FeedForward, fsdp: int, tp: int, network: Network) -> list[tuple[str, float]]:
    """Tokens per device that keep forward bound by compute: as it is, and with each remedy that the arithmetic knows.

    In order: the mesh and network as given; the same devices cut as well as whole numbers allow; the axes' collectives
    at the same time instead of one after another; both; and the bound that no split of many devices passes. Beyond this
    arithmetic help pipeline stages between groups of devices, which send activations only.
    Narrower numbers alone do not: half the bytes at twice the FLOP/s leaves every limit where it was.
    """
    own = replace(network, overlapping=True)

    def best(limits: Network) -> MeshThreshold:
        return min(thresholds(layer, fsdp * tp, limits), key=lambda found: found.tokens)

    recut, recut_own = best(network), best(own)
    return [
        (f"{fsdp} x {tp}", least_tokens(layer, fsdp, tp, network) / (fsdp * tp)),
        (f"cut {recut.fsdp} x {recut.tp}", recut.tokens_per_device),
        (f"{fsdp} x {tp}, axes overlap", least_tokens(layer, fsdp, tp, own) / (fsdp * tp)),
        (f"cut {recut_own.fsdp} x {recut_own.tp}, axes overlap", recut_own.tokens_per_device),
        ("best split of many devices", least_tokens_per_device(layer, network)),
    ]
