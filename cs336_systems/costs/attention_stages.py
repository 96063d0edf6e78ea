"""FLOPs and bytes of the stages of attention that materialises its scores: q k^T, softmax, probabilities times v.

Executed work, not model FLOPs: the masked half of the scores is multiplied too. Softmax counts five operations per
score in forward (maximum, subtract, exponentiate, add up, divide) and four in backward (p (g - sum(p g)): multiply, add
up, subtract, multiply). Backward takes two products for each of forward's. Bytes are the least that a stage moves when
every product and every softmax is a kernel of its own, which reads each input and writes each output once. Casts that
autocast inserts, the mask and the scaling of q are left out.

A stage whose FLOPs per byte lie below the device's (peak FLOP/s over bytes/s; 206 for an H200 in bf16) is limited by
memory, so times follow bytes there, not FLOPs: that is why softmax, with 5 operations per score to the products'
4 d_head, is not as many times faster.
"""

from dataclasses import dataclass

from cs336_systems.config import ModelConfig, Precision


@dataclass(frozen=True)
class StageWork:
    """One stage in one direction, of all layers together."""

    flops: int
    n_bytes: int


@dataclass(frozen=True)
class AttentionStages:
    """The three stages in one direction."""

    scores_matmul: StageWork
    softmax: StageWork
    values_matmul: StageWork


def attention_stages(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, direction: str
) -> AttentionStages:
    """Work of every layer's attention on (batch_size, seq_len) tokens; ``direction`` is ``forward`` or ``backward``.

    Raises:
        ValueError: no such direction.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"unknown direction {direction!r}: known are forward, backward")
    backward = direction == "backward"
    narrow, wide = precision.matmul_bytes, precision.softmax_bytes
    scores = config.n_layers * batch_size * config.n_heads * seq_len**2
    heads = config.n_layers * batch_size * config.n_heads * seq_len * config.d_head
    products, operations, softmax_bytes = (2, 4, 2 * wide + narrow) if backward else (1, 5, narrow + wide)
    matmul = StageWork(products * 2 * scores * config.d_head, products * narrow * (scores + 2 * heads))
    return AttentionStages(matmul, StageWork(operations * scores, softmax_bytes * scores), matmul)
