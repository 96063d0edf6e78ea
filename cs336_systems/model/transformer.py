"""The reference Transformer language model: pre-norm blocks of causal self-attention and SwiGLU.

One class serves the handout's sizes, Llama 3, Qwen2.5 and Qwen3: grouped-query heads, QKV biases, norms of queries and
keys, tied embeddings and RoPE variants are fields of ``ModelConfig``. Parameter names are the CS336 handout's. The
model imports no kernel and knows nothing of how it is measured, compiled or distributed.

    model = TransformerLM(MODEL_SIZES["small"], device="cuda", dtype=torch.bfloat16)
    logits = model(token_ids)                        # (batch, seq) -> (batch, seq, vocab)
    loss = model(token_ids, targets)                 # targets (batch, seq)

    shell = TransformerLM(config, device="meta")     # no storage; then, shard by shard or whole:
    shell.to_empty(device="cuda"); shell.reset_parameters()
"""

from collections.abc import Callable
from typing import Unpack

import torch
from einops import rearrange
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.model.layers import Embedding, Head, Linear, Placement, RMSNorm, RotaryEmbedding, SwiGLU
from cs336_systems.model.ops import REFERENCE_OPS, ModelOps


class CausalSelfAttention(nn.Module):
    """Computes multi-head or grouped-query causal self-attention with rotary positions: (B, S, d_model) -> same."""

    def __init__(self, config: ModelConfig, ops: ModelOps, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.ops = ops
        self.d_head = config.d_head
        d_model, d_query, d_kv, bias = config.d_model, config.d_query, config.d_kv, config.qkv_bias
        self.q_proj = Linear(d_model, d_query, ops, bias=bias, **placement)
        self.k_proj = Linear(d_model, d_kv, ops, bias=bias, **placement)
        self.v_proj = Linear(d_model, d_kv, ops, bias=bias, **placement)
        self.output_proj = Linear(d_query, d_model, ops, **placement)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.d_head, config.rms_norm_eps, ops, **placement)
            self.k_norm = RMSNorm(config.d_head, config.rms_norm_eps, ops, **placement)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries (B, heads, S, d_head) and keys (B, kv_heads, S, d_head), and values as the keys."""
        q, k, v = (
            rearrange(projection(x), "b s (h e) -> b h s e", e=self.d_head)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.ops.rotary(q, cos, sin), self.ops.rotary(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        documents = {} if starts is None else {"starts": starts}  # which not every attention knows of
        attended = self.ops.attention(q, k, v, causal=True, **documents)
        return self.output_proj(rearrange(attended, "b h s e -> b s (h e)"))


class TransformerBlock(nn.Module):
    """Adds attention(norm(x)) to x, then ffn(norm(x)): (B, S, d_model) -> same; cos and sin are (S, d_head / 2).

    Where several documents share a sequence, ``starts`` (B, S) int32 is the first position of each token's own.
    """

    def __init__(self, config: ModelConfig, ops: ModelOps = REFERENCE_OPS, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.rms_norm_eps, ops, **placement)
        self.attn = CausalSelfAttention(config, ops, **placement)
        self.ln2 = RMSNorm(config.d_model, config.rms_norm_eps, ops, **placement)
        self.ffn = SwiGLU(config.d_model, config.d_ff, ops, **placement)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln1(x), cos, sin, starts)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Maps int64 token ids (batch, seq) to logits (batch, seq, vocab_size) in the parameters' dtype.

    With int64 targets (batch, seq) it returns their mean loss in nats instead, a scalar; targets of -100 do not count.
    Token ids (batch, seq, 2) are ids, and the first position of the document that each token belongs to: documents in a
    row do not see each other. Their positions go on, as rotations only tell how far two tokens are apart.

    A loss that is computed here is inside whatever wraps the model, and ``ops`` may compute it in chunks, without
    holding all logits.

    Raises:
        ValueError: ``forward`` was given token ids of another shape, or a sequence that is longer than
            ``config.context_length``.
    """

    def __init__(self, config: ModelConfig, ops: ModelOps = REFERENCE_OPS, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, ops, **placement)
        self.rotary = RotaryEmbedding(config, **placement)
        self.layers = nn.ModuleList(TransformerBlock(config, ops, **placement) for _ in range(config.n_layers))
        self.ln_final = RMSNorm(config.d_model, config.rms_norm_eps, ops, **placement)
        self.lm_head = Head(config.d_model, config.vocab_size, ops, **placement)
        self._tie_embeddings()
        if not self.token_embeddings.weight.is_meta:
            self.reset_parameters()

    def _tie_embeddings(self) -> None:
        if self.config.tie_embeddings and isinstance(self.lm_head, Head):  # which not all stages of a pipeline have
            self.lm_head.weight = self.token_embeddings.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TransformerLM":
        """Tie the embeddings again, because ``nn.Module._apply`` makes two of a tied parameter that leaves ``meta``."""
        super()._apply(fn, recurse)
        self._tie_embeddings()
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter from torch's global generator and fill the buffers, as after ``to_empty``.

        A tied embedding is drawn twice and keeps the head's scale, the smaller: unit variance would make huge logits.
        """
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def forward(
        self,
        token_ids: Tensor,
        targets: Tensor | None = None,
        x: Tensor | None = None,
        blocks: slice | None = None,
    ) -> Tensor:
        """Return logits, or the loss if targets are given; the class docstring has shapes and errors.

        Args:
            x: the output of the blocks before ``blocks``, (batch, seq, d_model); None before the first.
            blocks: those that run, by their numbers; if others come after them, their output is returned.
        """
        if token_ids.dim() != 2 and (token_ids.dim() != 3 or token_ids.shape[2] != 2):
            raise ValueError(f"token ids are (batch, seq) or (batch, seq, 2), got {tuple(token_ids.shape)}")
        where = self.rotary(token_ids.shape[1])
        if token_ids.dim() == 3:
            where, token_ids = (*where, token_ids[..., 1].int().contiguous()), token_ids[..., 0]
        x = self.token_embeddings(token_ids) if x is None else x
        layers = list(self.layers.children())
        x = self.ops.stack(layers if blocks is None else layers[blocks], x, *where)
        if blocks is not None and blocks.stop < len(layers):
            return x
        return self.lm_head(self.ln_final(x), targets)
