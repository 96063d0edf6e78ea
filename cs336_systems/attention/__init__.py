"""Several implementations of attention behind one signature, and the oracle with which tests compare them.

    o = attention(q, k, v, causal=True, impl="flash")     # q (batch, heads, seq, d_head) -> o of the same shape

``dispatch.py`` lists the implementations and what each needs. ``FlashAttention`` needs Triton, so it is imported when
it is first used; ``TiledFlashAttention`` is the same algorithm in plain PyTorch.
"""

from typing import TYPE_CHECKING, Any

from cs336_systems.attention.dispatch import attention
from cs336_systems.attention.oracle import oracle_attention
from cs336_systems.attention.shapes import AttentionShape
from cs336_systems.attention.tiled import TiledFlashAttention

if TYPE_CHECKING:
    from cs336_systems.attention.flash import FlashAttention

__all__ = ["AttentionShape", "FlashAttention", "TiledFlashAttention", "attention", "oracle_attention"]


def __getattr__(name: str) -> Any:
    if name == "FlashAttention":
        from cs336_systems.attention.flash import FlashAttention  # Triton is not on every machine

        return FlashAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
