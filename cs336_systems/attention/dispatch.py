"""One signature for every attention: the caller names an implementation, and gets it or a reason why not.

    o = attention(q, k, v, causal=True, impl="flash")
    reason = unsupported_reason("sdpa-cudnn", q, k, v, causal=True)     # None, or one sentence

    reference            the model's own: every score in memory                 any device and dtype
    reference-compiled   the same through torch.compile
    tiled                FlashAttention-2 in plain PyTorch, tile by tile         any device and dtype
    flash                FlashAttention-2 in Triton                              CUDA
    hopper               the same for Hopper GPUs, in Gluon                      H100, H200: bf16/fp16, head dims to 128
    sdpa-flash           torch's FlashAttention-2                                CUDA bf16/fp16; the CPU's own
    sdpa-cudnn           cuDNN through torch                                     CUDA bf16/fp16
    sdpa-efficient       torch's memory-efficient kernel                         CUDA
    flex                 FlexAttention, compiled                                 CUDA

Nothing here falls back: an implementation that cannot serve a request raises, and never hands it to another. What
torch's kernels accept is asked of torch, since the rules change with its version.
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
from cs336_systems.attention.shapes import AttentionShape, hopper_limits, kernel_limits, validate
from cs336_systems.attention.tiled import TiledFlashAttention
from cs336_systems.attention.variants import RECOMPILE_LIMIT
from cs336_systems.config import ATTENTIONS
from cs336_systems.costs.kept import check_known
from cs336_systems.model.ops import attention as materialised_attention

Serve = Callable[[Tensor, Tensor, Tensor, bool, float | None], Tensor]
"""(q, k, v, causal, scale) -> o, of inputs that the implementation does not refuse."""

Refuse = Callable[[Tensor, Tensor, Tensor, bool, AttentionShape], str | None]
"""(q, k, v, causal, shape) -> why it cannot serve these valid inputs, in one sentence, or None if it can."""


class Implementation(NamedTuple):
    """One way to compute attention, and all that is to be known of it."""

    serve: Serve
    refuse: Refuse


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, impl: str, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v by the named implementation.

    Args:
        q: (batch[, heads], n_queries, d_head).
        k, v: (batch[, kv_heads], n_keys, d_head); kv_heads divides heads.
        causal: query i sees the keys j <= i + n_keys - n_queries.
        impl: one of ``config.ATTENTIONS``.
        scale: 1 / sqrt(d_head) by default.

    Returns:
        The shape and dtype of ``q``.

    Raises:
        ValueError: the inputs do not fit together, there is no such implementation, or it cannot serve this request;
            the message says why. Nothing has been launched then.
    """
    if reason := unsupported_reason(impl, q, k, v, causal=causal, scale=scale):
        raise ValueError(f"attention {impl!r} cannot serve this request: {reason}")
    return _named(impl).serve(q, k, v, causal, scale)


def attention_op(impl: str) -> Callable[..., Tensor]:
    """``impl`` as a ``ModelOps`` takes it, (q, k, v, *, causal) -> o; ask ``unsupported_reason`` first, once.

    Raises:
        ValueError: there is no such implementation.
    """
    serve = _named(impl).serve
    return lambda q, k, v, *, causal: serve(q, k, v, causal, None)


def unsupported_reason(
    impl: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> str | None:
    """Why ``impl`` cannot serve these inputs, in one sentence, or None if it can.

    Raises:
        ValueError: there is no such implementation, or no implementation could take these inputs.
    """
    refuse = _named(impl).refuse
    return refuse(q, k, v, causal, validate(q, k, v, scale=scale))


def _named(impl: str) -> Implementation:
    check_known("attention", impl, ATTENTIONS)
    return _IMPLEMENTATIONS[impl]


def _four_d(x: Tensor) -> Tensor:
    """Add a head dimension of one where there is none."""
    return x if x.ndim == 4 else x.unsqueeze(1)


def _off_cuda(impl: str, q: Tensor) -> str | None:
    if q.device.type == "cuda":
        return None
    return f"{impl} is compiled for CUDA devices, the inputs are on {q.device.type}"


def _empty_batch(shape: AttentionShape) -> str | None:
    return "it takes no empty batch" if shape.batch == 0 else None


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    o = materialised_attention(_four_d(q), _four_d(k), _four_d(v), causal=causal)
    return o if q.ndim == 4 else o.squeeze(1)


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


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    from cs336_systems.attention.flash.function import FlashKernels  # Triton is not on every machine

    return FlashKernels.apply(q, k, v, causal, scale)


def _hopper(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    from cs336_systems.attention.hopper.function import HopperKernels

    return HopperKernels.apply(q, k, v, causal, scale)


@functools.lru_cache(maxsize=32)
def _causal_blocks(shape: AttentionShape, device: torch.device) -> BlockMask | None:
    """Which blocks of scores a causal mask leaves, made once per shape: making it is not part of attention."""
    return variants.make_block_mask(variants.causal(), shape, device)


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    if not causal:
        return variants.variant_attention(q, k, v, variants.full(), scale=scale)
    blocks = _causal_blocks(AttentionShape.of(q, k), q.device)
    return variants.variant_attention(q, k, v, variants.causal(), scale=scale, block_mask=blocks)


def _sdpa(backend: SDPBackend, accepts: Callable[..., bool]) -> Implementation:
    """One of torch's kernels, which torch is asked about by ``accepts``."""

    def serve(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
        grouped = q.ndim == 4 and q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(
                _four_d(q), _four_d(k), _four_d(v), is_causal=causal, scale=scale, enable_gqa=grouped
            )
        return o if q.ndim == 4 else o.squeeze(1)

    def refuse(q: Tensor, k: Tensor, v: Tensor, causal: bool, shape: AttentionShape) -> str | None:
        if backend == SDPBackend.CUDNN_ATTENTION and (reason := _empty_batch(shape)):
            return reason
        if causal and shape.offset:
            return (
                f"torch aligns a causal mask to the first key and this suite to the last, which differ for "
                f"{shape.n_queries} queries and {shape.n_keys} keys"
            )
        if q.device.type != "cuda":
            on_any_device = backend == SDPBackend.FLASH_ATTENTION
            return None if on_any_device else f"it needs a CUDA device, the inputs are on {q.device.type}"
        grouped = shape.heads != shape.kv_heads
        params = torch.backends.cuda.SDPAParams(_four_d(q), _four_d(k), _four_d(v), None, 0.0, causal, grouped)
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
    "flash": Implementation(_flash, lambda q, *_: _off_cuda("flash", q) or kernel_limits(q)),
    "hopper": Implementation(_hopper, lambda q, *_: _off_cuda("hopper", q) or hopper_limits(q)),
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION, torch.backends.cuda.can_use_flash_attention),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.can_use_cudnn_attention),
    "sdpa-efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.can_use_efficient_attention),
    "flex": Implementation(_flex, lambda q, k, v, causal, shape: _off_cuda("flex", q) or _empty_batch(shape)),
}
