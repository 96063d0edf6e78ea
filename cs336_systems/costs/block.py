"""The work of a block's kernels besides FLOPs: partial tiles, operands, quantizing, passes over memory.

Kinds are those of operations (``costs/streaming.py``): ``head`` is the output head with its gradients, ``forward`` and
``backward`` are a block's. Sizes are in bytes or in numbers of each token.
"""

from functools import cache

from cs336_systems.config import Lora, ModelConfig, Recipe

TILE = 256
"""Columns of one tile of cuBLASLt's usual kernels. Where they do not divide a matrix, as the 896 of 0.5B, another
kernel can be faster: it saved 2.4 % of 0.5B's step in bf16 and 3.8 % in fp8, nothing of 7B's (LOG.md)."""


@cache
def tiles(config: ModelConfig, kind: str, *, frozen: bool) -> float:
    """FLOPs of whole tiles of ``TILE`` columns over the FLOPs of the products.

    It is 1 for gradients of weights, of which either side can be the columns; ``frozen`` weights have none.
    """
    if kind == "head":
        both = _whole(config.vocab_size) + _whole(config.d_model)
        return both / 2 if frozen else (both + 1) / 3
    shapes = config.block_shapes.values()
    flops = sum(k * n for k, n in shapes)
    forward = sum(k * n * _whole(n) for k, n in shapes) / flops
    if kind != "backward":
        return forward
    backward = sum(k * n * _whole(k) for k, n in shapes) / flops
    return backward if frozen else (backward + 1) / 2


def _whole(columns: int) -> float:
    """Columns rounded up to whole tiles, over columns."""
    return -(-columns // TILE) * TILE / columns


@cache
def operand_bytes_per_flop(config: ModelConfig, tokens: int, width: int, recipe: Recipe, kind: str) -> float:
    """Bytes that a product of (m, k) and (k, n) loads and stores for each of its FLOPs, on average over a block."""
    if kind == "head":
        d_model, words = config.d_model, config.vocab_size
        return width * (tokens * (d_model + words) + d_model * words) / (2 * tokens * d_model * words)
    shapes = config.block_shapes.values()
    n_bytes = sum(width * (tokens * (k + n) + k * n) for k, n in shapes)
    in_fp8 = 3 / 4 if recipe.quantized else 1.0  # half of what is loaded and stored
    return in_fp8 * n_bytes / sum(2 * tokens * k * n for k, n in shapes)


def quantizing_bytes(config: ModelConfig, tokens: int, recipe: Recipe, kind: str) -> int:
    """Bytes that quantized blocks move besides: operands once more, transposed, and gradients read and written so.

    What precedes a matmul writes its operand in fp8 instead of bf16, so that this costs nothing.
    """
    if not recipe.quantized:
        return 0
    d_model, d_ff, d_query, d_qkv = config.d_model, config.d_ff, config.d_query, config.d_qkv
    per_token = {"forward": 2 * d_model + d_query + d_ff, "backward": 4 * (d_qkv + 2 * d_model + 2 * d_ff)}
    return tokens * per_token.get(kind, 0)


def passes(config: ModelConfig) -> tuple[int, int]:
    """Numbers of each token that a block's passes read and write in (forward, backward), each tensor once.

    Forward: two norms and a sum 6 d, rotation 2 (d_query + d_kv), SwiGLU 3 d_ff. Backward: two norms 8 d, the same
    rotation, SwiGLU 5 d_ff.
    """
    d_model, rotated, d_ff = config.d_model, 2 * (config.d_query + config.d_kv), config.d_ff
    return 6 * d_model + rotated + 3 * d_ff, 8 * d_model + rotated + 5 * d_ff


@cache
def adapter_numbers(config: ModelConfig, lora: Lora | None) -> dict[str, int]:
    """Numbers of each token that the thin products of adapters read and write, by kind of operation."""
    on = lora.on if lora else ()
    adapted = [shape for name, shape in config.block_shapes.items() if name in on]
    forward = sum(k + 2 * n for k, n in adapted)  # x is read, y added to
    return {"forward": forward, "backward": sum(4 * k + 2 * n for k, n in adapted)}  # x, dy twice; dx added to
