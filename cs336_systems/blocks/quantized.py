"""The four matrix products of a block in fp8: operands are quantized, results have the block's dtype.

    products = block_products("reference", Recipe("e4m3"))
    y = forward(x, weights, saved, REFERENCE, config, cos, sin, products=products)

Scaling is current: each scale is computed from the tensor itself. Hopper's fp8 products sum over the last dimension of
both operands. So a matrix that is read both by rows and by columns is stored in both layouts, in one pass; with one
scale for the whole tensor, the second is the first one's transpose. ``quantized_matmul.py`` multiplies.

Tensor ranks gather bytes. Each rank quantizes its own rows by the largest magnitude on any rank (``maxima.py``), so the
gathered bytes are those of the whole tensor quantized on one rank; its transpose is made from them. Each rank has its
own scale for its weights and for what it computes from its own heads or its own part of the feed-forward width.

Weights are quantized at each use, or, with ``remember``, once until they change. A change shows in the parameters'
versions, which in-place operations and ``FusedAdamW`` raise. Collectives into flat memory and replayed graphs write
without raising them; their caller must (``torch.autograd.graph.increment_version``), as ``training.TrainStep`` does.
Frozen weights (with adapters) exist only in fp8 after their first use, in two layouts: two bytes per number. Under FSDP
weights must not be remembered, as it refills the same parameters in each pass. FSDP may quantize weights itself and
pass them in (``receive``), as ``distributed/fsdp_quantized.py`` does to send half the bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks.maxima import FoundMaxima, FusedQuantizers, Quantizers
from cs336_systems.blocks.ops import BlockOps
from cs336_systems.blocks.products import NONE, Maxima, Operand, Products, stored
from cs336_systems.blocks.quantized_matmul import Quantized, multiply, spread
from cs336_systems.config import Recipe
from cs336_systems.costs.kept import SCALED_BLOCK
from cs336_systems.kernels.lora_reference import LowRank, Scaled
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

ACTIVATIONS = ("normed1", "attended", "normed2", "product")
GRADIENTS = ("dy", "dgate_up", "dresidual", "dqkv")
"""Names of the activations and gradients that products read."""
WEIGHTS = ("qkv", "output", "gate_up", "down")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class UnstoredNorm:
    """RMSNorm of x (R, D), which is computed while it is quantized, and stored only quantized."""

    x_RD: Tensor
    gain_D: Tensor
    rstd_R: Tensor


class QuantizedProducts(Products):
    """Products in fp8 by a recipe.

    Args:
        remember: keep weights quantized until they change.
        ranks: the tensor ranks that share the block's matrices; each tensor that they gather has one scale.
    """

    quantized = True

    def __init__(self, recipe: Recipe, quantizers: Quantizers, remember: bool, ranks: TensorRanks = ALONE) -> None:
        assert ranks.n_ranks == 1 or recipe.scaling == "tensor", recipe
        super().__init__(ranks)
        self.recipe, self.quantizers, self.remember = recipe, quantizers, remember
        self._weights: dict[str, Operand] = {}
        self._versions: list[tuple[Any, ...]] = []
        self.frozen = False
        """Whether weights never change. The unquantized memory of remembered weights is then freed."""
        self.arrived: Arrived | None = None
        """Returns weights that FSDP has quantized and gathered; None if weights are quantized here."""

    @property
    def adds_apart(self) -> bool:  # type: ignore[override]
        """True if cuBLASLt adds, which rounds a product first if it adds in place (``kernels/cublaslt.py``)."""
        return self.ranks.n_ranks == 1 and self.recipe.scaling == "tensor"

    def for_another_block(self) -> "QuantizedProducts":
        """Make equal products with their own memory of weights."""
        return QuantizedProducts(self.recipe, self.quantizers, self.remember, self.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the remembered weights."""
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
        return self._read_in(FORMATS[self.recipe.matmul], name, x_RK, maxima, rows, columns)

    def read_gradient(self, name: str, dy_RN: Tensor, maxima: Maxima, *, columns: bool = True) -> Operand:
        return self._read_in(FORMATS[self.recipe.gradient], name, dy_RN, maxima, True, columns)

    def _read_in(self, dtype: torch.dtype, name: str, x: Any, maxima: Maxima, rows: bool, columns: bool) -> Operand:
        absmax, gathers = maxima.of(name, x), self.gathers(name)
        own_rows, own_columns = (True, False) if gathers else (rows, columns)
        if isinstance(x, UnstoredNorm):
            assert self._fused is not None and absmax is not None
            norm, how = (x.x_RD, x.gain_D, x.rstd_R), {"rows": own_rows, "transposed": own_columns}
            operand = _operand(self._fused.rms_norm_quantize(*norm, absmax, dtype, **how), x.x_RD.dtype)
        else:
            operand = self._quantize(x, dtype, own_rows, own_columns, absmax)
        return self._gather(operand, columns) if gathers else operand

    def _gather(self, operand: Operand, columns: bool) -> Operand:
        """All ranks' rows of an operand; this rank's rows have the scale that all ranks agreed on."""
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
        versions = [(p.untyped_storage()._cdata, p.storage_offset(), p._version) for p in parameters]
        if versions != self._versions:
            self._versions = versions
            self._weights.clear()

    def receive(self, arrived: "Arrived") -> None:
        """Read weights from this function from now on; the parameters need no memory then."""
        self.arrived = arrived

    def forward_(self, ops: BlockOps, out: Tensor, x: Operand, weight: Quantized, bias: Tensor | None = None) -> None:
        for part, rows in x.parts():
            multiply(rows, weight, bias, fast=self.recipe.fast_accumulation, out=out[part], by=self.recipe.scaling)

    def sum_forward(self, ops: BlockOps, x: Operand, weight: Quantized) -> Tensor:
        return self._sum(x, weight, fast=self.recipe.fast_accumulation)

    def _sum(self, x: Operand, weight: Quantized, *, fast: bool = False) -> Tensor:
        """Own rows of the ranks' sum of x W^T."""

        def compute(out: Tensor, rows: slice) -> None:
            multiply(x.rows[rows], weight, fast=fast, out=out, by=self.recipe.scaling)

        return self.ranks.sums(compute, x.rows.empty(0), len(weight.values))

    def add_forward_(self, ops: BlockOps, out: Tensor, base: Tensor, x: Operand, weight: Quantized) -> None:
        if self.ranks.n_ranks == 1:
            multiply(x.rows, weight, addend=base, out=out, by=self.recipe.scaling, fast=self.recipe.fast_accumulation)
        else:
            torch.add(base, self.sum_forward(ops, x, weight), out=out)

    def swiglu_forward_(
        self, ops: BlockOps, gate_up: Tensor, x: Operand, weight: Quantized, maxima: Maxima, low: LowRank | None = None
    ) -> Tensor:
        self.forward_(ops, gate_up, x, weight)
        if low is not None:
            ops.lora_expand_(gate_up, low)
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
            multiply(rows, weight, out=dx[part], by=self.recipe.scaling)
        return dx

    def sum_backward(self, ops: BlockOps, dy: Operand, weight: Quantized) -> Tensor:
        return self._sum(dy, weight)

    def backward_weight_(self, ops: BlockOps, gradient: Tensor, dy: Quantized, x: Quantized, accumulate: bool) -> None:
        multiply(dy, x, addend=gradient if accumulate else None, out=gradient, by=self.recipe.scaling)

    def by_rows(self, x: Operand) -> Scaled:
        x.wait()
        return self._scaled(x.rows)

    def by_columns(self, x: Operand) -> Scaled:
        values, scale = self._scaled(x.whole_columns())
        return Scaled(values.T, scale)

    def _scaled(self, x: Quantized) -> Scaled:
        """Several scales are applied here; a single scale is left for the reader to apply."""
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
        """Quantize x; with ``square``, each scale by block covers 128 x 128 numbers."""
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


