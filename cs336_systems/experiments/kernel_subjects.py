"""Each kernel's subject: the tensors on which it is measured, its formula, and the least bytes to read and write.

Tensors are (rows, width), normally distributed, in the cell's dtype, unless a function says otherwise. Errors are
differences from the formula in fp64, where ``scaled_bytes`` does not round. Other libraries' kernels are in
``kernel_peers.py``.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from cs336_systems.case import Unsupported
from cs336_systems.config import FP8_QUANTUM, PRECISIONS
from cs336_systems.experiments.kernel_measure import Subject
from cs336_systems.experiments.kernels import KernelCell
from cs336_systems.kernels import absmax, quantize_reference, rms_norm, rms_norm_quantize, swiglu
from cs336_systems.kernels.adamw import Update, UpdateTable, adamw_
from cs336_systems.kernels.column_sums import column_sums
from cs336_systems.kernels.cross_entropy_rows import launch_rows
from cs336_systems.kernels.grad_norm import grad_norm, norm_table
from cs336_systems.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy_forward_backward
from cs336_systems.kernels.quantize import quantize, quantize_blocks, transpose_bytes
from cs336_systems.kernels.quantize_reference import Quantized
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize
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
    if cell.rows % FP8_QUANTUM or cell.width % FP8_QUANTUM:
        raise Unsupported(f"{FP8_QUANTUM} does not divide {cell.rows} x {cell.width}")
    return normal(cell, device)


def held(found: Quantized) -> tuple[Tensor, ...]:
    """The bytes, as they lie, transposed or both."""
    return tuple(each for each in found[:2] if each is not None)


def scaled_bytes(x: Tensor, absmax: Tensor, *, rows: bool = True, transposed: bool = True) -> tuple[Tensor, ...]:
    """x quantized in plain PyTorch; in fp64 what is rounded then, so that errors are those of e4m3."""
    if x.dtype == torch.float64:
        scaled = x * (quantize_reference.LARGEST[FP8] / absmax.double())
        return (scaled,) * rows + (scaled.t(),) * transposed
    return held(quantize_reference.quantize(x, absmax, FP8, rows=rows, transposed=transposed))


def leaves(**inputs: Tensor) -> dict[str, Tensor]:
    """Inputs to which backward is measured."""
    return {name: x.requires_grad_() for name, x in inputs.items()}


def of_rms_norm(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads x and weight (width,) and writes y like x; backward reads both and the gradient of y, and writes
    the gradients of both."""
    x, weight = normal(cell, device), normal(cell, device, cell.width)
    ours, reference = (functools.partial(norm, eps=EPS) for norm in (rms_norm.rms_norm, ops.rms_norm))
    n_bytes = 2 * x.nbytes + weight.nbytes, 3 * x.nbytes + 2 * weight.nbytes
    return Subject(leaves(x=x, weight=weight), ours, reference, *n_bytes)


