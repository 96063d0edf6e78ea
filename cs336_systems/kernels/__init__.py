"""Fused Triton kernels, each beside the formula it computes."""

from cs336_systems.kernels.absmax import absmax, row_and_column_absmax
from cs336_systems.kernels.add_rms_norm import AddRMSNorm, add_rms_norm
from cs336_systems.kernels.column_sums import column_sums
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_forward_backward
from cs336_systems.kernels.norm_rotate import norm_rotate, norm_rotate_backward_
from cs336_systems.kernels.quantize import quantize
from cs336_systems.kernels.quantize_blocks import quantize_blocks
from cs336_systems.kernels.quantize_parts import PartsQuantizer
from cs336_systems.kernels.quantize_reference import Quantized
from cs336_systems.kernels.rms_norm import (
    RMSNorm,
    add_rms_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from cs336_systems.kernels.rms_norm_quantize import add_rms_norm_absmax, rms_norm_absmax, rms_norm_quantize
from cs336_systems.kernels.rotary import Rotary, rotary, rotate_
from cs336_systems.kernels.swiglu import (
    SwiGLU,
    empty_slopes,
    swiglu,
    swiglu_backward,
    swiglu_backward_,
    swiglu_forward,
)
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize
from cs336_systems.kernels.transpose_bytes import transpose_bytes
from cs336_systems.kernels.weighted_sum import WeightedSum, weighted_sum

__all__ = [
    "AddRMSNorm",
    "PartsQuantizer",
    "Quantized",
    "RMSNorm",
    "Rotary",
    "SwiGLU",
    "WeightedSum",
    "absmax",
    "add_rms_norm",
    "add_rms_norm_absmax",
    "add_rms_norm_forward",
    "column_sums",
    "empty_slopes",
    "linear_cross_entropy",
    "linear_cross_entropy_forward_backward",
    "norm_rotate",
    "norm_rotate_backward_",
    "quantize",
    "quantize_blocks",
    "rms_norm",
    "rms_norm_absmax",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_quantize",
    "rotary",
    "rotate_",
    "row_and_column_absmax",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_",
    "swiglu_backward_quantize",
    "swiglu_forward",
    "transpose_bytes",
    "weighted_sum",
]
