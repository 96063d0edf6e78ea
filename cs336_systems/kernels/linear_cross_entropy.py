"""Head and loss in chunks of tokens: the gradients of input and weight, without ever holding the logits of all tokens.

Formula, for x (T, D), weight (V, D), targets (T), with the sums over the targets that count and n their number:

    logits[t, v]   = sum_d x[t, d] weight[v, d]
    lse[t]         = log sum_v exp(logits[t, v])
    loss           = 1/n sum_t (lse[t] - logits[t, targets[t]] + z_loss lse[t]^2)
    dlogits[t, v]  = 1/n (exp(logits[t, v] - lse[t]) (1 + 2 z_loss lse[t]) - [v = targets[t]])
    dx             = dlogits weight,   dweight = dlogits^T x

A loss is a scalar, so its gradients are known before backward begins, except for one factor. They are computed in
forward, one chunk of tokens at a time: a matmul gives the chunk's logits, each row is overwritten by its gradient, and
two more matmuls read that. Only one chunk of logits exists besides the results. dweight sums over the chunks in its own
dtype, in which a CUDA device rounds each product and each sum (LOG.md, 1 December). A sum in fp32 would be twice as
large as a chunk of logits, and rounding logits to bf16 costs more precision than sixteen roundings of the sum.

In plain PyTorch it runs on any device and in any float dtype. With ``fused``, ``cross_entropy_rows.py`` computes losses
and gradients of rows, and ``matmul.py`` the products, in fp32 and bf16 (in fp16, 1/n would underflow in dlogits).

FLOPs: 6 T V D, of which 4 T V D for the gradients. At 32,768 x 151,936 and d 4096 in bf16 an H200 takes 183 to 185 ms
fused, 660 to 670 TFLOP/s (LOG.md).

    loss = linear_cross_entropy(x, weight, targets, fused=True)        # x (..., D), weight (V, D), targets (...) -> ()

A target of ``IGNORED`` does not count. The host never waits for a GPU, so the targets' device decides for which rows
logits are computed:

* on the CPU: only for rows whose targets count, as the host knows them. Each chunk gathers its rows of x, and scatters
  their gradients among zeros. Targets out of range are refused.
* on a GPU: for every row, because only the GPU knows how many count. With ``fused``, targets out of range make loss and
  gradients NaN. CUDA graphs and ``linear_cross_entropy_forward_backward`` always do this.

If no target counts, the mean is NaN and gradients are zero, as in ``torch.nn.functional.cross_entropy``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cs336_systems.costs.memory import default_chunk
from cs336_systems.kernels.host_memory import to_device
from cs336_systems.kernels.matmul import by_torch_, multiply_
from cs336_systems.kernels.own_gradient import adds_to, own_gradient
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

IGNORED = -100
"""The target that does not count, as everywhere in torch."""
ELSEWHERE, NOWHERE = -1, -2
"""The targets that are not among this rank's words: among another's, or no rank's."""
PLAIN_CHUNK = 1024
"""Tokens per chunk in plain PyTorch, which also holds the logits in fp32."""
FUSED_ROWS = 128
"""Rows of a matmul's tile. With ``fused``, logits are computed for a multiple of them: fewer rows hardly save time, and
launches, which are prepared for each shape, would be prepared anew in every micro-batch."""


