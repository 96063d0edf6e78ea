"""The four matrix products of a block in fp8: operands are quantized, results have the block's dtype.

    products = block_products("reference", Recipe("e4m3"))
    y = forward(x, weights, saved, REFERENCE, config, cos, sin, products=products)

Scales are current: of the tensor at hand. Fp8 products on Hopper sum over the last dimension of both operands, so a
matrix that is read both ways is stored both ways, in one pass; with one scale for all of it the second is the transpose
of the first. A bias is added to the product before it is rounded; to one with scales by block, afterwards.

On CUDA devices a product is ``torch._scaled_mm``; elsewhere it is emulated: the same quantized values, multiplied and
added up in fp32, so that a recipe can be judged without a GPU. What the emulation leaves out is how Hopper adds up
(measured by DeepSeek-V3, arXiv 2412.19437, and SageAttention2, arXiv 2411.10958): 32 products and the sum so far are
shifted to the largest exponent among them, and keep 13 bits behind its point; the rest is cut off, of the new sum too.
With fast accumulation a whole product is summed so, without it sums of 128 are, which then add up in fp32.

Tensor ranks gather bytes. Each quantizes its own rows by the largest magnitude of all ranks' (``maxima.py``), so that
what arrives is to the bit the whole, quantized on one rank; its transpose is made of the bytes that arrived. Weights,
and what a rank computes of its own heads or its own part of the feed-forward width, have a scale for each rank.

Gradients of weights that add to earlier ones: the sum is rounded once, as of a product in bf16; on CUDA devices with
scales by row or block the product is rounded before (``_scaled_mm`` adds to nothing).

Weights are quantized each time they are read, or, with ``remember``, once until they change. A change is seen by their
version, which operations in place raise, and ``FusedAdamW``. Collectives into flat memory and replayed graphs write
without raising it, so who lets them must (``torch.autograd.graph.increment_version``), as ``training.TrainStep`` does.
Weights that are frozen, beside adapters, are in memory in fp8 alone once they have been read: two bytes a number.
FSDP, which fills and frees the same parameters again and again, must not remember; it may quantize weights itself and
hand them over (``receive``), as ``distributed/fsdp_quantized.py`` does to move half the bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks.maxima import FoundMaxima, FusedQuantizers, Quantizers
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import NONE, Maxima, Operand, Products, stored
from cs336_systems.config import Recipe
from cs336_systems.costs.kept import SCALED_BLOCK
from cs336_systems.kernels.lora_reference import LowRank, Scaled
from cs336_systems.kernels.matmul import multiply_scaled_
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

ACTIVATIONS = ("normed1", "attended", "normed2", "product")
GRADIENTS = ("dy", "dgate_up", "dresidual", "dqkv")
"""The names of the tensors that products read, beside weights: activations and gradients."""
WEIGHTS = ("qkv", "output", "gate_up", "down")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Quantized:
    """A matrix (M, K) in fp8, to be multiplied by its scales."""

    values: Tensor
    scale: Tensor
    """fp32: (), (M, 1), or (M, K / 128), rounded up."""
    dtype: torch.dtype
    """The dtype of the matrix before it was quantized."""

    def __getitem__(self, rows: slice) -> "Quantized":
        return replace(self, values=self.values[rows], scale=self.scale[rows] if self.scale.dim() else self.scale)

    def empty(self, width: int) -> Tensor:
        """Memory for a matrix (M, width) of the dtype from before."""
        return self.values.new_empty(len(self.values), width, dtype=self.dtype)


@dataclass(frozen=True)
class UnstoredNorm:
    """RMSNorm of x (R, D) before it is computed: it is quantized as x is loaded."""

    x_RD: Tensor
    gain_D: Tensor
    rstd_R: Tensor


class QuantizedProducts(Products):
    """Products in fp8 by a recipe.

    Args:
        remember: keep weights quantized until they change.
        ranks: those that share the block's matrices, with one scale for each tensor that they gather.
    """

    quantized = True

    def __init__(
        self, recipe: Recipe, quantizers: Quantizers, remember: bool = False, ranks: TensorRanks = ALONE
    ) -> None:
        assert ranks.n_ranks == 1 or recipe.scaling == "tensor", recipe
        super().__init__(ranks)
        self.recipe, self.quantizers, self.remember = recipe, quantizers, remember
        self._weights: dict[str, Operand] = {}
        self._versions: _Versions = []
        self.frozen = False
        """Whether weights never change: those that are remembered then give back the memory in which they are stored,
        as nothing else reads it."""
        self.arrived: Arrived | None = None
        """A function that gives weights as who moves them has quantized them; None where they are quantized here."""

    def for_another_block(self) -> "QuantizedProducts":
        """Make equal products, with weights of their own to remember."""
        return QuantizedProducts(self.recipe, self.quantizers, self.remember, self.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without what is remembered."""
        return QuantizedProducts, (self.recipe, self.quantizers, self.remember, self.ranks)

    def maxima(self, x: Tensor, kept: Mapping[str, Tensor] | None = None) -> Maxima:
        return self._maxima(x, ACTIVATIONS, kept or {})

    def gradient_maxima(self, dy: Tensor) -> Maxima:
        maxima = self._maxima(dy, (*GRADIENTS, "dx"), {})
        if isinstance(maxima, FoundMaxima):
            maxima.take_over(dy)
        return maxima

    def _maxima(self, x: Tensor, names: Sequence[str], kept: Mapping[str, Tensor]) -> Maxima:
        if self.recipe.scaling != "tensor":
            return NONE
        known = kept.get("absmax")
        values = torch.zeros(len(names), device=x.device) if known is None else known
        how: dict[str, Any] = {"known": known is not None, "slopes": kept.get("slopes"), "ranks": self.ranks}
        return FoundMaxima(values, names, self.quantizers, **how)

    @property
    def _fused(self) -> FusedQuantizers | None:
        return self.quantizers.fused if self.recipe.scaling == "tensor" else None

    def norm(
        self,
        ops: BlockOps,
        x_RD: Tensor,
        gain_D: Tensor,
        eps: float,
        raised: Mapping[str, Tensor],
        rstd_R: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        if self._fused is None:
            return super().norm(ops, x_RD, gain_D, eps, raised, rstd_R)
        rstd = self._fused.rms_norm_absmax(x_RD, gain_D, eps, **raised) if rstd_R is None else rstd_R
        return UnstoredNorm(x_RD, gain_D, rstd), rstd

    def add_norm(
        self, ops: BlockOps, x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float, raised: Mapping[str, Tensor]
    ) -> tuple[Tensor, Any, Tensor]:
        if self._fused is None:
            return super().add_norm(ops, x_RD, branch_RD, gain_D, eps, raised)
        residual, rstd = self._fused.add_rms_norm_absmax(x_RD, branch_RD, gain_D, eps, **raised)
        return residual, UnstoredNorm(residual, gain_D, rstd), rstd

    def read(self, name: str, x_RK: Any, maxima: Maxima, *, rows: bool = True, columns: bool = True) -> Operand:
        absmax = maxima.of(name, x_RK)
        if self.gathers(name):
            return self._gather(self._read_own(x_RK, absmax, True, False), columns)
        return self._read_own(x_RK, absmax, rows, columns)

    def _read_own(self, x_RK: Any, absmax: Tensor | None, rows: bool, columns: bool) -> Operand:
        dtype = FORMATS[self.recipe.matmul]
        if isinstance(x_RK, UnstoredNorm):
            assert self._fused is not None and absmax is not None
            x, how = x_RK.x_RD, {"rows": rows, "transposed": columns}
            return _operand(self._fused.rms_norm_quantize(x, x_RK.gain_D, x_RK.rstd_R, absmax, dtype, **how), x.dtype)
        return self._quantize(x_RK, dtype, rows, columns, absmax)

    def read_gradient(self, name: str, dy_RN: Tensor, maxima: Maxima, *, columns: bool = True) -> Operand:
        absmax, dtype = maxima.of(name, dy_RN), FORMATS[self.recipe.gradient]
        if self.gathers(name):
            return self._gather(self._quantize(dy_RN, dtype, True, False, absmax), columns)
        return self._quantize(dy_RN, dtype, True, columns, absmax)

    def _gather(self, operand: Operand, columns: bool) -> Operand:
        """All ranks' rows of an operand with this rank's, which has the scale of all."""
        own: Quantized = operand.rows
        in_bytes = self.ranks.arriving(own.values.view(torch.uint8), whole=columns)  # gloo sends no fp8
        arriving = in_bytes.read_as(lambda rows: replace(own, values=rows.view(own.values.dtype)))
        whole: Quantized = arriving.whole

        def transpose() -> Quantized:
            return replace(whole, values=self.quantizers.transpose_bytes(whole.values))

        return Operand(whole, None, arriving, transpose if columns else None)

    def read_weight(self, name: str, weight_NK: Tensor, *, rows: bool = False, columns: bool = False) -> Operand:
        if self.arrived is not None:
            return Operand(
                Quantized(*self.arrived(name, False), weight_NK.dtype) if rows else None,
                Quantized(*self.arrived(name, True), weight_NK.dtype) if columns else None,
            )
        dtype = FORMATS[self.recipe.matmul]
        if not self.remember:
            return self._quantize(weight_NK, dtype, rows, columns, square=True)
        if name not in self._weights:
            assert weight_NK.is_meta or weight_NK.untyped_storage().nbytes(), name
            self._weights[name] = self._quantize(weight_NK, dtype, True, True, square=True)
            if self.frozen:
                weight_NK.untyped_storage().resize_(0)
        return self._weights[name]

    def at(self, parameters: Sequence[Tensor]) -> None:
        if not self.remember:
            return
        versions = _versions(parameters)
        if versions != self._versions:
            self._versions = versions
            self._weights.clear()

    def receive(self, arrived: "Arrived") -> None:
        """Read weights there from now on; the parameters may have no memory."""
        self.arrived = arrived

    def forward_(self, ops: BlockOps, out: Tensor, x: Operand, weight: Quantized, bias: Tensor | None = None) -> None:
        for part, rows in x.parts():
            self._multiply(rows, weight, bias, fast=self.recipe.fast_accumulation, out=out[part])

    def sum_forward(self, ops: BlockOps, x: Operand, weight: Quantized) -> Tensor:
        return self._sum(x, weight, fast=self.recipe.fast_accumulation)

    def _sum(self, x: Operand, weight: Quantized, *, fast: bool = False) -> Tensor:
        """Own rows of the ranks' sum of x W^T."""

        def multiply(out: Tensor, rows: slice) -> None:
            self._multiply(x.rows[rows], weight, fast=fast, out=out)

        return self.ranks.sums(multiply, x.rows.empty(0), len(weight.values))

    def add_forward_(self, ops: BlockOps, out: Tensor, base: Tensor, x: Operand, weight: Quantized) -> None:
        torch.add(base, self.sum_forward(ops, x, weight), out=out)

    def swiglu_forward_(
        self, ops: BlockOps, gate_up: Tensor, x: Operand, weight: Quantized, maxima: Maxima, low: LowRank | None = None
    ) -> Tensor:
        self.forward_(ops, gate_up, x, weight)
        if low is not None:
            ops.lora_expand_(gate_up, low)
        return self.swiglu(ops, gate_up, maxima)

    def swiglu(self, ops: BlockOps, gate_up: Tensor, maxima: Maxima) -> Tensor:
        slopes = maxima.steepest(gate_up) if isinstance(maxima, FoundMaxima) else {}
        product: Tensor = self.quantizers.swiglu(gate_up, **maxima.raised("product"), **slopes)
        return product

    def swiglu_backward_(
        self,
        ops: BlockOps,
        dproduct: Tensor,
        gate_up: Tensor,
        maxima: Maxima,
        gradient_maxima: Maxima,
        *,
        low: LowRank | None,
        with_product: bool,
        columns: bool,
    ) -> tuple[Operand | None, Operand]:
        if self._fused is None or not isinstance(maxima, FoundMaxima):
            how: dict[str, Any] = {"low": low, "with_product": with_product, "columns": columns}
            return super().swiglu_backward_(ops, dproduct, gate_up, maxima, gradient_maxima, **how)
        if low is not None:
            ops.lora_expand_(dproduct, low)
        how = {"transposed": columns, "z_dtype": FORMATS[self.recipe.matmul]}
        how |= {"z_absmax": maxima.found("product")} if with_product else {}
        absmax = gradient_maxima.raised("dgate_up")["absmax"]
        quantize, dtype = self._fused.swiglu_backward_quantize, FORMATS[self.recipe.gradient]
        gradient, product = quantize(dproduct, gate_up, maxima.slopes, absmax, dtype, **how)
        dtype = gate_up.dtype
        return None if product is None else _operand(product, dtype), _operand(gradient, dtype)

    def backward(self, ops: BlockOps, dy: Operand, weight: Quantized) -> Tensor:
        dx: Tensor = dy.rows.empty(len(weight.values))
        for part, rows in dy.parts():
            self._multiply(rows, weight, out=dx[part])
        return dx

    def sum_backward(self, ops: BlockOps, dy: Operand, weight: Quantized) -> Tensor:
        return self._sum(dy, weight)

    def backward_weight_(self, ops: BlockOps, gradient: Tensor, dy: Quantized, x: Quantized, accumulate: bool) -> None:
        self._multiply(dy, x, out=gradient, adds=accumulate)

    def by_rows(self, x: Operand) -> Scaled:
        x.wait()
        return self._scaled(x.rows)

    def by_columns(self, x: Operand) -> Scaled:
        values, scale = self._scaled(x.whole_columns())
        return Scaled(values.T, scale)

    def _scaled(self, x: Quantized) -> Scaled:
        """One scale is left to who reads the matrix; several are multiplied by here."""
        if self.recipe.scaling == "tensor":
            return Scaled(x.values, x.scale)
        scale = spread(x.scale, x.values.shape[1]) if self.recipe.scaling == "block" else x.scale
        return Scaled(x.values.to(x.dtype).mul_(scale))

    def kept(self, name: str, operand: Operand) -> dict[str, Tensor]:
        columns = operand.whole_columns()
        return {} if columns is None else {name: columns.values, f"{name}_scale": columns.scale}

    def recall(self, name: str, tensors: Mapping[str, Tensor]) -> Operand:
        return Operand(columns=Quantized(tensors[name], tensors[f"{name}_scale"], tensors["x"].dtype))

    def _quantize(
        self,
        x_RK: Tensor,
        dtype: torch.dtype,
        rows: bool,
        columns: bool,
        absmax: Tensor | None = None,
        *,
        square: bool = False,
    ) -> Operand:
        """Quantize x; ``square`` says that blocks, where the recipe has them, are 128 x 128."""
        quantizers, asked = self.quantizers, dict[str, Any](rows=rows, transposed=columns)
        match self.recipe.scaling:
            case "tensor":
                absmax = quantizers.absmax(x_RK) if absmax is None else absmax
                found = quantizers.quantize(x_RK, absmax, dtype, **asked)
            case "row":
                by_row, by_column = quantizers.row_and_column_absmax(x_RK)
                if columns:
                    asked["absmax_t"] = by_column
                found = quantizers.quantize(x_RK, by_row, dtype, **asked)
            case _:
                assert self.recipe.scaling == "block", self.recipe
                found = quantizers.quantize_blocks(x_RK, dtype, square=square, **asked)
                if square:
                    found = found._replace(
                        inverse_scale=_of_each_row(found.inverse_scale, found.q),
                        inverse_scale_t=_of_each_row(found.inverse_scale_t, found.q_t),
                    )
        return _operand(found, x_RK.dtype)

    def _multiply(
        self,
        a: Quantized,
        b: Quantized,
        bias: Tensor | None = None,
        *,
        out: Tensor,
        fast: bool = False,
        adds: bool = False,
    ) -> None:
        """out = a b^T + bias, of (M, K), (N, K) and (N,); or, with ``adds``, that and what out was."""
        multiply = _emulated if a.values.is_cpu else _scaled_mm
        multiply(a, b, bias, fast, out, adds, by=self.recipe.scaling)


Arrived = Callable[[str, bool], tuple[Tensor, Tensor]]
"""A function of a weight's name, and of whether it is to be transposed: its values in fp8 and its inverse scale, ()."""
_Versions = list[tuple[Any, ...]]


def _versions(parameters: Sequence[Tensor]) -> _Versions:
    """Place and version of each parameter, which differ once it has moved or changed."""
    return [(p.untyped_storage()._cdata, p.storage_offset(), p._version) for p in parameters]


def _operand(found: Any, dtype: torch.dtype) -> Operand:
    """Make an operand of what quantizers return for a tensor of this dtype."""
    rows = None if found.q is None else Quantized(found.q, found.inverse_scale, dtype)
    return Operand(rows, None if found.q_t is None else Quantized(found.q_t, found.inverse_scale_t, dtype))


def _of_each_row(scale: Tensor | None, values: Tensor | None) -> Tensor | None:
    """(M, K / 128) from scales of 128 x 128 blocks of values (M, K); as kernels leave them, M is contiguous.

    Where 4 does not divide K / 128, versions of PyTorch want different strides of larger blocks' scales.
    """
    if scale is None or values is None:
        return None
    return scale.t().repeat_interleave(SCALED_BLOCK, dim=1)[:, : len(values)].contiguous().t()


def block_products(kernels: str, recipe: Recipe, *, remember: bool = False, ranks: TensorRanks = ALONE) -> Products:
    """The products of a recipe, quantized by plain functions or kernels, as a name in ``config.KERNELS`` says.

    Args:
        remember: keep weights quantized until they change.
        ranks: those that share the matrices.
    """
    if not recipe.quantized:
        return stored(ranks)
    if kernels == "reference":
        return QuantizedProducts(recipe, Quantizers(), remember, ranks)
    from cs336_systems.blocks.fused import QUANTIZERS  # brings Triton along, which not every machine has

    return QuantizedProducts(recipe, QUANTIZERS, remember, ranks)


def _scaled_mm(
    a: Quantized, b: Quantized, bias: Tensor | None, fast: bool, out: Tensor, adds: bool, *, by: str
) -> None:
    """Multiply by the library's product, which with scales by block adds up in fp32 and adds no bias."""
    if by == "tensor" and bias is None:
        multiply_scaled_(out, a.values, b.values.T, (a.scale, b.scale), adds=adds, fast=fast)
        return
    if adds:
        product = torch.empty_like(out)
        _scaled_mm(a, b, bias, fast, product, False, by=by)
        out.add_(product)
        return
    scale_a, scale_b = a.scale, b.scale
    if by == "row":
        scale_b = scale_b.T
    if by == "block":  # along M and N first
        scale_a, scale_b = scale_a.T.contiguous().T, scale_b.T.contiguous()
    how: dict[str, Any] = {"out_dtype": a.dtype, "out": out}
    if by != "block":
        how |= {"bias": bias, "use_fast_accum": fast}
    torch._scaled_mm(a.values, b.values.T, scale_a, scale_b, **how)
    if bias is not None and by == "block":
        out.add_(bias)


def _emulated(a: Quantized, b: Quantized, bias: Tensor | None, fast: bool, out: Tensor, adds: bool, *, by: str) -> None:
    """Multiply quantized values in at least fp32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if by == "block":
        product = (_unscaled(a, wide) @ _unscaled(b, wide).T).to(wide if bias is None else a.dtype)
    else:
        product = a.values.to(wide) @ b.values.to(wide).T * (a.scale.view(-1, 1) * b.scale.view(1, -1))
    if bias is not None:
        product += bias
    if adds:
        product += out
    out.copy_(product)


def _unscaled(x: Quantized, dtype: torch.dtype) -> Tensor:
    """Values times the scale of their block."""
    return x.values.to(dtype) * spread(x.scale, x.values.shape[1])


def spread(scale: Tensor, width: int) -> Tensor:
    """Scales by block, (M, K / 128) rounded up, as one for each number: (M, K) of this width."""
    return scale.repeat_interleave(SCALED_BLOCK, dim=1)[:, :width]
