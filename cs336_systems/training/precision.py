"""The torch settings of each ``--dtype``: parameter dtype, autocast, TF32; and whether a device supports it.

fp32           IEEE fp32 everywhere (matmuls off the tensor cores)
tf32           fp32 storage, matmul operands rounded to TF32's ten mantissa bits on the tensor cores
bf16           parameters, gradients, optimizer state and matmuls in bf16
autocast-bf16  fp32 parameters and residual stream; torch.autocast casts matmul operands to bf16
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from cs336_systems.config import Precision, Recipe

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BY_BYTES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Dtypes by the bytes of a number; fp64 is for tests."""


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Dtype in which parameters, gradients and optimizer state are stored."""
    return torch.bfloat16 if precision.name == "bf16" else torch.float32


def matmul_dtype(precision: Precision) -> torch.dtype:
    """Dtype of what enters a matrix product, and attention."""
    return torch.bfloat16 if precision.autocast else parameter_dtype(precision)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    """The context for the forward pass: ``torch.autocast`` for the autocast precisions, else nothing."""
    if not precision.autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Allow TF32 products inside if ``precision`` is tf32, forbid them otherwise; restore the caller's setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision.name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def unsupported_reason(precision: Precision, device: torch.device) -> str | None:
    """Why ``device`` cannot run ``precision``, in one sentence, or None if it can."""
    if device.type == "cpu":
        return "tf32 needs a CUDA device with tensor cores, the CPU has none" if precision.name == "tf32" else None
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8 or precision.matmul_dtype == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return f"{precision.name} needs compute capability 8.0 or newer, {name} has {major}.{minor}"


def recipe_unsupported_reason(recipe: Recipe, precision: Precision, device: torch.device) -> str | None:
    """Why ``device`` cannot quantize products so, in one sentence, or None if it can; a CPU emulates every recipe."""
    if not recipe.quantized or device.type == "cpu":
        return None
    asked = f"matmul dtype {recipe.matmul}"
    if precision.name != "bf16":
        return f"{asked} on CUDA devices returns bf16: it goes with dtype bf16, got {precision.name}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name, has = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"{asked} needs compute capability 8.9 or newer, {name} has {has}"
    if recipe.scaling != "tensor" and capability[0] != 9:
        return f"{asked} with scaling {recipe.scaling} needs Hopper, {torch.cuda.get_device_name(device)} is another"
    return None
