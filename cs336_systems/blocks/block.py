"""Forward and backward of the Llama and Qwen block as plain functions on tensors, without autograd.

    x -> norm -> q | k | v (one product) -> rotate -> attention -> output product -> + x = residual
    residual -> norm -> gate | up (one product) -> SwiGLU -> down product -> + residual

q and k | v may be two products instead (``saved.APART``). If heads of q and k have norms (Qwen3), q | k | v is kept
without them: attention reads a normed and rotated copy of q and k, which backward computes again.

Callers choose what is kept for backward (``saved.py``), where gradients go (``grads``: in place, so micro-batches
accumulate without a second buffer), the operations (``ops.py``) and the matrix products (``products.py``). Activations
that were not kept are recomputed by the functions of forward (``stages.py``), so gradients have the same bits in any
case.

    weights, saved = BlockWeights.of(dict(block.named_parameters())), Saved(kept_names("products"))
    y = forward(x, weights, saved, REFERENCE, config, cos, sin)
    dx = backward(dy, weights, saved, grads, REFERENCE, config, cos, sin)

Given a list (``later``), backward appends to it the four products for matrices' gradients, which can wait until a
pipeline stage is idle (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2). ``recall`` recomputes before
backward, into the caller's memory.

All tensors share one dtype, except statistics, rotary tables and the operands of quantized products. Shape legend:
``ops.py``.
"""

from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import STORED, Operand, Products
from cs336_systems.blocks.saved import APART, Saved, low_rank_name
from cs336_systems.blocks.stages import Stages
from cs336_systems.blocks.weight_gradients import GradientWriter, Later
from cs336_systems.blocks.weights import BlockGradients, BlockWeights
from cs336_systems.config import ADAPTED, ModelConfig
from cs336_systems.costs.kept import KEPT, OPERANDS


