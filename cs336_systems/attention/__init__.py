"""Implementations of attention, with one signature."""

from typing import TYPE_CHECKING, Any

from cs336_systems.attention.dispatch import attention
from cs336_systems.attention.oracle import oracle_attention
from cs336_systems.attention.shapes import AttentionShape, validate
from cs336_systems.attention.tiled import TiledFlashAttention

if TYPE_CHECKING:
    from cs336_systems.attention.flash import FlashAttention

__all__ = ["AttentionShape", "FlashAttention", "TiledFlashAttention", "attention", "oracle_attention", "validate"]


def __getattr__(name: str) -> Any:
    if name == "FlashAttention":
        from cs336_systems.attention.flash import FlashAttention  # Triton is not on every machine

        return FlashAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
