"""Matmuls by the kernel that ``choose`` has measured to be the fastest for their shape.

    choose([Asked(out, a, b), ...])              # once, before training
    multiply_(out, a, b)                         # out = a b
    multiply_(out, a, b, addend)                 # out = addend + a b
    multiply_scaled_(out, a, b, scales)          # fp8 matrices; an addend is supported, too
    swiglu_product_(gate_up, x, weight, z)       # gate | up = x W^T, and SwiGLU's output z, in one launch

Method. Torch uses cuBLASLt's first candidate. Under the power limit, which bounds large matmuls, others can be faster
(LOG.md). So each candidate, and our own kernel (``products.py``), is timed on normally distributed numbers, and the
fastest is used from then on. Only kernels with the same bits as the default kernel are candidates, so a choice, which
may differ from run to run, changes no result. The default is our kernel for shapes in ``products.FASTER``, cuBLASLt's
first candidate for fp8 matmuls with an addend, and torch otherwise.

Shape legend: a (M, K), b (K, N), out (M, N).
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cs336_systems.kernels.cublaslt import Spec, candidates, serves, spec
from cs336_systems.kernels.lora_reference import LowRank

ROUNDS, SECONDS = 2, 0.05
"""The number of measurements of each candidate, interleaved with the others', and their length."""
LEAST_GAIN = 0.02
"""The least relative gain for which a kernel replaces the default: one that is faster alone may not be so in a step."""
WARM_SECONDS = 0.5
"""Seconds of warm-up before a product's measurements, after which the clock has settled under the power limit."""

Multiply = Callable[..., None]
_chosen: dict[Spec, Multiply] = {}


@dataclass(frozen=True)
class Asked:
    """A matmul to be measured; its tensors are overwritten.

    Attributes:
        addend: out or another tensor, as in later calls; None without an addend.
        scales: of fp8 operands, as for ``multiply_scaled_``.
        fast: as for ``multiply_scaled_``.
    """

    out: Tensor
    a: Tensor
    b: Tensor
    addend: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None
    fast: bool = False


def multiply_(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None) -> None:
    """out = a b, or addend + a b; the addend may be out."""
    chosen = _chosen.get(spec(out, a, b, addend)) if _chosen else None
    if chosen is not None and addend is not None and addend.data_ptr() != out.data_ptr():
        out.copy_(addend)  # as torch does, and as in the measurement: another addend may be rounded differently
        addend = out
    (chosen or _unmeasured)(out, a, b, addend)


def multiply_scaled_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    addend: Tensor | None = None,
    *,
    fast: bool = False,
) -> None:
    """out = scales a b for fp8 matrices, or addend + scales a b.

    Args:
        scales: fp32, of a and of b, one element each.
        addend: like out. The sum is rounded once; if the addend is out itself, or ``cublaslt.py`` does not support the
            matmul, the product is also rounded before it is added.
        fast: as ``use_fast_accum`` of ``torch._scaled_mm``.
    """
    asked = spec(out, a, b, addend, fast=fast)
    if addend is None or serves(asked):
        (_chosen.get(asked) or _first(asked))(out, a, b, addend, scales)
    elif not out.is_meta:
        product = torch.empty_like(out)
        _scaled_by_torch(product, a, b, None, scales, fast=fast)
        torch.add(addend, product, out=out)


def choose(asked_for: Iterable[Asked]) -> None:
    """Measure each matmul's candidates on the device of its tensors, and remember the fastest.

    It takes one or two seconds per matmul, and memory for its tensors and a second result.
    """
    for asked in asked_for:
        wanted = spec(asked.out, asked.a, asked.b, asked.addend, fast=asked.fast)
        if not serves(wanted):
            continue
        for operand in (asked.a, asked.b):
            _fill(operand)
        _chosen[wanted] = _fastest(asked, wanted)


