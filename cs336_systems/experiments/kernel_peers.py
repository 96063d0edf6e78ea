"""Other libraries' kernels, each in the best configuration that it supports; ``kernel_subjects.py`` says on what.

* Liger's RMSNorm with ``casting_mode="llama"``, which rounds as the reference does, and ``in_place=True``, its default:
  dx is written over the gradient that arrives, which is restored between samples, outside of the clock. With the
  residual add ``in_place=False``, its default, which writes as much. SwiGLU of one merged matrix of gates and ups, for
  which it has kernels of its own. Rotary positions of q and k in memory of their own: in a merged q | k | v it would
  copy them first.
* Liger's cross entropy writes the gradient over the logits in forward. Its head and loss runs in chunks whose logits
  take as much memory as the head's input, its default, and in chunks four times as large, which at 32,768 x 4096 are as
  large as ours. Gradients are computed in forward, in the parameters' dtype.
* ``liger-cute``: Liger's kernels in CuTe DSL, for Hopper, which need nvidia-cutlass-dsl. Its head and loss has all
  logits at once, and takes multiples of 128 rows and of 256 words.
* quack's RMSNorm and cross entropy in CuTe DSL. The latter writes the gradient over the logits in one kernel, as
  quack's own head does. Head and loss in bf16 on Hopper by its pipeline of scaled exponentials, whose weight gradient
  is summed in fp32, in chunks of 8,192 tokens: 4,096, its default, are refused at a width of 4,096. quack takes only
  what lies in a folder called ``site-packages`` for libraries: wheels that are unpacked elsewhere let the import of
  its head fail.
* Apple's cut cross entropy computes logits block by block in forward, and recomputes them in backward. With
  ``filter_eps=None`` it is the same computation as ours; by default it would leave out gradients of words whose
  probability rounds to nothing, on random data nearly all.
* Torch's ``F.rms_norm``, which has a fused kernel; AdamW, fused and ``foreach``, through its functional form, so that
  no optimizer object is part of the time; the norm of ``clip_grad_norm_(foreach=True)``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torchs_rms_norm
from torch.optim.adamw import adamw

from cs336_systems.experiments.kernel_measure import Function
from cs336_systems.experiments.kernel_subjects import ADAM_EPS, BETAS, D_HEAD, EPS, LR, STEP, WEIGHT_DECAY
from cs336_systems.experiments.peers import installed
from cs336_systems.kernels.linear_cross_entropy import IGNORED


def torchs_adamw(*, fused: bool = False, foreach: bool = False) -> Function:
    """Torch's update in place, ``fused`` or ``foreach``."""
    steps: list[Tensor] = []  # one, counted up by every call, where torch's optimizer has it

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if not steps:
            steps.append(torch.tensor(float(STEP), device=p.device if fused else "cpu"))
        rates: dict[str, Any] = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": ADAM_EPS}
        rates |= {"weight_decay": WEIGHT_DECAY, "amsgrad": False, "maximize": False}
        adamw([p], [g], [m], [v], [], steps, fused=fused, foreach=foreach, **rates)
        return p, m, v

    return update


LIGER = "liger_kernel.ops"
LIGER_CUTE = "liger_kernel.ops.cutedsl.ops"


def liger(name: str, *options: Any, module: str = LIGER, reverse: bool = False) -> Callable[[], Function]:
    """Imports and returns one of Liger's autograd Functions, with these options behind the inputs."""
    needs = "liger-kernel" if module == LIGER else "nvidia-cutlass-dsl"

    def load() -> Function:
        installed(LIGER, "liger-kernel")
        function = getattr(installed(module, needs), name).apply
        if reverse:
            return lambda *inputs: tuple(reversed(function(*inputs, *options)))
        return lambda *inputs: function(*inputs, *options)

    return load


