"""What flash attention is checked against: the formula in fp64, and the error that the same dtype's eager code makes.

The budget is that of ``tests/kernels/against_fp64.py``, with a floor for where eager code is exact by luck (a softmax
over one key, say): every term of the sums rounded once, eps * sum |terms|. The backward pass recomputes
P = exp(S - lse) from an fp32 lse, so each of its terms also carries the relative error eps_fp32 * max |S|.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse) of 4-D inputs, in their dtype; rows that see no key give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT) * scale
    if causal:
        n_queries, n_keys = scores.shape[-2:]
        seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - n_queries)
        scores = scores.masked_fill(~seen, float("-inf"))
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores.detach().to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
    return p @ v, lse


def eager(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float, dtype: torch.dtype) -> Results:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    o, lse = formula(q, k, v, causal, scale)
    return Results(o.detach(), lse, *torch.autograd.grad(o, (q, k, v), do.to(dtype)))


def floors(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float) -> Results:
    """Largest sum of rounded terms of each result, from the absolute values of its factors in fp64."""
    eps, eps_fp32 = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
    group = q.shape[1] // k.shape[1]
    q, k, v, do = (x.detach().double() for x in (q, k, v, do))
    k_each, v_each = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k_each.mT).abs() * scale
    o, _ = formula(q, k, v, causal, scale)
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    p, _ = formula(q, k, identity, causal, scale)
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


def compare(actual: Results, q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float) -> None:
    """Hold results of 4-D inputs against fp64."""
    exact = eager(q, k, v, do, causal, scale, torch.float64)
    same_dtype = eager(q, k, v, do, causal, scale, q.dtype)
    floor = floors(q, k, v, do, causal, scale)
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
