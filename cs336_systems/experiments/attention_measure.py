"""Time, memory and error of one attention at one shape: the cell of ``benchmark_attention.py``.

Forward, backward and both are timed separately, backward as backward, with a cold L2 cache; by this suite's clock or
by triton's ``do_bench``, which has warm-up and repetitions of its own; or by the first while the GPU waits for the
host's launches (``device``). TFLOP/s use the FlashAttention convention; for a variant they count the scores that its
mask leaves. Errors are relative Frobenius norms against fp64 of the first key/value head of the first sequence and the
query heads that share it.

A cell with a ``mask`` measures one of ``VARIANTS``: FlexAttention (``flex``) beside torch's attention with the same
rule as a dense tensor (``sdpa-dense-mask``). Masks are built before any clock starts, and their bytes reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention import variants
from cs336_systems.attention.dispatch import attention, off_cuda, unsupported_reason
from cs336_systems.attention.oracle import oracle_attention
from cs336_systems.attention.shapes import HOPPER_DTYPES, AttentionShape, validate
from cs336_systems.case import Unsupported
from cs336_systems.experiments.attention import FLASH_4, MATERIALISED, AttentionCell
from cs336_systems.experiments.peers import error_metric, installed, relative_error
from cs336_systems.hardware import GIB, find_hardware
from cs336_systems.harness.clock import in_gib, rate, time_kernel
from cs336_systems.harness.isolation import PredictedOutOfMemory
from cs336_systems.harness.memory import PeakMeter, allocated_bytes, free_bytes
from cs336_systems.harness.record import Metric
from cs336_systems.training.precision import DTYPES

_ORACLE_LENGTH = {"cuda": 16_384, "cpu": 2048}
"""Longest sequence whose fp64 scores of one head are worth their memory (2 GiB) and time."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> o."""


@dataclass(frozen=True)
class _Served:
    """A cell's function, the oracle of its first head, and metrics known beforehand."""

    attend: Attend
    exact: Attend
    metrics: list[Metric] = field(default_factory=list)
    share_of_scores: float = 1.0
    """The share that the mask leaves of the scores that ``AttentionWork`` counts."""


