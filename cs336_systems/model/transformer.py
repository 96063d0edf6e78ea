"""The reference Transformer language model: pre-norm blocks of causal self-attention and SwiGLU.

One class for the handout's sizes and for Llama-3, Qwen2.5 and Qwen3 (grouped-query heads, QKV biases, norms of queries
and keys, tied embeddings and RoPE variants are fields of ``ModelConfig``). Parameter names are the CS336 handout's. The
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
    """Multi-head (or grouped-query) causal self-attention with rotary positions: (B, S, d_model) -> same."""

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
        """Queries (B, H, S, E) and keys (B, K, S, E), rotated to their positions, and values (B, K, S, E)."""
        q, k, v = (
            rearrange(projection(x), "b s (h e) -> b h s e", e=self.d_head)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.ops.rotary(q, cos, sin), self.ops.rotary(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.output_proj(rearrange(self.ops.attention(q, k, v, causal=True), "b h s e -> b s (h e)"))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then + feed-forward(norm(x)): (B, S, d_model) -> same; cos, sin (S, d_head / 2)."""

    def __init__(self, config: ModelConfig, ops: ModelOps = REFERENCE_OPS, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.rms_norm_eps, ops, **placement)
        self.attn = CausalSelfAttention(config, ops, **placement)
        self.ln2 = RMSNorm(config.d_model, config.rms_norm_eps, ops, **placement)
        self.ffn = SwiGLU(config.d_model, config.d_ff, ops, **placement)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x), cos, sin)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Token ids (batch, seq), int64 -> logits (batch, seq, vocab_size) in the parameters' dtype.

    Given targets (batch, seq) as well, -> their mean loss in nats, a scalar; -100 does not count. A training step that
    computes it here need not hold all logits, and inside whatever wraps the model.

    Raises:
        ValueError: in ``forward``, a sequence beyond ``config.context_length``.
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
        if self.config.tie_embeddings:
            self.lm_head.weight = self.token_embeddings.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TransformerLM":
        """``nn.Module._apply``, which ``to`` and ``to_empty`` call: leaving meta, it makes two of a tied parameter."""
        super()._apply(fn, recurse)
        self._tie_embeddings()
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill every parameter and buffer, as after ``to_empty``; draws from torch's global generator.

        A tied embedding is drawn twice and keeps the head's scale, the smaller: unit variance would make huge logits.
        """
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        cos, sin = self.rotary(token_ids.shape[-1])
        x = self.ops.stack(list(self.layers.children()), self.token_embeddings(token_ids), cos, sin)
        return self.lm_head(self.ln_final(x), targets)