def of_a_loss(load: Callable[[], Callable[..., Any]]) -> Callable[[], Function]:
    """The gradients of a loss, the first of what a function returns, by its floating-point inputs, as ours has them:
    by forward and backward in one call."""

    def loaded() -> Function:
        function = load()

        def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
            found = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
            loss = function(*found)
            return torch.autograd.grad(
                loss if isinstance(loss, Tensor) else loss[0], [x for x in found if x.requires_grad]
            )

        return gradients

    return loaded


def liger_head(chunk_mem_const: int) -> Callable[[], Function]:
    """Liger's head and loss, in chunks of so many times its usual memory."""
    usual = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)
    return of_a_loss(liger("LigerFusedLinearCrossEntropyFunction", *usual, chunk_mem_const))


def liger_rows(module: str) -> Callable[[], Function]:
    """Liger's cross entropy of logits."""
    return of_a_loss(liger("LigerCrossEntropyFunction", None, IGNORED, 0.0, 0.0, "sum", module=module))


def cut_cross_entropy() -> Function:
    """Apple's head and loss."""
    function = installed("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    return functools.partial(function, impl="cce", filter_eps=None)


def quack(module: str, name: str, **options: Any) -> Callable[[], Function]:
    """Imports and returns a function of quack, with these options."""
    return lambda: functools.partial(getattr(installed(f"quack.{module}", "quack-kernels"), name), **options)


def quack_add_rms_norm() -> Function:
    """(residual, norm)."""
    function = quack("rmsnorm", "rmsnorm", eps=EPS, prenorm=True)()
    return lambda x, branch, weight: function(branch, weight, residual=x)[::-1]


def quack_rows() -> Function:
    """(dlogits, lse)."""
    how = {"ignore_index": IGNORED, "return_lse": True, "return_dx": True, "inplace_backward": True}
    function = quack("cross_entropy", "cross_entropy_fwd", **how)()
    return lambda logits, targets: function(logits, targets)[:0:-1]


PEERS: dict[str, dict[str, Callable[[], Function]]] = {
    "torch": {
        "rms_norm": lambda: lambda x, weight: torchs_rms_norm(x, weight.shape, weight, EPS),
        "adamw": lambda: torchs_adamw(fused=True),
        "grad_norm": lambda: lambda x: torch.nn.utils.get_total_norm([x], foreach=True),
    },
    "torch-foreach": {"adamw": lambda: torchs_adamw(foreach=True)},
    "quack": {
        "rms_norm": quack("rmsnorm", "rmsnorm", eps=EPS),
        "add_rms_norm": quack_add_rms_norm,
        "cross_entropy": quack_rows,
        "linear_cross_entropy": of_a_loss(
            quack("linear_cross_entropy", "chunked_linear_cross_entropy", chunk_size=8192)
        ),
    },
    "liger": {
        "rms_norm": liger("LigerRMSNormFunction", EPS, 0.0, "llama", True),
        "add_rms_norm": liger("LigerFusedAddRMSNormFunction", EPS, 0.0, "llama", False, reverse=True),
        "swiglu": liger("LigerFusedGateUpSiLUMulFunction"),
        "rotary": liger("LigerRopeFunction", None, 1, D_HEAD),
        "cross_entropy": liger_rows(LIGER),
        "linear_cross_entropy": liger_head(1),
    },
    "liger-large-chunks": {"linear_cross_entropy": liger_head(4)},
    "liger-cute": {
        "rms_norm": liger("LigerRMSNormFunction", EPS, 0.0, "llama", True, module=LIGER_CUTE),
        "cross_entropy": liger_rows(LIGER_CUTE),
        "linear_cross_entropy": of_a_loss(
            liger("LigerFusedLinearCrossEntropySM90Function", module=f"{LIGER_CUTE}.fused_linear_cross_entropy_sm90")
        ),
    },
    "cut-cross-entropy": {"linear_cross_entropy": of_a_loss(cut_cross_entropy)},
}
"""By the names of ``kernels.PEERS`` and by kernel, functions that import and return a peer's: it may overwrite its
inputs and arriving gradients, and returns what ours does or the first of it."""