def measure(cell: AttentionCell) -> list[Metric]:
    """Time, memory and error of one cell.

    Raises:
        Unsupported: the implementation cannot serve the shape on this device.
        PredictedOutOfMemory: the predicted peak is more than what is free.
    """
    device, dtype, work = torch.device(cell.device), DTYPES[cell.dtype], cell.work
    if cell.impl in MATERIALISED:
        needed = work.materialised_bytes(dtype.itemsize, compiled=cell.impl == "reference-compiled")
    else:
        needed = work.tiled_bytes(dtype.itemsize)
    if needed > (free := free_bytes(device)):
        raise PredictedOutOfMemory(f"needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
    torch.manual_seed(cell.seed)
    heads = (cell.heads, *2 * [cell.kv_heads or cell.heads], cell.heads)
    shapes = ((cell.batch_size, *((n,) if n else ()), cell.length, cell.d_head) for n in heads)
    q, k, v, do = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    served = _serve_variant(cell, q, k, v) if cell.mask else _serve(cell, q, k, v)

    def forward() -> Tensor:
        return served.attend(q, k, v)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, do)

    torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
    both()  # compiles and autotunes outside of every clock and meter
    meter, before = PeakMeter(device), allocated_bytes(device)
    o = forward()
    kept = allocated_bytes(device) - before
    backward = functools.partial(torch.autograd.grad, o, inputs, do, retain_graph=True)
    gradients = backward()
    metrics = []
    if device.type == "cuda" and (peak_bytes := meter.peak_bytes()):
        not_ours = max(0, before - sum(x.nbytes for x in (q, k, v, do)))  # cuBLAS workspaces, say
        metrics += in_gib(kept_for_backward=kept, peak_memory=peak_bytes - not_ours)
    metrics += [*in_gib(predicted_peak_memory=needed), *served.metrics]
    if cell.repeat == 0 and cell.length <= _ORACLE_LENGTH[device.type]:
        metrics += errors(served.exact, (q, k, v), do, (o, *gradients))
    clocks: dict[str, Callable[..., list[float]]] = {"harness": timed, "do-bench": timed_by_do_bench}
    clocks["device"] = functools.partial(timed, host_first=True)  # kernels alone, once the host has launched them all
    clock = clocks[cell.clock]
    del gradients
    samples_ms = {"backward": clock(backward, device)}
    del o, backward  # the graph holds what forward kept, which the others need room for
    samples_ms |= {"forward": clock(forward, device), "both": clock(both, device)}
    flops = {"forward": work.forward_flops, "backward": work.backward_flops}
    flops["both"] = flops["forward"] + flops["backward"]
    hardware = find_hardware(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    peak = hardware.peak(cell.dtype) if hardware else None
    for name, samples in samples_ms.items():
        seen = served.share_of_scores * flops[name]
        metrics += [Metric(name, "ms", samples), rate(f"{name}_tflops", "TFLOP/s", seen / 1e12, samples)]
        if peak:
            metrics.append(rate(f"{name}_peak_share", "% of datasheet peak", 100 * seen / peak, samples))
    return metrics


def timed(run: Callable[[], object], device: torch.device, host_first: bool = False) -> list[float]:
    """At least ten samples, and about a third of a second of them."""
    first = sorted(time_kernel(run, device=device, warmup=1, samples=3))[1]
    samples = int(min(100, max(10, 300 / first)))
    return time_kernel(run, device=device, warmup=2, samples=samples, host_first=host_first)


def timed_by_do_bench(run: Callable[[], object], device: torch.device) -> list[float]:
    """Every sample of triton's ``do_bench`` at its defaults, 25 ms of warm-up and 100 ms of samples, at least one."""
    from triton.testing import do_bench  # Triton is not on every machine

    return do_bench(run, return_mode="all")


def errors(
    exact: Attend, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor, results: tuple[Tensor, ...]
) -> list[Metric]:
    """Relative errors of (o, dq, dk, dv) in the first key/value head of the first sequence, with the query heads that
    share it, against ``exact`` in fp64, which takes one query head at a time."""
    first = [x.detach()[:1] if x.ndim == 4 else x.detach()[:1, None] for x in (*inputs, do, *results)]
    q, k, v, do = first[:4]
    parts = []
    for head in range(q.shape[1] // k.shape[1]):
        here = slice(head, head + 1)
        leaves = [x.double().requires_grad_() for x in (q[:, here], k[:, :1], v[:, :1])]
        o = exact(*leaves)
        parts.append((o.detach(), *torch.autograd.grad(o, leaves, do[:, here].double())))
    of_all = [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
    wanted = [*of_all[:2], *(x.sum(1, keepdim=True) for x in of_all[2:])]
    return [
        error_metric(name, relative_error(got[:, : want.shape[1]], want))
        for name, got, want in zip(("o", "dq", "dk", "dv"), first[4:], wanted, strict=True)
    ]


def make_variant(name: str, shape: AttentionShape, device: torch.device, *, of_heads: int) -> variants.Variant:
    """One of ``VARIANTS`` with plausible data: four documents of unequal length, a prefix of a quarter, fixed biases.

    ``shape`` may hold fewer heads than the ``of_heads`` over which slopes are spread: the first of them.
    """
    positions = torch.arange(shape.n_keys, device=device)
    bounds = torch.tensor([0.1, 0.3, 0.6], device=device) * shape.n_keys
    ids = torch.bucketize(positions, bounds, right=True).repeat(shape.batch, 1)
    slopes = variants.alibi_slopes(of_heads)[: shape.heads].to(device)
    distances = torch.linspace(-1, 1, 257, device=device).abs().neg().repeat(shape.heads, 1)
    parts: dict[str, Callable[[], variants.Variant]] = {
        "full": variants.full,
        "causal": variants.causal,
        "window 256": lambda: variants.sliding_window(256),
        "document": lambda: variants.document(ids),
        "prefix-LM": lambda: variants.prefix_lm(torch.full((shape.batch,), shape.n_keys // 4, device=device)),
        "ALiBi": lambda: variants.alibi(slopes),
        "relative bias": lambda: variants.relative_bias(distances),
        "softcap": lambda: variants.softcap(30.0),
    }
    return functools.reduce(variants.Variant.__and__, (parts[part]() for part in name.split(" & ")))


def _serve(cell: AttentionCell, q: Tensor, k: Tensor, v: Tensor) -> _Served:
    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle_attention(q, k, v, causal=cell.causal)[0]

    if cell.impl == FLASH_4:
        return _Served(_flash_4(q.device, q.dtype, causal=cell.causal), exact)
    if reason := unsupported_reason(cell.impl, q, k, v, causal=cell.causal):
        raise Unsupported(reason)
    return _Served(functools.partial(attention, causal=cell.causal, impl=cell.impl), exact)


def _flash_4(device: torch.device, dtype: torch.dtype, *, causal: bool) -> Attend:
    """FlashAttention-4, which gets views of the inputs with the sequence before the heads; nothing is copied.

    Raises:
        Unsupported: it is not installed, or takes no such device or dtype.
    """
    if reason := off_cuda(FLASH_4, device):
        raise Unsupported(reason)
    if dtype not in HOPPER_DTYPES:
        raise Unsupported(f"{FLASH_4} multiplies in {' and '.join(map(str, HOPPER_DTYPES))}, the inputs are {dtype}")
    function = installed("flash_attn.cute", FLASH_4).flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, _ = function(*(x.transpose(1, 2) if x.ndim == 4 else x.unsqueeze(2) for x in (q, k, v)), causal=causal)
        return o.transpose(1, 2) if q.ndim == 4 else o.squeeze(2)

    return attend


def _serve_variant(cell: AttentionCell, q: Tensor, k: Tensor, v: Tensor) -> _Served:
    """FlexAttention, or the dense form of the same variant for torch's own attention."""
    shape = validate(q, k, v)
    first = validate(q[:1, :1], k[:1, :1], v[:1, :1])
    variant, alone = (make_variant(cell.mask, each, q.device, of_heads=cell.heads) for each in (shape, first))
    attend: Attend
    if cell.impl == "flex":
        if reason := off_cuda("flex", q.device):
            raise Unsupported(reason)
        blocks = variants.make_block_mask(variant, shape, q.device)
        attend = functools.partial(variants.variant_attention, variant=variant, block_mask=blocks)
        n_bytes = sum(x.nbytes for x in blocks.as_tuple() if isinstance(x, Tensor)) if blocks else 0
    else:
        dense = _dense_form(variant, shape, q)
        attend = functools.partial(F.scaled_dot_product_attention, attn_mask=dense)
        n_bytes = dense.untyped_storage().nbytes()
    share = variants.dense_mask(alone, first, q.device).double().mean().item()
    metrics = [
        Metric("seen_scores", "% of all", [100 * share]),
        Metric("skipped_blocks", "% of all", [variants.block_sparsity(variant, shape)]),
        *in_gib(mask_memory=n_bytes),
    ]
    return _Served(attend, lambda q, k, v: variants.dense_attention(q, k, v, alone)[0], metrics, share)


def _dense_form(variant: variants.Variant, shape: AttentionShape, q: Tensor) -> Tensor:
    """A mask for ``attn_mask``: bool where scores are only hidden, else the addends of scores, in the dtype of q.

    Raises:
        Unsupported: the variant changes scores by more than a sum.
    """
    seen = variants.dense_mask(variant, shape, q.device)[:, :1]
    if variant.score_mod is None:
        return (seen if variant.mask_per_batch else seen[:1]).contiguous()
    zeros = torch.zeros(1, shape.heads, shape.n_queries, shape.n_keys, device=q.device)
    added = variants.dense_scores(variant, zeros)
    if not torch.equal(variants.dense_scores(variant, zeros + 1), added + 1):
        raise Unsupported(f"torch's attention can add to scores, and {variant.name!r} does more")
    return added.masked_fill(~seen, float("-inf")).to(q.dtype)
