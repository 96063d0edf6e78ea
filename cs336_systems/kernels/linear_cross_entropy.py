"""Loss and gradients of the head's input and weight, without ever holding the logits of all tokens.

Formula, for x (T, D), weight (V, D), targets (T), with the sums over the targets that count and n their number:

    logits[t, v]   = sum_d x[t, d] weight[v, d]
    lse[t]         = log sum_v exp(logits[t, v])
    loss           = 1/n sum_t (lse[t] - logits[t, targets[t]] + z_loss lse[t]^2)
    dlogits[t, v]  = 1/n (exp(logits[t, v] - lse[t]) (1 + 2 z_loss lse[t]) - [v = targets[t]])
    dx             = dlogits weight,   dweight = dlogits^T x

A loss is a scalar, so its gradients are known before backward begins, but for one factor. They are computed in forward,
one chunk of tokens at a time: a product gives the chunk's logits, a Triton kernel turns each row into its gradient
where it lies, and two more products read that. What exists beyond the results is one chunk of logits. dweight sums over
the chunks in its own dtype: each product is added in fp32 and rounded once per chunk. A sum kept in fp32 would be twice
as large as a chunk of logits, and those, rounded to bf16, cost more precision than sixteen roundings of the sum.

The kernel has a program per row and reads the row twice: once for maximum and sum, and backwards for the gradient, so
that what was read last, and is likely to be in the caches still, comes first. At 151,936 words in bf16 one row is in
work on a multiprocessor (1,024 threads of 64 registers each): 40 MB on an H200, whose L2 holds 50.

FLOPs: 6 T V D, of which 4 T V D for the gradients. The kernel's traffic: logits read and written once, if caches serve
the second reading; 20 GB at 32,768 x 151,936 in bf16, 5 ms at 4.3 TB/s. It takes 6.2 ms there on an H200, products and
all 183 to 185 ms at d 4096, 660 to 670 TFLOP/s (LOG.md).

    loss = linear_cross_entropy(x, weight, targets)        # x (..., D), weight (V, D), targets (...) -> ()

Nothing waits for the device: how many targets count is computed and used there. Targets out of range are therefore not
refused on GPUs; they make loss and gradients NaN. If no target counts, the mean is NaN and gradients are zero, as of
``torch.nn.functional.cross_entropy``. fp16 is not taken: 1/n would underflow in dlogits.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.kernels.launching import ceil_div, check_alike, check_runnable, launch, next_power_of_2, operator
from cs336_systems.kernels.products import product_

CHUNK_BYTES = 5 * 2**27
"""The most bytes of a chunk's logits: 0.625 GiB, 2,048 tokens of 151,936 words in bf16. At 32,768 x 4096 an H200 takes
183.3, 185.4 and 185.0 ms in chunks of 2,048, 4,096 and 8,192 (LOG.md)."""
CHUNK_MULTIPLE = 256
"""Tokens of a chunk are a multiple of this, which tiles of matmuls divide."""
LONG_ROW = 2**15
"""A row of so many words or more gets 32 warps instead of 8, and a multiprocessor for itself: then few long rows are in
work, which the caches can keep. 4,096 rows of 151,936 words take 0.78 ms so, and 0.85 with two on a multiprocessor."""
LONG_ROW_REGISTERS = 64
"""Registers per thread, with which 1,024 threads fill a multiprocessor."""
SCALE_BLOCK = 4096
"""Elements of a program of 4 warps: 4 loads of 16 bytes per thread in bf16."""
LOADS = 4
"""Loads of 16 bytes per thread and block."""


@triton.jit
def cross_entropy_rows_kernel(
    logits, targets, scale, losses, lses, stride, n_words, ignore_index, z_loss,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Program i: losses[i] and lses[i] of row i of logits, and its gradient times scale[0] in its place.

    Rows begin at multiples of ``stride``; between ``n_words`` and ``stride`` they are -inf.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    exists = (target >= 0) & (target < n_words)
    target_logit = tl.load(row_logits + target, mask=exists, other=float("nan")).to(tl.float32)

    # Maxima are of logits times log2(e): an exponential is then one multiply-add and one exp2. A vector lies in one
    # thread, which keeps its own maximum and sum: threads meet once per row, not once per block.
    words = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    maxima = tl.full((BLOCK // VECTOR,), -3.4e38, tl.float32)  # finite: -inf - -inf would be NaN
    sums = tl.zeros((BLOCK // VECTOR,), tl.float32)
    n_blocks = tl.cdiv(stride, BLOCK)
    for i in range(0, n_blocks):
        columns = i * BLOCK + words
        x = tl.load(row_logits + columns, mask=columns < stride, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(maxima, tl.max(x, axis=1) * LOG2_E)
        sums = sums * tl.exp2(maxima - larger) + tl.sum(tl.exp2(x * LOG2_E - larger[:, None]), axis=1)
        maxima = larger
    maximum = tl.max(maxima, axis=0)
    total = tl.sum(sums * tl.exp2(maxima - maximum), axis=0)
    lse = (maximum + tl.log2(total)) / LOG2_E
    tl.store(lses + row, lse)
    tl.store(losses + row, tl.where(counts, lse - target_logit + z_loss * lse * lse, 0.0))

    if GRADIENT:
        tl.debug_barrier()  # every thread has read the target's logit, over which one of them will write
        one = tl.where(exists, tl.load(scale), float("nan"))
        factor = tl.where(counts, one * (1.0 + 2.0 * z_loss * lse) / total, 0.0)
        for i in range(0, n_blocks):
            columns = (n_blocks - 1 - i) * BLOCK + words
            x = tl.load(row_logits + columns, mask=columns < stride, other=-float("inf")).to(tl.float32)
            tl.store(row_logits + columns, tl.exp2(x * LOG2_E - maximum) * factor, mask=columns < stride)
        tl.debug_barrier()  # the target's word comes last, once, rather than in a comparison for every word
        at_target = tl.exp2(target_logit * LOG2_E - maximum) * factor - one
        tl.store(row_logits + target, at_target, mask=exists & counts)


def launch_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    lse_C: Tensor,
    *,
    scale: Tensor,
    ignore_index: int,
    z_loss: float,
    gradient: bool,
) -> None:
    """Fill fp32 losses and lse of a chunk; with ``gradient``, logits become their gradient times ``scale`` (1,)."""
    stride, n_words = logits_CV.stride(0), logits_CV.shape[1]
    vector = 16 // logits_CV.itemsize
    n_warps = 32 if n_words >= LONG_ROW else 8
    block = min(n_warps * 32 * vector * LOADS, max(vector, next_power_of_2(stride)))
    launch(
        cross_entropy_rows_kernel,
        (len(logits_CV),),
        *(logits_CV, targets_C, scale, losses_C, lse_C, stride, n_words, ignore_index, z_loss),
        BLOCK=block,
        VECTOR=vector,
        GRADIENT=gradient,
        num_warps=n_warps,
        maxnreg=LONG_ROW_REGISTERS if n_words >= LONG_ROW else None,
    )


def default_chunk(n_tokens: int, n_words: int, itemsize: int) -> int:
    """Tokens per chunk, for the fewest chunks of equal size whose logits take at most ``CHUNK_BYTES`` each."""
    most = max(CHUNK_MULTIPLE, CHUNK_BYTES // (n_words * itemsize) // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
    equal = ceil_div(n_tokens, max(1, ceil_div(n_tokens, most)))
    return max(1, ceil_div(equal, CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


def in_chunks(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    grad_weight: Tensor | None,
    accumulate: bool,
    wants_dx: bool,
    chunk: int,
    rows: Callable[[Tensor, Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """losses (T,), dx (T, D) or (0,), lse (T,): the matmuls around ``rows(logits, targets, losses, lse)``.

    ``rows`` fills a chunk's losses and lse and, where gradients are wanted, writes that of the logits over them.
    """
    n_tokens, n_words = len(x_TD), len(weight_VD)
    losses = torch.empty(n_tokens, dtype=torch.float32, device=x_TD.device)
    lse = torch.empty_like(losses)
    dx = torch.empty_like(x_TD) if wants_dx else x_TD.new_empty(0)
    # Whatever the vocabulary, rows begin at multiples of 16 elements: the products' fast kernels and ours need that.
    buffer = torch.empty(min(chunk, n_tokens), ceil_div(n_words, 16) * 16, dtype=x_TD.dtype, device=x_TD.device)
    if grad_weight is not None and not (n_tokens or accumulate):
        grad_weight.zero_()
    for start in range(0, n_tokens, chunk):
        part = slice(start, start + chunk)
        x = x_TD[part]
        logits = buffer[: len(x), :n_words]
        buffer[:, n_words:].fill_(-torch.inf)
        product_(logits, x, weight_VD)
        rows(logits, targets_T[part], losses[part], lse[part])
        if wants_dx:
            torch.mm(logits, weight_VD, out=dx[part])
        if grad_weight is not None and (accumulate or start):
            grad_weight.addmm_(logits.t(), x)
        elif grad_weight is not None:
            torch.mm(logits.t(), x, out=grad_weight)
    return losses, dx, lse


def _results(x_TD: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, wants_dx, _, _, _ = rest
    dx = torch.empty_like(x_TD) if wants_dx else x_TD.new_empty(0)
    lse = x_TD.new_empty(len(x_TD), dtype=torch.float32)
    return lse.new_empty(()), dx, lse


@operator("linear_cross_entropy", _results, mutates=("grad_weight",))
def linear_cross_entropy_op(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    denominator: Tensor | None,
    grad_weight: Tensor | None,
    accumulate: bool,
    wants_dx: bool,
    ignore_index: int,
    z_loss: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, lse); grad_weight, if any, is added to or, unless ``accumulate``, overwritten."""
    targets_T = targets_T.contiguous()
    if targets_T.is_cpu:
        _check_targets(targets_T, len(weight_VD), ignore_index)
    if denominator is None:
        denominator = (targets_T != ignore_index).sum()
    scale = denominator.to(torch.float32).reciprocal()
    gradient = wants_dx or grad_weight is not None
    rows = functools.partial(launch_rows, scale=scale, ignore_index=ignore_index, z_loss=z_loss, gradient=gradient)
    losses, dx, lse = in_chunks(x_TD, weight_VD, targets_T, grad_weight, accumulate, wants_dx, chunk, rows)
    return losses.sum() * scale, dx, lse


