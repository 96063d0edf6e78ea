"""FSDP and tensor parallelism together: how to divide N = X Y devices into X for weights and Y for activations.

Along X, a device all-gathers its column's 1/Y of the weights; along Y, it all-reduces the outputs of its row's 1/X of
the batch. In the notation of ``costs/parallelism/forms.py``, forward takes:

    T_compute = 2 m BDF / (X Y C)     T_fsdp = (X-1)/X e m DF / (Y W_x)     T_tp = 2 (Y-1)/Y e BD / (X W_y)

Relative to compute, each communication time depends only on its own axis:

    T_fsdp / T_compute = (X - 1) / a,  a = 2 B W_x / (e C)        T_tp / T_compute = (Y - 1) / t,  t = m F W_y / (e C)

where a and t are the limits of FSDP alone and of tensor parallelism alone. Therefore everything has a closed form:

                            axes overlap (own links): max         axes share the network: sum
    bound by compute while  X - 1 <= a and Y - 1 <= t             (X-1)/a + (Y-1)/t <= 1
    best X for a given N    root of t X^2 + (a-t) X - a N         sqrt(a N / t)
    largest N               (1 + a)(1 + t)                        a t (1 + 1/a + 1/t)^2 / 4

For large rings (X, Y in place of X - 1, Y - 1, as in the scaling book) the best X is sqrt(a N / t) in both cases, and
the largest N are a t and a t / 4: sharing the network costs a factor of four in devices, or in tokens per device. With
the handout's m = 3 and e = 2, they are N <= 3/2 B F (W/C)^2 and 3/8 B F (W/C)^2; with the book's m = 2 and M_x, M_y
torus axes, the sum needs tokens per device >= 4 (C/W)^2 / (M_x M_y F).

The 4D accounting question (CS336 2025 handout, section 2.4) asks where a stack of feed-forward layers fits, and when it
is busy. XXL has the shape of Llama-3 405B: d_model 16384, d_ff 53248, 126 blocks, each two matrices without a
nonlinearity worth storing. Master weights, accumulated gradients and AdamW's two moments are FP32: 16 bytes per
parameter. Saved activations are BF16: per token the input of each matrix, 2 (d_model + d_ff) bytes per block. If the
states of P parameters and half of the activations A (every second layer's) are sharded over N devices, each holds
(16 P + A / 2) / N + A / 2. Gathered weights, workspaces and fragmentation are not included. "GB" is 1e9 bytes.

Sources: CS336 2026 handout, section 8.5; scaling book, chapter 5, "Mixed FSDP and tensor parallelism".
"""

import math
from dataclasses import dataclass, replace

from cs336_systems.costs.parallelism.forms import BYTES_PER_ELEMENT, FeedForward, check_positive
from cs336_systems.hardware import MIB


@dataclass(frozen=True)
class Network:
    """The limits of a mesh: compute per device, and the egress along each of its two axes.

    Raises:
        ValueError: a rate is not positive.
    """

    flops_per_s: float
    fsdp_bytes_per_s: float
    """W_x: on a torus the number of axes that FSDP spans times the W of one."""
    tp_bytes_per_s: float
    """W_y."""
    overlapping: bool
    """Whether collectives along the two axes run at the same time, each at full speed."""
    large_rings: bool = False
    """Whether to approximate (n-1)/n by 1, as the scaling book does."""

    def __post_init__(self) -> None:
        check_positive(self, "flops_per_s", "fsdp_bytes_per_s", "tp_bytes_per_s")

    @property
    def _own(self) -> int:
        """The chunks of a ring that a device already has: 1, or 0 in the large-ring approximation."""
        return 0 if self.large_rings else 1


@dataclass(frozen=True)
class Split:
    """Seconds of one layer's forward pass on an X by Y mesh."""

    fsdp: float
    """X; a whole number unless a closed form returned it."""
    tp: float
    """Y."""
    compute_s: float
    fsdp_s: float
    tp_s: float
    communication_s: float
    """The larger of the two communication times, or their sum."""


