"""FlashAttention-2 in Triton: forward and backward kernels, and the Function that joins them to autograd."""

from cs336_systems.attention.flash.function import FlashAttention

__all__ = ["FlashAttention"]
