"""The operations that a written-out block calls: their formulas in plain PyTorch, and sets of them as values.

The functions here define the operations, on plain tensors and without autograd, for any device and float dtype. Sums
are taken in at least fp32; attention holds all scores in memory, forward and backward. ``block_ops`` returns the set
that a command or case names: these functions, or fused kernels instead (``fused.py``). Every set must be deterministic,
and two of its operations that compute the same value must give the same bits, since a block may keep one value or
recompute the other:

* ``add_rms_norm_forward`` norms the residual that it returns, rounded, as ``rms_norm_forward`` of it would;
* ``swiglu_backward_`` recomputes the product that ``swiglu_product_`` wrote;
* ``swiglu_product_`` without an adapter's part computes the gate | up that ``product_`` would.

If kernels quantize products, operations that write operands of products, including the norm's backward, take
``absmax=``: one fp32 element, which they raise to the largest magnitude of their output.

Shape legend: B batch, S sequence, R = B S rows, D d_model, F d_ff, H query heads, K key/value heads, E d_head,
P = (H + 2 K) E; N and K also a weight's rows and columns. Statistics (``rstd``, ``lse``) are at least fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from cs336_systems.kernels.lora_reference import LowRank, expand_, factor_gradients_, shrink
from cs336_systems.model.ops import widened

PRODUCTS = frozenset({"product_", "add_product_", "product_backward_", "weight_backward_"})
"""The operations that are only a matrix product."""


def rms_norm_forward(x_RD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x * rstd * gain, rstd), where rstd = 1 / sqrt(mean(x^2) + eps) of each row."""
    x_wide = widened(x_RD)
    rstd_R = torch.rsqrt(x_wide.square().mean(-1) + eps)
    return (x_wide * rstd_R[:, None]).to(x_RD.dtype) * gain_D, rstd_R


def add_rms_norm_forward(x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + branch, its norm, its rstd)."""
    residual_RD = x_RD + branch_RD
    return residual_RD, *rms_norm_forward(residual_RD, gain_D, eps)


def rms_norm_backward(
    dy_RD: Tensor, x_RD: Tensor, gain_D: Tensor, rstd_R: Tensor, dresidual_RD: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dgain); with n = x rstd and g = dy gain: dx = rstd (g - n mean(n g)) + dresidual, dgain = sum_r dy n."""
    dy, rstd = widened(dy_RD), rstd_R[:, None]
    normalised = widened(x_RD) * rstd
    g = dy * gain_D
    dx = rstd * (g - normalised * (normalised * g).mean(-1, keepdim=True)) + dresidual_RD
    return dx.to(x_RD.dtype), (dy * normalised).sum(0).to(gain_D.dtype)


