"""Generate text, a token at a time: the reference model's operations with a key/value cache.

    for token_id in generate(model, prompt_ids, temperature=0.8, top_p=0.95, max_tokens=200, seed=0): ...

Rotated keys and values of every position are cached in two tensors that are allocated once, per key/value head, so a
token costs one pass over the weights and the cache. Queries that share a key/value head are rows of one matmul, so no
head is repeated. The prompt is processed in parts, so that memory for its scores does not grow quadratically.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch
from einops import rearrange
from torch import Tensor

from cs336_systems.model import TransformerBlock, TransformerLM

_PROMPT_PART = 512
"""Tokens of the prompt that are processed at once."""


class CachedModel:
    """A model with a key/value cache for the positions of one sequence, at most ``capacity``.

    Raises:
        ValueError: the capacity is beyond the model's context length.
    """

    def __init__(self, model: TransformerLM, capacity: int) -> None:
        config, weight = model.config, model.token_embeddings.weight
        if capacity > config.context_length:
            raise ValueError(f"a cache of {capacity} positions is beyond the context length {config.context_length}")
        shape = (config.n_layers, 1, config.kv_heads, capacity, config.d_head)
        self.model = model
        self.length = 0
        self._keys, self._values = (torch.empty(shape, device=weight.device, dtype=weight.dtype) for _ in range(2))

    @torch.no_grad()
    def hidden(self, token_ids: Tensor) -> Tensor:
        """Process the next ids, (1, S) int64; return (1, S, d_model), the input of the last norm."""
        model, start, end = self.model, self.length, self.length + token_ids.shape[1]
        assert end <= self._keys.shape[3], (end, self._keys.shape)
        cos, sin = (table[start:] for table in model.rotary(end))
        x = model.token_embeddings(token_ids)
        for block, keys, values in zip(
            cast(list[TransformerBlock], model.layers), self._keys, self._values, strict=True
        ):
            q, keys[:, :, start:end], values[:, :, start:end] = block.attn.project(block.ln1(x), cos, sin)
            attended = _attend(q, keys[:, :, :end], values[:, :, :end])
            x = x + block.attn.output_proj(rearrange(attended, "b h s e -> b s (h e)"))
            x = x + block.ffn(block.ln2(x))
        self.length = end
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(1, S, vocab_size) for (1, S, d_model)."""
        return self.model.lm_head(self.model.ln_final(hidden))


def _attend(q_BHSE: Tensor, k_BKNE: Tensor, v_BKNE: Tensor) -> Tensor:
    """Return causal softmax(q k^T / sqrt(E)) v for the last S of N positions; H / K query heads share a key head."""
    n_queries, n_keys = q_BHSE.shape[2], k_BKNE.shape[2]
    q = rearrange(q_BHSE * q_BHSE.shape[-1] ** -0.5, "b (k g) s e -> b k (g s) e", k=k_BKNE.shape[1])
    scores = rearrange(q @ k_BKNE.mT, "b k (g s) n -> b k g s n", s=n_queries)
    future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=scores.device).triu(n_keys - n_queries + 1)
    p = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    o = rearrange(p, "b k g s n -> b k (g s) n") @ v_BKNE
    return rearrange(o, "b k (g s) e -> b (k g) s e", s=n_queries)


def probabilities(logits: Tensor, temperature: float = 1.0, top_p: float | None = None) -> Tensor:
    """The probability of each next token, (V,), at least fp32, for logits (V,) at a temperature above 0.

    Args:
        top_p: keep only the likeliest tokens, as few as have this total probability (Holtzman et al. 2020).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    least = torch.finfo(wide.dtype).tiny  # smaller numbers are zeros in this dtype, and 0 / 0 is no probability
    p = torch.softmax((wide - wide.amax()) / max(temperature, least), dim=-1)
    if top_p is None:
        return p
    ordered, order = p.sort(descending=True, stable=True)
    ordered[ordered.cumsum(-1) - ordered >= max(top_p, least)] = 0
    return torch.zeros_like(p).scatter_(-1, order, ordered / ordered.sum())


def generate(
    model: TransformerLM,
    prompt: Sequence[int],
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    max_tokens: int,
    seed: int = 0,
    eos_ids: Collection[int] = (),
    n_ids: int | None = None,
) -> Iterator[int]:
    """Continue a prompt: yield the ids that follow it, up to and including one of ``eos_ids``.

    Ends after ``max_tokens``, too, or when the context is full: with context length C and P prompt tokens, after at
    most C - P + 1. The same seed gives the same ids on the same device.

    Args:
        temperature: 0 always takes the likeliest token.
        top_p: as in ``probabilities``.
        n_ids: the tokenizer's number of ids; larger ids are never drawn.

    Raises:
        ValueError: the prompt is empty, longer than the context or beyond the vocabulary, a number is out of range, or
            the model's logits are not finite.
    """
    context, vocab_size = model.config.context_length, model.config.vocab_size
    if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(f"a prompt has one token or more, all of a vocabulary of {vocab_size}")
    if len(prompt) > context:
        raise ValueError(f"the prompt has {len(prompt):,} tokens, the model's context {context:,}")
    if max_tokens < 1:
        raise ValueError(f"the number of tokens must be positive, got {max_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and not negative, got {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top p must lie in (0, 1], got {top_p:g}")
    device, capacity = model.token_embeddings.weight.device, min(context, len(prompt) + max_tokens - 1)
    cached, generator = CachedModel(model, capacity), torch.Generator(device).manual_seed(seed)
    *earlier, token_ids = torch.tensor([prompt], device=device).split(_PROMPT_PART, dim=1)
    for part in earlier:
        cached.hidden(part)
    while True:
        logits = cached.logits(cached.hidden(token_ids)[:, -1:])[0, 0, :n_ids]
        if not logits.isfinite().all():
            raise ValueError(f"the model's logits after {cached.length} tokens are not finite")
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(probabilities(logits, temperature, top_p), 1, generator=generator)
        yield (token_id := int(chosen))
        if token_id in eos_ids or cached.length == capacity:
            return
        token_ids = chosen[None]
