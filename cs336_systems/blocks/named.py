"""The operations and matrix products of a written-out block by the names that commands and cases use.

Triton comes with all but plain PyTorch, and is imported where it is asked for: not every machine has it.
"""

from dataclasses import replace

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
    if kernels == "reference":
        from cs336_systems.kernels import quantize_reference as plain

        quantizers = Quantizers(
            *(plain.absmax, plain.row_and_column_absmax, plain.quantize, plain.quantize_blocks, plain.transpose_bytes),
            *(plain.PartsQuantizer, reference.swiglu),
            raised=False,
        )
        return QuantizedProducts(recipe, quantizers, remember=remember)
    from cs336_systems.kernels.absmax import absmax, row_and_column_absmax
    from cs336_systems.kernels.quantize import quantize, transpose_bytes
    from cs336_systems.kernels.quantize_blocks import quantize_blocks
    from cs336_systems.kernels.quantize_parts import PartsQuantizer
    from cs336_systems.kernels.rms_norm_quantize import add_rms_norm_absmax, rms_norm_absmax, rms_norm_quantize
    from cs336_systems.kernels.swiglu import empty_slopes, swiglu_forward
    from cs336_systems.kernels.swiglu_quantize import swiglu_backward_quantize

    norms = rms_norm_absmax, add_rms_norm_absmax, rms_norm_quantize
    quantizers = Quantizers(
        *(absmax, row_and_column_absmax, quantize, quantize_blocks, transpose_bytes, PartsQuantizer, swiglu_forward),
        raised=True,
        fused=FusedQuantizers(*norms, empty_slopes, swiglu_backward_quantize),
    )
    return QuantizedProducts(recipe, quantizers, remember=remember)
