"""What an item of a schedule consists of: named tensors, one after the other.

    layout = Layout.of(config, torch.bfloat16, Chunks(n_tokens=8192, seq_len=32768, per_round=4, rounds=2))
    layout.parts["products"]                       # q, residual, gate_up with shapes and dtypes
    layout.n_bytes("weights")

Weights, gradients, moments and masters have the tensors of ``blocks.BlockWeights``. Keys and values of a token are
neighbours, so that those of chunks in neighbouring slots are one tensor. Their gradients are summed in at least fp32,
as are statistics. Sizes: n tokens of a chunk, D d_model, F d_ff, P = (H + 2 K) E the width of q | k | v.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from cs336_systems.config import ModelConfig

MASTER = "master"
"""fp32 weights that the optimizer keeps beside bf16 ones."""
KEPT_BY_OPTIMIZERS = ("exp_avg", "exp_avg_sq", MASTER)


@dataclass(frozen=True)
class Chunks:
    """How the tokens of a step are cut: sequence after sequence, a chunk being some of them or a piece of one.

    Raises:
        ValueError: chunks and sequences do not divide one another, or a round ends within a sequence.
    """

    n_tokens: int
    """Of a chunk."""
    seq_len: int
    per_round: int
    rounds: int

    def __post_init__(self) -> None:
        long, short = max(self.n_tokens, self.seq_len), min(self.n_tokens, self.seq_len)
        if long % short:
            raise ValueError(
                f"a chunk of {self.n_tokens} tokens and sequences of {self.seq_len} do not divide one another"
            )
        if self.per_round % self.per_sequence:
            raise ValueError(f"a round of {self.per_round} chunks ends within a sequence of {self.per_sequence} chunks")

    @property
    def per_sequence(self) -> int:
        """Chunks of one sequence; 1 for chunks of whole sequences."""
        return max(1, self.seq_len // self.n_tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """(sequences, positions) of a chunk."""
        return max(1, self.n_tokens // self.seq_len), min(self.n_tokens, self.seq_len)

    @property
    def n_sequences(self) -> int:
        """Of a step."""
        return self.rounds * self.per_round * self.n_tokens // self.seq_len

    def start(self, chunk: int) -> int:
        """The position in its sequence at which a chunk begins."""
        return chunk % self.per_sequence * self.n_tokens

    def tokens(self, round_: int, chunk: int) -> slice:
        """A chunk's tokens among those of the step."""
        first = (round_ * self.per_round + chunk) * self.n_tokens
        return slice(first, first + self.n_tokens)


@dataclass(frozen=True)
class Part:
    """One tensor of an item."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The parts of every kind of item."""

    parts: Mapping[str, tuple[Part, ...]]
    states: Mapping[str, torch.dtype]
    """What the optimizer keeps of each parameter."""

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: torch.dtype, chunks: Chunks, moments: Mapping[str, int] | None = None
    ) -> "Layout":
        """For weights, gradients and activations of one dtype.

        Args:
            moments: bytes a parameter of what the optimizer keeps, the dtype's or those of fp32; two moments of the
                dtype if None.

        Raises:
            ValueError: the optimizer keeps no such thing, or in no such dtype.
        """
        states = {
            name: _state_dtype(name, size, dtype)
            for name, size in (moments or dict.fromkeys(("exp_avg", "exp_avg_sq"), dtype.itemsize)).items()
        }
        n, d, wide = chunks.n_tokens, config.d_model, torch.promote_types(dtype, torch.float32)
        weights = (
            Part("ln1", (d,), dtype),
            Part("qkv", (config.d_qkv, d), dtype),
            *([Part("qkv_bias", (config.d_qkv,), dtype)] if config.qkv_bias else []),
            Part("output", (d, d), dtype),
            Part("ln2", (d,), dtype),
            Part("gate_up", (2 * config.d_ff, d), dtype),
            Part("down", (d, config.d_ff), dtype),
        )
        sequences, positions = chunks.shape
        long = chunks.per_sequence > 1
        keys_values = (n, 2, config.kv_heads, config.d_head)
        parts = {
            **dict.fromkeys(("weights", "gradients"), weights),
            **{name: tuple(replace(part, dtype=kept) for part in weights) for name, kept in states.items()},
            "input": (
                Part("x", (sequences, positions, d), dtype),
                Part("rstd1", (n,), wide),
                Part("rstd2", (n,), wide),
            ),
            "context": (Part("keys_values", keys_values, dtype),),
            "attention": (Part("attended", (n, d), dtype), Part("lse", (sequences, config.n_heads, positions), wide)),
            "products": (
                Part("q", (n, d), dtype) if long else Part("qkv", (n, config.d_qkv), dtype),
                Part("residual", (n, d), dtype),
                Part("gate_up", (n, 2 * config.d_ff), dtype),
            ),
            "dy": (Part("dy", (sequences, positions, d), dtype),),
            "dcontext": (Part("keys_values", keys_values, wide),),
        }
        return cls(parts, states)

    def offsets(self, what: str) -> list[int]:
        """The byte at which each part of an item begins."""
        found, end = [], 0
        for part in self.parts[what]:
            found.append(end)
            end += part.n_bytes
        return found

    def n_bytes(self, what: str) -> int:
        """Of an item."""
        return sum(part.n_bytes for part in self.parts[what])


def _state_dtype(name: str, size: int, dtype: torch.dtype) -> torch.dtype:
    if name not in KEPT_BY_OPTIMIZERS or size not in (dtype.itemsize, torch.float32.itemsize):
        raise ValueError(f"the optimizer keeps no {name} of {size} bytes a parameter beside {dtype} weights")
    return dtype if size == dtype.itemsize else torch.float32
