"""A Transformer block with a hand-written backward; the caller chooses which activations it keeps for that."""

from cs336_systems.blocks.adapters import adapt
from cs336_systems.blocks.autograd import WrittenOutBlock, head_ops, write_out
from cs336_systems.blocks.block import backward, forward, recall
from cs336_systems.blocks.ops import REFERENCE, BlockOps, block_ops
from cs336_systems.blocks.quantized import QuantizedProducts, block_products
from cs336_systems.blocks.saved import Saved
from cs336_systems.blocks.weights import BlockGradients, BlockWeights, merge_

__all__ = [
    "REFERENCE",
    "BlockGradients",
    "BlockOps",
    "BlockWeights",
    "QuantizedProducts",
    "Saved",
    "WrittenOutBlock",
    "adapt",
    "backward",
    "block_ops",
    "block_products",
    "forward",
    "head_ops",
    "merge_",
    "recall",
    "write_out",
]
