"""The inputs that every attention of this package accepts, checked in one place.

Inputs are (batch, sequence, d_head), with one head, or (batch, heads, sequence, d_head). Keys and values may have fewer
heads than queries (grouped-query attention, Ainslie et al. 2023): key/value head h is shared by the query heads
h * group to (h + 1) * group - 1. The numbers of queries and keys may differ; a causal mask is then aligned to the last
key: query i sees the keys j <= i + n_keys - n_queries, so that the last query sees every key.

    shape = validate(q, k, v, scale=None)
    shape.group, shape.default_scale

A batch may be empty. The additional limits of the Triton kernels are here too, in ``kernel_limits``, so that the
dispatch can report them on a machine without Triton.

The autograd Functions of the Triton and the Hopper kernels share ``forward_through`` and ``backward_through``, which
call a pair of opaque operators registered with torch.library. Their fake implementations give shapes, dtypes and
strides. ``torch.compile(fullgraph=True)`` traces through the Function and keeps the operators as opaque nodes; eager
code runs the same lines. The operators are 4-D and have no autograd formula: the Function is that formula,
differentiable once. (A second derivative raises if the gradient of o requires a gradient; otherwise torch treats
gradients as constants.) Saved for backward are q, k, v, o, and one tensor of shape (batch[, heads], n_queries): the
natural log-sum-exp, in fp32.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER_DTYPES = (torch.bfloat16, torch.float16)
MIN_D_HEAD, MAX_D_HEAD, MAX_HOPPER_D_HEAD = 16, 256, 128


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention; ``heads`` counts query heads and is 1 for inputs without a head dimension."""

    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    d_head: int
    four_d: bool = True
    """Whether the inputs have a head dimension."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "AttentionShape":
        """The shape for queries and keys that ``validate`` has accepted."""
        four_d = q.ndim == 4
        heads, kv_heads = (q.shape[1], k.shape[1]) if four_d else (1, 1)
        return cls(q.shape[0], heads, kv_heads, q.shape[-2], k.shape[-2], q.shape[-1], four_d)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def offset(self) -> int:
        """Position of query 0 if the last query is at the last key's position; negative with more queries than keys."""
        return self.n_keys - self.n_queries

    @property
    def default_scale(self) -> float:
        """1 / sqrt(d_head), the factor of the scores unless the caller passes another."""
        return 1.0 / math.sqrt(self.d_head)

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """(batch, heads, n_queries, n_keys), the shape of all scores."""
        return self.batch, self.heads, self.n_queries, self.n_keys


def validate(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> AttentionShape:
    """The shape of an attention: q (batch[, heads], n_queries, d_head), k and v (batch[, kv_heads], n_keys, d_head).

    Raises:
        ValueError: one sentence with the offending values, for inputs that no implementation here supports.
    """

    tensors = {"q": q, "k": k, "v": v}
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        refusal = "q, k and v must all be (batch, sequence, d_head) or (batch, heads, sequence, d_head)"
    elif 0 in (*q.shape[1:], *k.shape[1:], *v.shape[1:]):
        refusal = "only the batch of q, k and v may be empty"
    elif not q.shape[0] == k.shape[0] == v.shape[0]:
        refusal = "q, k and v must have the same batch size"
    elif k.shape[-2] != v.shape[-2]:
        refusal = "k and v must have the same length"
    elif not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        refusal = "q, k and v must have the same head dimension"
    elif q.ndim == 4 and k.shape[1] != v.shape[1]:
        refusal = "k and v must have the same number of heads"
    elif q.ndim == 4 and q.shape[1] % k.shape[1]:
        refusal = "the key/value heads must divide the query heads"
    elif not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        refusal = f"q, k and v must have one dtype of {', '.join(map(str, DTYPES))}"
    elif not q.device == k.device == v.device:
        refusal = "q, k and v must be on the same device"
    elif scale is not None and not (math.isfinite(scale) and scale > 0):
        refusal = f"the scale must be finite and positive, got {scale}"
    else:
        return AttentionShape.of(q, k)
    got = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items())
    raise ValueError(f"{refusal}: {got}")


