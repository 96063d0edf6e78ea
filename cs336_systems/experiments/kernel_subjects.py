"""Each kernel's subject: the tensors it is measured on, the formula beside it, the bytes that must move, and its peers.

Tensors are (rows, width) of the cell's dtype and normal, unless a function says otherwise. A subject is chosen by the
kernel's name before a dot; after the dot stands a form of it that writes more.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cs336_systems.case import Unsupported
from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernel_measure import Function, Subject, cut_cross_entropy, liger, liger_loss
from cs336_systems.experiments.kernels import KernelCell
from cs336_systems.kernels import absmax, quantize_reference, rms_norm, rms_norm_quantize, swiglu
from cs336_systems.kernels.adamw import Update, UpdateTable, adamw_
from cs336_systems.kernels.column_sums import column_sums
from cs336_systems.kernels.grad_norm import grad_norm, norm_table
from cs336_systems.kernels.linear_cross_entropy import linear_cross_entropy_forward_backward
from cs336_systems.kernels.quantize import quantize, quantize_blocks, transpose_bytes
from cs336_systems.kernels.quantize_parts import PartsQuantizer
from cs336_systems.kernels.quantize_reference import Part, Quantized
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize
from cs336_systems.kernels.weighted_sum import weighted_sum
from cs336_systems.model import ops
from cs336_systems.training.precision import parameter_dtype

EPS = 1e-5
FP8 = torch.float8_e4m3fn


def normal(cell: KernelCell, device: torch.device, *shape: int) -> Tensor:
    """Normal numbers of this shape, (rows, width) by default."""
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    return torch.randn(shape or (cell.rows, cell.width), device=device, dtype=dtype)


def of_16(cell: KernelCell, device: torch.device) -> Tensor:
    """x (rows, width) that can be quantized.

    Raises:
        Unsupported: 16 does not divide both.
    """
    if cell.rows % quantize_reference.QUANTUM or cell.width % quantize_reference.QUANTUM:
        raise Unsupported(f"{quantize_reference.QUANTUM} does not divide {cell.rows} x {cell.width}")
    return normal(cell, device)


def quantized(found: Quantized) -> tuple[Tensor, ...]:
    """The bytes, as they lie, transposed or both."""
    return tuple(each for each in found[:2] if each is not None)


def exactly_scaled(x: Tensor, absmax: Tensor) -> Tensor:
    """x in fp64 as quantization scales it, before it is rounded."""
    return x * (quantize_reference.LARGEST[FP8] / absmax.double())


def with_absmax(formula: Callable[..., Tensor]) -> Function:
    """The formula, and the largest magnitude of its result."""

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        y = formula(*inputs)
        return y, quantize_reference.absmax(y)

    return function


def leaves(**inputs: Tensor) -> dict[str, Tensor]:
    """Inputs to which backward is measured."""
    return {name: x.requires_grad_() for name, x in inputs.items()}


def of_weighted_sum(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads x and weight (width,) and writes out (rows,); backward reads both and the gradient of out, and
    writes the gradients of both."""
    inputs = leaves(x=normal(cell, device), weight=normal(cell, device, cell.width))
    both, out = sum(x.nbytes for x in inputs.values()), cell.rows * inputs["x"].itemsize
    return Subject(inputs, weighted_sum, lambda x, weight: x @ weight, both + out, 2 * both + out)


