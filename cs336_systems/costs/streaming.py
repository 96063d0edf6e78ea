"""A training step under memory caps: bytes and seconds of each operation's memory, copies and computation.

A step is R rounds and an optimizer step; a round is forward and backward over chunks of n tokens, each several short
sequences or a piece of a long one. Layers' weights, gradients and moments, and kept activations, may be on the host and
are copied over the link. With B bytes/s of the link in each direction and F sustained FLOP/s,

    weight copies hide under forward   if a layer processes W F / (2 P B) = F / B tokens per visit (bf16, P parameters)
    offload hides under forward        up to B t_f bytes per token and layer, t_f = (2 P + 2 S d) / F, causal
    sequential rounds                  out during forward, in during backward: each direction is idle half of the time
    interleaved rounds                 the next round's forward overlaps backward: B (t_f + t_b) in each direction

Kept activations are copied in three parts, ``input``, ``attention`` and ``products``; the level of ``costs/kept.py``
decides whether one, two or three are kept. If a sequence is longer than a chunk, attention needs k and v of all earlier
chunks, in forward and backward: they are a separate part, ``context``, that is kept for all chunks or for none.

If adapters are trained (LoRA), weights stream and are never written, so only activations are copied to the host.
Adapters, their gradients and their moments stay on the device.

FLOPs: causal attention counts half of the full square; backward has twice the matmul FLOPs of forward, and 2.5 times in
attention; recomputation counts in HFU, not in MFU. Seconds: matmuls and attention at sustained rates; norms, rotation,
SwiGLU and optimizer at memory bandwidth. Launch overhead and Python are left out, as chunks of 8,192 tokens hide them.

``streaming/schedule.py`` defines operations; ``costs/lanes.py`` simulates when they begin and end.

    work = StreamedWork(config, context_length=32_768, chunk=16_384)
    work.item_bytes("products"), work.seconds("forward", chunk=1), Rates.of(hardware).link_alone
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from cs336_systems.config import FP8_QUANTUM, PRECISIONS, Lora, ModelConfig, Precision, Recipe
from cs336_systems.costs.block import adapter_numbers, operand_bytes_per_flop, passes, quantizing_bytes, tiles
from cs336_systems.costs.flops import forward_flops, model_flops
from cs336_systems.costs.kept import LEVELS as ALL_LEVELS
from cs336_systems.costs.kept import STORED, kept_names, kept_sizes, maxima_shapes, recomputed, recomputed_flops
from cs336_systems.costs.memory import WIDE, rotary_bytes
from cs336_systems.costs.rates import Rates

LEVELS = ALL_LEVELS[:3]
"""The levels from which a plan chooses. The fourth would save only memory-bound passes, for half as many bytes more."""

MOMENTS = {"exp_avg": 2, "exp_avg_sq": 2}
"""Bytes a parameter that the optimizer keeps, rounded stochastically; with bf16 weights and gradients 8 in total."""
MASTER_MOMENTS = {"exp_avg": 4, "exp_avg_sq": 4, "master": 4}
"""Bytes a parameter that the optimizer keeps with FP32 master weights; with bf16 weights and gradients 16 in total."""

HEAD_TOKENS = 2048
"""Tokens per chunk of logits: 32,768 x 4096 x 151,936 take 183 ms, no less with twice as many (LOG.md)."""

ADD_ROWS_SHARE = 1 / 18
"""The share of memory bandwidth that an embedding's backward reaches (measured: 8,192 rows of width 4096 in 1.5 to 1.7
ms, of width 2048 in 0.85 ms)."""


@dataclass(frozen=True)
class Share:
    """The part of a model that one rank of a ring holds: whole layers and, on one rank, the head with its norm.

    The embedding is on the rank of the first layer. Activations are sent to another rank if it has the next layer or
    the head; their gradients return the same way.

    Raises:
        ValueError: a rank has no layer.
    """

    rank: int
    owners: tuple[int, ...]
    """The rank of each layer, then the rank of the head."""

    def __post_init__(self) -> None:
        if idle := set(range(self.n_ranks)) - set(self.owners[:-1]):
            raise ValueError(f"{len(self.owners) - 1} layers leave rank {min(idle)} of a ring without one")

    @property
    def n_ranks(self) -> int:
        return max(self.rank, *self.owners) + 1

    @classmethod
    def dealt(cls, config: ModelConfig, rank: int, n_ranks: int, first: int = 0) -> "Share | None":
        """A rank's share if layers are assigned round-robin; None for a single rank.

        The head is on the last rank, which has the fewest layers, or on the first if it is tied to the embedding.

        Args:
            first: how many of the lowest layers rank 0 gets before the round-robin, to balance the head's time.

        Raises:
            ValueError: there are fewer layers than ranks.
        """
        if n_ranks == 1:
            return None
        head = 0 if config.tie_embeddings else n_ranks - 1
        if config.n_layers < n_ranks:
            raise ValueError(f"{config.n_layers} layers are too few for a ring of {n_ranks} ranks")
        return cls(rank, (*(max(0, layer - first) % n_ranks for layer in range(config.n_layers)), head))


@dataclass(frozen=True)
class StreamedWork:
    """The operations of a step on sequences of ``context_length`` tokens in chunks of ``chunk`` tokens.

    Raises:
        ValueError: neither length divides the other, a chunk with quantized matmuls is no multiple of 16, the
            precision has autocast, or a tied embedding is not on the rank of its head.
    """

    config: ModelConfig
    context_length: int
    chunk: int
    precision: Precision = PRECISIONS["bf16"]
    moments: tuple[tuple[str, int], ...] = tuple(MOMENTS.items())
    """Names of the states that the optimizer keeps, and bytes a parameter of each."""
    recipe: Recipe = STORED
    """The recipe of the blocks' matmuls. If it quantizes, ``input`` also has ``maxima``; other items are the same."""
    share: Share | None = None
    """The part of the model that a rank of a ring has; all of it if None."""
    lora: Lora | None = None
    """The adapters that are trained while the weights are frozen; None if the weights are trained."""
    quantized_at_use: bool = False
    """Whether each operation quantizes the weights that it reads, as under memory caps. Otherwise weights are quantized
    once per step, which is assumed to take no time."""

    def __post_init__(self) -> None:
        short, long = sorted((self.chunk, self.context_length))
        if short < 1 or long % short:
            raise ValueError(
                f"a chunk of {self.chunk} tokens does not divide sequences of {self.context_length} evenly"
            )
        if self.recipe.quantized and self.chunk % FP8_QUANTUM:
            raise ValueError(f"matmuls in fp8 take chunks that {FP8_QUANTUM} divides, not {self.chunk} tokens")
        if self.precision.autocast:
            raise ValueError(f"streamed blocks run in one dtype: {self.precision.name} is not served")
        if self.config.tie_embeddings and self.owner(0) != self.owner(self.config.n_layers):
            raise ValueError(
                f"a tied embedding is on one rank: the first layer is on {self.owner(0)}, the head on another"
            )

    def owner(self, layer: int) -> int:
        """The rank that holds a layer; layer ``n_layers`` stands for the head."""
        return self.share.owners[layer] if self.share else 0

    @property
    def rank(self) -> int:
        return self.share.rank if self.share else 0

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that are here."""
        return tuple(layer for layer in range(self.config.n_layers) if self.owner(layer) == self.rank)

    @property
    def restores(self) -> bool:
        """Whether x may be recomputed from the layer below. Not in a ring, where that layer is on another rank, nor
        with quantized matmuls, whose magnitudes are kept with x."""
        return self.share is None and not self.recipe.quantized

    @property
    def has_embedding(self) -> bool:
        return self.owner(0) == self.rank

    @property
    def has_head(self) -> bool:
        """Whether head and final norm are here."""
        return self.owner(self.config.n_layers) == self.rank

    @property
    def chunks_per_sequence(self) -> int:
        """Chunks of a sequence; 1 if a chunk has several sequences."""
        return max(1, self.context_length // self.chunk)

    @property
    def is_long(self) -> bool:
        """Whether a sequence is longer than a chunk."""
        return self.context_length > self.chunk

    @property
    def batch(self) -> tuple[int, int]:
        """(sequences, tokens of each) of a chunk."""
        length = min(self.chunk, self.context_length)
        return self.chunk // length, length

    # bytes

    @property
    def maxima(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fp32 maxima that quantized matmuls keep for a chunk, by name."""
        return maxima_shapes(self.config, self.chunk, self.recipe)

    @property
    def states(self) -> tuple[str, ...]:
        """The parts of a layer's state that may stream; the state of adapters stays on the device."""
        return ("weights",) if self.lora else ("weights", "gradients", "moments")

    @property
    def streamed_moments(self) -> tuple[str, ...]:
        """The names of ``moments`` if they may stream, else none."""
        return () if self.lora else tuple(name for name, _ in self.moments)

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters of one layer that are trained."""
        return self.lora.n_parameters(replace(self.config, n_layers=1)) if self.lora else self.config.n_block_parameters

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's weights, and of their gradients if they are trained."""
        return self.config.n_block_parameters * self.precision.parameter_bytes

    @cached_property
    def _item_bytes(self) -> dict[str, int]:
        config, width = self.config, self.precision.parameter_bytes
        context = self.chunk * 2 * config.d_kv
        of = kept_sizes(config, *self.batch, self.precision, "products")
        apart = context * width if self.is_long else 0
        return {
            "weights": self.layer_bytes,
            "gradients": 0 if self.lora else self.layer_bytes,
            "input": of["x"] + of["rstd1"] + of["rstd2"] + sum(WIDE * prod(shape) for shape in self.maxima.values()),
            "context": context * width,
            "attention": of["attended"] + of["lse"],
            "products": of["qkv"] - apart + of["residual"] + of["gate_up"],
            "dy": self.chunk * config.d_model * width,
            "dcontext": context * WIDE,  # sums over chunks
            **{name: n * config.n_block_parameters for name, n in self.moments if name in self.streamed_moments},
        }

    def item_bytes(self, what: str) -> int:
        """Bytes of one item: one state of a layer, or one part of the activations kept for a (layer, chunk).

        Raises:
            KeyError: no such item.
        """
        return self._item_bytes[what]

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and moments of one layer."""
        moments = sum(map(self.item_bytes, self.streamed_moments))
        return self.layer_bytes + self.item_bytes("gradients") + moments

    @property
    def _fixed_parameters(self) -> int:
        """Parameters of the embedding, head and final norm that this rank has."""
        config, matrices = self.config, self.has_embedding + (self.has_head and not self.config.tie_embeddings)
        return matrices * config.vocab_size * config.d_model + self.has_head * config.d_model

    @property
    def fixed_bytes(self) -> int:
        """Bytes that stay on the device: this rank's embedding, head and final norm with all their state, adapters, and
        the rotary tables.

        A tied embedding has two gradients, added up at the end of a step. If sequences are longer than a chunk, there
        is a buffer for one chunk's contribution to the gradients of keys and values.
        """
        config, width = self.config, self.precision.parameter_bytes
        per_parameter = width if self.lora else self._bytes_per_trained
        found = self._fixed_parameters * per_parameter + rotary_bytes(config.at_context(self.context_length))
        if config.tie_embeddings and self.has_head and not self.lora:
            found += config.vocab_size * config.d_model * width
        found += self.adapter_bytes
        return found + (self.context_length * 2 * config.d_kv * width if self.is_long else 0)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters that are here with all their state."""
        return len(self.layers) * self.trained_parameters * self._bytes_per_trained if self.lora else 0

    @property
    def _bytes_per_trained(self) -> int:
        return 2 * self.precision.parameter_bytes + sum(n for _, n in self.moments)

    @property
    def temporary_bytes(self) -> int:
        """The most bytes that the kernels of one operation need in addition to slots."""
        config, width, tokens = self.config, self.precision.parameter_bytes, self.chunk
        d_model, d_query = config.d_model, config.d_query
        wide_queries = 4 * d_query + 32 * config.n_heads  # attention's fp32 sums of dq, and 16 statistics of 2 bytes
        # outputs of forward's norms and residual, and SwiGLU's output after them; with adapters also to recompute
        feed_forward = (config.d_ff + (4 if self.lora else 3) * d_model) * width
        attention = (d_model + d_query + config.d_qkv) * width + wide_queries
        if config.qk_norm:  # q and k normed and rotated, and where sequences are long the k of all their chunks
            attention += (d_query + config.d_kv * (1 + self.chunks_per_sequence * self.is_long)) * width
        # x A^T of all matrices; the gradient of q, k and v's
        low_rank = 10 * self.lora.rank * width if self.lora else 0
        quantized = matrices = 0
        if self.recipe.quantized:
            # SwiGLU's backward: dproduct, and by rows and columns dgate_up and dy; SwiGLU's output by columns
            quantized = (5 * config.d_ff + d_model) if self.lora else (7 * config.d_ff + 2 * d_model)
            # the largest matrix too, which dominates if tokens are few
            matrices = tokens * ((2 if self.lora else 4) * config.d_ff + 3 * d_model) + 2 * config.d_ff * d_model
        head = 3 * d_model * width  # norm, its gradient, and x
        logits = min(tokens, HEAD_TOKENS) * config.vocab_size * width
        of_block = max(tokens * (max(feed_forward, attention, quantized) + low_rank), matrices)
        return max(of_block, (tokens * head + logits) * self.has_head)

    @property
    def n_parameters(self) -> int:
        """Parameters that this rank has."""
        return len(self.layers) * self.config.n_block_parameters + self._fixed_parameters

    @property
    def n_trained(self) -> int:
        """Trained parameters that this rank has."""
        return len(self.layers) * self.trained_parameters if self.lora else self.n_parameters

    # operations

    def attention_flops(self, chunk: int) -> int:
        """FLOPs of one layer's causal attention in forward, which depend on the chunk's position in its sequence."""
        length, before = self.batch[1], (chunk % self.chunks_per_sequence) * self.chunk
        return 2 * self.config.d_query * self.chunk * (2 * before + length)

    def model_flops_per_token(self) -> float:
        """FLOPs of a whole step for each token."""
        return model_flops(self.config, 1, self.context_length, "step") / self.context_length

    def hardware_flops(self, kind: str, chunk: int, level: str) -> int:
        """FLOPs that one operation executes (a kind of ``streaming/schedule.py``), 0 if it does not compute."""
        amounts = self._amounts(kind, chunk, level)
        return amounts.products + amounts.attention if amounts else 0

    def seconds(self, kind: str, chunk: int, level: str, rates: Rates) -> float:
        """Seconds of computation of one operation (a kind of ``streaming/schedule.py``).

        Raises:
            KeyError: there is no such kind, or it does not compute.
        """
        if (amounts := self._amounts(kind, chunk, level)) is None:
            raise KeyError(kind)
        # The length of a causal sequence whose queries see as many keys on average as this chunk's.
        length = 2 * (chunk % self.chunks_per_sequence) * self.chunk + self.batch[1]
        attention = rates.attention(self.config.d_head, length)[kind == "backward"]
        products = rates.quantized if self.recipe.quantized and kind != "head" else rates.products
        config, tokens, recipe = self.config, self.chunk, self.recipe
        quantizing = quantizing_bytes(config, tokens, recipe, kind)
        traffic = amounts.traffic + quantizing + rates.added * self.gradient_bytes(kind)
        if self.recipe.quantized and self.quantized_at_use and kind in ("forward", "recompute", "backward", "keys"):
            # weights are read for their absmax, then read and written in one byte each; not for their own gradients
            passed = amounts.products / (2 * tokens * (2 if kind == "backward" and not self.lora else 1))
            traffic += (2 * self.precision.parameter_bytes + 1) * passed
        per_flop = operand_bytes_per_flop(config, tokens, self.precision.parameter_bytes, recipe, kind)
        operands = rates.operands * per_flop * amounts.products
        multiplied = amounts.products * tiles(config, kind, frozen=self.lora is not None) / products
        computed = multiplied + operands / rates.products + amounts.attention / attention
        return computed + traffic / rates.memory

    def gradient_bytes(self, kind: str) -> int:
        """Bytes of the weight (or adapter) gradients that an operation's matmuls accumulate into."""
        if self.lora:
            return self.trained_parameters * self.precision.parameter_bytes if kind == "backward" else 0
        head = self.config.vocab_size * self.config.d_model * self.precision.parameter_bytes
        return {"backward": self.layer_bytes, "head": head}.get(kind, 0)

    def _amounts(self, kind: str, chunk: int, level: str) -> "_Amounts | None":
        """The work of one operation; None if it does not compute."""
        config, tokens, attention = self.config, self.chunk, self.attention_flops(chunk)
        row = tokens * self.precision.parameter_bytes  # bytes of one element per token
        d_model, d_query, d_kv, d_ff = config.d_model, config.d_query, config.d_kv, config.d_ff
        whole = forward_flops(config, 1, tokens)  # of all layers and the head, as if the chunk were a sequence
        products = (whole.projections + whole.feed_forward) // config.n_layers
        keys = 2 * tokens * d_model * 2 * d_kv  # k and v, a matmul of their own where sequences are longer than a chunk
        behind = products - 2 * tokens * d_model * config.d_qkv
        always = recomputed(config, *self.batch, self.precision, "products").traffic_bytes
        adapters = 2 * tokens * self.trained_parameters if self.lora else 0
        forward, backward = passes(config)
        thin = {name: row * n for name, n in adapter_numbers(config, self.lora).items()}
        match kind:
            case "forward":
                traffic = row * forward + thin["forward"]
                return _Amounts(products + adapters, attention, traffic)
            case "recompute":
                again = recomputed_flops(config, *self.batch, level, 0)
                traffic = recomputed(config, *self.batch, self.precision, level).traffic_bytes - always
                if self.is_long and level != "products":  # k is there, and has been rotated
                    again, traffic = again - keys, traffic - 2 * row * d_kv
                return _Amounts(again, 0 if "attended" in kept_names(level) else attention, traffic)
            case "backward":  # also attention's outputs and sums 8 d_query
                traffic = row * (backward + 8 * d_query) + always
                if config.qk_norm:  # recomputed norm and rotation, and x beside their backward
                    traffic += 3 * row * (d_query + d_kv)
                if self.lora:  # no gradients of weights; x A^T once more, half of forward's
                    products, traffic = products + 5 * adapters // 2, traffic + thin["backward"]
                else:
                    products *= 2
                return _Amounts(products, 5 * attention // 2, traffic)
            case "keys":  # and a norm, and their rotation
                return _Amounts(keys, 0, row * (2 * d_model + 2 * d_kv))
            case "restore":  # the matmuls behind attention, a norm with its sum, SwiGLU
                return _Amounts(behind, 0, row * (4 * d_model + 3 * d_ff))
            case "head":  # logits are read twice and written once between its products
                return _Amounts((2 if self.lora else 3) * whole.head, 0, 3 * row * config.vocab_size)
            case "embed":
                return _Amounts(0, 0, 2 * row * d_model)
            case "embed backward":
                return _Amounts(0, 0, 6 * row * d_model / ADD_ROWS_SHARE)
            case "norm":
                return _Amounts(0, 0, self.trained_parameters * self.precision.parameter_bytes)
            case "optimizer":
                return _Amounts(0, 0, self._optimizer_bytes(self.trained_parameters))
            case "fixed optimizer":
                return _Amounts(0, 0, self._optimizer_bytes(0 if self.lora else self._fixed_parameters))
        return None

    def _optimizer_bytes(self, parameters: int) -> int:
        """Bytes that the optimizer moves: it reads weights, gradients and moments and writes weights and moments."""
        return parameters * (3 * self.precision.parameter_bytes + 2 * sum(n for _, n in self.moments))


class _Amounts(NamedTuple):
    """The work of one operation."""

    products: int
    """FLOPs of matmuls."""
    attention: int
    """FLOPs of attention, causal."""
    traffic: float
    """Bytes that passes over memory read and write."""
