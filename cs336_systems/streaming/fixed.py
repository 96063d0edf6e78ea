"""What never leaves the device: embedding, head and final norm with gradients and moments, and rotary tables.

A tied embedding has a gradient from each of its two uses, added up once at the end: rounds may be in any order, and
the sums still have the same bits.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from cs336_systems.config import ModelConfig
from cs336_systems.kernels.host_memory import Slab, aligned, device_slab
from cs336_systems.model.layers import RotaryEmbedding

EMBEDDING, NORM, HEAD = "token_embeddings.weight", "ln_final.weight", "lm_head.weight"


class Fixed:
    """State of embedding, final norm and head by name, and the rotary tables of ``seq_len`` positions.

    Args:
        states: what the optimizer keeps of each, and in which dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        states: Mapping[str, torch.dtype],
    ) -> None:
        matrix = config.vocab_size, config.d_model
        shapes = {EMBEDDING: matrix, NORM: (config.d_model,), HEAD: matrix}
        self.tied = config.tie_embeddings
        owned = {name: shape for name, shape in shapes.items() if not (self.tied and name == HEAD)}
        kept = {"weights": dtype, **states}
        n_bytes = sum(_bytes(shape, of) for of in kept.values() for shape in owned.values())
        n_bytes += sum(_bytes(shape, dtype) for shape in shapes.values())
        self.slab: Slab = device_slab(n_bytes, device)
        self.states = {
            what: {name: self.slab.take(shape, of) for name, shape in owned.items()} for what, of in kept.items()
        }
        """``weights`` and what the optimizer keeps, by the names of parameters."""
        self.weights = self.states["weights"]
        self.gradients = {name: self.slab.take(shape, dtype) for name, shape in shapes.items()}
        rotary = RotaryEmbedding(config.at_context(seq_len), device=device, dtype=dtype)
        rotary.reset_parameters()
        self.cos, self.sin = rotary(seq_len)

    @property
    def embedding(self) -> Tensor:
        """(V, D)"""
        return self.weights[EMBEDDING]

    @property
    def head(self) -> Tensor:
        """(V, D)"""
        return self.weights[EMBEDDING if self.tied else HEAD]

    def clear_gradients(self) -> None:
        """Before a step."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def whole_gradients(self) -> Mapping[str, Tensor]:
        """Of the weights there are, at the end of a step's last backward; to be asked for once in a step."""
        if self.tied:
            self.gradients[EMBEDDING].add_(self.gradients[HEAD])
        return {name: self.gradients[name] for name in self.weights}


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return aligned(prod(shape) * dtype.itemsize)