def evaluate(layer: FeedForward, tokens: float, fsdp: float, tp: float, network: Network) -> Split:
    """Seconds of the forward pass over a global batch of ``tokens``.

    Raises:
        ValueError: no tokens, or an axis shorter than one device.
    """
    if not tokens > 0:
        raise ValueError(f"tokens must be positive, got {tokens}")
    if fsdp < 1 or tp < 1:
        raise ValueError(f"an axis has at least one device, got {fsdp:g} x {tp:g}")
    compute = layer.flops(tokens, "forward") / (fsdp * tp * network.flops_per_s)
    weights, activations = layer.weight_bytes / tp, layer.activation_bytes(tokens) / fsdp
    fsdp_s = _share(fsdp, network) * weights / network.fsdp_bytes_per_s
    tp_s = 2 * _share(tp, network) * activations / network.tp_bytes_per_s
    total = max(fsdp_s, tp_s) if network.overlapping else fsdp_s + tp_s
    return Split(fsdp, tp, compute, fsdp_s, tp_s, total)


def _share(n: float, network: Network) -> float:
    return 0.0 if n == 1 else (n - network._own) / n


def axis_limits(layer: FeedForward, tokens: float, network: Network) -> tuple[float, float]:
    """(a, t): the largest X - 1 and Y - 1 (X and Y in large rings) at which each axis alone is compute-bound."""
    fsdp = 2 * tokens * network.fsdp_bytes_per_s / (BYTES_PER_ELEMENT * network.flops_per_s)
    tp = layer.n_matrices * layer.d_ff * network.tp_bytes_per_s / (BYTES_PER_ELEMENT * network.flops_per_s)
    return fsdp, tp


def optimal_split(layer: FeedForward, tokens: float, world_size: float, network: Network) -> Split:
    """The split with the least communication time in closed form; X and Y are at least 1 and not rounded.

    Raises:
        ValueError: no devices.
    """
    if not world_size >= 1:
        raise ValueError(f"number of devices must be positive, got {world_size}")
    a, t = axis_limits(layer, tokens, network)
    if network.overlapping and not network.large_rings:
        x = (t - a + math.sqrt((t - a) ** 2 + 4 * a * t * world_size)) / (2 * t)
    else:
        x = math.sqrt(a * world_size / t)
    x = min(max(x, 1.0), float(world_size))
    return evaluate(layer, tokens, x, world_size / x, network)


def best_whole_split(layer: FeedForward, tokens: float, world_size: int, network: Network) -> Split:
    """The split into whole numbers with the least communication time, found by trying all of them."""
    splits = [evaluate(layer, tokens, x, y, network) for x, y in whole_splits(world_size)]
    return min(splits, key=lambda split: split.communication_s)


