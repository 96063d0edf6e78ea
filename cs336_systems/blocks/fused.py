"""The fused kernels as a written-out block calls them: every operation between its matrix products is one launch.

Products of forward, SwiGLU included, are kernels of our own for the shapes where those are faster
(``kernels/products.py``); others are torch's.

    forward(x, weights, saved, fused(HOPPER_ATTENTION), config, cos, sin)
"""

from dataclasses import replace

from cs336_systems.blocks.attention import AttentionOps
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.reference import REFERENCE
from cs336_systems.kernels.column_sums import column_sums
from cs336_systems.kernels.norm_rotate import norm_rotate, norm_rotate_backward_
from cs336_systems.kernels.products import product_, swiglu_product_
from cs336_systems.kernels.rms_norm import add_rms_norm_forward, rms_norm_backward, rms_norm_forward
from cs336_systems.kernels.rotary import rotate_
from cs336_systems.kernels.swiglu import swiglu_backward_


def fused(attention: AttentionOps) -> BlockOps:
    """The kernels, with ``FLASH_ATTENTION`` or ``HOPPER_ATTENTION`` (``attention.py``)."""
    return replace(
        REFERENCE,
        rms_norm_forward=rms_norm_forward,
        add_rms_norm_forward=add_rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        product_=product_,
        swiglu_product_=swiglu_product_,
        swiglu_backward_=swiglu_backward_,
        column_sums=column_sums,
        rotate_=rotate_,
        norm_rotate=norm_rotate,
        norm_rotate_backward_=norm_rotate_backward_,
        **attention,
    )
