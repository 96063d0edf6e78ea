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


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """2026: data parallelism that sends each gradient as soon as it is ready."""
    from cs336_systems.distributed.ddp import OverlappedDDP

    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2026: between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_individual_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """2025: the same under another name."""
    return get_ddp(module)


def ddp_individual_parameters_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2025: between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float | None) -> torch.nn.Module:
    """2025: data parallelism in buckets of at most this many MiB; None for a single bucket."""
    from cs336_systems.distributed.ddp import BucketedDDP

    return BucketedDDP(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2025: between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2025: before each step; there is nothing to do."""
