"""The fused kernels as a written-out block calls them: every operation is one launch, products included.

forward(x, weights, saved, fused(HOPPER_ATTENTION), config, cos, sin)
"""

from cs336_systems.blocks.attention import AttentionOps
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.kernels import (
    add_rms_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
    rotate_,
    swiglu_backward_,
)
from cs336_systems.kernels.products import (
    add_product_,
    product_,
    product_backward,
    swiglu_product_,
    weight_backward_,
)


def fused(attention: AttentionOps) -> BlockOps:
    """The kernels, with ``FLASH_ATTENTION`` or ``HOPPER_ATTENTION`` (``attention.py``)."""
    return BlockOps(
        rms_norm_forward=rms_norm_forward,
        add_rms_norm_forward=add_rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        product_=product_,
        add_product_=add_product_,
        product_backward=product_backward,
        weight_backward_=weight_backward_,
        swiglu_product_=swiglu_product_,
        swiglu_backward_=swiglu_backward_,
        rotate_=rotate_,
        **attention,
    )
