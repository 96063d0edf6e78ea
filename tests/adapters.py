"""This package under the hook names of the public CS336 assignment 2 test suites, so that they run on it unchanged.

Copy a suite's own test files into this folder; they import their hooks from here. The names are those of
github.com/stanford-cs336/assignment2-systems; the attention hooks are the same in its 2025 and 2026 editions.

The 2026 suite's test_fsdp_correctness[fp32] holds training on halves of a batch, averaged, against training on the
whole. The two round differently without any FSDP: on a CPU with AVX-512, plain arithmetic misses equal bits by one unit
in the last place. The tolerances that we know of, 1e-6 absolute and 1e-4 relative, leave room for that. A copy of the
test that asks for equal bits fails there through no fault of the wrapper; MKL_ENABLE_INSTRUCTIONS=AVX2 in the
environment has been seen to help where MKL obeys it.
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


def get_sharded_optimizer(params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    """Both: an optimizer whose state is divided among the ranks."""
    from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """2026: fully sharded data parallelism; the module runs in ``compute_dtype``, shards keep their own dtype."""
    from cs336_systems.distributed.fsdp import FSDP

    return FSDP(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """2026: between backward and the optimizer's step."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """2026: every parameter whole, by its name in the wrapped module."""
    return fsdp_model.gather_full_params()