def of_rms_norm(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads x and weight (width,) and writes y like x; backward reads both and the gradient of y, and writes
    the gradients of both. With absmax forward alone is measured."""
    x, weight = normal(cell, device), normal(cell, device, cell.width)
    ours, reference = (functools.partial(norm, eps=EPS) for norm in (rms_norm.rms_norm, ops.rms_norm))
    read_and_written = 2 * x.nbytes + weight.nbytes
    if cell.form == "absmax":
        slot = torch.zeros((), device=device)

        def ours_with_absmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return rms_norm.rms_norm_forward(x, weight, EPS, slot)[0], slot

        return Subject({"x": x, "weight": weight}, ours_with_absmax, with_absmax(reference), read_and_written)
    others = {
        "torch": lambda: lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),
        "liger": liger("LigerRMSNormFunction", EPS, 0.0, "llama", True),
    }
    n_bytes = read_and_written, 3 * x.nbytes + 2 * weight.nbytes
    return Subject(leaves(x=x, weight=weight), ours, reference, *n_bytes, peers=others)


def of_add_rms_norm(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads x, branch and weight (width,) and writes two results like x; backward reads the residual, weight
    and the gradients of both, and writes one gradient for x and branch, and weight's."""
    x, branch, weight = normal(cell, device), normal(cell, device), normal(cell, device, cell.width)

    def reference(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + branch
        return residual, ops.rms_norm(residual, weight, EPS)

    def ligers() -> Function:
        function = liger("LigerFusedAddRMSNormFunction", EPS, 0.0, "llama", False)()
        return lambda *inputs: tuple(reversed(function(*inputs)))

    ours = functools.partial(rms_norm.add_rms_norm, eps=EPS)
    n_bytes = 4 * x.nbytes + weight.nbytes, 4 * x.nbytes + 2 * weight.nbytes
    return Subject(leaves(x=x, branch=branch, weight=weight), ours, reference, *n_bytes, peers={"liger": ligers})


def of_swiglu(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads gate_up (rows, 2 width) and writes z (rows, width); backward reads it and the gradient of z, and
    writes its gradient. With absmax forward alone is measured."""
    gate_up = normal(cell, device, cell.rows, 2 * cell.width)
    z_bytes = gate_up.nbytes // 2

    def reference(gate_up: Tensor) -> Tensor:
        return ops.swiglu(*gate_up.chunk(2, dim=-1))

    if cell.form == "absmax":
        slot, inputs = torch.zeros((), device=device), {"gate_up": gate_up}

        def ours(gate_up: Tensor) -> tuple[Tensor, Tensor]:
            return swiglu.swiglu_forward(gate_up, slot), slot

        return Subject(inputs, ours, with_absmax(reference), gate_up.nbytes + z_bytes)
    n_bytes = gate_up.nbytes + z_bytes, 2 * gate_up.nbytes + z_bytes
    others = {"liger": liger("LigerFusedGateUpSiLUMulFunction")}
    return Subject(leaves(gate_up=gate_up), swiglu.swiglu, reference, *n_bytes, peers=others)


D_HEAD = 128
SHARING = 4
"""Query heads for each key/value head, as in Llama-3 8B."""


class _InPlace(torch.autograd.Function):
    """``rotate_`` forward, and back again on the gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = n_heads, n_kv_heads
        rotate_(qkv.detach(), cos, sin, n_heads, n_kv_heads)
        return qkv

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), (n_heads, n_kv_heads) = ctx.saved_tensors, ctx.heads
        rotate_(dqkv, cos, sin, n_heads, n_kv_heads, inverse=True)
        return dqkv, None, None, None, None


def of_rotary(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads q (1, H, rows, 128), k (1, H / 4, rows, 128) and the fp32 angles of ``rows`` positions and writes q
    and k; backward does the same with their gradients. Width is 128 H.

    Ours rotates in place in a merged q | k | v, as a written-out block has it, and leaves v alone. The others have q
    and k in memory of their own, as separate matmuls leave them: token by token, a token's heads together.

    Raises:
        Unsupported: a width that heads do not divide.
    """
    if cell.width % D_HEAD:
        raise Unsupported(f"heads of {D_HEAD} do not divide a width of {cell.width}")
    n_heads = cell.width // D_HEAD
    n_kv_heads = max(1, n_heads // SHARING)
    q, k, v = (normal(cell, device, cell.rows, n * D_HEAD) for n in (n_heads, *2 * [n_kv_heads]))
    angle = 2 * torch.pi * torch.rand(cell.rows, D_HEAD // 2, device=device)
    angles = {"cos": angle.cos(), "sin": angle.sin()}
    n_bytes = 2 * (q.nbytes + k.nbytes) + 2 * angle.nbytes

    def heads(x: Tensor) -> Tensor:
        return x.view(1, cell.rows, -1, D_HEAD).transpose(1, 2)

    def ours(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _InPlace.apply(qkv, cos, sin, n_heads, n_kv_heads)

    def merged_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_k, v = qkv.split(((n_heads + n_kv_heads) * D_HEAD, n_kv_heads * D_HEAD), dim=-1)
        return torch.cat((ops.rotary(heads(q_k), cos, sin).transpose(1, 2).flatten(2)[0], v), dim=-1)

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)

    if cell.how == "ours":
        return Subject(leaves(qkv=torch.cat((q, k, v), dim=-1)) | angles, ours, merged_reference, n_bytes, n_bytes)
    others = {"liger": liger("LigerRopeFunction", None, 1, D_HEAD)}
    return Subject(leaves(q=heads(q), k=heads(k)) | angles, ours, reference, n_bytes, n_bytes, others)


VOCABULARY = {"cuda": 151_936, "cpu": 1000}
"""Words: Qwen2.5's, and few enough for a CPU."""
COMPILED_CHUNK = 4096
"""Tokens at a time of the compiled formula, the faster of what PyTorch offers, and of the reference in fp64."""
SMALL_CHUNK = 1024
"""As many tokens as Liger takes by default at 32,768 x 4096."""


def of_linear_cross_entropy(cell: KernelCell, device: torch.device) -> Subject:
    """Forward does everything: it reads x and weight (vocabulary, width) and writes the gradients of both and lse
    (rows,). Its bound is not these bytes but 6 rows x width x vocabulary FLOPs.

    Logits have unit variance, and every eighth target is ignored. lse stands for the loss, as a scalar's error says
    little; peers do not return it. Eager has the logits of all tokens at once, as a separate head and loss have.
    """
    n_words = VOCABULARY[device.type]
    x = normal(cell, device)
    weight = normal(cell, device, n_words, cell.width).mul_(cell.width**-0.5)
    dtype, targets = x.dtype, torch.randint(n_words, (cell.rows,), device=device)
    targets[::8] = -100

    def ours(x: Tensor, weight: Tensor, chunk: int | None = None) -> tuple[Tensor, ...]:
        _, dx, dweight, lse = linear_cross_entropy_forward_backward(x, weight, targets, chunk=chunk)
        return dx, dweight, lse

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        chunk = cell.rows if cell.how == "eager" and x.dtype == dtype else COMPILED_CHUNK
        counts = (targets != -100).to(wide)
        scale = counts / counts.sum()
        all_lse, all_dx, dweight = [], [], torch.zeros_like(weight)
        for x_C, targets_C, scale_C in zip(x.split(chunk), targets.split(chunk), scale.split(chunk), strict=True):
            logits = (x_C @ weight.T).to(wide)
            lse = logits.logsumexp(-1, keepdim=True)
            one_hot = torch.arange(n_words, device=device) == targets_C[:, None]
            dlogits = (((logits - lse).exp() - one_hot.to(wide)) * scale_C[:, None]).to(x.dtype)
            all_lse.append(lse.squeeze(-1))
            all_dx.append(dlogits @ weight)
            dweight = torch.addmm(dweight, dlogits.T, x_C)
        return torch.cat(all_dx), dweight, torch.cat(all_lse)

    others: dict[str, Callable[[], Function]] = {
        "ours-small-chunks": lambda: functools.partial(ours, chunk=SMALL_CHUNK),
        "liger": liger_loss(targets, 1),
        "liger-large-chunks": liger_loss(targets, 4),
        "cut-cross-entropy": cut_cross_entropy(targets, filter_eps=None),
        "cut-cross-entropy-filtered": cut_cross_entropy(targets),
    }
    n_bytes = 2 * (x.nbytes + weight.nbytes) + cell.rows * torch.float32.itemsize
    return Subject({"x": x, "weight": weight}, ours, reference, n_bytes, peers=others)


LR, BETAS, ADAM_EPS, WEIGHT_DECAY = 0.1, (0.9, 0.95), 1e-8, 0.01
"""Every element changes by more than the spacing of bf16: a smaller update is lost by rounding to nearest, whose error
is then that update, and less than what stochastic rounding pays for keeping it on average."""
STEP = 10**6
"""By then the moments need no correction, and so every repetition computes the same formula."""


def of_adamw(cell: KernelCell, device: torch.device) -> Subject:
    """Parameter, gradient and moments are read, and all but the gradient written; the form ``absmax`` also gives the
    largest magnitude of the parameter."""
    p, g, m, v = (normal(cell, device) for _ in range(4))
    step, table = torch.tensor(STEP, device=device), UpdateTable()
    slot = torch.zeros((), device=device) if cell.form == "absmax" else None

    def ours(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        update = Update(p, g, m, v, step, LR, BETAS, ADAM_EPS, WEIGHT_DECAY, absmax=slot)
        adamw_([update], stochastic_rounding=True, table=table)
        return (p, m, v) if slot is None else (p, m, v, slot)

    def formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        p = (1 - LR * WEIGHT_DECAY) * p - LR * (m / (v.sqrt() + ADAM_EPS))
        return (p, m, v) if slot is None else (p, m, v, quantize_reference.absmax(p))

    steps = [step.float()]  # counted up by every call of torch's

    def torchs(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        rates: dict[str, Any] = {
            "lr": LR,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "eps": ADAM_EPS,
            "weight_decay": WEIGHT_DECAY,
        }
        adamw([p], [g], [m], [v], [], steps, fused=True, amsgrad=False, maximize=False, **rates)
        return p, m, v

    inputs = {"p": p, "g": g, "m": 0.1 * m, "v": v.square()}
    return Subject(inputs, ours, formula, 7 * p.nbytes, peers={"torch": lambda: torchs} if slot is None else {})


def of_grad_norm(cell: KernelCell, device: torch.device) -> Subject:
    """x is read; one fp32 number is written."""
    x, table = normal(cell, device), norm_table()
    others = {"torch": lambda: lambda x: torch.nn.utils.get_total_norm([x], foreach=True)}
    return Subject({"x": x}, lambda x: grad_norm([x], table), torch.linalg.vector_norm, x.nbytes, peers=others)


def of_column_sums(cell: KernelCell, device: torch.device) -> Subject:
    """x is read; its sums (width,) are written."""
    x = normal(cell, device)
    return Subject({"x": x}, column_sums, lambda x: x.sum(0), x.nbytes + cell.width * x.itemsize)


def of_absmax(cell: KernelCell, device: torch.device) -> Subject:
    """x is read."""
    x = normal(cell, device)
    return Subject({"x": x}, absmax.absmax, quantize_reference.absmax, x.nbytes)


def of_quantize(cell: KernelCell, device: torch.device) -> Subject:
    """x, whose scale is known, is read; a byte is written for each element, or two with the transposed copy.

    The error is that of e4m3, here and in the other quantizations.
    """
    x = of_16(cell, device)
    absmax, transposed = quantize_reference.absmax(x), cell.form == "transposed"

    def by(quantizer: Callable[..., Quantized]) -> Function:
        return lambda x: quantized(quantizer(x, absmax, FP8, transposed=transposed))

    def exact(x: Tensor) -> tuple[Tensor, ...]:
        scaled = exactly_scaled(x, absmax)
        return (scaled, scaled.t())[: 1 + transposed]

    n_bytes = x.nbytes + (1 + transposed) * x.numel()
    return Subject({"x": x}, by(quantize), by(quantize_reference.quantize), n_bytes, exact=exact)


def of_quantize_blocks(cell: KernelCell, device: torch.device) -> Subject:
    """x is read; two bytes are written for each element, and scales of 1 x 128."""
    x = of_16(cell, device)

    def by(quantizer: Callable[..., Quantized]) -> Function:
        return lambda x: quantized(quantizer(x, FP8, transposed=True))

    def exact(x: Tensor) -> tuple[Tensor, ...]:
        """x over its scales, before it is rounded."""
        q, q_t, inverse, inverse_t = quantize_reference.quantize_blocks(x.float(), FP8, transposed=True)
        assert q is not None and q_t is not None and inverse is not None and inverse_t is not None
        return tuple(
            wide / quantize_reference.dequantize(torch.ones_like(bytes_, dtype=torch.float32), scales)
            for wide, bytes_, scales in ((x, q, inverse), (x.t(), q_t, inverse_t))
        )

    n_bytes = x.nbytes + 2 * x.numel() + 2 * 4 * x.numel() // quantize_reference.BLOCK
    return Subject({"x": x}, by(quantize_blocks), by(quantize_reference.quantize_blocks), n_bytes, exact=exact)


N_MATRICES, N_PARTS = 4, 2
"""Matrices that x is cut into, and parts of each."""


def of_quantize_parts(cell: KernelCell, device: torch.device) -> Subject:
    """x, four matrices in two parts each, is read twice and written as bytes."""
    x, n_parts = of_16(cell, device), N_MATRICES * N_PARTS
    made: dict[int, tuple[PartsQuantizer, Tensor]] = {}

    def ours(x: Tensor) -> Tensor:
        if x.data_ptr() not in made:  # as a caller that quantizes the same memory again and again
            q, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(N_MATRICES, device=device)
            pieces = enumerate(zip(x.chunk(n_parts), q.chunk(n_parts), strict=True))
            parts = [Part(*piece, i // N_PARTS, scales[i // N_PARTS]) for i, piece in pieces]
            made.clear()
            made[x.data_ptr()] = PartsQuantizer(parts, FP8), q
        quantizer, q = made[x.data_ptr()]
        quantizer.quantize_(quantizer.absmax())
        return q.view(FP8)

    def eager(x: Tensor) -> Tensor:
        matrices = x.view(N_MATRICES, -1)
        scale, _ = quantize_reference.scales(matrices.abs().amax(dim=1, keepdim=True).float(), FP8)
        return quantize_reference.cast(matrices, scale, FP8).view_as(x)

    def exact(x: Tensor) -> Tensor:
        matrices = x.view(N_MATRICES, -1)
        return exactly_scaled(matrices, matrices.abs().amax(dim=1, keepdim=True)).view_as(x)

    return Subject({"x": x}, ours, eager, 2 * x.nbytes + x.numel(), exact=exact)


def of_rms_norm_quantize(cell: KernelCell, device: torch.device) -> Subject:
    """x and weight (width,) are read; two bytes are written for each element of the norm, as it is and transposed.

    What ours reads a second time is not counted.
    """
    x, weight = of_16(cell, device), normal(cell, device, cell.width)
    absmax = quantize_reference.absmax(ops.rms_norm(x, weight, EPS))

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = ops.rms_norm(x, weight, EPS)
        return quantized(quantize_reference.quantize(y, absmax, FP8, transposed=True))

    def exact(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scaled = exactly_scaled(ops.rms_norm(x, weight, EPS), absmax)
        return scaled, scaled.t()

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        slot = torch.zeros((), device=x.device)
        rstd = rms_norm_quantize.rms_norm_absmax(x, weight, EPS, slot)
        return quantized(rms_norm_quantize.rms_norm_quantize(x, weight, rstd, slot, FP8, transposed=True))

    n_bytes = x.nbytes + weight.nbytes + 2 * x.numel()
    return Subject({"x": x, "weight": weight}, ours, reference, n_bytes, exact=exact)


def of_swiglu_quantize(cell: KernelCell, device: torch.device) -> Subject:
    """dz and gate_up (rows, 2 width) are read; a byte is written for each element of gate_up's gradient as it is and
    transposed, and of z transposed. What ours reads a second time is not counted."""
    dz, gate_up = of_16(cell, device), torch.cat([of_16(cell, device), of_16(cell, device)], dim=1)
    slopes = swiglu.empty_slopes(gate_up)
    if cell.how == "ours":
        swiglu.swiglu_forward(gate_up, slopes=slopes)

    def gradients(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """(dgate | dup, z)."""
        gate, up = gate_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return torch.cat([dz * up * (sigmoid + silu * (1 - sigmoid)), dz * silu], dim=-1), ops.swiglu(gate, up)

    dgate_up_absmax, z_absmax = map(quantize_reference.absmax, gradients(dz, gate_up))

    def reference(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        dgate_up, z = gradients(dz, gate_up)
        found = quantize_reference.quantize(dgate_up, dgate_up_absmax, FP8, transposed=True)
        recomputed = quantize_reference.quantize(z, z_absmax, FP8, rows=False, transposed=True)
        return *quantized(found), *quantized(recomputed)

    def exact(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        dgate_up, z = gradients(dz, gate_up)
        q = exactly_scaled(dgate_up, dgate_up_absmax)
        return q, q.t(), exactly_scaled(z.t(), z_absmax)

    def ours(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        slot = torch.zeros((), device=dz.device)
        found, recomputed = swiglu_backward_quantize(dz, gate_up, slopes, slot, FP8, z_absmax=z_absmax)
        assert recomputed is not None
        return *quantized(found), *quantized(recomputed)

    n_bytes = dz.nbytes + gate_up.nbytes + 5 * dz.numel()
    return Subject({"dz": dz, "gate_up": gate_up}, ours, reference, n_bytes, exact=exact)


def of_transpose_bytes(cell: KernelCell, device: torch.device) -> Subject:
    """x, rounded to e4m3 whatever the cell's dtype, is read and written."""
    x = of_16(cell, device).to(FP8)
    return Subject({"x": x}, transpose_bytes, lambda x: x.t().contiguous(), 2 * x.nbytes)


_EVERY: tuple[Callable[[KernelCell, torch.device], Subject], ...] = (
    of_weighted_sum, of_rms_norm, of_add_rms_norm, of_swiglu, of_rotary, of_linear_cross_entropy, of_adamw,
    of_grad_norm, of_column_sums, of_absmax, of_quantize, of_quantize_blocks, of_quantize_parts,
    of_rms_norm_quantize, of_swiglu_quantize, of_transpose_bytes,
)  # fmt: skip
SUBJECTS = {function.__name__.removeprefix("of_"): function for function in _EVERY}
"""By the kernel's name before a dot."""