def check_starts(shape: AttentionShape, causal: bool, starts: Tensor) -> None:
    """Raise ValueError unless ``starts`` is (batch, n_queries) int32, contiguous, and the attention is causal.

    Its values, which may be on a GPU, are not checked: each must be between 0 and its query's own position, and they
    must not decrease along a sequence.
    """
    wanted = (shape.batch, shape.n_queries)
    if starts.dtype != torch.int32 or tuple(starts.shape) != wanted or not starts.is_contiguous():
        got = f"{starts.dtype} {tuple(starts.shape)}"
        raise ValueError(f"starts of documents must be contiguous int32 {wanted}, got {got}")
    if not causal or shape.offset < 0:
        sizes = f"{shape.n_queries} queries, {shape.n_keys} keys"
        raise ValueError(
            f"documents are masked in causal attention with no more queries than keys, got causal {causal}, {sizes}"
        )


def ends_of(starts_BQ: Tensor, n_keys: int) -> Tensor:
    """The first query whose document starts after each key, (B, n_keys) int32; 0 for keys that no query sees.

    ``starts_BQ``, int32, holds the first key of each query's document; it does not decrease along a sequence.
    """
    keys = torch.arange(n_keys, dtype=torch.int32, device=starts_BQ.device).expand(len(starts_BQ), -1).contiguous()
    return torch.searchsorted(starts_BQ, keys, right=True, out_int32=True)


def kernel_limits(q: Tensor) -> str | None:
    """Why the Triton kernels do not support valid inputs like ``q``, in one sentence, or None if they do."""
    if q.dtype not in KERNEL_DTYPES:
        return f"the kernels multiply in {', '.join(str(dtype) for dtype in KERNEL_DTYPES)}, the inputs are {q.dtype}"
    if not MIN_D_HEAD <= q.shape[-1] <= MAX_D_HEAD:
        return f"head dimensions {MIN_D_HEAD} to {MAX_D_HEAD} are supported, got {q.shape[-1]}"
    return None


def hopper_limits(q: Tensor) -> str | None:
    """Why the Hopper kernels do not support valid inputs like ``q``, in one sentence, or None if they do."""
    d_head, on_hopper = q.shape[-1], "need a CUDA device of compute capability 9.0"
    instead = "reference" if kernel_limits(q) else "flash"
    if q.dtype not in HOPPER_DTYPES:
        reason = f"multiply in torch.bfloat16 and torch.float16, the inputs are {q.dtype}"
    elif not MIN_D_HEAD <= d_head <= MAX_HOPPER_D_HEAD or d_head % 8:
        reason = f"take head dimensions {MIN_D_HEAD} to {MAX_HOPPER_D_HEAD} in steps of 8, got {d_head}"
    elif q.device.type != "cuda":
        reason, instead = f"{on_hopper}, the inputs are on {q.device.type}", "tiled"
    elif (capability := torch.cuda.get_device_capability(q.device)) != (9, 0):
        reason = f"{on_hopper}, this one has {capability[0]}.{capability[1]}"
    else:
        return None
    return f'the Hopper kernels {reason}; impl="{instead}" takes them'


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` or fp32, whichever is wider: the dtype of sums, softmax and the log-sum-exp."""
    return torch.promote_types(dtype, torch.float32)


def forward_through(
    op: OpOverload, ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, *options: Any
) -> Tensor:
    """Call ``op(q, k, v, causal, scale, *options)``, which gives (o, lse); returns o like q, and saves for backward."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.dim() == 3:
        o, lse = (x.squeeze(1) for x in op(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal, scale, *options))
    else:
        o, lse = op(q, k, v, is_causal, scale, *options)
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.is_causal, ctx.scale = is_causal, scale
    return o


def backward_through(op: OpOverload, ctx: Any, do: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv) by ``op(q, k, v, o, lse, do, causal, scale, *options)``; None for inputs without a gradient."""
    tensors = (*ctx.saved_tensors, do)
    if one_head := do.dim() == 3:
        tensors = tuple(x.unsqueeze(1) for x in tensors)
    gradients = op(*tensors, ctx.is_causal, ctx.scale, *options)
    wanted = [x if want else None for x, want in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
    if one_head:
        wanted = [x if x is None else x.squeeze(1) for x in wanted]
    return tuple(wanted)
