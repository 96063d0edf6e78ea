"""More GPUs for the same batch: when FSDP stops scaling, which of two limits it has reached, and the remedy.

A step of FSDP on N devices over a global batch of B tokens computes 6 P B / N FLOPs per device and sends three times
the weights, whatever N: all-gathers for forward and backward, and a reduce-scatter of gradients. Compute time falls as
1/N, communication time does not change, and the two are equal at

    N - 1 = 2 B W / (e C)          the communication limit: tokens per device reach e C / (2 W)

Independently, N cannot exceed the number of sequences as long as each device processes whole ones:

    N = B / sequence length        the local batch limit: one sequence per device

The remedy depends on which limit is reached (``REMEDIES``). Tensor parallelism divides the gathered bytes by its
degree, HSDP replicates across nodes, and context parallelism is data parallelism over tokens. The batch can grow only
up to the critical batch size, beyond which more tokens per step hardly save steps.

Conventions as in ``costs/parallelism/forms.py``: peaks and bandwidths of datasheets, two-byte weights and gradients,
compute and communication overlap, attention scores not counted. On a device that reaches 70 % of its peak, the
communication limit is 1/0.7 times as large.
"""

import math
from dataclasses import dataclass

from cs336_systems.config import MODEL_SIZES
from cs336_systems.costs.communication import cost
from cs336_systems.costs.parallelism.forms import BYTES_PER_ELEMENT, Device, check_positive

LLAMA3_70B = MODEL_SIZES["llama3-70b"]


@dataclass(frozen=True)
class ModelAndBatch:
    """A model and the batch that it is trained on.

    Raises:
        ValueError: a size is not positive, or the batch is shorter than a sequence.
    """

    n_parameters: int
    batch_tokens: int
    sequence_length: int

    def __post_init__(self) -> None:
        check_positive(self, "n_parameters", "batch_tokens", "sequence_length")
        if self.batch_tokens < self.sequence_length:
            raise ValueError(
                f"a batch of {self.batch_tokens} tokens is shorter than a sequence of {self.sequence_length}"
            )

    @property
    def n_sequences(self) -> int:
        """Whole sequences in a batch, and so the most devices with at least one each."""
        return self.batch_tokens // self.sequence_length


@dataclass(frozen=True)
class FsdpStep:
    """One step of FSDP on some number of devices."""

    compute_s: float
    communication_s: float
    tokens_per_device: float
    sequences_per_device: float

    @property
    def seconds(self) -> float:
        """Compute and communication overlapped perfectly."""
        return max(self.compute_s, self.communication_s)

    @property
    def limits(self) -> tuple[bool, bool]:
        """Whether the step is beyond the local batch limit, and beyond the communication limit."""
        return self.sequences_per_device < 1, self.communication_s > self.compute_s


def fsdp_step(workload: ModelAndBatch, n_devices: int, device: Device) -> FsdpStep:
    """Time of a whole step, forward and backward; ValueError for no devices."""
    if n_devices < 1:
        raise ValueError(f"number of devices must be positive, got {n_devices}")
    flops = 6 * workload.n_parameters * workload.batch_tokens / n_devices
    weights = BYTES_PER_ELEMENT * workload.n_parameters
    sent = sum(cost(name, n_devices, weights).wire_bytes for name in ("all_gather", "all_gather", "reduce_scatter"))
    return FsdpStep(
        flops / device.flops_per_s,
        sent / device.egress(n_devices),
        workload.batch_tokens / n_devices,
        workload.batch_tokens / workload.sequence_length / n_devices,
    )


def communication_limit(workload: ModelAndBatch, device: Device) -> int:
    """The most devices with which computation hides communication.

    Inside one fast domain its links set the limit. If they allow more devices than a domain has, the network sets it,
    but it is at least a whole domain.
    """
    inside, beyond = (
        math.floor(1 + 2 * workload.batch_tokens * egress / (BYTES_PER_ELEMENT * device.flops_per_s) * (1 + 1e-12))
        for egress in (device.egress(device.domain_size), device.egress(device.domain_size + 1))
    )
    return inside if inside <= device.domain_size else max(beyond, device.domain_size)


REMEDIES = {
    (False, False): (
        "every device has whole sequences, and enough tokens to hide its gathers",
        "add FSDP devices: step time falls as 1/N",
    ),
    (False, True): (
        "several sequences per device, but too few tokens in them to hide the gathers",
        "tensor parallelism inside the domain, pipeline stages or replicas (HSDP) across; or a larger batch",
    ),
    (True, False): (
        "less than a sequence per device, though each has tokens enough to hide its gathers",
        "split sequences: context parallelism; or matrices: tensor parallelism up to its own limit",
    ),
    (True, True): (
        "neither a sequence nor enough tokens per device",
        "tensor parallelism inside the domain, context parallelism or pipeline across; else a larger batch, or stop",
    ),
}
"""For each combination of limits reached by adding devices to FSDP (local batch, communication): what has happened and
what helps."""