Arrived = Callable[[str, bool], tuple[Tensor, Tensor]]
"""(a weight's name, whether to transpose it) -> (its fp8 values, its inverse scale ())."""


def _operand(found: Any, dtype: torch.dtype) -> Operand:
    """Make an operand from a quantizer's result for a tensor of this dtype."""
    rows = None if found.q is None else Quantized(found.q, found.inverse_scale, dtype)
    return Operand(rows, None if found.q_t is None else Quantized(found.q_t, found.inverse_scale_t, dtype))


def _of_each_row(scale: Tensor | None, values: Tensor | None) -> Tensor | None:
    """Scales (M, K / 128) from those of 128 x 128 blocks of values (M, K); M is contiguous, as kernels leave it.

    PyTorch versions disagree on the strides of 128 x 128 blocks' scales where 4 does not divide K / 128.
    """
    if scale is None or values is None:
        return None
    return scale.t().repeat_interleave(SCALED_BLOCK, dim=1)[:, : len(values)].contiguous().t()


def block_products(kernels: str, recipe: Recipe, *, remember: bool = False, ranks: TensorRanks = ALONE) -> Products:
    """The products of a recipe, quantized by plain functions or kernels.

    Args:
        kernels: a name in ``config.KERNELS``.
        remember: keep weights quantized until they change.
        ranks: the tensor ranks that share the matrices.
    """
    if not recipe.quantized:
        return stored(ranks)
    if kernels == "reference":
        return QuantizedProducts(recipe, Quantizers(), remember, ranks)
    from cs336_systems.blocks.fused import QUANTIZERS  # imports Triton, which not every machine has

    return QuantizedProducts(recipe, QUANTIZERS, remember, ranks)
