"""One signature for every attention: the caller names an implementation; an unsupported request raises with a reason.

    o = attention(q, k, v, causal=True, impl="flash")
    reason = unsupported_reason("sdpa-cudnn", q, k, v, causal=True)     # None, or one sentence

    reference            the model's own, all scores in memory                  any device and dtype
    reference-compiled   the same through torch.compile
    tiled                FlashAttention-2 in plain PyTorch, tile by tile         any device and dtype
    flash                FlashAttention-2 in Triton                              CUDA
    hopper               the same for Hopper GPUs, in Gluon                      H100, H200: bf16/fp16, head dims to 128
    sdpa-flash           torch's FlashAttention-2                                CUDA bf16/fp16; the CPU's own
    sdpa-cudnn           cuDNN through torch                                     CUDA bf16/fp16
    sdpa-efficient       torch's memory-efficient kernel                         CUDA
    flex                 FlexAttention, compiled                                 CUDA

No implementation falls back to another: one that does not support a request raises. Whether torch's kernels support it
is decided by torch's own checks, because the rules change with its version.

flash and tiled are FlashAttention-2: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning", ICLR 2024.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from cs336_systems.attention import variants
from cs336_systems.attention.shapes import AttentionShape, check_starts, hopper_limits, kernel_limits, validate
from cs336_systems.attention.tiled import TiledFlashAttention
from cs336_systems.attention.variants import RECOMPILE_LIMIT
from cs336_systems.config import ATTENTIONS, PACKING, check_known
from cs336_systems.model.ops import attention as materialised_attention

Serve = Callable[..., Tensor]
"""A function (q, k, v, causal, scale[, starts]) -> o of 4-D inputs that ``Refuse`` did not refuse."""

Refuse = Callable[[Tensor, Tensor, Tensor, bool, AttentionShape], str | None]
"""A function (q, k, v, causal, shape) -> one sentence that says why valid 4-D inputs cannot be served, or None."""


class Implementation(NamedTuple):
    """An implementation of attention: a function that computes it, and one that says why it does not support inputs."""

    serve: Serve
    refuse: Refuse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    impl: str,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T) v with the named implementation; gradients flow to q, k and v.

    Args:
        q: (batch[, heads], n_queries, d_head), of a floating-point dtype.
        k, v: (batch[, kv_heads], n_keys, d_head), of the dtype of ``q``; kv_heads divides heads.
        causal: whether query i sees only the keys j <= i + n_keys - n_queries.
        impl: one of ``config.ATTENTIONS``.
        scale: the factor of the scores; None means 1 / sqrt(d_head).
        starts: (batch, n_queries) int32, the first key of each query's document; the query sees no earlier key. Must
            not decrease along a sequence. Needs ``causal``, and no more queries than keys.

    Returns:
        A tensor of the shape and dtype of ``q``.

    Raises:
        ValueError: the inputs do not match, there is no such implementation, or it does not support this request; the
            message says why. No kernel has been launched.
    """
    if reason := unsupported_reason(impl, q, k, v, causal=causal, scale=scale, starts=starts):
        raise ValueError(f"attention {impl!r} cannot serve this request: {reason}")
    o = _named(impl).serve(*_four_d(q, k, v), causal, scale, *(() if starts is None else (starts,)))
    return o if q.ndim == 4 else o.squeeze(1)


def attention_op(impl: str) -> Callable[..., Tensor]:
    """Return ``impl`` as the function (q, k, v, *, causal, starts=None) -> o of ``ModelOps``, for inputs with heads.

    The function checks nothing, so call ``unsupported_reason`` once before.

    Raises:
        ValueError: there is no such implementation.
    """
    serve = _named(impl).serve

    def served(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, starts: Tensor | None = None) -> Tensor:
        return serve(q, k, v, causal, None, *(() if starts is None else (starts,)))

    return served


