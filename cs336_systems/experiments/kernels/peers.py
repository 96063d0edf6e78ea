"""Other libraries' kernels for the same formulas, each in the best configuration that it supports.

Liger (liger-kernel):

* RMSNorm with ``casting_mode="llama"``, which rounds as the reference does, and ``in_place=True``, its default: dx is
  written over the gradient that arrives. The other way it would first fill dx with zeros. What was overwritten is
  restored between samples, outside of the clock.
* RMSNorm with the residual add with ``in_place=False``, its default, which writes as much as in place.
* SwiGLU of one merged matrix of gates and ups, for which it has kernels of its own; the gradient is written beside it,
  as the forward's input could serve one backward alone otherwise. The bytes are the same.
* Rotary positions in place, of q and k in memory of their own: in a merged q | k | v it would copy them first.
* The head's loss in chunks whose logits take as much memory as the head's input, its default, and in chunks four times
  as large (``chunk_mem_const=4``), which at 32,768 x 4096 are as large as ours. Gradients are computed in forward, in
  the parameters' dtype, and backward finds that the gradient of the loss is 1. ``ours-small-chunks`` is ours in chunks
  of 1,024 tokens, as many as Liger's default takes there.

Apple's cut cross entropy computes logits block by block in forward, and again in backward. By default it leaves out
gradients of words whose probability rounds to nothing. Exact (``filter_eps=None``) it is the same computation as ours;
``filtered`` is the default. On random data every probability is near 1 / words, so it leaves out nearly everything:
its time there is a lower bound of what training would see, and its error says so.

Torch: ``F.rms_norm``, which has a fused kernel; fused AdamW through its functional form, so that no optimizer object is
part of the time; the norm of ``clip_grad_norm_(foreach=True)``.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cs336_systems.case import Unsupported
from cs336_systems.experiments.kernels.measure import Function


def installed(module: str, distribution: str) -> ModuleType:
    """The module.

    Raises:
        Unsupported: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(f"{distribution} is not there ({error}): uv sync, or pip install {distribution}") from error


def _liger() -> ModuleType:
    return installed("liger_kernel.ops", "liger-kernel")


def liger_rms_norm(eps: float) -> Function:
    function = _liger().LigerRMSNormFunction
    return lambda x, weight: function.apply(x, weight, eps, 0.0, "llama", True)


def liger_add_rms_norm(eps: float) -> Function:
    function = _liger().LigerFusedAddRMSNormFunction

    def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = function.apply(x, branch, weight, eps, 0.0, "llama", False)
        return residual, y

    return add_rms_norm


def liger_swiglu() -> Function:
    return _liger().LigerFusedGateUpSiLUMulFunction.apply


def liger_rotary(d_head: int) -> Function:
    function = _liger().LigerRopeFunction
    return lambda q, k, cos, sin: function.apply(q, k, cos, sin, None, 1, d_head)


def liger_linear_cross_entropy(targets: Tensor, chunk_mem_const: int) -> Function:
    function = _liger().LigerFusedLinearCrossEntropyFunction

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        defaults = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)
        return function.apply(x, weight, targets, *defaults, chunk_mem_const)[0]

    return _gradients_of(loss)


def cut_cross_entropy(targets: Tensor, *, filtered: bool) -> Function:
    function = installed("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    options = {} if filtered else {"filter_eps": None}
    return _gradients_of(lambda x, weight: function(x, weight, targets, impl="cce", **options))


def _gradients_of(loss: Function) -> Function:
    """(x, weight) -> the gradients of a loss, forward and backward in one call, as ours computes them."""

    def gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        return torch.autograd.grad(loss(*leaves), leaves)

    return gradients


def torch_rms_norm(eps: float) -> Function:
    return lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def torch_adamw(step: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Function:
    steps = [step.float()]  # counted up by every call

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        adamw(
            *([p], [g], [m], [v], [], steps),
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return p, m, v

    return update


def torch_grad_norm() -> Function:
    return lambda x: torch.nn.utils.get_total_norm([x], foreach=True)
