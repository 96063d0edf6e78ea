"""This package under the hook names of the public CS336 assignment 2 test suites, so that they run on it unchanged.

Copy a suite's own test files into this folder; they import their hooks from here. The names are those of
github.com/stanford-cs336/assignment2-systems; the attention hooks are the same in its 2025 and 2026 editions.
"""

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in PyTorch: ``.apply(q, k, v, is_causal)`` on (batch, length, d)."""
    from cs336_systems.attention import TiledFlashAttention

    return TiledFlashAttention


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton, likewise."""
    from cs336_systems.attention.flash import FlashAttention

    return FlashAttention