def unsupported_reason(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> str | None:
    """Say in one sentence why ``impl`` does not support these inputs of ``attention``; None if it does.

    Raises:
        ValueError: there is no such implementation, or the inputs are invalid for every implementation.
    """
    refuse = _named(impl).refuse
    shape = validate(q, k, v, scale=scale)
    if starts is not None:
        check_starts(shape, causal, starts)
        if impl not in PACKING:
            can = f"{', '.join(PACKING[:-1])} and {PACKING[-1]}"
            return f"it cannot mask documents from each other, as {can} can"
    return refuse(*_four_d(q, k, v), causal, shape)


def _named(impl: str) -> Implementation:
    check_known("attention", impl, ATTENTIONS)
    return _IMPLEMENTATIONS[impl]


def _four_d(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a head dimension of size 1 to inputs without one."""
    return (q, k, v) if q.ndim == 4 else (q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))


def off_cuda(impl: str, device: torch.device) -> str | None:
    """Why an implementation with compiled kernels does not support the device, or None if it does."""
    return None if device.type == "cuda" else f"{impl} is compiled for CUDA devices, the inputs are on {device.type}"


def _empty_batch(shape: AttentionShape) -> str | None:
    return "it takes no empty batch" if shape.batch == 0 else None


def _reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, starts: Tensor | None = None
) -> Tensor:
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    return materialised_attention(q, k, v, causal=causal, starts=starts)


@functools.cache
def _compiled_reference() -> Callable:
    return torch.compile(_reference, dynamic=False, fullgraph=True)


def _reference_compiled(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):  # beyond it, torch would run the eager code
        return _compiled_reference()(q, k, v, causal, scale)


def _refuse_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, shape: AttentionShape) -> str | None:
    if causal and shape.offset < 0:
        return f"it has no row for queries that see no key, got {shape.n_queries} queries and {shape.n_keys} keys"
    return None


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, starts: Tensor | None = None) -> Tensor:
    from cs336_systems.attention.flash.function import FlashKernels  # Triton is not on every machine

    return FlashKernels.apply(q, k, v, causal, scale, starts)


def _hopper(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, starts: Tensor | None = None) -> Tensor:
    from cs336_systems.attention.hopper.function import HopperKernels

    return HopperKernels.apply(q, k, v, causal, scale, False, starts)


@functools.lru_cache(maxsize=32)
def _causal_blocks(shape: AttentionShape, device: torch.device) -> BlockMask | None:
    """The causal block mask, cached per shape: building it is not part of attention."""
    return variants.make_block_mask(variants.causal(), shape, device)


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    if not causal:
        return variants.variant_attention(q, k, v, variants.full(), scale=scale)
    blocks = _causal_blocks(AttentionShape.of(q, k), q.device)
    return variants.variant_attention(q, k, v, variants.causal(), scale=scale, block_mask=blocks)


def _sdpa(backend: SDPBackend, accepts: Callable[..., bool]) -> Implementation:
    """One of torch's kernels; ``accepts`` is torch's check of its inputs."""

    def serve(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    def refuse(q: Tensor, k: Tensor, v: Tensor, causal: bool, shape: AttentionShape) -> str | None:
        if backend == SDPBackend.CUDNN_ATTENTION and (reason := _empty_batch(shape)):
            return reason
        if causal and shape.offset:
            return (
                f"torch aligns a causal mask to the first key and this suite to the last, which differ for "
                f"{shape.n_queries} queries and {shape.n_keys} keys"
            )
        if q.device.type != "cuda":
            if backend != SDPBackend.FLASH_ATTENTION:
                return f"it needs a CUDA device, the inputs are on {q.device.type}"
            strides = [x.stride(-1) for x in (q, k, v)]
            return None if strides == [1, 1, 1] else f"torch's CPU kernel needs heads of stride 1, got {strides}"
        grouped = shape.heads != shape.kv_heads
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if accepts(params, True):
                return None
        reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in said]
        return "; ".join(reasons) or "torch refuses these inputs without saying why"

    return Implementation(serve, refuse)


_IMPLEMENTATIONS = {
    "reference": Implementation(_reference, _refuse_reference),
    "reference-compiled": Implementation(_reference_compiled, _refuse_reference),
    "tiled": Implementation(TiledFlashAttention.apply, lambda *_: None),
    "flash": Implementation(_flash, lambda q, *_: off_cuda("flash", q.device) or kernel_limits(q)),
    "hopper": Implementation(_hopper, lambda q, *_: off_cuda("hopper", q.device) or hopper_limits(q)),
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION, torch.backends.cuda.can_use_flash_attention),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.can_use_cudnn_attention),
    "sdpa-efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.can_use_efficient_attention),
    "flex": Implementation(_flex, lambda q, k, v, causal, shape: off_cuda("flex", q.device) or _empty_batch(shape)),
}
