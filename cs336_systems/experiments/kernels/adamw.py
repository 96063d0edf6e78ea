"""One step of AdamW over one tensor and its moments, against the formula in plain PyTorch."""

import functools

import torch
from torch import Tensor

from cs336_systems.config import PRECISIONS
from cs336_systems.experiments.kernels import peers
from cs336_systems.experiments.kernels.cells import KernelCell
from cs336_systems.experiments.kernels.measure import Subject
from cs336_systems.kernels import quantize_reference
from cs336_systems.kernels.adamw import Update, UpdateTable, adamw_
from cs336_systems.training.precision import parameter_dtype

LR, BETAS, EPS, WEIGHT_DECAY = 0.1, (0.9, 0.95), 1e-8, 0.01
"""Every element changes by more than the spacing of bf16: a smaller update is lost by rounding to nearest, whose error
is then that update, and less than what stochastic rounding pays for keeping it on average."""
STEP = 10**6
"""By then the moments need no correction, and so every repetition computes the same formula."""


def formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parameter and moments after the step."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    return (1 - LR * WEIGHT_DECAY) * p - LR * (m / (v.sqrt() + EPS)), m, v


def formula_with_absmax(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The same, and the largest magnitude of the parameter."""
    updated = formula(p, g, m, v)
    return *updated, quantize_reference.absmax(updated[0])


def subject(cell: KernelCell, device: torch.device) -> Subject:
    """Parameter, gradient and moments (rows, width), all of the cell's dtype. Reads the four, writes all but the
    gradient; the largest magnitude of the parameter comes with the form ``absmax``."""
    dtype = parameter_dtype(PRECISIONS[cell.dtype])
    p, g, m, v = (torch.randn(cell.rows, cell.width, device=device, dtype=dtype) for _ in range(4))
    step, table = torch.tensor(STEP, device=device), UpdateTable()
    slot = torch.zeros((), device=device) if cell.form == "absmax" else None

    def ours(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        update = Update(p, g, m, v, step, LR, BETAS, EPS, WEIGHT_DECAY, absmax=slot)
        adamw_([update], stochastic_rounding=True, table=table)
        return (p, m, v) if slot is None else (p, m, v, slot)

    inputs = {"p": p, "g": g, "m": 0.1 * m, "v": v.square()}
    if slot is not None:
        return Subject(inputs, ours, formula_with_absmax, 7 * p.nbytes)
    others = {"torch": functools.partial(peers.torch_adamw, step, LR, BETAS, EPS, WEIGHT_DECAY)}
    return Subject(inputs, ours, formula, 7 * p.nbytes, peers=others)
