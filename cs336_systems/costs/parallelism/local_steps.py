"""The bytes that DiLoCo sends: replicas train independently and average their weights every H steps.

Data parallelism all-reduces P gradients over n replicas in every step. On a ring, each replica sends 2 (n - 1) / n
times their bytes (``costs/communication.py``). DiLoCo all-reduces P weight changes every H steps:

    bytes per step, from each replica     2 (n - 1)/n P b        data parallelism; b bytes per element
                                          2 (n - 1)/n P b / H    DiLoCo
                                            (n - 1)   P b / H    DiLoCo in 8 bits, by an all-gather

In 8 bits, b is 1 byte plus 4 bytes of scale per ``SCALED`` elements. The all-gather costs n / 2 times the bytes of an
8-bit all-reduce. F fragments send the same total, but 1/F of it at once.

Sources: Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023 (arXiv 2311.08105),
H of 500; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (2501.18512).
"""

from cs336_systems.costs.communication import cost

SCALED = 256
"""Elements that share a scale when they are sent in 8 bits."""


def sent_bytes_per_step(
    n_parameters: int, n_replicas: int, every: int = 1, *, element_bytes: int = 4, in_8_bits: bool = False
) -> float:
    """Bytes that each replica sends per step, averaged over ``every`` steps.

    Args:
        every: steps between two averages of the same weights.
        element_bytes: bytes of a gradient, or of a weight change if it is not sent in 8 bits.

    Raises:
        ValueError: ``n_replicas`` or ``every`` is not positive.
    """
    if every < 1:
        raise ValueError(f"steps between averages must be positive, got {every}")
    if in_8_bits:
        total = n_replicas * n_parameters * (1 + 4 / SCALED)
        return cost("all_gather", n_replicas, total).wire_bytes / every
    return cost("all_reduce", n_replicas, n_parameters * element_bytes).wire_bytes / every