class _Recalled:
    """A block's activations by name; those that were not kept are recomputed when they are first read."""

    def __init__(self, stages: Stages, saved: Saved, *, consume: bool) -> None:
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
        """A tensor, or a norm as an operand."""
        if name not in self.there:
            self.there |= self._again(name)
        return self.there[name]

    def projected(self) -> dict[str, Tensor]:
        """q | k | v, or q and k | v, by name."""
        return {name: self[name] for name in self.projections}

    def operand(self, name: str, *, rows: bool = False) -> Operand:
        """The operand of this name: its columns, and with ``rows`` its rows, from which later stages are recomputed."""
        found = self.operands.get(name)
        if found is None or (rows and found.rows is None):
            found = self.operands[name] = self.stages.read(name, self[name], rows=rows)
            del self.there[name]
        return found

    def forget(self, *names: str) -> None:
        """Free tensors that backward no longer needs, unless ``saved`` still refers to them."""
        for name in names:
            self.there.pop(name, None)
            self.operands.pop(name, None)

    def take(self, name: str) -> Tensor:
        """Remove and return a tensor that backward may write over."""
        tensor = self[name]
        self.forget(name)
        return tensor.clone() if name in self.stay else tensor

    def _again(self, name: str) -> dict[str, Any]:
        match name:
            case "rstd1":
                normed1, rstd1 = self.stages.norm(1, self["x"])
                return {"normed1": normed1, "rstd1": rstd1}
            case "normed1" | "normed2":
                number, x = (1, self["x"]) if name == "normed1" else (2, self["residual"])
                rstd = self[f"rstd{number}"]  # recomputing it, or the residual, also gives the norm
                return {} if name in self.there else {name: self.stages.norm(number, x, rstd)[0]}
            case "qkv" | "q" | "keys_values":
                return {name: self.stages.project(name, self["x"], self.operand("normed1", rows=True))}
            case "attended" | "lse":
                attended, lse = self.stages.attend(self.projected())
                return {"attended": attended, "lse": lse}
            case "residual" | "rstd2":
                residual, normed2, rstd2 = self.stages.add(self["x"], self["attended"])
                self.operands.pop("normed2", None)
                return {"residual": residual, "normed2": normed2, "rstd2": self.there.get("rstd2", rstd2)}
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
    """The block's output (B, S, D) for contiguous x (B, S, D). Only ``saved`` and ``out`` are written.

    If ``saved`` already holds attention's output, forward starts there.

    Args:
        cos, sin: (S, E/2), as ``model.layers.RotaryEmbedding`` returns them.
        out: contiguous memory for the output, which no other argument uses.
        starts: the first position of each token's document, (B, S) int32, if several share a sequence.
    """
    how = config, cos, sin, saved.places, starts
    stages = Stages(weights, ops, products, products.maxima(x_BSD), *how)
    x = x_BSD.view(-1, x_BSD.shape[-1])
    attended = saved.tensors.get("attended")
    if attended is None:
        y, rstd1 = stages.norm(1, x)
        normed1 = stages.read("normed1", y, columns="normed1" in saved.names)
        del y  # freed, as below, unless it is kept
        saved.keep(x=x_BSD, rstd1=rstd1)
        projected = {name: stages.project(name, x, normed1) for name in saved.projections}
        saved.keep(**projected, **products.kept("normed1", normed1))  # waits for the rows of all ranks
        del normed1
        attended, lse = stages.attend(projected)
        del projected
        saved.keep(attended=attended, lse=lse)
        attended = saved.tensors.get("attended", attended)  # in the caller's memory, if given
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
    elif "residual" in saved.names or products.adds_apart:
        y = torch.empty_like(residual)
    else:
        y = residual
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
    products: Products = STORED,
    starts: Tensor | None = None,
) -> None:
    """Recompute the tensors that ``saved`` names but does not hold, from those that it holds, and keep them.

    ``products`` and ``starts`` are forward's.
    """
    maxima = products.maxima(saved.tensors["x"], saved.tensors)
    stages = Stages(weights, ops, products, maxima, config, cos, sin, saved.places, starts)
    again = _Recalled(stages, saved, consume=False)
    for name in (*(row.name for row in KEPT), *APART):
        if name in saved.names and name not in saved.tensors:
            saved.keep(**{name: again.operand(name, rows=True).rows if name in OPERANDS else again[name]})


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
    """The gradient of x (B, S, D) for contiguous dy (B, S, D); weights' gradients are written into ``grads``.

    Args:
        products: those of forward.
        accumulate: add to what ``grads`` holds, as every micro-batch but the first does.
        consume: take the tensors out of ``saved``, write over them and free each after its last use, so no other
            backward can follow. Otherwise ``saved`` stays as it is.
        later: receives functions that compute the gradients of matrices, whose tensors in ``grads`` may be on ``meta``.
            Calling them in order, before weights change, gives the same bits. They hold the tensors they will read;
            until they are called, dy and ``saved`` must not be written.
        starts: that of forward.
    """
    activation_maxima = products.maxima(dy_BSD, saved.tensors)
    low_rank = {name: saved.tensors[name] for name in map(low_rank_name, ADAPTED) if name in saved.tensors}
    stages = Stages(weights, ops, products, activation_maxima, config, cos, sin, {}, starts, low_rank)
    maxima, write = products.gradient_maxima(dy_BSD), GradientWriter(grads, stages, accumulate, later)
    recalled, dy = _Recalled(stages, saved, consume=consume), dy_BSD.view(-1, dy_BSD.shape[-1])

    gate_up, with_product = recalled.take("gate_up"), write.wants("down") and "product" not in recalled.operands
    dy_read = products.read_gradient("dy", dy, maxima, columns=grads.down is not None)
    if products.ranks.under_products and write.wants("gate_up"):
        recalled.operand("normed2")  # its rows are sent during the next product
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
    residual = recalled["residual"]  # recomputing it also gives its norm, which is read next
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
    raised = {} if config.qk_norm else maxima.raised("dqkv")
    rotation = {"cos": cos, "sin": sin, **raised} if ops.rotates_back and not config.qk_norm else {}
    ops.attention_backward(
        stages.heads(dattended),
        *stages.attended_heads(projected),
        stages.heads(recalled["attended"]),
        recalled["lse"],
        stages.qkv_heads(dqkv),
        **stages.documents,
        **rotation,
    )
    del dattended
    recalled.forget("attended", "lse")
    if config.qk_norm:
        dgains["q_norm"], dgains["k_norm"] = stages.norm_rotate_backward_(dqkv, projected)
    del projected
    recalled.forget("qkv", *APART)
    if not (config.qk_norm or rotation):
        stages.rotate_(dqkv, config.n_heads, config.kv_heads, inverse=True, **raised)
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
