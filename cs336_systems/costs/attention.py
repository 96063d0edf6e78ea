"""FLOPs and bytes of attention by itself, for benchmarks of implementations.

FLOPs follow the FlashAttention convention (Dao 2023, section 4.1): forward 4 B H S_q S_k D, half of it if causal;
backward 2.5 times that, since the scores are computed again; both 3.5 times. The same count is used for implementations
that keep the probabilities instead, so that TFLOP/s compare times.

Bytes: eager materialised attention needs four score matrices at the height of its backward (probabilities, their
gradient, the product of the two that torch's CUDA softmax keeps, the scores' gradient), compiled two, since the last
three share one; tiled implementations need their inputs, outputs and gradients, and two numbers per query.
"""

from dataclasses import dataclass


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

    def materialised_bytes(self, bytes_per_element: int, *, compiled: bool = False) -> int:
        """Peak of forward and backward with every score in memory, the scaled queries and the mask included."""
        queries = self.batch_size * self.heads * self.n_queries * self.d_head
        mask = self.n_queries * self.n_keys if self.causal else 0
        scores = (2 if compiled else 4) * self.n_scores * bytes_per_element
        return self.tensor_bytes(bytes_per_element) + scores + queries * bytes_per_element + mask

    def tiled_bytes(self, bytes_per_element: int) -> int:
        """Peak of forward and backward without a score matrix: the tensors, log-sum-exp and delta in fp32."""
        return self.tensor_bytes(bytes_per_element) + 2 * 4 * self.batch_size * self.heads * self.n_queries
