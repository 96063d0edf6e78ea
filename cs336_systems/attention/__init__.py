"""Attention, several ways, one signature."""

from cs336_systems.attention.reference import reference_attention
from cs336_systems.attention.shapes import AttentionShape, validate
from cs336_systems.attention.tiled import TiledFlashAttention

__all__ = ["AttentionShape", "TiledFlashAttention", "reference_attention", "validate"]