def of_add_rms_norm(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads x, branch and weight (width,) and writes two results like x; backward reads the residual, weight
    and the gradients of both, and writes one gradient for x and branch, and weight's."""
    x, branch, weight = normal(cell, device), normal(cell, device), normal(cell, device, cell.width)

    def reference(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + branch
        return residual, ops.rms_norm(residual, weight, EPS)

    ours = functools.partial(rms_norm.add_rms_norm, eps=EPS)
    n_bytes = 4 * x.nbytes + weight.nbytes, 4 * x.nbytes + 2 * weight.nbytes
    return Subject(leaves(x=x, branch=branch, weight=weight), ours, reference, *n_bytes)


def of_swiglu(cell: KernelCell, device: torch.device) -> Subject:
    """Forward reads gate_up (rows, 2 width) and writes z (rows, width); backward reads it and the gradient of z, and
    writes its gradient."""
    gate_up = normal(cell, device, cell.rows, 2 * cell.width)
    n_bytes = 3 * gate_up.nbytes // 2, 5 * gate_up.nbytes // 2
    return Subject(leaves(gate_up=gate_up), swiglu.swiglu, lambda x: ops.swiglu(*x.chunk(2, dim=-1)), *n_bytes)


D_HEAD = 128
SHARING = 4
"""Query heads for each key/value head, as in Llama-3 8B."""


def of_rotary(cell: KernelCell, device: torch.device) -> Subject:
    """Reads q (1, H, rows, 128), k (1, H / 4, rows, 128) and the fp32 angles of ``rows`` positions and writes q and k;
    backward would be the same kernel. Width is 128 H.

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
        rotate_(qkv, cos, sin, n_heads, n_kv_heads)
        return qkv

    def merged_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_k, v = qkv.split(((n_heads + n_kv_heads) * D_HEAD, n_kv_heads * D_HEAD), dim=-1)
        return torch.cat((ops.rotary(heads(q_k), cos, sin).transpose(1, 2).flatten(2)[0], v), dim=-1)

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)

    if cell.how == "ours":
        return Subject({"qkv": torch.cat((q, k, v), dim=-1)} | angles, ours, merged_reference, n_bytes)
    return Subject({"q": heads(q), "k": heads(k)} | angles, ours, reference, n_bytes)


COMPILED_CHUNK = 4096
"""Tokens at a time of the head's compiled formula, the faster of what PyTorch offers, and of references in fp64."""


def some_targets(cell: KernelCell, n_words: int, device: torch.device) -> Tensor:
    """Targets (rows,) among so many words, every eighth of them ignored."""
    targets = torch.randint(n_words, (cell.rows,), device=device)
    targets[::8] = IGNORED
    return targets


def rows_of_logits(logits: Tensor, targets: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """(gradient of the loss times a scale (rows, 1), lse (rows,)) of logits (rows, words), at least fp32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = logits.logsumexp(-1, keepdim=True)
    one_hot = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((logits - lse).exp() - one_hot.to(logits.dtype)) * scale, lse.squeeze(-1)


def of_cross_entropy(cell: KernelCell, device: torch.device) -> Subject:
    """Forward does everything: it reads logits (rows, width) of ``width`` words, and writes the gradient of the sum of
    the losses in their place, and lse (rows,), which stands for the loss."""
    logits, targets = normal(cell, device), some_targets(cell, cell.width, device)
    one = torch.ones(1, device=device)

    def ours(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, lse = (torch.empty(len(logits), device=device) for _ in range(2))
        launch_rows(logits, targets, losses, lse, scale=one, z_loss=0.0, gradient=True)
        return logits, lse

    def reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        chunk = COMPILED_CHUNK if logits.dtype == torch.float64 else cell.rows
        gradients, all_lse = [], []
        for logits_C, targets_C in zip(logits.split(chunk), targets.split(chunk), strict=True):
            dlogits, lse = rows_of_logits(logits_C, targets_C, (targets_C != IGNORED)[:, None])
            gradients.append(dlogits.to(logits.dtype))
            all_lse.append(lse)
        return torch.cat(gradients), torch.cat(all_lse)

    n_bytes = 2 * logits.nbytes + cell.rows * torch.float32.itemsize
    return Subject({"logits": logits, "targets": targets}, ours, reference, n_bytes)


def of_linear_cross_entropy(cell: KernelCell, device: torch.device) -> Subject:
    """Forward does everything: it reads x and weight (vocabulary, width) and writes the gradients of both and lse
    (rows,). Its bound is not these bytes but 6 rows x width x vocabulary FLOPs.

    Logits have unit variance. lse stands for the loss, as a scalar's error says little; peers do not return it. Eager
    has the logits of all tokens at once, as a separate head and loss have.
    """
    x = normal(cell, device)
    weight = normal(cell, device, cell.vocabulary, cell.width).mul_(cell.width**-0.5)
    dtype, targets = x.dtype, some_targets(cell, cell.vocabulary, device)

    def reference(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        chunk = cell.rows if cell.how == "eager" and x.dtype == dtype else COMPILED_CHUNK
        counts = (targets != IGNORED).to(wide)
        scale = counts / counts.sum()
        all_lse, all_dx, dweight = [], [], torch.zeros_like(weight)
        for x_C, targets_C, scale_C in zip(x.split(chunk), targets.split(chunk), scale.split(chunk), strict=True):
            dlogits, lse = rows_of_logits(x_C @ weight.T, targets_C, scale_C[:, None])
            dlogits = dlogits.to(x.dtype)
            all_lse.append(lse)
            all_dx.append(dlogits @ weight)
            dweight = torch.addmm(dweight, dlogits.T, x_C)
        return torch.cat(all_dx), dweight, torch.cat(all_lse)

    n_bytes = 2 * (x.nbytes + weight.nbytes) + cell.rows * torch.float32.itemsize
    return Subject({"x": x, "weight": weight, "targets": targets}, our_loss, reference, n_bytes)


def our_loss(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """(dx, dweight, lse)."""
    _, dx, dweight, lse = linear_cross_entropy_forward_backward(x, weight, targets, fused=True)
    assert dweight is not None
    return dx, dweight, lse


LR, BETAS, ADAM_EPS, WEIGHT_DECAY = 0.1, (0.9, 0.95), 1e-8, 0.01
"""Every element changes by more than the spacing of bf16: a smaller update is lost by rounding to nearest, whose error
is then that update, and less than what stochastic rounding pays for keeping it on average."""
STEP = 10**6
"""By then the moments need no correction, and so every repetition computes the same formula."""


def of_adamw(cell: KernelCell, device: torch.device) -> Subject:
    """Parameter, gradient and moments are read, and all but the gradient written."""
    p, g, m, v = (normal(cell, device) for _ in range(4))
    step, table = torch.tensor(STEP, device=device), UpdateTable()

    def ours(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        adamw_([Update(p, g, m, v, step, LR, BETAS, ADAM_EPS, WEIGHT_DECAY)], table=table)
        return p, m, v

    def formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        return (1 - LR * WEIGHT_DECAY) * p - LR * (m / (v.sqrt() + ADAM_EPS)), m, v

    return Subject({"p": p, "g": g, "m": 0.1 * m, "v": v.square()}, ours, formula, 7 * p.nbytes)


def of_grad_norm(cell: KernelCell, device: torch.device) -> Subject:
    """x is read; one fp32 number is written."""
    x, table = normal(cell, device), norm_table()
    return Subject({"x": x}, lambda x: grad_norm([x], table), torch.linalg.vector_norm, x.nbytes)


def of_column_sums(cell: KernelCell, device: torch.device) -> Subject:
    """x is read; its sums (width,) are written."""
    x = normal(cell, device)
    return Subject({"x": x}, column_sums, lambda x: x.sum(0), x.nbytes + cell.width * x.itemsize)


def of_absmax(cell: KernelCell, device: torch.device) -> Subject:
    """x is read."""
    x = normal(cell, device)
    return Subject({"x": x}, absmax.absmax, quantize_reference.absmax, x.nbytes)


def of_quantize(cell: KernelCell, device: torch.device, transposed: bool = False) -> Subject:
    """x, whose scale is known, is read; a byte is written for each element, or two with the transposed copy."""
    x = of_16(cell, device)
    absmax = quantize_reference.absmax(x)

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        return held(quantize(x, absmax, FP8, transposed=transposed))

    reference = functools.partial(scaled_bytes, absmax=absmax, transposed=transposed)
    return Subject({"x": x}, ours, reference, x.nbytes + (1 + transposed) * x.numel())


def of_quantize_blocks(cell: KernelCell, device: torch.device) -> Subject:
    """x is read; two bytes are written for each element, and scales of 1 x 128."""
    x = of_16(cell, device)

    def reference(x: Tensor) -> tuple[Tensor, ...]:
        if x.dtype != torch.float64:
            return held(quantize_reference.quantize_blocks(x, FP8, transposed=True))
        _, _, *inverses = quantize_reference.quantize_blocks(x.float(), FP8, transposed=True)
        return tuple(
            wide / quantize_reference.dequantize(torch.ones_like(wide, dtype=torch.float32), scales)
            for wide, scales in zip((x, x.t()), inverses, strict=True)
            if scales is not None
        )

    n_bytes = x.nbytes + 2 * x.numel() + 2 * 4 * x.numel() // quantize_reference.BLOCK
    return Subject({"x": x}, lambda x: held(quantize_blocks(x, FP8, transposed=True)), reference, n_bytes)


def of_rms_norm_quantize(cell: KernelCell, device: torch.device) -> Subject:
    """x and weight (width,) are read; two bytes are written for each element of the norm, as it is and transposed.

    What ours reads a second time is not counted.
    """
    x, weight = of_16(cell, device), normal(cell, device, cell.width)
    absmax = quantize_reference.absmax(ops.rms_norm(x, weight, EPS))

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return scaled_bytes(ops.rms_norm(x, weight, EPS), absmax)

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        slot = torch.zeros((), device=x.device)
        rstd = rms_norm_quantize.rms_norm_absmax(x, weight, EPS, slot)
        return held(rms_norm_quantize.rms_norm_quantize(x, weight, rstd, slot, FP8, transposed=True))

    return Subject({"x": x, "weight": weight}, ours, reference, x.nbytes + weight.nbytes + 2 * x.numel())


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
        return *scaled_bytes(dgate_up, dgate_up_absmax), *scaled_bytes(z, z_absmax, rows=False)

    def ours(dz: Tensor, gate_up: Tensor) -> tuple[Tensor, ...]:
        slot = torch.zeros((), device=dz.device)
        found, recomputed = swiglu_backward_quantize(dz, gate_up, slopes, slot, FP8, z_absmax=z_absmax)
        assert recomputed is not None
        return *held(found), *held(recomputed)

    return Subject({"dz": dz, "gate_up": gate_up}, ours, reference, dz.nbytes + gate_up.nbytes + 5 * dz.numel())


def of_transpose_bytes(cell: KernelCell, device: torch.device) -> Subject:
    """x, rounded to e4m3 whatever the cell's dtype, is read and written."""
    x = of_16(cell, device).to(FP8)
    return Subject({"x": x}, transpose_bytes, lambda x: x.t().contiguous(), 2 * x.nbytes)


_EVERY: tuple[Callable[[KernelCell, torch.device], Subject], ...] = (
    of_rms_norm, of_add_rms_norm, of_swiglu, of_rotary, of_cross_entropy, of_linear_cross_entropy,
    of_adamw, of_grad_norm, of_column_sums, of_absmax, of_quantize, of_quantize_blocks,
    of_rms_norm_quantize, of_swiglu_quantize, of_transpose_bytes,
)  # fmt: skip
SUBJECTS = {function.__name__.removeprefix("of_"): function for function in _EVERY}
SUBJECTS["quantize.transposed"] = functools.partial(of_quantize, transposed=True)