def linear_cross_entropy_forward_backward(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    grad_weight: Tensor | None = None,
    denominator: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss (), dx (T, D), dweight (V, D), lse (T,)), outside of autograd; loss and lse are fp32.

    Args:
        x_TD: fp32 or bf16, as weight_VD.
        targets_T: int64 in [0, V), or ``ignore_index``; anything else makes loss and gradients NaN.
        grad_weight: like weight_VD; dweight is added to it in place, and it is what is returned.
        denominator: () on the device of x, by which the sum over the targets that count is divided; by default their
            number. It may be the number over all micro-batches or ranks.
        z_loss: adds z_loss * lse^2 to each target's loss.
        chunk: tokens whose logits exist at a time; ``default_chunk`` if None.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a chunk below 1, or tensors that are on no CUDA device.
    """
    _check(x_TD, weight_VD, targets_T, chunk)
    accumulate = grad_weight is not None
    if grad_weight is None:
        grad_weight = torch.empty_like(weight_VD)
    elif (grad_weight.shape, grad_weight.dtype) != (weight_VD.shape, weight_VD.dtype):
        got = f"{tuple(grad_weight.shape)} {grad_weight.dtype}"
        raise ValueError(f"grad_weight must be like weight {tuple(weight_VD.shape)} {weight_VD.dtype}, got {got}")
    chunk = chunk or default_chunk(len(x_TD), len(weight_VD), x_TD.itemsize)
    with torch.no_grad():
        loss, dx, lse = linear_cross_entropy_op(
            x_TD, weight_VD, targets_T, denominator, grad_weight, accumulate, True, ignore_index, z_loss, chunk
        )
    return loss, dx, grad_weight, lse


class LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients; backward multiplies them, in place, by the gradient that arrives.

    That reads and writes each once more: 0.7 ms beside 187 at 32,768 x 4096 x 151,936 by its bytes, where torch's
    multiplication by a scalar on the device takes 3.5. If another backward is to come, copies are multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        denominator: Tensor | None,
        wants: tuple[bool, bool],
        ignore_index: int,
        z_loss: float,
        chunk: int,
    ) -> Tensor:
        wants_dx, wants_dweight = wants
        dweight = torch.empty_like(weight_VD) if wants_dweight else None
        loss, dx, _ = linear_cross_entropy_op(
            x_TD, weight_VD, targets_T, denominator, dweight, False, wants_dx, ignore_index, z_loss, chunk
        )
        ctx.save_for_backward(dx if wants_dx else None, dweight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        found = list(ctx.saved_tensors)
        if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
            found = [None if gradient is None else gradient.clone() for gradient in found]
        else:
            ctx.maybe_clear_saved_tensors()  # autograd would copy what it holds itself
        for gradient in found:
            if gradient is not None:
                scale_op(gradient, arriving)
        return *found, None, None, None, None, None, None


@triton.jit
def scale_kernel(x, factor, n_elements, BLOCK: tl.constexpr):
    """Multiply x by the one factor in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_elements
    tl.store(x + at, tl.load(x + at, mask=inside).to(tl.float32) * tl.load(factor), mask=inside)


