"""The fused kernels as a written-out block calls them: every operation between its matrix products is one launch.

Products are torch's; with ``own_products`` those of forward are kernels of our own (``kernels/products.py``), SwiGLU
included, which have not run on a GPU in the form that stands there.

    forward(x, weights, saved, fused(HOPPER_ATTENTION), config, cos, sin)
"""

from dataclasses import replace

from torch import Tensor

from cs336_systems.blocks.attention import AttentionOps
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.reference import REFERENCE
from cs336_systems.kernels import (
    add_rms_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
    rotate_,
    swiglu_backward_,
    swiglu_forward,
)
from cs336_systems.kernels.products import product_, swiglu_product_


def _swiglu_product_(gate_up: Tensor, x_RD: Tensor, weight: Tensor) -> Tensor:
    REFERENCE.product_(gate_up, x_RD, weight)
    return swiglu_forward(gate_up)


def fused(attention: AttentionOps, *, own_products: bool = False) -> BlockOps:
    """The kernels, with ``FLASH_ATTENTION`` or ``HOPPER_ATTENTION`` (``attention.py``)."""
    return replace(
        REFERENCE,
        rms_norm_forward=rms_norm_forward,
        add_rms_norm_forward=add_rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        product_=product_ if own_products else REFERENCE.product_,
        swiglu_product_=swiglu_product_ if own_products else _swiglu_product_,
        swiglu_backward_=swiglu_backward_,
        rotate_=rotate_,
        **attention,
    )
