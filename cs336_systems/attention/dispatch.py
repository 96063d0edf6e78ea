"""One signature for every attention: the caller names an implementation, and gets that one or a reason why not.

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
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from cs336_systems.attention import variants
from cs336_systems.attention.shapes import AttentionShape, exceeds_device, hopper_limits, kernel_limits, validate
from cs336_systems.attention.tiled import TiledFlashAttention
from cs336_systems.attention.variants import RECOMPILE_LIMIT
from cs336_systems.model.ops import attention as materialised_attention

IMPLEMENTATIONS = (
    "reference",
    "reference-compiled",
    "tiled",
    "flash",
    "hopper",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
)

_SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, impl: str, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v by the named implementation.

    Args:
        q: (batch[, heads], n_queries, d_head).
        k, v: (batch[, kv_heads], n_keys, d_head); kv_heads divides heads.
        causal: query i sees the keys j <= i + n_keys - n_queries.
        impl: one of ``IMPLEMENTATIONS``.
        scale: 1 / sqrt(d_head) by default.

    Returns:
        The shape and dtype of ``q``.

    Raises:
        ValueError: the inputs do not fit together, there is no such implementation, or it cannot serve this request;
            the message says why. Nothing has been launched then.
    """
    if reason := unsupported_reason(impl, q, k, v, causal=causal, scale=scale):
        raise ValueError(f"attention {impl!r} cannot serve this request: {reason}")
    return _SERVE[impl](q, k, v, causal, scale)


def attention_op(impl: str) -> Callable[..., Tensor]:
    """``impl`` as a ``ModelOps`` takes it, (q, k, v, *, causal) -> o; ask ``unsupported_reason`` first, once.

    Raises:
        ValueError: there is no such implementation.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention {impl!r}: known are {', '.join(IMPLEMENTATIONS)}")
    serve = _SERVE[impl]

    def op(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return serve(q, k, v, causal, None)

    return op


def unsupported_reason(
    impl: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> str | None:
    """Why ``impl`` cannot serve these inputs, in one sentence, or None if it can.

    Raises:
        ValueError: there is no such implementation, or no implementation could take these inputs.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention {impl!r}: known are {', '.join(IMPLEMENTATIONS)}")
    shape = validate(q, k, v, scale=scale)
    if impl.startswith("reference") and causal and shape.offset < 0:
        return f"it has no row for queries that see no key, got {shape.n_queries} queries and {shape.n_keys} keys"
    if impl.startswith("reference"):
        scores_bytes = math.prod(shape.scores) * q.element_size()
        if reason := exceeds_device(scores_bytes, q.device):
            return f"its scores need {reason}"
    if impl in ("flash", "hopper", "flex") and q.device.type != "cuda":
        return f"{impl} is compiled for CUDA devices, the inputs are on {q.device.type}"
    if impl == "flash":
        return kernel_limits(q)
    if impl == "hopper":
        return hopper_limits(q)
    if impl in ("flex", "sdpa-cudnn") and shape.batch == 0:
        return "it takes no empty batch"
    if impl in _SDPA_BACKENDS:
        return _sdpa_reason(impl, q, k, v, causal, shape)
    return None


def _sdpa_reason(impl: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, shape: AttentionShape) -> str | None:
    if causal and shape.offset:
        return (
            f"torch aligns a causal mask to the first key and this suite to the last, which differ for "
            f"{shape.n_queries} queries and {shape.n_keys} keys"
        )
    if q.device.type != "cuda":
        return None if impl == "sdpa-flash" else f"it needs a CUDA device, the inputs are on {q.device.type}"
    accepts = {
        "sdpa-flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa-cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "sdpa-efficient": torch.backends.cuda.can_use_efficient_attention,
    }[impl]
    params = torch.backends.cuda.SDPAParams(
        _four_d(q), _four_d(k), _four_d(v), None, 0.0, causal, shape.heads != shape.kv_heads
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if accepts(params, True):
            return None
    reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in said]
    return "; ".join(reasons) or "torch refuses these inputs without saying why"


def _four_d(x: Tensor) -> Tensor:
    """With a head dimension of one, if it has none."""
    return x if x.ndim == 4 else x.unsqueeze(1)


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


def _tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    return TiledFlashAttention.apply(q, k, v, causal, scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    from cs336_systems.attention.flash import flash_attention  # Triton is not on every machine

    return flash_attention(q, k, v, causal=causal, scale=scale)


def _hopper(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    from cs336_systems.attention.hopper import hopper_attention

    return hopper_attention(q, k, v, causal=causal, scale=scale)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    grouped = q.ndim == 4 and q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(
            _four_d(q), _four_d(k), _four_d(v), is_causal=causal, scale=scale, enable_gqa=grouped
        )
    return o if q.ndim == 4 else o.squeeze(1)


@functools.lru_cache(maxsize=32)
def _causal_blocks(shape: AttentionShape, device: torch.device) -> BlockMask | None:
    """Which blocks of scores a causal mask leaves, made once per shape: making it is not part of attention."""
    return variants.make_block_mask(variants.causal(), shape, device)


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    if not causal:
        return variants.variant_attention(q, k, v, variants.full(), scale=scale)
    blocks = _causal_blocks(validate(q, k, v), q.device)
    return variants.variant_attention(q, k, v, variants.causal(), scale=scale, block_mask=blocks)


_SERVE: dict[str, Callable[[Tensor, Tensor, Tensor, bool, float | None], Tensor]] = {
    "reference": _reference,
    "reference-compiled": _reference_compiled,
    "tiled": _tiled,
    "flash": _flash,
    "hopper": _hopper,
    "flex": _flex,
    **{impl: functools.partial(_sdpa, backend) for impl, backend in _SDPA_BACKENDS.items()},
}