def product_(out_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
    """out = x weight^T."""
    torch.mm(x_RK, weight_NK.T, out=out_RN)


def add_product_(out_RN: Tensor, addend_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
    """out = addend + x weight^T; out may be addend. CUDA rounds a bf16 product before it adds (LOG.md, 1 December)."""
    torch.addmm(addend_RN, x_RK, weight_NK.T, out=out_RN)


def product_backward_(dx_RK: Tensor, dy_RN: Tensor, weight_NK: Tensor) -> None:
    """The gradient of x, dy weight."""
    torch.mm(dy_RN, weight_NK, out=dx_RK)


def weight_backward_(gradient_NK: Tensor, dy_RN: Tensor, x_RK: Tensor, accumulate: bool) -> None:
    """gradient = dy^T x, plus gradient if ``accumulate``; beta = 0 overwrites even NaN."""
    gradient_NK.addmm_(dy_RN.T, x_RK, beta=int(accumulate))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of merged gate | up (R, 2F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_product_(gate_up: Tensor, x_RD: Tensor, weight: Tensor, product: Tensor, low: LowRank | None = None) -> None:
    """product = silu(gate) * up (R, F), after gate | up (R, 2F) = x weight^T (+ low, if given)."""
    product_(gate_up, x_RD, weight)
    if low is not None:
        expand_(gate_up, low)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=product)


def swiglu_backward_(dproduct: Tensor, gate_up: Tensor, *, with_product: bool, low: LowRank | None = None) -> None:
    """Write the gradient of gate | up over it and, ``with_product``, silu(gate) * up over dproduct (R, F).

    With s = sigmoid(gate): dup = dproduct silu(gate), dgate = dproduct up s (1 + gate (1 - s)). If low is given, it is
    first added to dproduct.
    """
    if low is not None:
        expand_(dproduct, low)
    dproduct_wide = widened(dproduct)
    gate, up = widened(gate_up).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    gradients = dproduct_wide * up * s * (1 + gate * (1 - s)), dproduct_wide * gate * s
    if with_product:
        dproduct.copy_(swiglu(gate_up))
    gate_up.copy_(torch.cat(gradients, dim=-1))


def column_sums(x_RP: Tensor) -> Tensor:
    """The sum of the rows, (P,): the gradient of a bias."""
    return x_RP.sum(0)


def rotate_(qkv_BSP: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, *, inverse: bool) -> None:
    """Rotate the pairs (x[i], x[i + E/2]) of every head of q and k by their position's angle, or back by it, in place.

    cos and sin are (S, E/2); one of the numbers of heads may be 0.
    """
    d_half = cos.shape[-1]
    heads = qkv_BSP.view(*qkv_BSP.shape[:2], n_heads + 2 * n_kv_heads, 2, d_half)[:, :, : n_heads + n_kv_heads]
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    first, second = heads.unbind(-2)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    heads.copy_(rotated)


def norm_rotate(
    qkv_RP: Tensor, q_gain: Tensor, k_gain: Tensor, eps: float, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int
) -> Tensor:
    """q | k (R, (H + K) E): RMSNorm of each head of q with its gain and of each of k with its own, then rotated.

    One of the numbers of heads may be 0.
    """
    n_rotated, d_head = n_heads + n_kv_heads, q_gain.shape[0]
    heads = qkv_RP[:, : n_rotated * d_head].reshape(-1, d_head)
    gains = torch.cat((q_gain.expand(n_heads, -1), k_gain.expand(n_kv_heads, -1))).repeat(qkv_RP.shape[0], 1)
    normed, _ = rms_norm_forward(heads, gains, eps)
    normed = normed.view(-1, cos.shape[0], n_rotated * d_head)
    rotate_(normed, cos, sin, n_rotated, 0, inverse=False)
    return normed.view(qkv_RP.shape[0], -1)


def norm_rotate_backward_(
    dqkv_RP: Tensor,
    qkv_RP: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """(dq_gain (E), dk_gain (E)); the gradient of what ``norm_rotate`` returned becomes that of q and k, in place.

    It rotates back, then applies ``rms_norm_backward`` to each head. v's gradient is unchanged; rows may be strided.
    """
    d_head, found = q_gain.shape[0], []
    for start, n, gain in ((0, n_heads, q_gain), (n_heads, n_kv_heads, k_gain)):
        columns = slice(start * d_head, (start + n) * d_head)
        dheads, heads = dqkv_RP[:, columns].contiguous(), qkv_RP[:, columns].reshape(-1, d_head)
        if not n:
            found.append(torch.zeros_like(gain))
            continue
        rotate_(dheads.view(-1, cos.shape[0], n * d_head), cos, sin, n, 0, inverse=True)
        rstd = torch.rsqrt(widened(heads).square().mean(-1) + eps)
        dheads, dgain = rms_norm_backward(dheads.view(-1, d_head), heads, gain, rstd, dheads.new_zeros(()))
        dqkv_RP[:, columns] = dheads.view(dqkv_RP.shape[0], -1)
        found.append(dgain)
    dq_gain, dk_gain = found
    return dq_gain, dk_gain


def _grouped(x: Tensor, n_groups: int) -> Tensor:
    """Query heads by the key/value head that they share: (B, H, S, ...) -> (B, K, H/K, S, ...), at least fp32."""
    return rearrange(widened(x), "b (k g) ... -> b k g ...", k=n_groups)


def _scores(q_BKGSE: Tensor, k_BK1SE: Tensor, causal: bool, starts: Tensor | None) -> Tensor:
    n_queries, d_head = q_BKGSE.shape[-2:]
    n_keys = k_BK1SE.shape[-2]
    scores = q_BKGSE * d_head**-0.5 @ k_BK1SE.mT
    if not causal:
        return scores
    future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q_BKGSE.device).triu(n_keys - n_queries + 1)
    hidden = future if starts is None else future | (torch.arange(n_keys, device=future.device) < starts[..., None])
    return scores.masked_fill(hidden if starts is None else hidden[:, None, None], float("-inf"))


def attention_forward(
    q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, *, causal: bool = True, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T / sqrt(E)) v, log-sum-exp of the scores (B, H, S)); causal: the last query sees every key.

    A query sees no key before its document's first, which ``starts`` (B, S) int32 says if several share a sequence.

    Inputs have the strides of slices of q | k | v. An output whose memory is (B, S, H, E) saves a copy.
    """
    n_groups = k_BKSE.shape[1]
    scores = _scores(_grouped(q_BHSE, n_groups), _grouped(k_BKSE, n_groups), causal, starts)
    lse = torch.logsumexp(scores, dim=-1)
    o = torch.exp(scores - lse[..., None]) @ _grouped(v_BKSE, n_groups)
    return o.flatten(1, 2).to(q_BHSE.dtype), lse.flatten(1, 2)


def attention_backward(
    do_BHSE: Tensor,
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    o_BHSE: Tensor,
    lse_BHS: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    *,
    causal: bool = True,
    starts: Tensor | None = None,
) -> None:
    """Write (dq, dk, dv) into ``gradients``, slices of one gradient of q | k | v.

    With p = exp(scores - lse): dv = p^T do, ds = p (do v^T - sum(do o)), dq = ds k and dk = ds^T q, both scaled. Output
    and lse may be over more keys than these; gradients are then the part due to these keys.
    """
    n_groups, scale = k_BKSE.shape[1], q_BHSE.shape[-1] ** -0.5
    q, k, v, o, do, lse = (_grouped(x, n_groups) for x in (q_BHSE, k_BKSE, v_BKSE, o_BHSE, do_BHSE, lse_BHS))
    p = torch.exp(_scores(q, k, causal, starts) - lse[..., None])
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    dq_BHSE, dk_BKSE, dv_BKSE = gradients
    dq_BHSE.copy_((ds @ k * scale).flatten(1, 2))
    dk_BKSE.copy_((ds.mT @ q * scale).sum(2))
    dv_BKSE.copy_((p.mT @ do).sum(2))


def attention_merge_(o_BHSE: Tensor, lse_BHS: Tensor, part_o_BHSE: Tensor, part_lse_BHS: Tensor) -> None:
    """Merge attention over further keys, its output and lse, into o (B, H, S, E) and lse (B, H, S), in place."""
    both = torch.logaddexp(lse_BHS, part_lse_BHS)
    own, other = (torch.exp(lse - both)[..., None] for lse in (lse_BHS, part_lse_BHS))
    o_BHSE.copy_(widened(o_BHSE) * own + widened(part_o_BHSE) * other)
    lse_BHS.copy_(both)


@dataclass(frozen=True)
class BlockOps:
    """One function for each operation, with the signature of the plain function that is its default here."""

    rms_norm_forward: Callable[..., tuple[Tensor, Tensor]] = rms_norm_forward
    add_rms_norm_forward: Callable[..., tuple[Tensor, Tensor, Tensor]] = add_rms_norm_forward
    rms_norm_backward: Callable[..., tuple[Tensor, Tensor]] = rms_norm_backward
    product_: Callable[..., object] = product_
    add_product_: Callable[..., object] = add_product_
    product_backward_: Callable[..., object] = product_backward_
    weight_backward_: Callable[..., object] = weight_backward_
    swiglu_product_: Callable[..., object] = swiglu_product_
    swiglu_backward_: Callable[..., object] = swiglu_backward_
    column_sums: Callable[..., Tensor] = column_sums
    rotate_: Callable[..., object] = rotate_
    norm_rotate: Callable[..., Tensor] = norm_rotate
    norm_rotate_backward_: Callable[..., tuple[Tensor, Tensor]] = norm_rotate_backward_
    attention_forward: Callable[..., tuple[Tensor, Tensor]] = attention_forward
    attention_backward: Callable[..., object] = attention_backward
    rotates_back: bool = False
    """Whether ``attention_backward`` takes cos and sin, and then rotates its gradients back as ``rotate_`` would."""
    attention_merge_: Callable[..., object] = attention_merge_
    lora_shrink: Callable[..., Tensor] = shrink
    lora_expand_: Callable[..., object] = expand_
    lora_gradients_: Callable[..., object] = factor_gradients_


OPERATIONS = frozenset(field.name for field in fields(BlockOps)) - {"rotates_back"}
REFERENCE = BlockOps()


def block_ops(kernels: str, attention: str, *, deterministic: bool = False) -> BlockOps:
    """The operations of a name in ``config.KERNELS`` with attention of one in ``config.WRITTEN_OUT_ATTENTIONS``.

    Args:
        deterministic: bit-identical results from run to run, whatever torch's setting.

        Raises:
            ValueError: these cannot be combined.
    """
    if attention == "reference":
        if kernels != "reference":
            raise ValueError(f"kernels {kernels} need attention flash or hopper, got {attention}")
        return REFERENCE
    from cs336_systems.blocks import fused  # imports Triton, which not every machine has

    hopper = fused.HOPPER_ATTENTION_IN_ORDER if deterministic else fused.HOPPER_ATTENTION
    own: dict[str, Any] = {"flash": fused.FLASH_ATTENTION, "hopper": hopper}[attention]
    return replace(REFERENCE if kernels == "reference" else fused.KERNELS, **own)
