"""The reference Transformer LM in plain PyTorch."""

from cs336_systems.model.ops import REFERENCE_OPS, ModelOps
from cs336_systems.model.transformer import TransformerBlock, TransformerLM

__all__ = ["REFERENCE_OPS", "ModelOps", "TransformerBlock", "TransformerLM"]