def row_width(n_words: int) -> int:
    """Elements from one row of fused logits to the next: fast kernels of products and ours need multiples of 16."""
    return -(-n_words // 16) * 16


def rows_that_count(targets_T: Tensor, n_ranks: int, multiple: int) -> Tensor | None:
    """(ranks, N): indices of the rows of each rank whose targets count; None if N would be all rows.

    N is a multiple of ``multiple`` and equal for all ranks; other rows fill up the end. Targets are on the CPU.
    """
    counts_RT = (targets_T != IGNORED).view(n_ranks, len(targets_T) // n_ranks)
    n = -(-int(counts_RT.sum(1).max()) // multiple) * multiple
    if n >= counts_RT.shape[1]:
        return None
    return torch.stack([torch.cat((counts.nonzero(), (~counts).nonzero()))[:n, 0] for counts in counts_RT])


def own_places(targets_C: Tensor, n_words: int, ranks: TensorRanks) -> Tensor:
    """Targets as indices among this rank's ``n_words`` words, ``ELSEWHERE`` or ``NOWHERE``; ``IGNORED`` stays."""
    if ranks.n_ranks == 1:
        return targets_C
    places = targets_C - ranks.rank * n_words
    places = places.where((places >= 0) & (places < n_words), ELSEWHERE)
    exists = (targets_C >= 0) & (targets_C < n_words * ranks.n_ranks)
    return places.where(exists, NOWHERE).where(targets_C != IGNORED, IGNORED)


def agree_(
    losses_C: Tensor,
    lse_C: Tensor,
    own_lse_C: Tensor,
    target_logits_C: Tensor,
    places_C: Tensor,
    z_loss: float,
    ranks: TensorRanks,
) -> None:
    """Fill losses and lse over the whole vocabulary from each rank's lse and target logits; NaN for ``NOWHERE``.

    Args:
        target_logits_C: of targets among this rank's words; anything for others.
        places_C: of the targets, as ``own_places`` gives them.
    """
    target_logits_C = target_logits_C.where(places_C >= 0, 0.0).masked_fill(places_C == NOWHERE, torch.nan)
    own = torch.stack((own_lse_C, target_logits_C), dim=1)
    lse_RC, target_logits_RC = ranks.gather(own).view(ranks.n_ranks, -1, 2).unbind(-1)
    lse_C.copy_(torch.logsumexp(lse_RC, dim=0))
    losses_C.copy_((lse_C - target_logits_RC.sum(0) + z_loss * lse_C.square()).where(places_C != IGNORED, 0.0))


def plain_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    losses_C: Tensor,
    lse_C: Tensor,
    *,
    denominator: Tensor,
    z_loss: float,
    gradient: bool,
    ranks: TensorRanks = ALONE,
) -> None:
    """Fill losses and lse of a chunk; with ``gradient``, logits become their gradient over the denominator.

    Args:
        ranks: the ranks that share the vocabulary; the logits are of this rank's words.
    """
    found, x = own_places(targets_C, logits_CV.shape[1], ranks), logits_CV.to(lse_C.dtype)
    counts, here = found != IGNORED, found >= 0
    places = found.where(here, 0)
    agree_(losses_C, lse_C, torch.logsumexp(x, dim=-1), x.gather(1, places[:, None]).squeeze(1), found, z_loss, ranks)
    if gradient:
        dlogits = torch.exp(x - lse_C[:, None]) * (1 + 2 * z_loss * lse_C)[:, None]
        dlogits.scatter_add_(1, places[:, None], -here[:, None].to(dlogits.dtype))
        logits_CV.copy_((dlogits / denominator).where(counts[:, None], 0.0))


def _in_chunks(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    denominator: Tensor,
    dx_TD: Tensor | None,
    grad_weight: Tensor | None,
    accumulate: bool,
    z_loss: float,
    chunk: int | None,
    fused: bool,
    ranks: TensorRanks = ALONE,
    rows_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, lse (T,)), at least fp32; writes dx, if given, and writes or accumulates into grad_weight.

    Each of several ranks has some rows of x, some words and all targets; lse then has all ranks' rows, chunk by chunk.

    Args:
        rows_N: the rows of x with logits, by default all; lse and targets have these rows, and dx of others is zero.
    """
    n_tokens, n_words, n_ranks = len(x_TD), len(weight_VD), ranks.n_ranks
    n_rows = n_tokens if rows_N is None else len(rows_N)
    asked: dict[str, Any] = {"z_loss": z_loss, "gradient": dx_TD is not None or grad_weight is not None}
    if n_ranks > 1:
        asked["ranks"] = ranks
    if fused:
        from cs336_systems.kernels.cross_entropy_rows import launch_rows, launch_rows_of_ranks  # brings Triton along

        scale = denominator.to(torch.float32).reciprocal()
        rows: Callable[..., None] = partial(launch_rows if n_ranks == 1 else launch_rows_of_ranks, scale=scale, **asked)
        width, chunk = row_width(n_words), chunk or default_chunk(n_tokens * n_ranks, n_words, x_TD.itemsize)
    else:
        rows = partial(plain_rows, denominator=denominator, **asked)
        width, chunk = n_words, chunk or PLAIN_CHUNK
    multiply = multiply_ if fused else by_torch_
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    losses = torch.empty(n_rows * n_ranks, dtype=wide, device=x_TD.device)
    lse = torch.empty_like(losses)
    own_chunk = max(1, min(chunk // n_ranks, n_tokens))
    # As large as for all rows: the number of rows may differ in each call, and sizes that change fragment memory.
    buffer = torch.empty(own_chunk * n_ranks, width, dtype=x_TD.dtype, device=x_TD.device)
    taken = x_TD.new_empty(0 if rows_N is None else own_chunk, x_TD.shape[1])
    if grad_weight is not None and not (n_rows or accumulate):
        grad_weight.zero_()
    if dx_TD is not None and rows_N is not None:
        dx_TD.zero_()
    for start in range(0, n_rows, own_chunk):
        part = slice(start, min(start + own_chunk, n_rows))
        own = x_TD[part]
        if rows_N is not None:
            own = torch.index_select(x_TD, 0, rows_N[part], out=taken[: part.stop - start])
        x = ranks.gather(own)
        rows_of_all = slice(start * n_ranks, start * n_ranks + len(x))
        targets = targets_T.view(n_ranks, n_rows)[:, part].flatten()
        logits = buffer[: len(x), :n_words]
        if fused:
            buffer[:, n_words:].fill_(-torch.inf)
        multiply(logits, x, weight_VD.T)
        rows(logits, targets, losses[rows_of_all], lse[rows_of_all])
        if grad_weight is not None:
            multiply(grad_weight, logits.t(), x, grad_weight if accumulate or start else None)
        if dx_TD is None:
            continue
        if n_ranks == 1:
            dx = dx_TD[part] if rows_N is None else own  # which is no longer read
            multiply(dx, logits, weight_VD)
        else:
            dx = ranks.scatter(torch.mm(logits, weight_VD))
        if rows_N is not None:
            dx_TD.index_copy_(0, rows_N[part], dx)
        elif n_ranks > 1:
            dx_TD[part] = dx
    if fused:
        return losses.sum() * scale, lse
    total = losses.new_zeros(())
    for each in losses.split(chunk):
        total += each.sum()
    return total / denominator, lse


def linear_cross_entropy_forward_backward(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    grad_weight: Tensor | None = None,
    frozen: bool = False,
    denominator: Tensor | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(loss (), dx (T, D), dweight (V, D), lse (T,)), outside of autograd; loss and lse are at least fp32.

    Args:
        targets_T: int64 in [0, V), or ``IGNORED``.
        grad_weight: like weight_VD; dweight is added to it in place, and it is returned.
        frozen: compute no dweight; None is returned instead.
        denominator: () on the device of x, by which the sum over the targets that count is divided; by default their
            number. It may be the number over all micro-batches or ranks.
        z_loss: adds z_loss * lse^2 to each target's loss.
        chunk: tokens whose logits exist at a time; chosen if None.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a chunk below 1, or, fused, no CUDA device.
    """
    _check(x_TD, weight_VD, targets_T, chunk, fused)
    if grad_weight is not None and (grad_weight.shape, grad_weight.dtype) != (weight_VD.shape, weight_VD.dtype):
        got = f"{tuple(grad_weight.shape)} {grad_weight.dtype}"
        raise ValueError(f"grad_weight must be like weight {tuple(weight_VD.shape)} {weight_VD.dtype}, got {got}")
    dx, dweight = torch.empty_like(x_TD), grad_weight
    if dweight is None and not frozen:
        dweight = torch.empty_like(weight_VD)
    denominator = (targets_T != IGNORED).sum() if denominator is None else denominator
    how = dx, dweight, grad_weight is not None, z_loss, chunk, fused
    with torch.no_grad():
        loss, lse = _in_chunks(x_TD, weight_VD, targets_T.contiguous(), denominator, *how)
    return loss, dx, dweight, lse


class _Known(torch.autograd.Function):
    """``apply(x, weight, fused, (loss, dx, dweight))`` returns the loss, whose gradients are known already.

    Backward multiplies them by the incoming gradient, in place, or copies them if another backward may follow. With
    ``fused``, the weight's gradient is added to an existing one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, known: tuple[Tensor, Any, Any]) -> Tensor:
        loss, *gradients = known
        ctx.save_for_backward(*gradients)
        ctx.fused, ctx.weight = fused, weight
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        found = list(ctx.saved_tensors)
        if torch._C._autograd._get_current_graph_task_keep_graph():
            found = [None if gradient is None else gradient.clone() for gradient in found]
        else:
            ctx.maybe_clear_saved_tensors()  # autograd would copy a tensor to which it refers itself
        scale_: Callable[..., object] = Tensor.mul_
        if ctx.fused:
            from cs336_systems.kernels.cross_entropy_rows import scale_

            own = own_gradient(ctx.weight)
            if found[1] is not None and own is not None and own.is_contiguous() and adds_to(ctx.weight):
                scale_(found[1], arriving, own)
                found[1] = None
        for gradient in found:
            if gradient is not None:
                scale_(gradient, arriving)
        return *found, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    chunk: int | None = None,
    fused: bool,
    ranks: TensorRanks = ALONE,
    every_row: bool = False,
) -> Tensor:
    """Cross entropy of ``x @ weight.T``, in nats: x (..., D), weight (V, D), int64 targets (...) -> (), at least fp32.

    If gradients are needed, they are computed here, without the logits of all tokens.

    Args:
        targets: on the device of x, or on the CPU.
        z_loss: adds z_loss * logsumexp(logits)^2 to each target's loss.
        chunk: tokens whose logits exist at a time; chosen if None.
        fused: whether to use Triton kernels.
        ranks: the ranks that divide the vocabulary of weight evenly, and the rows of x; targets are of all rows, in
            the order of ranks.
        every_row: whether to compute logits of rows with ignored targets also if targets are on the CPU.

    Raises:
        ValueError: as ``linear_cross_entropy_forward_backward``, or an unknown reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, got {reduction!r}")
    if x.dim() < 1 or (ranks.n_ranks == 1 and x.shape[:-1] != targets.shape):  # of several, ``_check`` counts rows
        raise ValueError(f"targets {tuple(targets.shape)} do not match x {tuple(x.shape)} without its last dimension")
    x_TD, targets_T = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
    _check(x_TD, weight, targets_T, chunk, fused, ranks, from_host=True)
    recorded, rows = torch.is_grad_enabled(), None
    with torch.no_grad():
        if targets_T.is_cpu:
            rows_RN = None if every_row else rows_that_count(targets_T, ranks.n_ranks, FUSED_ROWS if fused else 1)
            if rows_RN is None:
                targets_T = to_device(targets_T, x.device)
            else:
                counting_RN = targets_T.view(ranks.n_ranks, -1).gather(1, rows_RN)
                sent = to_device(torch.cat((rows_RN[ranks.rank, None], counting_RN)), x.device)
                rows, targets_T = sent[0], sent[1:].flatten()
        dx = torch.empty_like(x_TD) if recorded and x.requires_grad else None
        dweight = torch.empty_like(weight) if recorded and weight.requires_grad else None
        denominator = (targets_T != IGNORED).sum() if reduction == "mean" else torch.ones((), device=x.device)
        how = False, z_loss, chunk, fused, ranks, rows
        loss, _ = _in_chunks(x_TD, weight, targets_T, denominator, dx, dweight, *how)
    found: Tensor = _Known.apply(x_TD, weight, fused, (loss, dx, dweight))
    return found


def _check(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    chunk: int | None,
    fused: bool,
    ranks: TensorRanks = ALONE,
    *,
    from_host: bool = False,
) -> None:
    if weight_VD.dim() != 2 or x_TD.dim() != 2 or x_TD.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        raise ValueError(f"weight {tuple(weight_VD.shape)} is not (words, d) for x {tuple(x_TD.shape)}")
    n_rows, n_words = len(x_TD) * ranks.n_ranks, len(weight_VD) * ranks.n_ranks
    if targets_T.shape != (n_rows,) or targets_T.dtype != torch.int64:
        raise ValueError(f"targets must be int64 ({n_rows},), got {targets_T.dtype} {tuple(targets_T.shape)}")
    if fused:
        from cs336_systems.kernels.cross_entropy_rows import cross_entropy_rows_kernel
        from cs336_systems.kernels.launching import check_alike, check_runnable

        if x_TD.dtype == torch.float16:
            raise ValueError("the kernel takes float32 and bfloat16: in float16 gradients of logits would underflow")
        check_alike(x=x_TD, weight=weight_VD)
        check_runnable(cross_entropy_rows_kernel, x_TD)
    if targets_T.device != x_TD.device and not (from_host and targets_T.is_cpu):
        raise ValueError(f"targets are on {targets_T.device}, x is on {x_TD.device}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if targets_T.is_cpu:
        wrong = targets_T[((targets_T < 0) | (targets_T >= n_words)) & (targets_T != IGNORED)]
        if len(wrong):
            raise ValueError(f"target {wrong[0].item()} is neither in [0, {n_words}) nor {IGNORED}, ignored")
