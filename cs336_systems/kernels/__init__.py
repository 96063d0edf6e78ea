"""Fused Triton kernels, one file each, beside the formula it computes."""

from cs336_systems.kernels.weighted_sum import WeightedSum, weighted_sum

__all__ = ["WeightedSum", "weighted_sum"]
