"""The operations of a written-out block by the names under which a command or a case asks for them.

Triton comes with all but plain PyTorch, and is imported where it is asked for: not every machine has it.
"""

from dataclasses import replace

from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.reference import REFERENCE


def block_ops(kernels: str, attention: str) -> BlockOps:
    """Of a name in ``config.KERNELS`` and one in ``config.WRITTEN_OUT_ATTENTIONS``.

    Raises:
        ValueError: these do not go together.
    """
    if attention == "reference":
        if kernels != "reference":
            raise ValueError(f"kernels {kernels} need attention flash or hopper, got {attention}")
        return REFERENCE
    from cs336_systems.blocks.attention import FLASH_ATTENTION, HOPPER_ATTENTION
    from cs336_systems.blocks.fused import fused

    own = {"flash": FLASH_ATTENTION, "hopper": HOPPER_ATTENTION}[attention]
    return fused(own) if kernels == "fused" else replace(REFERENCE, **own)