def product_(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out (R, N) = x (R, K) times weight (N, K) transposed."""
    multiply_(out, x, weight.T)


def add_product_(out: Tensor, addend: Tensor, x: Tensor, weight: Tensor) -> None:
    """out (R, N) = addend + x (R, K) times weight (N, K) transposed; out may be addend."""
    multiply_(out, x, weight.T, addend)


def product_backward_(dx: Tensor, dy: Tensor, weight: Tensor) -> None:
    """dx (R, K) = dy (R, N) times weight (N, K)."""
    multiply_(dx, dy, weight)


def weight_backward_(gradient: Tensor, dy: Tensor, x: Tensor, accumulate: bool) -> None:
    """gradient (N, K) = dy (R, N) transposed times x (R, K), or gradient += that."""
    multiply_(gradient, dy.T, x, gradient if accumulate else None)


def swiglu_product_(gate_up: Tensor, x: Tensor, weight: Tensor, product: Tensor, low: LowRank | None = None) -> None:
    """gate | up (R, 2F) = x (R, K) times weight (2F, K) transposed, plus low; product (R, F) = silu(gate) * up."""
    from cs336_systems.kernels import lora, products  # brings Triton along, as below
    from cs336_systems.kernels.swiglu import swiglu_forward

    if (*weight.shape, True) in products.FASTER and products.launch_product(x, weight, gate_up, product, low):
        return
    product_(gate_up, x, weight)
    if low is not None:
        lora.expand_(gate_up, low)
    swiglu_forward(gate_up, out=product)


def _unmeasured(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None) -> None:
    if addend is None and b.stride(0) == 1:
        from cs336_systems.kernels import products

        if (b.shape[1], b.shape[0], False) in products.FASTER and products.launch_product(a, b.T, out):
            return
    by_torch_(out, a, b, addend)


def by_torch_(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None) -> None:
    """``multiply_`` by torch's kernel."""
    if addend is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(addend, a, b, out=out)


def _scaled_by_torch(
    out: Tensor, a: Tensor, b: Tensor, addend: None, scales: tuple[Tensor, Tensor], *, fast: bool
) -> None:
    torch._scaled_mm(a, b, *scales, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def _ours(out: Tensor, a: Tensor, b: Tensor, addend: None) -> None:
    from cs336_systems.kernels import products

    if not products.launch_product(a, b.T, out):
        raise RuntimeError(f"no kernel of ours for {tuple(a.shape)} by {tuple(b.shape)}")


def _first(asked: Spec) -> Multiply:
    """The default kernel."""
    if asked.dtypes[1].itemsize > 1:
        return _unmeasured
    return candidates(asked)[0] if asked.adds else partial(_scaled_by_torch, fast=asked.fast)


def _fastest(asked: Asked, wanted: Spec) -> Multiply:
    first, others = _first(wanted), list[Multiply](candidates(wanted))
    if asked.addend is not None:
        asked.addend.fill_(1)
    elif asked.scales is None and asked.b.stride(0) == 1:
        others.append(_ours)
    expected = _result(asked, first)
    seconds = {kernel: math.inf for kernel in (first, *others) if _gives(expected, asked, kernel)}
    del expected
    _seconds(partial(_call, asked, first), WARM_SECONDS)
    for _ in range(ROUNDS):
        for kernel in seconds:
            seconds[kernel] = min(seconds[kernel], _seconds(partial(_call, asked, kernel), SECONDS))
    best = min(seconds, key=lambda kernel: seconds[kernel])
    return best if seconds[best] <= (1 - LEAST_GAIN) * seconds[first] else first


def _call(asked: Asked, kernel: Multiply) -> None:
    scales = () if asked.scales is None else (asked.scales,)
    kernel(asked.out, asked.a, asked.b, asked.addend, *scales)


def _result(asked: Asked, kernel: Multiply) -> Tensor:
    asked.out.fill_(1)
    _call(asked, kernel)
    return asked.out.clone()


def _gives(expected: Tensor, asked: Asked, kernel: Multiply) -> bool:
    """Whether the kernel supports the product and gives these bits."""
    asked.out.fill_(1)
    try:
        _call(asked, kernel)
    except RuntimeError:
        return False
    return torch.equal(asked.out, expected)


def _seconds(call: Callable[[], None], at_least: float) -> float:
    """Mean seconds per call over about this much time, after warm-up."""
    call()
    torch.cuda.synchronize()
    start, n_calls, more = time.perf_counter(), 0, 1
    while (taken := time.perf_counter() - start) < at_least:
        for _ in range(more):
            call()
        torch.cuda.synchronize()
        n_calls, more = n_calls + more, min(2 * more, 32)
    return taken / n_calls


def _fill(operand: Tensor) -> None:
    """Fill with normally distributed numbers, as power depends on values; some rows at a time to save memory."""
    rows_first = operand if operand.stride(-1) == 1 else operand.T
    generator = torch.Generator(operand.device).manual_seed(0)
    for part in rows_first.split(max(1, 2**22 // rows_first.shape[1])):
        part.copy_(torch.randn(part.shape, generator=generator, device=part.device))
