"""Loss, log-sum-exp and gradient of each row of a chunk of logits; the gradient overwrites the logits.

Formula, for logits (C, V), targets (C), n the number of targets that count and a scale of 1/n:

    lse[t]         = log sum_v exp(logits[t, v])
    losses[t]      = lse[t] - logits[t, targets[t]] + z_loss lse[t]^2        0 where the target does not count
    dlogits[t, v]  = scale (exp(logits[t, v] - lse[t]) (1 + 2 z_loss lse[t]) - [v = targets[t]])

Method. A program per row reads the row twice: once for maximum and sum, and then from its end to its beginning for the
gradient, so that the part read last, which the caches most likely still hold, comes first. At 151,936 words in bf16 a
multiprocessor works on one row at a time (1,024 threads of 64 registers each): 40 MB on an H200, whose L2 holds 50.

Traffic: logits read and written once, if caches serve the second reading; 20 GB at 32,768 x 151,936 in bf16, 5 ms at
4.3 TB/s. It takes 6.2 ms there on an H200 (LOG.md).

Limits: fp32 and bf16; rows of logits begin at multiples of 16 elements. ``linear_cross_entropy.py`` calls it.
"""

import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.launching import ceil_div, launch, next_power_of_2
from cs336_systems.kernels.linear_cross_entropy import IGNORED, agree_, own_places
from cs336_systems.model.tensor_ranks import TensorRanks

LONG_ROW = 2**15
"""A row of at least this many words gets 32 warps instead of 8, and a multiprocessor for itself; caches then hold all
rows in progress. 4,096 rows of 151,936 words take 0.78 ms this way, and 0.85 with two on a multiprocessor."""
LONG_ROW_REGISTERS = 64
"""Registers per thread, with which 1,024 threads fill a multiprocessor."""
SCALE_BLOCK = 4096
"""Elements of a program of 4 warps: 4 loads of 16 bytes per thread in bf16."""
LOADS = 4
"""Loads of 16 bytes per thread and block."""


@triton.jit
def cross_entropy_rows_kernel(
    logits, targets, scale, losses, lses, stride, n_words, ignore_index, z_loss,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, GRADIENT: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Program i: losses[i] and lses[i] of row i of logits, and its gradient times scale[0] in its place.

    Rows begin at multiples of ``stride``; between ``n_words`` and ``stride`` they are -inf. With KNOWN, losses and
    lses are inputs, over a vocabulary of which the row has a part, and targets may be outside of that part.
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
    n_blocks = tl.cdiv(stride, BLOCK)
    if KNOWN:
        lse = tl.load(lses + row)
        maximum, total = lse * LOG2_E, 1.0
    else:
        maxima = tl.full((BLOCK // VECTOR,), -3.4e38, tl.float32)  # finite: -inf - -inf would be NaN
        sums = tl.zeros((BLOCK // VECTOR,), tl.float32)
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
        tl.debug_barrier()  # every thread has read the target's logit, which one of them will overwrite
        one = tl.load(scale) if KNOWN else tl.where(exists, tl.load(scale), float("nan"))
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
    z_loss: float,
    gradient: bool,
    known: bool = False,
) -> None:
    """Fill fp32 losses and lse of a chunk; with ``gradient``, logits become their gradient times ``scale`` (1,).

    Args:
        known: losses and lse are inputs; targets may be ``linear_cross_entropy.ELSEWHERE``.
    """
    stride, n_words = logits_CV.stride(0), logits_CV.shape[1]
    vector = 16 // logits_CV.itemsize
    n_warps = 32 if n_words >= LONG_ROW else 8
    block = min(n_warps * 32 * vector * LOADS, max(vector, next_power_of_2(stride)))
    launch(
        cross_entropy_rows_kernel,
        (len(logits_CV),),
        *(logits_CV, targets_C, scale, losses_C, lse_C, stride, n_words, IGNORED, z_loss),
        BLOCK=block,
        VECTOR=vector,
        GRADIENT=gradient,
        KNOWN=known,
        num_warps=n_warps,
        maxnreg=LONG_ROW_REGISTERS if n_words >= LONG_ROW else None,
    )


def launch_rows_of_ranks(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    lse_C: Tensor,
    *,
    scale: Tensor,
    z_loss: float,
    gradient: bool,
    ranks: TensorRanks,
) -> None:
    """``launch_rows`` for this rank's words of a vocabulary that ranks share; targets are among all words."""
    places, chunk = own_places(targets_C, logits_CV.shape[1], ranks), (losses_C, lse_C)
    launch_rows(logits_CV, places, *chunk, scale=scale, z_loss=0.0, gradient=False)
    agree_(*chunk, lse_C, lse_C - losses_C, places, z_loss, ranks)
    if gradient:
        launch_rows(logits_CV, places, *chunk, scale=scale, z_loss=z_loss, gradient=True, known=True)


@triton.jit
def scale_kernel(x, factor, out, n_elements, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """out = x times the one factor; with ADD, out += that."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_elements
    scaled = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(factor)
    if ADD:
        scaled += tl.load(out + at, mask=inside).to(tl.float32)
    tl.store(out + at, scaled, mask=inside)


def scale_(x: Tensor, factor: Tensor, onto: Tensor | None = None) -> None:
    """Contiguous x times a factor () in fp32, in place or added to ``onto``, which is like x; rounded once.

    0.7 ms for the gradients of 32,768 x 4096 x 151,936 by their bytes, where torch's multiplication takes 3.5.
    """
    out, adds = (x, False) if onto is None else (onto, True)
    launch(scale_kernel, (ceil_div(x.numel(), SCALE_BLOCK),), *(x, factor, out, x.numel()), ADD=adds, BLOCK=SCALE_BLOCK)
