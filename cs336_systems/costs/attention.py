"""FLOPs and bytes of attention by itself, for benchmarks of implementations.

FLOPs follow the FlashAttention convention (Dao 2023, section 4.1): forward 4 B H S_q S_k D, half of it if causal;
backward 2.5 times that, since the scores are recomputed; both 3.5 times. The same count is used for implementations
that keep the probabilities instead, so that TFLOP/s compare times.

Bytes: eager materialised attention needs four score matrices at the height of its backward (probabilities, their
gradient, the product of the two that torch's CUDA softmax keeps, the scores' gradient), compiled two, since the last
three share one; tiled implementations need their inputs, outputs and gradients, and two numbers per query.

``attention_stages`` counts executed work of materialised attention, stage by stage, not model FLOPs: the masked half of
the scores is multiplied too. Softmax counts five operations per score in forward (maximum, subtract, exponentiate, add
up, divide) and four in backward (p (g - sum(p g)): multiply, add up, subtract, multiply). Backward takes two matmuls
for each of forward's. Bytes are the least that a stage moves when every matmul and every softmax is a kernel of its
own, which reads each input and writes each output once. Casts that autocast inserts, the mask and the scaling of q are
left out. A stage whose FLOPs per byte lie below the device's (206 for an H200 in bf16) is limited by memory: that is
why softmax, with 5 operations per score to the matmuls' 4 d_head, is not as many times faster.
"""

from dataclasses import dataclass

from cs336_systems.config import ModelConfig, Precision, check_known


@dataclass(frozen=True)
class AttentionWork:
    """One attention: (batch, heads, n_queries, d_head) queries over n_keys keys of kv_heads heads."""

    batch_size: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    d_head: int
    causal: bool

    @property
    def forward_flops(self) -> int:
        """Causal work counts half of the square, as the convention has it."""
        full = 4 * self.batch_size * self.heads * self.n_queries * self.n_keys * self.d_head
        return full // 2 if self.causal else full

    @property
    def backward_flops(self) -> int:
        return 5 * self.forward_flops // 2

    @property
    def n_scores(self) -> int:
        return self.batch_size * self.heads * self.n_queries * self.n_keys

    def tensor_bytes(self, bytes_per_element: int) -> int:
        """q, k, v and o, and the gradients of all four."""
        queries = self.batch_size * self.heads * self.n_queries * self.d_head
        keys = self.batch_size * self.kv_heads * self.n_keys * self.d_head
        return 2 * bytes_per_element * (2 * queries + 2 * keys)

    def materialised_bytes(self, bytes_per_element: int, *, compiled: bool) -> int:
        """Peak of forward and backward with every score in memory, the scaled queries and the mask included."""
        queries = self.batch_size * self.heads * self.n_queries * self.d_head
        mask = self.n_queries * self.n_keys if self.causal else 0
        scores = (2 if compiled else 4) * self.n_scores * bytes_per_element
        return self.tensor_bytes(bytes_per_element) + scores + queries * bytes_per_element + mask

    def tiled_bytes(self, bytes_per_element: int) -> int:
        """Peak of forward and backward without a score matrix: the tensors, log-sum-exp and delta in fp32."""
        return self.tensor_bytes(bytes_per_element) + 2 * 4 * self.batch_size * self.heads * self.n_queries


@dataclass(frozen=True)
class StageWork:
    """One stage in one direction, of all layers together."""

    flops: int
    n_bytes: int


def attention_stages(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, direction: str
) -> tuple[StageWork, StageWork]:
    """Work of either matmul (of scores, of values), and of softmax, in every layer on (batch_size, seq_len) tokens.

    Args:
        direction: ``forward`` or ``backward``.

    Raises:
        ValueError: no such direction.
    """
    check_known("direction", direction, ("forward", "backward"))
    backward = direction == "backward"
    narrow, wide = precision.matmul_bytes, precision.softmax_bytes
    scores = config.n_layers * batch_size * config.n_heads * seq_len**2
    heads = config.n_layers * batch_size * config.n_heads * seq_len * config.d_head
    products, operations, softmax_bytes = (2, 4, 2 * wide + narrow) if backward else (1, 5, narrow + wide)
    matmul = StageWork(products * 2 * scores * config.d_head, products * narrow * (scores + 2 * heads))
    return matmul, StageWork(operations * scores, softmax_bytes * scores)
