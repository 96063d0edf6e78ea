"""Fused Triton kernels, one file each, beside the formula it computes."""

from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward_backward
from cs336_systems.kernels.rotary import Rotary, rotary, rotate_
from cs336_systems.kernels.swiglu import SwiGLU, swiglu, swiglu_backward, swiglu_backward_, swiglu_forward
from cs336_systems.kernels.weighted_sum import WeightedSum, weighted_sum

__all__ = [
    "Rotary",
    "SwiGLU",
    "WeightedSum",
    "linear_cross_entropy",
    "linear_cross_entropy_forward_backward",
    "rotary",
    "rotate_",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_",
    "swiglu_forward",
    "weighted_sum",
]
