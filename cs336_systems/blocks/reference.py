"""The operations of a written-out block in plain PyTorch: any device, any float dtype, formulas written for reading.

Sums are taken in at least fp32. Attention holds every score, forward and backward.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from cs336_systems.blocks.ops import BlockOps


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm_forward(x_RD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x * rstd * gain, rstd), where rstd = 1 / sqrt(mean(x^2) + eps) of each row."""
    x_wide = _widened(x_RD)
    rstd_R = torch.rsqrt(x_wide.square().mean(-1) + eps)
    return (x_wide * rstd_R[:, None]).to(x_RD.dtype) * gain_D, rstd_R


def add_rms_norm_forward(x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + branch, its norm, its rstd)."""
    residual_RD = x_RD + branch_RD
    return residual_RD, *rms_norm_forward(residual_RD, gain_D, eps)


def rms_norm_backward(
    dy_RD: Tensor, x_RD: Tensor, gain_D: Tensor, rstd_R: Tensor, dresidual_RD: Tensor
) -> tuple[Tensor, Tensor]:
    """With n = x rstd and g = dy gain: dx = rstd (g - n mean(n g)) + dresidual, dgain = sum over rows of dy n."""
    dy, rstd = _widened(dy_RD), rstd_R[:, None]
    normalised = _widened(x_RD) * rstd
    g = dy * gain_D
    dx = rstd * (g - normalised * (normalised * g).mean(-1, keepdim=True)) + dresidual_RD
    return dx.to(x_RD.dtype), (dy * normalised).sum(0).to(gain_D.dtype)


def product_(out_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
    """out = x weight^T."""
    torch.mm(x_RK, weight_NK.T, out=out_RN)


def add_product_(out_RN: Tensor, addend_RN: Tensor, x_RK: Tensor, weight_NK: Tensor) -> None:
    """out = addend + x weight^T."""
    torch.addmm(addend_RN, x_RK, weight_NK.T, out=out_RN)


def product_backward(dy_RN: Tensor, weight_NK: Tensor) -> Tensor:
    """dy weight."""
    return dy_RN @ weight_NK


def weight_backward_(gradient_NK: Tensor, dy_RN: Tensor, x_RK: Tensor, accumulate: bool) -> None:
    """dy^T x; beta = 0 overwrites whatever was there."""
    gradient_NK.addmm_(dy_RN.T, x_RK, beta=int(accumulate))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of merged gate | up (R, 2F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_product_(gate_up: Tensor, x_RD: Tensor, weight: Tensor) -> Tensor:
    """gate | up = x weight^T; silu(gate) * up."""
    product_(gate_up, x_RD, weight)
    return swiglu(gate_up)


def swiglu_backward_(dproduct: Tensor, gate_up: Tensor, *, with_product: bool) -> None:
    """With s = sigmoid(gate): dup = dproduct silu(gate), dgate = dproduct up s (1 + gate (1 - s)); all in place."""
    dproduct_wide = _widened(dproduct)
    gate, up = _widened(gate_up).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    gradients = dproduct_wide * up * s * (1 + gate * (1 - s)), dproduct_wide * gate * s
    if with_product:
        dproduct.copy_(swiglu(gate_up))
    gate_up.copy_(torch.cat(gradients, dim=-1))


def column_sums(x_RP: Tensor) -> Tensor:
    """The sum of the rows, (P,): the gradient of a bias."""
    return x_RP.sum(0)


def rotate_(qkv_BSP: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, *, inverse: bool) -> None:
    """Rotate the pairs (x[i], x[i + E/2]) of every head of q and k by their position's angle, or back by it."""
    d_half = cos.shape[-1]
    heads = qkv_BSP.view(*qkv_BSP.shape[:2], n_heads + 2 * n_kv_heads, 2, d_half)[:, :, : n_heads + n_kv_heads]
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    first, second = heads.unbind(-2)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    heads.copy_(rotated)


def norm_rotate(
    qkv_RP: Tensor, q_gain: Tensor, k_gain: Tensor, eps: float, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int
) -> Tensor:
    """RMSNorm of each head of q with its gain and of each head of k with its own, then the rotation of both."""
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
    """The rotation back, then ``rms_norm_backward`` of each head; the gradients of the two gains."""
    d_head, found = q_gain.shape[0], []
    for start, n, gain in ((0, n_heads, q_gain), (n_heads, n_kv_heads, k_gain)):
        columns = slice(start * d_head, (start + n) * d_head)
        dheads, heads = dqkv_RP[:, columns].contiguous(), qkv_RP[:, columns].reshape(-1, d_head)
        if not n:
            found.append(torch.zeros_like(gain))
            continue
        rotate_(dheads.view(-1, cos.shape[0], n * d_head), cos, sin, n, 0, inverse=True)
        rstd = torch.rsqrt(_widened(heads).square().mean(-1) + eps)
        dheads, dgain = rms_norm_backward(dheads.view(-1, d_head), heads, gain, rstd, dheads.new_zeros(()))
        dqkv_RP[:, columns] = dheads.view(dqkv_RP.shape[0], -1)
        found.append(dgain)
    dq_gain, dk_gain = found
    return dq_gain, dk_gain


def _grouped(x: Tensor, n_groups: int) -> Tensor:
    """Query heads by the key/value head that they share: (B, H, S, ...) -> (B, K, H/K, S, ...), at least fp32."""
    return rearrange(_widened(x), "b (k g) ... -> b k g ...", k=n_groups)


def _scores(q_BKGSE: Tensor, k_BK1SE: Tensor) -> Tensor:
    n_queries, d_head = q_BKGSE.shape[-2:]
    n_keys = k_BK1SE.shape[-2]
    future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q_BKGSE.device).triu(n_keys - n_queries + 1)
    return (q_BKGSE * d_head**-0.5 @ k_BK1SE.mT).masked_fill(future, float("-inf"))


def attention_forward(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T / sqrt(E)) v, log-sum-exp of the scores), causal; the last query sees every key."""
    n_groups = k_BKSE.shape[1]
    scores = _scores(_grouped(q_BHSE, n_groups), _grouped(k_BKSE, n_groups))
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
) -> None:
    """With p = exp(scores - lse): dv = p^T do, ds = p (do v^T - sum(do o)), dq = ds k and dk = ds^T q, both scaled."""
    n_groups, scale = k_BKSE.shape[1], q_BHSE.shape[-1] ** -0.5
    q, k, v, o, do, lse = (_grouped(x, n_groups) for x in (q_BHSE, k_BKSE, v_BKSE, o_BHSE, do_BHSE, lse_BHS))
    p = torch.exp(_scores(q, k) - lse[..., None])
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    dq_BHSE, dk_BKSE, dv_BKSE = gradients
    dq_BHSE.copy_((ds @ k * scale).flatten(1, 2))
    dk_BKSE.copy_((ds.mT @ q * scale).sum(2))
    dv_BKSE.copy_((p.mT @ do).sum(2))


REFERENCE = BlockOps(
    rms_norm_forward=rms_norm_forward,
    add_rms_norm_forward=add_rms_norm_forward,
    rms_norm_backward=rms_norm_backward,
    product_=product_,
    add_product_=add_product_,
    product_backward=product_backward,
    weight_backward_=weight_backward_,
    swiglu_product_=swiglu_product_,
    swiglu_backward_=swiglu_backward_,
    column_sums=column_sums,
    rotate_=rotate_,
    norm_rotate=norm_rotate,
    norm_rotate_backward_=norm_rotate_backward_,
    attention_forward=attention_forward,
    attention_backward=attention_backward,
)
