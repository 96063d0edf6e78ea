"""What DiLoCo sends: replicas that train by themselves and average their weights every H steps, by arithmetic.

Data parallelism sums the P gradients of n replicas in every step. On a ring each replica sends 2 (n - 1) / n times
their bytes for that (``costs/communication.py``). DiLoCo sums as many changes of weights, and that every H steps:

    bytes of a step, from each replica    2 (n - 1)/n P b        data parallelism; b bytes for an element
                                          2 (n - 1)/n P b / H    DiLoCo
                                            (n - 1)   P b / H    DiLoCo in 8 bits, where each gathers the others' bytes

8 bits are b = 1 and 4 bytes of scale for ``SCALED`` elements. Gathered by all, they cost n / 2 times what a sum in 8
bits would. Fragments divide what is sent at once, not the sum: F of them need 1/F of the peak.

Sources: Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023 (arXiv 2311.08105),
H of 500; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (2501.18512).
"""

from cs336_systems.costs.communication import cost

SCALED = 256
"""Elements that share a scale when they are sent in 8 bits."""


def sent_bytes_per_step(
    n_parameters: int, n_replicas: int, every: int = 1, *, element_bytes: int = 4, in_8_bits: bool = False
) -> float:
    """Bytes that each replica sends in a step, on average over ``every`` steps.

    Args:
        every: steps between two averages of the same weights.
        element_bytes: of a gradient, or of a change of weights that is not sent in 8 bits.

    Raises:
        ValueError: no replicas, or no step between averages.
    """
    if every < 1:
        raise ValueError(f"steps between averages must be positive, got {every}")
    if in_8_bits:
        total = n_replicas * n_parameters * (1 + 4 / SCALED)
        return cost("all_gather", n_replicas, total).wire_bytes / every
    return cost("all_reduce", n_replicas, n_parameters * element_bytes).wire_bytes / every
