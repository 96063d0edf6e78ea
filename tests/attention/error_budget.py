"""What flash attention is checked against: the oracle in fp64, and its error in the same dtype.

The budget is that of ``tests/kernels/against_fp64.py``, with a floor for where eager code is exact by luck (a softmax
over one key, say): every term of the sums rounded once, eps * sum |terms|. The backward pass recomputes
P = exp(S - lse) from an fp32 lse, so each of its terms also carries the relative error eps_fp32 * max |S|.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.attention import oracle_attention
from cs336_systems.attention.flash import FlashAttention
from tests.kernels import against_fp64
from tests.kernels.against_fp64 import random


class Results(NamedTuple):
    """Output, log-sum-exp and gradients."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    dtype: torch.dtype,
    starts: Tensor | None = None,
) -> Results:
    """The oracle's results for 4-D inputs in a dtype."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    o, lse = oracle_attention(q, k, v, causal=causal, scale=scale, starts=starts)
    return Results(o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do.to(dtype)))


def floors(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float, starts: Tensor | None = None
) -> Results:
    """Largest sum of rounded terms of each result, from the absolute values of its factors in fp64.

    A GPU multiplies fp32 numbers split in two TF32 numbers, of 11 bits each: what is left of each factor is at most
    2^-22 of it, and the product of both second parts, which is not computed, 2^-22 of the term: 6 eps together.
    """
    eps, eps_fp32 = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
    if q.is_cuda and q.dtype == torch.float32:
        eps = eps_fp32 = 6 * eps_fp32  # as the docstring derives
    group = q.shape[1] // k.shape[1]
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    k_each, v_each = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k_each.mT).abs() * scale
    o, lse = oracle_attention(q, k, v, causal=causal, scale=scale, starts=starts)
    p = torch.exp(q @ k_each.mT * scale - lse.masked_fill(lse == float("-inf"), float("inf"))[..., None])
    p = p.tril(k.shape[2] - q.shape[2]) if causal else p
    if starts is not None:
        p = p * (torch.arange(k.shape[2], device=p.device) >= starts[:, None, :, None])
    ds = p * (do.abs() @ v_each.abs().mT + (o.abs() * do.abs()).sum(-1, keepdim=True))
    terms = (p @ v_each.abs(), ds @ k_each.abs() * scale, ds.mT @ q.abs() * scale, p.mT @ do.abs())
    relative = eps + eps_fp32 * scores.max()
    for_o, for_dq, for_dk, for_dv = (relative * group * term.max() for term in terms)
    return Results(for_o, eps_fp32 * (1 + scores.max()), for_dq, for_dk, for_dv)


def results_of(
    attend: type[torch.autograd.Function],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    scale: float | None = None,
    *options: bool,
) -> Results:
    """Results of an autograd Function, called with views of the arguments that keep their strides."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attend.apply(q, k, v, causal, scale, *options)
    (lse,) = (x for x in o.grad_fn.saved_tensors if x.shape == q.shape[:-1])
    return Results(o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do))


def compare(
    actual: Results,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    starts: Tensor | None = None,
) -> None:
    """Hold results of 4-D inputs against fp64."""
    exact = eager(q, k, v, do, causal, scale, torch.float64, starts)
    same_dtype = eager(q, k, v, do, causal, scale, q.dtype, starts)
    floor = floors(q, k, v, do, causal, scale, starts)
    for name, *of in zip(Results._fields, actual, same_dtype, exact, floor, strict=True):
        against_fp64.check(name, *of)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    scale: float | None = None,
    attend: type[torch.autograd.Function] = FlashAttention,
) -> Results:
    """``compare`` the results of 4-D inputs."""
    actual = results_of(attend, q, k, v, do, causal, scale)
    compare(actual, q, k, v, do, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return actual


def make(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    n_queries: int = 17,
    n_keys: int | None = None,
    d_head: int = 16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random contiguous 4-D q, k, v, do."""
    kv = (batch, kv_heads or heads, n_queries if n_keys is None else n_keys, d_head)
    query = (batch, heads, n_queries, d_head)
    q, k, v, do = (random(shape, device, dtype, seed) for seed, shape in enumerate((query, kv, kv, query)))
    return q, k, v, do


def strided(x: Tensor) -> list[Tensor]:
    """The values of x in other layouts: heads inside rows, columns apart, odd and even slices of wider tensors."""
    wide, twice = torch.cat((x[..., :3], x, x), dim=-1), torch.cat((x, x), dim=-1)
    heads_inside, columns_apart = x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT
    return [heads_inside, columns_apart, wide[..., 3 : 3 + x.shape[-1]], twice[..., x.shape[-1] :]]