@operator("scale_", lambda x, factor: None, mutates=("x",))
def scale_op(x: Tensor, factor: Tensor) -> None:
    """Contiguous x times a factor () in fp32, in place, rounded once."""
    launch(scale_kernel, (ceil_div(x.numel(), SCALE_BLOCK),), x, factor, x.numel(), BLOCK=SCALE_BLOCK)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Cross entropy of ``x @ weight.T``, in nats: x (..., D), weight (V, D), int64 targets (...) -> () in fp32.

    For training: where gradients are wanted, they are computed here, without the logits of all tokens.

    Args:
        ignore_index: targets of this value do not count, for the mean neither.
        z_loss: adds z_loss * logsumexp(logits)^2 to each target's loss.
        chunk: tokens whose logits exist at a time; ``default_chunk`` if None.

    Raises:
        ValueError: shapes, dtypes (fp32 and bf16 are taken) or devices that do not fit, an unknown reduction, a chunk
            below 1, or tensors that are not on a CUDA device.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, got {reduction!r}")
    if x.dim() < 1 or x.shape[:-1] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not match x {tuple(x.shape)} without its last dimension")
    x_TD, targets_T = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)
    _check(x_TD, weight, targets_T, chunk)
    chunk = chunk or default_chunk(len(x_TD), len(weight), x.itemsize)
    denominator = torch.ones((), device=x.device) if reduction == "sum" else None
    wants = torch.is_grad_enabled() and x.requires_grad, torch.is_grad_enabled() and weight.requires_grad
    if any(wants):
        loss: Tensor = LinearCrossEntropy.apply(
            x_TD, weight, targets_T, denominator, wants, ignore_index, z_loss, chunk
        )
        return loss
    loss, _, _ = linear_cross_entropy_op(
        x_TD, weight, targets_T, denominator, None, False, False, ignore_index, z_loss, chunk
    )
    return loss


def _check(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk: int | None) -> None:
    if weight_VD.dim() != 2 or x_TD.dim() != 2 or x_TD.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        raise ValueError(f"weight {tuple(weight_VD.shape)} is not (words, d) for x {tuple(x_TD.shape)}")
    if targets_T.shape != x_TD.shape[:1] or targets_T.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 {tuple(x_TD.shape[:1])}, got {targets_T.dtype} {tuple(targets_T.shape)}"
        )
    if x_TD.dtype == torch.float16:
        raise ValueError("the kernel takes float32 and bfloat16: in float16 gradients of logits would underflow")
    check_alike(x=x_TD, weight=weight_VD)
    check_runnable(cross_entropy_rows_kernel, x_TD)
    if targets_T.device != x_TD.device:
        raise ValueError(f"targets are on {targets_T.device}, x is on {x_TD.device}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")


def _check_targets(targets_T: Tensor, n_words: int, ignore_index: int) -> None:
    wrong = targets_T[((targets_T < 0) | (targets_T >= n_words)) & (targets_T != ignore_index)]
    if len(wrong):
        raise ValueError(f"target {wrong[0].item()} is neither in [0, {n_words}) nor {ignore_index}, which is ignored")