def whole_splits(world_size: int) -> list[tuple[int, int]]:
    """Every (X, Y) of whole numbers whose product is the number of devices, from FSDP only to tensor parallel only.

    Raises:
        ValueError: no devices.
    """
    if world_size < 1:
        raise ValueError(f"number of devices must be positive, got {world_size}")
    return [(world_size // y, y) for y in range(1, world_size + 1) if world_size % y == 0]


def largest_mesh(layer: FeedForward, tokens: float, network: Network) -> tuple[float, float]:
    """(X, Y) of the most devices on which the forward pass is still bound by compute."""
    a, t = axis_limits(layer, tokens, network)
    own = network._own
    if network.overlapping:
        return max(1.0, a + own), max(1.0, t + own)
    total = 1 + own / a + own / t
    x, y = a * total / 2, t * total / 2
    if y < 1:
        return max(1.0, a * (total - 1 / t)), 1.0
    if x < 1:
        return 1.0, max(1.0, t * (total - 1 / a))
    return x, y


def least_tokens(layer: FeedForward, fsdp: int, tp: int, network: Network) -> float:
    """The smallest global batch at which a mesh's forward pass is compute-bound; infinite if it never is.

    Along Y, both times grow with the batch, so more tokens do not help if that axis is too long.
    """
    per_token, t = axis_limits(layer, 1.0, network)
    own = network._own
    used = max(0.0, (tp - own) / t) if tp > 1 else 0.0
    if used > 1 or (used == 1 and not network.overlapping):
        return math.inf
    needed = max(0, fsdp - own) if fsdp > 1 else 0
    return needed / per_token / (1 if network.overlapping else 1 - used)


def least_tokens_per_device(layer: FeedForward, network: Network) -> float:
    """Tokens per device below which even the best split of many devices is communication-bound (large rings).

    It is e^2 C^2 / (2 m F W_x W_y) if the axes overlap, and four times that if they share the network.
    """
    intensity = BYTES_PER_ELEMENT * network.flops_per_s
    overlapping = intensity**2 / (2 * layer.n_matrices * layer.d_ff * network.fsdp_bytes_per_s * network.tp_bytes_per_s)
    return overlapping if network.overlapping else 4 * overlapping


def thresholds(layer: FeedForward, n_devices: int, network: Network) -> dict[tuple[int, int], float]:
    """``least_tokens`` of every whole mesh of ``n_devices``, in the order of ``whole_splits``."""
    return {(x, y): least_tokens(layer, x, y, network) for x, y in whole_splits(n_devices)}


def smaller_batches(layer: FeedForward, fsdp: int, tp: int, network: Network) -> list[tuple[str, float]]:
    """(Remedy, tokens per device at which forward becomes compute-bound), for each remedy in this model.

    In order: the mesh and network as given; the best split of the same devices into whole numbers; overlapping the two
    axes' collectives; both; and the bound for any split of many devices. Pipeline stages between groups of devices
    would help too, as they send only activations. A narrower dtype alone would not: half the bytes at twice the FLOP/s
    leaves every limit unchanged.
    """
    n, found = fsdp * tp, []
    for limits, how in ((network, ""), (replace(network, overlapping=True), ", axes overlap")):
        of_mesh = thresholds(layer, n, limits)
        x, y = min(of_mesh, key=of_mesh.__getitem__)
        found.append((f"{fsdp} x {tp}{how}", of_mesh[fsdp, tp] / n))
        found.append((f"cut {x} x {y}{how}", of_mesh[x, y] / n))
    return [*found, ("best split of many devices", least_tokens_per_device(layer, network))]


@dataclass(frozen=True)
class FeedForwardStack:
    """Blocks of one feed-forward layer each, and how many bytes its states take; ValueError for no blocks."""

    layer: FeedForward
    n_blocks: int

    def __post_init__(self) -> None:
        if self.n_blocks < 1:
            raise ValueError(f"number of blocks must be positive, got {self.n_blocks}")

    @property
    def n_parameters(self) -> int:
        return self.n_blocks * self.layer.n_parameters

    @property
    def state_bytes(self) -> int:
        return 16 * self.n_parameters  # an FP32 master weight, its gradient and two moments

    @property
    def activation_bytes_per_token(self) -> int:
        """Bytes of every matrix's input: d_model wide for up-projections, d_ff wide for the down-projection.

        The up-projections of a gated layer share their input; their outputs are also saved.
        """
        inputs = self.layer.d_model + self.layer.d_ff
        gated = (self.layer.n_matrices - 1) * self.layer.d_ff if self.layer.n_matrices > 2 else 0
        return self.n_blocks * BYTES_PER_ELEMENT * (inputs + gated)

    def device_bytes(self, n_devices: int, tokens: float = 0.0) -> float:
        """Bytes per device if states and half of the activations of ``tokens`` are sharded over ``n_devices``.

        Raises:
            ValueError: no devices, or negative tokens.
        """
        if n_devices < 1:
            raise ValueError(f"number of devices must be positive, got {n_devices}")
        half = self._half_of_activations(tokens)
        return (self.state_bytes + half) / n_devices + half

    def least_devices(self, memory_bytes: float, tokens: float) -> int:
        """The fewest devices whose memory suffices.

        Raises:
            ValueError: as ``device_bytes``; or the activations that are not sharded fill a device by themselves.
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


H100_BYTES = 81_559 * MIB
"""Memory of an H100 of 80 GB, as nvidia-smi shows it: 79.6 GiB."""

XXL = FeedForwardStack(FeedForward(16_384, 53_248, n_matrices=2), n_blocks=126)
