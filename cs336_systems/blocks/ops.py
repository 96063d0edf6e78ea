"""The operations that a written-out block calls, as values: plain tensors, no autograd.

Every set of them (``reference.py`` in plain PyTorch, others of fused kernels) must be deterministic, and agree with
itself to the bit where one value can be had in two ways, since a block may keep the one or compute the other:

* ``add_rms_norm_forward`` norms the residual that it returns, rounded, as ``rms_norm_forward`` of it would;
* ``swiglu_backward_`` finds the product that ``swiglu_product_`` returned;
* ``swiglu_product_`` finds the gate | up that ``product_`` would.

Operations that write what products read, the norm's backward among them, take ``absmax=`` where products are quantized
by kernels: one fp32 element, which they raise to the largest magnitude of what they write.

Shape legend: B batch, S sequence, R = B S rows, D d_model, F d_ff, H query heads, K key/value heads, E d_head,
P = (H + 2 K) E; N and K also a weight's rows and columns. Statistics (``rstd``, ``lse``) are at least fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

PRODUCTS = frozenset({"product_", "add_product_", "product_backward", "weight_backward_"})
"""Those that are a matrix product and nothing else."""


@dataclass(frozen=True)
class BlockOps:
    """One function per operation; arguments are passed by position unless they are named below."""

    rms_norm_forward: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x_RD, gain_D, eps) -> (y_RD, rstd_R)."""
    add_rms_norm_forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    """(x_RD, branch_RD, gain_D, eps) -> (x + branch, its norm, rstd_R)."""
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(dy_RD, x_RD, gain_D, rstd_R, dresidual_RD) -> (dx_RD, dgain_D); dresidual is added to dx."""
    product_: Callable[[Tensor, Tensor, Tensor], object]
    """(out_RN, x_RK, weight_NK): out becomes x weight^T."""
    add_product_: Callable[[Tensor, Tensor, Tensor, Tensor], object]
    """(out_RN, addend_RN, x_RK, weight_NK): out becomes addend + x weight^T, rounded once; out may be addend."""
    product_backward: Callable[[Tensor, Tensor], Tensor]
    """(dy_RN, weight_NK) -> dy weight (R, K), the gradient of x."""
    weight_backward_: Callable[[Tensor, Tensor, Tensor, bool], object]
    """(gradient_NK, dy_RN, x_RK, accumulate): gradient becomes dy^T x, or that and what it was."""
    swiglu_product_: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(gate | up (R, 2F), x_RD, weight (2F, D)) -> silu(gate) * up (R, F); gate | up becomes x weight^T."""
    swiglu_backward_: Callable[..., object]
    """(dproduct_RF, gate | up (R, 2F), with_product=), in place: gate | up becomes its gradient, and with_product
    dproduct becomes silu(gate) * up again."""
    column_sums: Callable[[Tensor], Tensor]
    """x_RP -> the sum of its rows (P,), the gradient of a bias."""
    rotate_: Callable[..., object]
    """(qkv_BSP, cos (S, E/2), sin, H, K, inverse=): rotate the heads of q and k in place, forth or back.

    H or K may be 0."""
    norm_rotate: Callable[..., Tensor]
    """(qkv_RP, q_gain_E, k_gain_E, eps, cos (S, E/2), sin, H, K) -> q | k (R, (H + K) E): the heads of q and of k, each
    normed with its gain and rotated. H or K may be 0."""
    norm_rotate_backward_: Callable[..., tuple[Tensor, Tensor]]
    """(dqkv_RP, qkv_RP, q_gain_E, k_gain_E, eps, cos, sin, H, K) -> (dq_gain_E, dk_gain_E), in place: the gradient of
    what ``norm_rotate`` returned becomes that of q and k before it; that of v stays. Rows of dqkv may lie apart."""
    attention_forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Causal, scaled by 1 / sqrt(E): (q_BHSE, k_BKSE, v_BKSE) -> (o_BHSE, lse_BHS).

    Strides are those of slices of q | k | v. An o whose memory is (B, S, H, E) saves a copy. There may be more keys
    than queries: the last query sees them all."""
    attention_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]], None]
    """(do, q, k, v, o, lse, (dq, dk, dv)): writes the gradients into the last, slices of one gradient of q | k | v."""
