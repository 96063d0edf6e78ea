"""The operations and matrix products of a written-out block by the names that commands and cases use.

Triton comes with all but plain PyTorch, and is imported where it is asked for: not every machine has it.
"""

from dataclasses import replace
from typing import Any

from cs336_systems.blocks import reference
from cs336_systems.blocks.maxima import FusedQuantizers, Quantizers
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import STORED, Products
from cs336_systems.blocks.quantized import QuantizedProducts
from cs336_systems.blocks.reference import REFERENCE
from cs336_systems.config import Recipe


def block_ops(kernels: str, attention: str, *, deterministic: bool = False) -> BlockOps:
    """Of a name in ``config.KERNELS`` and one in ``config.WRITTEN_OUT_ATTENTIONS``.

    Args:
        deterministic: the same bits every run, whatever torch has been told.

    Raises:
        ValueError: these do not go together.
    """
    if attention == "reference":
        if kernels != "reference":
            raise ValueError(f"kernels {kernels} need attention flash or hopper, got {attention}")
        return REFERENCE
    from cs336_systems.blocks.attention import FLASH_ATTENTION, HOPPER_ATTENTION, HOPPER_ATTENTION_IN_ORDER
    from cs336_systems.blocks.fused import fused

    hopper = HOPPER_ATTENTION_IN_ORDER if deterministic else HOPPER_ATTENTION
    own = {"flash": FLASH_ATTENTION, "hopper": hopper}[attention]
    if kernels == "reference":
        return replace(REFERENCE, **own)
    return fused(own)


def block_products(kernels: str, recipe: Recipe, *, remember: bool = False) -> Products:
    """By a recipe, whose quantization is that of a name in ``config.KERNELS``.

    Args:
        remember: keep weights quantized until they change.
    """
    if not recipe.quantized:
        return STORED
    from cs336_systems import kernels as by_kernels
    from cs336_systems.kernels import quantize_reference

    own: Any = quantize_reference if kernels == "reference" else by_kernels
    swiglu = reference.swiglu if kernels == "reference" else by_kernels.swiglu_forward
    quantize = own.quantize, own.quantize_blocks, own.transpose_bytes, own.PartsQuantizer
    functions = own.absmax, own.row_and_column_absmax, *quantize, swiglu
    if kernels == "reference":
        return QuantizedProducts(recipe, Quantizers(*functions, raised=False), remember=remember)
    fused = FusedQuantizers(
        by_kernels.rms_norm_absmax,
        by_kernels.add_rms_norm_absmax,
        by_kernels.rms_norm_quantize,
        by_kernels.empty_slopes,
        by_kernels.swiglu_backward_quantize,
    )
    return QuantizedProducts(recipe, Quantizers(*functions, raised=True, fused=fused), remember=remember)
