"""The stages of a block's forward, from activations to activations; backward calls some of them again.

Shape legend: ``ops.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from cs336_systems.blocks.adapters import Adapter
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import Maxima, Operand, Products
from cs336_systems.blocks.saved import APART, low_rank_name
from cs336_systems.blocks.weights import BlockWeights
from cs336_systems.config import ModelConfig
from cs336_systems.kernels.lora_reference import LowRank


@dataclass(frozen=True)
class Stages:
    """One block with its weights and operations; each stage is a method."""

    weights: BlockWeights
    ops: BlockOps
    products: Products
    maxima: Maxima
    config: ModelConfig
    cos: Tensor
    sin: Tensor
    places: Mapping[str, Tensor]
    """The caller's memory for results of products, by the names of ``Saved``."""
    starts: Tensor | None
    """The first position of each token's document, (B, S) int32, if several share a sequence."""
    low_rank: dict[str, Tensor] = field(default_factory=dict)
    """Adapters' h by the names in ``Saved``: those that forward kept, and others once they are computed."""

    def place(self, name: str, like: Tensor, width: int) -> Tensor:
        """Memory for the result of a product: the caller's if given, else new."""
        if name in self.places:
            return self.places[name]
        return like.new_empty(like.shape[0] * self.products.ranks.n_ranks, width)

    def rows_of(self, name: str) -> Any:
        return self.products.read_weight(name, getattr(self.weights, name), rows=True).rows

    def columns_of(self, name: str) -> Any:
        return self.products.read_weight(name, getattr(self.weights, name), columns=True).columns

    def read(self, name: str, x: Any, *, rows: bool = True, columns: bool = True) -> Operand:
        """An activation as an operand of products, by its name in ``Saved``."""
        return self.products.read(name, x, self.maxima, rows=rows, columns=columns)

    def adapter(self, name: str) -> Adapter | None:
        """The matrix's adapter, if it has one; for a name in ``APART``, its part of the adapter of q | k | v."""
        if name in APART:
            if (whole := self.adapter("qkv")) is None:
                return None
            ends = whole.b.shape[1], self.config.d_query, 1  # where q's rows end
            rows_a, rows_b, parts = (slice(end) if name == "q" else slice(end, None) for end in ends)
            return replace(whole, a=whole.a[rows_a], b=whole.b[rows_b], widths=whole.widths[parts])
        a, b = (getattr(self.weights, f"{name}_{each}") for each in "ab")
        if a is None:
            return None
        config = self.config
        widths = {"qkv": (config.d_query, config.d_kv, config.d_kv), "gate_up": (config.d_ff, config.d_ff)}
        return Adapter(a, b, widths.get(name, (config.d_model,)), self.weights.adapter_scale)

    def addition(self, name: str, x_RK: Operand) -> LowRank | None:
        """The term that the matrix's adapter, if there is one, adds to the product of operand and matrix."""
        if (adapter := self.adapter(name)) is None:
            return None
        kept = low_rank_name(name)
        if kept not in self.low_rank:
            self.low_rank[kept] = adapter.forward(self.ops, self.products.by_rows(x_RK))
        return adapter.addition(self.low_rank[kept])

    def adapt_(self, name: str, out_RN: Tensor, x_RK: Operand) -> None:
        """Add ``addition`` to the product."""
        if (low := self.addition(name, x_RK)) is not None:
            self.ops.lora_expand_(out_RN, low)

    def addition_backward(self, name: str, dy_RN: Operand) -> LowRank | None:
        """The term that the adapter adds to the gradient of the product's operand; its ``h`` is the gradient of h."""
        adapter = self.adapter(name)
        return None if adapter is None else adapter.backward(self.ops, self.products.by_rows(dy_RN))

    def adapt_backward_(self, name: str, dx_RK: Tensor, dy_RN: Operand) -> LowRank | None:
        """Add ``addition_backward`` to the gradient, and return it."""
        if (low := self.addition_backward(name, dy_RN)) is not None:
            self.ops.lora_expand_(dx_RK, low)
        return low

    def _norm(self, number: int) -> tuple[Tensor, float, dict[str, Tensor]]:
        gain = self.weights.ln1 if number == 1 else self.weights.ln2
        return gain, self.config.rms_norm_eps, self.maxima.raised(f"normed{number}")

    def norm(self, number: int, x_RD: Tensor, rstd_R: Tensor | None = None) -> tuple[Any, Tensor]:
        """(The block's first or second norm of x as an operand, rstd); a known rstd may be given."""
        return self.products.norm(self.ops, x_RD, *self._norm(number), rstd_R)

    def n_heads(self, name: str) -> tuple[int, int]:
        """The numbers of query heads and key/value heads in the projection of this name."""
        return 0 if name == "keys_values" else self.config.n_heads, 0 if name == "q" else self.config.kv_heads

    def project(self, name: str, x_RD: Tensor, normed1_RD: Operand) -> Tensor:
        """q | k | v (R, P), or the projection in ``APART`` of this name; rotated, unless q and k have norms."""
        weight, bias, (n_heads, n_kv_heads) = self.rows_of("qkv"), self.weights.qkv_bias, self.n_heads(name)
        if name in APART:
            rows = slice(self.config.d_query) if name == "q" else slice(self.config.d_query, None)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        out = self.place(name, x_RD, (n_heads + 2 * n_kv_heads) * self.config.d_head)
        self.products.forward_(self.ops, out, normed1_RD, weight, bias)
        self.adapt_(name, out, normed1_RD)
        if not self.config.qk_norm:
            self.rotate_(out, n_heads, n_kv_heads, inverse=False)
        return out

    def norm_rotate_backward_(self, dqkv: Tensor, projected: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The gradients of both gains. In dqkv, replace the gradient of q | k by the one before norm and rotation."""
        parts = zip(dqkv.split([rows.shape[1] for rows in projected.values()], dim=1), projected.items(), strict=True)
        dgains = [
            self.ops.norm_rotate_backward_(part, rows, *self._qk_norms, *self.n_heads(name))
            for part, (name, rows) in parts
        ]
        return dgains[0][0], dgains[-1][1]

    @property
    def _qk_norms(self) -> tuple[Tensor, Tensor, float, Tensor, Tensor]:
        assert self.weights.q_norm is not None and self.weights.k_norm is not None
        return self.weights.q_norm, self.weights.k_norm, self.config.rms_norm_eps, self.cos, self.sin

    def rotate_(self, rows: Tensor, n_heads: int, n_kv_heads: int, *, inverse: bool, **absmax: Tensor) -> None:
        sequences = rows.view(-1, self.cos.shape[0], rows.shape[-1])
        self.ops.rotate_(sequences, self.cos, self.sin, n_heads, n_kv_heads, inverse=inverse, **absmax)

    def heads(self, rows: Tensor) -> Tensor:
        """Rows of heads (R, n E) in attention's layout: a view (B, n, S, E)."""
        d_head = self.config.d_head
        return rows.view(-1, self.cos.shape[0], rows.shape[-1] // d_head, d_head).transpose(1, 2)

    def qkv_heads(self, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v from q | k | v, or from q and k | v: views (B, H, S, E) and (B, K, S, E)."""
        config = self.config
        if len(projected) == 1:
            sizes = config.n_heads, config.kv_heads, config.kv_heads
            q, k, v = self.heads(*projected).split_with_sizes(sizes, dim=1)
        else:
            q, keys_values = map(self.heads, projected)
            k, v = keys_values.chunk(2, dim=1)
        return q, k, v

    def attended_heads(self, projected: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as attention reads them, shaped as ``qkv_heads``."""
        q, k, v = self.qkv_heads(*projected.values())
        if self.config.qk_norm:
            turned = [
                self.heads(self.ops.norm_rotate(rows, *self._qk_norms, *self.n_heads(name)))
                for name, rows in projected.items()
            ]
            q, k = turned if len(turned) == 2 else turned[0].tensor_split([self.config.n_heads], dim=1)
        return q, k, v

    @property
    def documents(self) -> dict[str, Tensor]:
        """``starts`` as a keyword argument, only if given: not every attention takes it."""
        return {} if self.starts is None else {"starts": self.starts}

    def attend(self, projected: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Attention's output (R, H E) and lse (B, H, S)."""
        o_BHSE, lse = self.ops.attention_forward(*self.attended_heads(projected), **self.documents)
        return o_BHSE.transpose(1, 2).reshape(-1, self.config.d_query), lse

    def add(self, x_RD: Tensor, attended_RD: Tensor) -> tuple[Tensor, Any, Tensor]:
        """(The residual stream after attention, its norm as an operand, the norm's rstd)."""
        attended = self.read("attended", attended_RD, columns=False)
        branch = self.products.sum_forward(self.ops, attended, self.rows_of("output"))
        self.adapt_("output", branch, attended)
        del attended
        return self.products.add_norm(self.ops, x_RD, branch, *self._norm(2))

    def gate_up(self, x_RD: Tensor, normed2_RD: Operand) -> Tensor:
        if self.weights.gate_up_a is not None and not self.products.quantized:
            return self.feed(x_RD, normed2_RD)[0]  # rounds the sum of product and addition once
        gate_up = self.place("gate_up", x_RD, self.weights.gate_up.shape[0])
        self.products.forward_(self.ops, gate_up, normed2_RD, self.rows_of("gate_up"))
        self.adapt_("gate_up", gate_up, normed2_RD)
        return gate_up

    def feed(self, x_RD: Tensor, normed2_RD: Operand) -> tuple[Tensor, Tensor]:
        """(gate | up, its SwiGLU)."""
        gate_up, weight = self.place("gate_up", x_RD, self.weights.gate_up.shape[0]), self.rows_of("gate_up")
        how = self.maxima, self.addition("gate_up", normed2_RD)
        return gate_up, self.products.swiglu_forward_(self.ops, gate_up, normed2_RD, weight, *how)
