"""The Llama and Qwen block, forward and backward as plain functions on tensors: what autograd would do, written out.

    x -> norm -> q | k | v (one product) -> rotate -> attention -> output product -> + x = residual
    residual -> norm -> gate | up (one product) -> SwiGLU -> down product -> + residual

Written out, backward can be told what it may keep (``saved.py``), where gradients go (``grads``, in place, so that
micro-batches accumulate without a second buffer), and which operations it calls (``ops.py``). What was not kept is
computed again by the functions that computed it first, so gradients are the same bits whatever is kept.

    weights, saved = BlockWeights.of(dict(block.named_parameters())), Saved(kept_names("products"))
    y = forward(x, weights, saved, REFERENCE, config, cos, sin)
    dx = backward(dy, weights, saved, grads, REFERENCE, config, cos, sin)

``recall`` computes what was not kept before backward, into memory of the caller's, where backward is to find it there.

All tensors share one dtype, but for statistics and the rotary tables. Shape legend: ``ops.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.saved import Saved
from cs336_systems.blocks.weights import BlockGradients, BlockWeights
from cs336_systems.config import ModelConfig
from cs336_systems.costs.kept import KEPT


@dataclass(frozen=True)
class _Stages:
    """The forward of one block in steps, from activations to activations; backward runs some of them again."""

    weights: BlockWeights
    ops: BlockOps
    config: ModelConfig
    cos: Tensor
    sin: Tensor
    places: Mapping[str, Tensor]
    """Where results of products go, as of ``Saved``."""

    def place(self, name: str, like: Tensor, width: int) -> Tensor:
        """Memory for a result of a product: the caller's, or new."""
        return self.places[name] if name in self.places else like.new_empty(like.shape[0], width)

    def norm1(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.rms_norm_forward(x_RD, self.weights.ln1, self.config.rms_norm_eps)

    def norm2(self, residual_RD: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.rms_norm_forward(residual_RD, self.weights.ln2, self.config.rms_norm_eps)

    def project(self, normed1_RD: Tensor) -> Tensor:
        """Rotated q | k | v (R, P)."""
        weight, bias = self.weights.qkv, self.weights.qkv_bias
        qkv = self.place("qkv", normed1_RD, weight.shape[0])
        if bias is None:
            self.ops.product_(qkv, normed1_RD, weight)
        else:
            torch.addmm(bias, normed1_RD, weight.T, out=qkv)
        self.rotate_(qkv, inverse=False)
        return qkv

    def rotate_(self, qkv_RP: Tensor, *, inverse: bool) -> None:
        qkv_BSP = qkv_RP.view(-1, self.cos.shape[0], qkv_RP.shape[-1])
        self.ops.rotate_(qkv_BSP, self.cos, self.sin, self.config.n_heads, self.config.kv_heads, inverse=inverse)

    def heads(self, rows: Tensor) -> Tensor:
        """Rows of heads (R, n E) as attention takes them: a view (B, n, S, E)."""
        d_head = self.config.d_head
        return rows.view(-1, self.cos.shape[0], rows.shape[-1] // d_head, d_head).transpose(1, 2)

    def qkv_heads(self, qkv_RP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of q | k | v: views (B, H, S, E) and (B, K, S, E)."""
        config = self.config
        sizes = config.n_heads, config.kv_heads, config.kv_heads
        q, k, v = self.heads(qkv_RP).split_with_sizes(sizes, dim=1)
        return q, k, v

    def attend(self, qkv_RP: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's output (R, D) and lse (B, H, S)."""
        o_BHSE, lse = self.ops.attention_forward(*self.qkv_heads(qkv_RP))
        return o_BHSE.transpose(1, 2).reshape(qkv_RP.shape[0], -1), lse

    def add(self, x_RD: Tensor, attended_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The residual stream after attention, its norm and the norm's statistic."""
        branch = torch.empty_like(x_RD)
        self.ops.product_(branch, attended_RD, self.weights.output)
        return self.ops.add_rms_norm_forward(x_RD, branch, self.weights.ln2, self.config.rms_norm_eps)

    def gate_up(self, normed2_RD: Tensor) -> Tensor:
        gate_up = self.place("gate_up", normed2_RD, self.weights.gate_up.shape[0])
        self.ops.product_(gate_up, normed2_RD, self.weights.gate_up)
        return gate_up

    def feed(self, normed2_RD: Tensor) -> tuple[Tensor, Tensor]:
        """gate | up and SwiGLU's product of it."""
        gate_up = self.place("gate_up", normed2_RD, self.weights.gate_up.shape[0])
        return gate_up, self.ops.swiglu_product_(gate_up, normed2_RD, self.weights.gate_up)


class _Recalled:
    """A block's activations by name: what was kept, and the rest computed again when it is first asked for."""

    def __init__(self, stages: _Stages, saved: Saved, *, consume: bool) -> None:
        x = saved.tensors["x"]
        self.stages, self.there = stages, saved.tensors | {"x": x.view(-1, x.shape[-1])}
        if consume:
            saved.tensors.clear()
        self.stay = frozenset(saved.tensors)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.there:
            self.there |= self._again(name)
        return self.there[name]

    def forget(self, *names: str) -> None:
        """Free what backward needs no longer, unless ``saved`` still has it."""
        for name in names:
            self.there.pop(name, None)

    def take(self, name: str) -> Tensor:
        """What backward may write over, and has no longer here."""
        tensor = self[name]
        self.forget(name)
        return tensor.clone() if name in self.stay else tensor

    def _again(self, name: str) -> dict[str, Tensor]:
        match name:
            case "normed1":
                return {"normed1": self.stages.norm1(self["x"])[0]}
            case "qkv":
                return {"qkv": self.stages.project(self["normed1"])}
            case "attended" | "lse":
                attended, lse = self.stages.attend(self["qkv"])
                return {"attended": attended, "lse": lse}
            case "residual":
                residual, normed2, _ = self.stages.add(self["x"], self["attended"])
                return {"residual": residual, "normed2": normed2}
            case "normed2":
                residual = self["residual"]  # which brings its norm, if it had to be computed again
                return {} if "normed2" in self.there else {"normed2": self.stages.norm2(residual)[0]}
            case _:
                assert name == "gate_up", name
                return {"gate_up": self.stages.gate_up(self["normed2"])}


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
) -> Tensor:
    """The block's output (B, S, D) for contiguous x (B, S, D); fills ``saved``, and writes into no argument besides.

    Args:
        cos: of the angles of every position, (S, E/2), as ``model.layers.RotaryEmbedding`` gives them; sin likewise.
        out: contiguous memory for the output, which none of the arguments has.
    """
    stages = _Stages(weights, ops, config, cos, sin, saved.places)
    x = x_BSD.view(-1, x_BSD.shape[-1])
    normed1, rstd1 = stages.norm1(x)
    saved.keep(x=x_BSD, normed1=normed1, rstd1=rstd1)
    qkv = stages.project(normed1)
    del normed1  # each is freed once it has been read, unless it is kept
    saved.keep(qkv=qkv)
    attended, lse = stages.attend(qkv)
    del qkv
    saved.keep(attended=attended, lse=lse)
    residual, normed2, rstd2 = stages.add(x, attended)
    del attended, lse
    saved.keep(residual=residual, normed2=normed2, rstd2=rstd2)
    gate_up, product = stages.feed(normed2)
    saved.keep(gate_up=gate_up, product=product)
    del normed2, gate_up
    if out is not None:
        y = out.view_as(residual)
    else:
        y = residual if "residual" not in saved.names else torch.empty_like(residual)
    ops.add_product_(y, residual, product, weights.down)
    return y.view_as(x_BSD)


def recall(saved: Saved, weights: BlockWeights, ops: BlockOps, config: ModelConfig, cos: Tensor, sin: Tensor) -> None:
    """Compute again what ``saved`` names but does not hold, as ``forward`` did, from what it holds, and keep it."""
    again = _Recalled(_Stages(weights, ops, config, cos, sin, saved.places), saved, consume=False)
    for row in KEPT:
        if row.name in saved.names and row.name not in saved.tensors:
            saved.keep(**{row.name: again[row.name]})


@dataclass(frozen=True)
class _Writer:
    """Writes gradients of weights, or adds to them."""

    ops: BlockOps
    accumulate: bool

    def product(self, gradient: Tensor | None, dy_RN: Tensor, x_RM: Tensor) -> None:
        """Of y = x W^T: dy^T x."""
        if gradient is not None:
            self.ops.weight_backward_(gradient, dy_RN, x_RM, self.accumulate)

    def vector(self, gradient: Tensor | None, value: Tensor) -> None:
        """Of a gain or a bias."""
        if gradient is not None and self.accumulate:
            gradient.add_(value)
        elif gradient is not None:
            gradient.copy_(value)


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
    accumulate: bool = False,
    consume: bool = False,
) -> Tensor:
    """The gradient of x (B, S, D), for contiguous dy (B, S, D); those of weights are written into ``grads``.

    Args:
        accumulate: add to what ``grads`` holds, as for every micro-batch but the first.
        consume: take what ``saved`` holds, write over it and free it once it has been read; no other backward can come
            then. Otherwise ``saved`` stays as it is.
    """
    stages, write = _Stages(weights, ops, config, cos, sin, {}), _Writer(ops, accumulate)
    recalled, dy = _Recalled(stages, saved, consume=consume), dy_BSD.view(-1, dy_BSD.shape[-1])

    dgate_up, with_product = recalled.take("gate_up"), "product" not in recalled.there
    dproduct = ops.product_backward(dy, weights.down)
    ops.swiglu_backward_(dproduct, dgate_up, with_product=with_product)
    write.product(grads.down, dy, dproduct if with_product else recalled["product"])
    del dproduct
    recalled.forget("product")
    residual = recalled["residual"]  # before its norm, which it brings with it if it has to be computed again
    write.product(grads.gate_up, dgate_up, recalled["normed2"])
    dnormed2 = ops.product_backward(dgate_up, weights.gate_up)
    del dgate_up
    recalled.forget("normed2")
    dresidual, dgain = ops.rms_norm_backward(dnormed2, residual, weights.ln2, recalled["rstd2"], dy)
    write.vector(grads.ln2, dgain)
    del dnormed2, residual
    recalled.forget("residual")

    write.product(grads.output, dresidual, recalled["attended"])
    dattended, dqkv = ops.product_backward(dresidual, weights.output), torch.empty_like(recalled["qkv"])
    ops.attention_backward(
        stages.heads(dattended),
        *stages.qkv_heads(recalled["qkv"]),
        stages.heads(recalled["attended"]),
        recalled["lse"],
        stages.qkv_heads(dqkv),
    )
    del dattended
    recalled.forget("qkv", "attended", "lse")
    stages.rotate_(dqkv, inverse=True)
    write.product(grads.qkv, dqkv, recalled["normed1"])
    if grads.qkv_bias is not None:
        write.vector(grads.qkv_bias, dqkv.sum(0))
    dnormed1 = ops.product_backward(dqkv, weights.qkv)
    del dqkv
    recalled.forget("normed1")
    dx, dgain = ops.rms_norm_backward(dnormed1, recalled["x"], weights.ln1, recalled["rstd1"], dresidual)
    write.vector(grads.ln1, dgain)
    return dx.view_as(dy_BSD)
