"""Bytes of every tensor of a written-out step by its name in the code; for ``written_out.py``, which moves them."""

from cs336_systems.config import ModelConfig, Precision
from cs336_systems.costs.activations import WIDE
from cs336_systems.costs.held_states import block_pieces
from cs336_systems.costs.kept import kept_tensors

MULTIPROCESSORS = 132
"""Of an H200; the backward of a norm runs three programs on each, or one where rows are long, with fp32 sums each."""
FEW_TOKENS = 3072
"""Up to so many torch adds up an embedding's gradient without sorting (aten/src/ATen/native/cuda/Embedding.cu)."""
TOKENS_PER_PARTIAL = 10
"""Of equal ones, which a partial sum takes (NROWS_PER_THREAD in EmbeddingBackwardKernel.cu)."""


MATRICES = ("qkv", "output", "gate_up", "down")
"""Weights of products."""


class Sizes:
    """Bytes of every tensor of a step by its name in the code, and of every parameter."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        seq_len: int,
        precision: Precision,
        attention: str,
        chunk: int,
        *,
        sorts: bool,
    ) -> None:
        self.config, self.width = config, precision.parameter_bytes
        tokens, width = batch_size * seq_len, self.width
        of = {tensor.name: tensor.n_bytes for tensor in kept_tensors(config, batch_size, seq_len, precision, "all")}
        self.of = of
        self.stream, self.row, self.inner = of["x"], of["rstd1"], of["product"]
        self.elements = {name: n_bytes // width for name, n_bytes in of.items()}
        self.matrices = {name: n for name, n in block_pieces(config, 1).items() if name in MATRICES}
        self.gain = config.d_model * width
        rows = min(32, max(1, 2048 >> (config.d_model - 1).bit_length()))  # that a program of a norm holds at once
        programs = MULTIPROCESSORS * (3 if config.d_model <= 2048 else 1)
        self.gain_sums = min(-(-tokens // rows), programs) * config.d_model * WIDE
        self.head = config.vocab_size * config.d_model * width
        words = -(-config.vocab_size // 16) * 16
        self.logits = min(chunk, tokens) * words * width
        self.attention_buffers = self._attention_buffers(attention, batch_size, seq_len)
        partial_rows = tokens // TOKENS_PER_PARTIAL + min(tokens, config.vocab_size)
        indices = {f"embedding indices {i}": 8 * tokens for i in range(4)}
        self.embedding_buffers = (
            {"embedding sums": partial_rows * config.d_model * WIDE, **indices} if sorts and tokens > FEW_TOKENS else {}
        )

    def _attention_buffers(self, attention: str, batch_size: int, seq_len: int) -> dict[str, int]:
        """Of its backward, which writes into the gradient of q | k | v: statistics, and fp32 sums for dq."""
        config, heads = self.config, batch_size * self.config.n_heads
        if attention == "flash":
            return {"lse in base 2": heads * seq_len * WIDE, "delta": heads * seq_len * WIDE}
        padded, columns = -(-seq_len // 128) * 128, 64 if config.d_head <= 64 else 128
        return {"statistics": heads * 2 * padded * WIDE, "sums of dq": heads * padded * columns * WIDE}
