"""The Llama and Qwen block, forward and backward as plain functions on tensors: autograd's work, written out.

    x -> norm -> q | k | v (one product) -> rotate -> attention -> output product -> + x = residual
    residual -> norm -> gate | up (one product) -> SwiGLU -> down product -> + residual

q and k | v may be two products instead (``saved.APART``). Where heads of q and k have norms (Qwen3), q | k | v is kept
as it was before them: attention reads a normed and rotated copy of q and k, and backward computes that copy again.

Written out, backward can be told what it may keep (``saved.py``), where gradients go (``grads``, in place, so that
micro-batches accumulate without a second buffer), which operations it calls (``ops.py``), and how its matrix products
are computed (``products.py``). What was not kept is computed again by the functions that computed it first, so
gradients are the same bits whatever is kept.

    weights, saved = BlockWeights.of(dict(block.named_parameters())), Saved(kept_names("products"))
    y = forward(x, weights, saved, REFERENCE, config, cos, sin)
    dx = backward(dy, weights, saved, grads, REFERENCE, config, cos, sin)

Given a list (``later``), backward leaves out the gradients of matrices, four products that can wait until a stage of a
pipeline has nothing else to do (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).

``recall`` computes what was not kept before backward, into memory of the caller's, where backward is to find it there.

All tensors share one dtype, but for statistics, the rotary tables and what quantized products read. Shape legend:
``ops.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks.adapters import Adapter
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import NONE, STORED, Maxima, Operand, Products
from cs336_systems.blocks.saved import APART, Saved, low_rank_name
from cs336_systems.blocks.weights import BlockGradients, BlockWeights
from cs336_systems.config import ADAPTED, ModelConfig
from cs336_systems.costs.kept import KEPT, OPERANDS
from cs336_systems.kernels.lora_reference import LowRank

Later = list[Callable[[BlockGradients, bool], None]]
"""Gradients of matrices that are still to be computed: each is called with where they go, and whether to add there."""


@dataclass(frozen=True)
class _Stages:
    """The forward of one block in steps, from activations to activations; backward runs some of them again."""

    weights: BlockWeights
    ops: BlockOps
    products: Products
    maxima: Maxima
    config: ModelConfig
    cos: Tensor
    sin: Tensor
    places: Mapping[str, Tensor]
    """Memory for results of products, by the names of ``Saved``."""
    documents: Mapping[str, Tensor]
    """``starts`` of attention, if several documents share a sequence; not every attention takes it."""
    low_rank: dict[str, Tensor] = field(default_factory=dict)
    """h of adapters, by the names under which they are kept: those that forward kept, or as they are computed."""

    def place(self, name: str, like: Tensor, width: int) -> Tensor:
        """Memory for a result of a product: the caller's, or new."""
        if name in self.places:
            return self.places[name]
        return like.new_empty(like.shape[0] * self.products.ranks.n_ranks, width)

    def rows_of(self, name: str) -> Any:
        return self.products.read_weight(name, getattr(self.weights, name), rows=True).rows

    def columns_of(self, name: str) -> Any:
        return self.products.read_weight(name, getattr(self.weights, name), columns=True).columns

    def read(self, name: str, x: Any, *, rows: bool = True, columns: bool = True) -> Operand:
        """An activation, by its name among ``Saved``'s, as products read it."""
        return self.products.read(name, x, self.maxima, rows=rows, columns=columns)

    def adapter(self, name: str) -> Adapter | None:
        """The adapter of the matrix of this name, if it has one; of ``APART`` the part that belongs to it."""
        if name in APART:
            if (whole := self.adapter("qkv")) is None:
                return None
            ends = whole.b.shape[1], self.config.d_query, 1  # of what is q's
            rows_a, rows_b, parts = (slice(end) if name == "q" else slice(end, None) for end in ends)
            return replace(whole, a=whole.a[rows_a], b=whole.b[rows_b], widths=whole.widths[parts])
        a, b = (getattr(self.weights, f"{name}_{each}") for each in "ab")
        if a is None:
            return None
        config = self.config
        widths = {"qkv": (config.d_query, config.d_kv, config.d_kv), "gate_up": (config.d_ff, config.d_ff)}
        return Adapter(a, b, widths.get(name, (config.d_model,)), self.weights.adapter_scale)

    def addition(self, name: str, x_RK: Operand) -> LowRank | None:
        """What the adapter of the matrix of this name, if it has one, adds to its product with the operand."""
        if (adapter := self.adapter(name)) is None:
            return None
        kept = low_rank_name(name)
        if kept not in self.low_rank:
            self.low_rank[kept] = adapter.forward(self.ops, self.products.by_rows(x_RK))
        return adapter.addition(self.low_rank[kept])

    def adapt_(self, name: str, out_RN: Tensor, x_RK: Operand) -> None:
        """Add ``addition``."""
        if (low := self.addition(name, x_RK)) is not None:
            self.ops.lora_expand_(out_RN, low)

    def addition_backward(self, name: str, dy_RN: Operand) -> LowRank | None:
        """What the adapter adds to the gradient of the product's operand; its h is the gradient of h."""
        adapter = self.adapter(name)
        return None if adapter is None else adapter.backward(self.ops, self.products.by_rows(dy_RN))

    def adapt_backward_(self, name: str, dx_RK: Tensor, dy_RN: Operand) -> LowRank | None:
        """Add ``addition_backward``, and return it."""
        if (low := self.addition_backward(name, dy_RN)) is not None:
            self.ops.lora_expand_(dx_RK, low)
        return low

    def norm1(self, x_RD: Tensor, rstd_R: Tensor | None = None) -> tuple[Any, Tensor]:
        """The norm of x, to be read, and its statistic, which may be known."""
        how = self.weights.ln1, self.config.rms_norm_eps, self.maxima.raised("normed1")
        return self.products.norm(self.ops, x_RD, *how, rstd_R)

    def norm2(self, residual_RD: Tensor, rstd_R: Tensor | None = None) -> tuple[Any, Tensor]:
        how = self.weights.ln2, self.config.rms_norm_eps, self.maxima.raised("normed2")
        return self.products.norm(self.ops, residual_RD, *how, rstd_R)

    def project(self, name: str, x_RD: Tensor, normed1_RD: Operand) -> Tensor:
        """q | k | v (R, P), or of ``APART`` the one of this name; rotated, unless q and k have norms."""
        config, weight, bias = self.config, self.rows_of("qkv"), self.weights.qkv_bias
        n_heads, n_kv_heads = config.n_heads, config.kv_heads
        if name in APART:
            rows = slice(config.d_query) if name == "q" else slice(config.d_query, None)
            weight, bias = weight[rows], None if bias is None else bias[rows]
            n_heads, n_kv_heads = (n_heads, 0) if name == "q" else (0, n_kv_heads)
        out = self.place(name, x_RD, (n_heads + 2 * n_kv_heads) * config.d_head)
        self.products.forward_(self.ops, out, normed1_RD, weight, bias)
        self.adapt_(name, out, normed1_RD)
        if not config.qk_norm:
            self.rotate_(out, n_heads, n_kv_heads, inverse=False)
        return out

    def norm_rotate(self, rows: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
        """q | k of rows of q | k | v, normed and rotated."""
        return self.ops.norm_rotate(rows, *self._norms, self.cos, self.sin, n_heads, n_kv_heads)

    def norm_rotate_backward_(self, dqkv: Tensor, projected: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The gradients of both gains; that of q | k in dqkv becomes the gradient of what was projected."""
        config, how = self.config, (*self._norms, self.cos, self.sin)
        if len(projected) == 1:
            return self.ops.norm_rotate_backward_(dqkv, *projected, *how, config.n_heads, config.kv_heads)
        (q, keys_values), (dq, dkeys_values) = projected, dqkv.split((config.d_query, 2 * config.d_kv), dim=1)
        dq_gain, _ = self.ops.norm_rotate_backward_(dq, q, *how, config.n_heads, 0)
        _, dk_gain = self.ops.norm_rotate_backward_(dkeys_values, keys_values, *how, 0, config.kv_heads)
        return dq_gain, dk_gain

    @property
    def _norms(self) -> tuple[Tensor, Tensor, float]:
        assert self.weights.q_norm is not None and self.weights.k_norm is not None
        return self.weights.q_norm, self.weights.k_norm, self.config.rms_norm_eps

    def rotate_(self, rows: Tensor, n_heads: int, n_kv_heads: int, *, inverse: bool, **absmax: Tensor) -> None:
        sequences = rows.view(-1, self.cos.shape[0], rows.shape[-1])
        self.ops.rotate_(sequences, self.cos, self.sin, n_heads, n_kv_heads, inverse=inverse, **absmax)

    def heads(self, rows: Tensor) -> Tensor:
        """Rows of heads (R, n E) as attention takes them: a view (B, n, S, E)."""
        d_head = self.config.d_head
        return rows.view(-1, self.cos.shape[0], rows.shape[-1] // d_head, d_head).transpose(1, 2)

    def qkv_heads(self, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of q | k | v, or of q and k | v: views (B, H, S, E) and (B, K, S, E)."""
        config = self.config
        if len(projected) == 1:
            sizes = config.n_heads, config.kv_heads, config.kv_heads
            q, k, v = self.heads(*projected).split_with_sizes(sizes, dim=1)
        else:
            q, keys_values = map(self.heads, projected)
            k, v = keys_values.chunk(2, dim=1)
        return q, k, v

    def attended_heads(self, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as attention reads them, shaped as ``qkv_heads``."""
        q, k, v = self.qkv_heads(*projected)
        if not self.config.qk_norm:
            return q, k, v
        n_heads, n_kv_heads = self.config.n_heads, self.config.kv_heads
        if len(projected) == 1:
            q, k = self.heads(self.norm_rotate(*projected, n_heads, n_kv_heads)).split_with_sizes(
                (n_heads, n_kv_heads), dim=1
            )
        else:
            q = self.heads(self.norm_rotate(projected[0], n_heads, 0))
            k = self.heads(self.norm_rotate(projected[1], 0, n_kv_heads))
        return q, k, v

    def attend(self, *projected: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's output (R, H E) and lse (B, H, S)."""
        o_BHSE, lse = self.ops.attention_forward(*self.attended_heads(*projected), **self.documents)
        return o_BHSE.transpose(1, 2).reshape(projected[0].shape[0], -1), lse

    def add(self, x_RD: Tensor, attended_RD: Tensor) -> tuple[Tensor, Any, Tensor]:
        """The residual stream after attention, its norm, to be read, and the norm's statistic."""
        attended = self.read("attended", attended_RD, columns=False)
        branch = self.products.sum_forward(self.ops, attended, self.rows_of("output"))
        self.adapt_("output", branch, attended)
        del attended
        how = self.weights.ln2, self.config.rms_norm_eps, self.maxima.raised("normed2")
        return self.products.add_norm(self.ops, x_RD, branch, *how)

    def gate_up(self, x_RD: Tensor, normed2_RD: Operand) -> Tensor:
        if self.weights.gate_up_a is not None and not self.products.quantized:
            return self.feed(x_RD, normed2_RD)[0]  # which rounds the product and what is added to it together
        gate_up = self.place("gate_up", x_RD, self.weights.gate_up.shape[0])
        self.products.forward_(self.ops, gate_up, normed2_RD, self.rows_of("gate_up"))
        self.adapt_("gate_up", gate_up, normed2_RD)
        return gate_up

    def feed(self, x_RD: Tensor, normed2_RD: Operand) -> tuple[Tensor, Tensor]:
        """gate | up and SwiGLU's product of it."""
        gate_up, weight = self.place("gate_up", x_RD, self.weights.gate_up.shape[0]), self.rows_of("gate_up")
        how = self.maxima, self.addition("gate_up", normed2_RD)
        return gate_up, self.products.swiglu_forward_(self.ops, gate_up, normed2_RD, weight, *how)


def _documents(starts: Tensor | None) -> dict[str, Tensor]:
    return {} if starts is None else {"starts": starts}


class _Recalled:
    """A block's activations by name: what was kept, and the rest computed again when it is first asked for."""

    def __init__(self, stages: _Stages, saved: Saved, *, consume: bool) -> None:
        x, products = saved.tensors["x"], stages.products
        self.stages, self.projections = stages, saved.projections
        self.there: dict[str, Any] = saved.tensors | {"x": x.view(-1, x.shape[-1])}
        self.operands = {name: products.recall(name, self.there) for name in OPERANDS if name in self.there}
        for name in self.operands:
            del self.there[name]
        if consume:
            saved.tensors.clear()
        self.stay = frozenset(saved.tensors)

    def __getitem__(self, name: str) -> Any:
        """A tensor, or a norm to be read."""
        if name not in self.there:
            self.there |= self._again(name)
        return self.there[name]

    def projected(self) -> list[Tensor]:
        """q | k | v, or q and k | v."""
        return [self[name] for name in self.projections]

    def operand(self, name: str, *, rows: bool = False) -> Operand:
        """The operand of this name: its columns, and its rows where what follows it is recomputed."""
        found = self.operands.get(name)
        if found is None or (rows and found.rows is None):
            found = self.operands[name] = self.stages.read(name, self[name], rows=rows)
            del self.there[name]
        return found

    def forget(self, *names: str) -> None:
        """Free what backward needs no longer, unless ``saved`` still has it."""
        for name in names:
            self.there.pop(name, None)
            self.operands.pop(name, None)

    def take(self, name: str) -> Tensor:
        """Hand out a tensor for backward to write over, and keep it no longer."""
        tensor = self[name]
        self.forget(name)
        return tensor.clone() if name in self.stay else tensor

    def _again(self, name: str) -> dict[str, Any]:
        match name:
            case "rstd1":
                normed1, rstd1 = self.stages.norm1(self["x"])
                return {"normed1": normed1, "rstd1": rstd1}
            case "normed1":
                rstd1 = self["rstd1"]  # which brings its norm, if it had to be computed again
                if "normed1" in self.there:
                    return {}
                return {"normed1": self.stages.norm1(self["x"], rstd1)[0]}
            case "qkv" | "q" | "keys_values":
                return {name: self.stages.project(name, self["x"], self.operand("normed1", rows=True))}
            case "attended" | "lse":
                attended, lse = self.stages.attend(*self.projected())
                return {"attended": attended, "lse": lse}
            case "residual" | "rstd2":
                residual, normed2, rstd2 = self.stages.add(self["x"], self["attended"])
                self.operands.pop("normed2", None)
                return {"residual": residual, "normed2": normed2, "rstd2": self.there.get("rstd2", rstd2)}
            case "normed2":
                residual = self["residual"]  # which brings its norm, if it had to be computed again
                if "normed2" in self.there:
                    return {}
                return {"normed2": self.stages.norm2(residual, self["rstd2"])[0]}
            case _:
                assert name == "gate_up", name
                return {"gate_up": self.stages.gate_up(self["x"], self.operand("normed2", rows=True))}


def forward(
    x_BSD: Tensor,
    weights: BlockWeights,
    saved: Saved,
    ops: BlockOps,
    config: ModelConfig,
    cos: Tensor,
    sin: Tensor,
    *,
    out: Tensor | None = None,
    products: Products = STORED,
    starts: Tensor | None = None,
) -> Tensor:
    """The block's output (B, S, D) for contiguous x (B, S, D); fills ``saved``, and writes into no argument besides.

    Where ``saved`` holds attention's output already, what comes before it is not computed.

    Args:
        cos: of the angles of every position, (S, E/2), as ``model.layers.RotaryEmbedding`` gives them; sin likewise.
        out: contiguous memory for the output, which none of the arguments has.
        starts: the first position of each token's document, (B, S) int32, if several share a sequence.
    """
    how = config, cos, sin, saved.places, _documents(starts)
    stages = _Stages(weights, ops, products, products.maxima(x_BSD), *how)
    x = x_BSD.view(-1, x_BSD.shape[-1])
    attended = saved.tensors.get("attended")
    if attended is None:
        y, rstd1 = stages.norm1(x)
        normed1 = stages.read("normed1", y, columns="normed1" in saved.names)
        del y  # each is freed once it has been read, unless it is kept
        saved.keep(x=x_BSD, rstd1=rstd1)
        projected = {name: stages.project(name, x, normed1) for name in saved.projections}
        saved.keep(**projected, **products.kept("normed1", normed1))  # which waits for the rows of all ranks
        del normed1
        attended, lse = stages.attend(*projected.values())
        del projected
        saved.keep(attended=attended, lse=lse)
        attended = saved.tensors.get("attended", attended)  # at its place, if it has one
        del lse
    residual, y, rstd2 = stages.add(x, attended)
    del attended
    normed2 = stages.read("normed2", y, columns="normed2" in saved.names)
    del y
    saved.keep(residual=residual, rstd2=rstd2)
    residual = saved.tensors.get("residual", residual)
    gate_up, y = stages.feed(residual, normed2)
    saved.keep(gate_up=gate_up, **products.kept("normed2", normed2))
    del normed2, gate_up
    product = stages.read("product", y, columns="product" in saved.names)
    del y
    saved.keep(**products.kept("product", product), **stages.maxima.kept())
    if out is not None:
        y = out.view_as(residual)
    else:
        y = residual if "residual" not in saved.names else torch.empty_like(residual)
    products.add_forward_(ops, y, residual, product, stages.rows_of("down"))
    stages.adapt_("down", y, product)
    saved.keep(**stages.low_rank)
    return y.view_as(x_BSD)


def recall(
    saved: Saved,
    weights: BlockWeights,
    ops: BlockOps,
    config: ModelConfig,
    cos: Tensor,
    sin: Tensor,
    *,
    starts: Tensor | None = None,
) -> None:
    """Compute again what ``saved`` names but does not hold, as ``forward`` did, from what it holds, and keep it.

    Products are of matrices as they are stored; ``starts`` is that of forward.
    """
    stages = _Stages(weights, ops, STORED, NONE, config, cos, sin, saved.places, _documents(starts))
    again = _Recalled(stages, saved, consume=False)
    for name in (*(row.name for row in KEPT), *APART):
        if name in saved.names and name not in saved.tensors:
            saved.keep(**{name: again.operand(name, rows=True).rows if name in OPERANDS else again[name]})


@dataclass(frozen=True)
class _Writer:
    """Writes gradients of weights, or adds to them."""

    gradients: BlockGradients
    stages: _Stages
    accumulate: bool
    later: Later | None
    """Takes the products, if they are for later."""

    def product(self, name: str, dy_RN: Operand, x_RM: Operand) -> None:
        """Write the gradient of W in y = x W^T."""
        if getattr(self.gradients, name) is None:
            return
        # Without this writer, whose list it may join: a cycle would keep what it reads until Python's collector comes.
        read = dy_RN.whole_columns(), x_RM.whole_columns()
        self._now_or_later(partial(_write_product, self.stages.products, self.stages.ops, name, *read))

    def wants(self, name: str) -> bool:
        """Whether a matrix or its adapter has a gradient to be written, which reads the product's operand."""
        return any(getattr(self.gradients, each) is not None for each in (name, f"{name}_a", f"{name}_b"))

    def adapter(self, name: str, dy_RN: Operand, x_RM: Operand, low: LowRank | None) -> None:
        """Write the gradients of the matrix's adapter, if it has one; ``low`` is its ``addition_backward``."""
        if (adapter := self.stages.adapter(name)) is not None and low is not None:
            products, h = self.stages.products, self.stages.low_rank.get(low_rank_name(name))
            if h is None:  # a streamed step keeps none
                h = adapter.forward(self.stages.ops, products.by_columns(x_RM))
            read = products.by_columns(x_RM), products.by_rows(dy_RN), h, low.h, adapter.widths
            self._now_or_later(partial(_write_adapter, self.stages.ops, name, read))

    def _now_or_later(self, write: Callable[[BlockGradients, bool], None]) -> None:
        if self.later is None:
            write(self.gradients, self.accumulate)
        else:
            self.later.append(write)

    def vector(self, gradient: Tensor | None, value: Tensor) -> None:
        """Write the gradient of a gain or a bias."""
        if gradient is not None and self.accumulate:
            gradient.add_(value)
        elif gradient is not None:
            gradient.copy_(value)


def _write_product(
    products: Products, ops: BlockOps, name: str, dy: Any, x: Any, gradients: BlockGradients, accumulate: bool
) -> None:
    products.backward_weight_(ops, getattr(gradients, name), dy, x, accumulate)


def _write_adapter(
    ops: BlockOps, name: str, read: tuple[Any, ...], gradients: BlockGradients, accumulate: bool
) -> None:
    da, db = (getattr(gradients, f"{name}_{each}") for each in "ab")
    ops.lora_gradients_(da, db, *read, accumulate)


def backward(
    dy_BSD: Tensor,
    weights: BlockWeights,
    saved: Saved,
    grads: BlockGradients,
    ops: BlockOps,
    config: ModelConfig,
    cos: Tensor,
    sin: Tensor,
    *,
    products: Products = STORED,
    accumulate: bool = False,
    consume: bool = False,
    later: Later | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """The gradient of x (B, S, D), for contiguous dy (B, S, D); those of weights are written into ``grads``.

    Args:
        products: those of forward.
        accumulate: add to what ``grads`` holds, as for every micro-batch but the first.
        consume: take what ``saved`` holds, write over it and free it once it has been read; no other backward can come
            then. Otherwise ``saved`` stays as it is.
        later: receives the products that give matrices' gradients, instead of their being computed; those in ``grads``
            may be on ``meta``. To call them in their order, before weights change, gives the same bits. Until then they
            hold what they read, and neither dy nor ``saved`` may be written over.
        starts: that of forward.
    """
    of_dy = products.maxima(dy_BSD, saved.tensors)
    low_rank = {name: saved.tensors[name] for name in map(low_rank_name, ADAPTED) if name in saved.tensors}
    stages = _Stages(weights, ops, products, of_dy, config, cos, sin, {}, _documents(starts), low_rank)
    maxima, write = products.gradient_maxima(dy_BSD), _Writer(grads, stages, accumulate, later)
    recalled, dy = _Recalled(stages, saved, consume=consume), dy_BSD.view(-1, dy_BSD.shape[-1])

    gate_up, with_product = recalled.take("gate_up"), write.wants("down") and "product" not in recalled.operands
    dy_read = products.read_gradient("dy", dy, maxima, columns=grads.down is not None)
    if products.ranks.under_products and write.wants("gate_up"):
        recalled.operand("normed2")  # whose rows travel meanwhile
    dproduct = products.backward(ops, dy_read, stages.columns_of("down"))
    low = stages.addition_backward("down", dy_read)
    asked: dict[str, Any] = {"low": low, "with_product": with_product, "columns": grads.gate_up is not None}
    again, dgate_up = products.swiglu_backward_(ops, dproduct, gate_up, stages.maxima, maxima, **asked)
    del dproduct, gate_up
    if write.wants("down"):
        again = recalled.operand("product") if again is None else again
        write.product("down", dy_read, again)
        write.adapter("down", dy_read, again, low)
    del dy_read, again
    recalled.forget("product")
    residual = recalled["residual"]  # before its norm, which it brings with it if it has to be computed again
    if write.wants("gate_up"):
        write.product("gate_up", dgate_up, recalled.operand("normed2"))
    dnormed2 = products.sum_backward(ops, dgate_up, stages.columns_of("gate_up"))
    low = stages.adapt_backward_("gate_up", dnormed2, dgate_up)
    if write.wants("gate_up"):
        write.adapter("gate_up", dgate_up, recalled.operand("normed2"), low)
    del dgate_up
    recalled.forget("normed2")
    how = weights.ln2, recalled["rstd2"], dy
    dresidual, dgain = ops.rms_norm_backward(dnormed2, residual, *how, **maxima.raised("dresidual"))
    dgains = {"ln2": dgain}
    del dnormed2, residual, how
    recalled.forget("residual")

    dy_read = products.read_gradient("dresidual", dresidual, maxima, columns=grads.output is not None)
    if products.ranks.under_products and write.wants("qkv"):
        recalled.operand("normed1")
    dattended = products.backward(ops, dy_read, stages.columns_of("output"))
    low = stages.adapt_backward_("output", dattended, dy_read)
    if write.wants("output"):
        attended = stages.read("attended", recalled["attended"], rows=False)
        write.product("output", dy_read, attended)
        write.adapter("output", dy_read, attended, low)
        del attended
    del dy_read
    projected = recalled.projected()
    dqkv = dattended.new_empty(dattended.shape[0], config.d_qkv)
    ops.attention_backward(
        stages.heads(dattended),
        *stages.attended_heads(*projected),
        stages.heads(recalled["attended"]),
        recalled["lse"],
        stages.qkv_heads(dqkv),
        **stages.documents,
    )
    del dattended
    recalled.forget("attended", "lse")
    if config.qk_norm:
        dgains["q_norm"], dgains["k_norm"] = stages.norm_rotate_backward_(dqkv, projected)
    del projected
    recalled.forget("qkv", *APART)
    if not config.qk_norm:
        stages.rotate_(dqkv, config.n_heads, config.kv_heads, inverse=True, **maxima.raised("dqkv"))
    if grads.qkv_bias is not None:
        write.vector(grads.qkv_bias, ops.column_sums(dqkv))
    dy_read = products.read_gradient("dqkv", dqkv, maxima, columns=grads.qkv is not None)
    del dqkv
    if write.wants("qkv"):
        write.product("qkv", dy_read, recalled.operand("normed1"))
    dnormed1 = products.sum_backward(ops, dy_read, stages.columns_of("qkv"))
    low = stages.adapt_backward_("qkv", dnormed1, dy_read)
    if write.wants("qkv"):
        write.adapter("qkv", dy_read, recalled.operand("normed1"), low)
    del dy_read, low
    recalled.forget("normed1")
    how = weights.ln1, recalled["rstd1"], dresidual
    dx, dgains["ln1"] = ops.rms_norm_backward(dnormed1, recalled["x"], *how, **maxima.raised("dx"))
    for name, value in zip(dgains, products.ranks.total(list(dgains.values())), strict=True):
        write.vector(getattr(grads, name), value)
    dx_BSD = dx.view_as(dy_BSD)
    maxima.hand_on(dx_BSD)
    return dx_BSD
