"""The four matrix products of a block on tensors as they are stored; quantized ones are in ``quantized.py``.

Each product is y = x W^T. Forward and the two products of its backward sum over another dimension each:

    y  = x W^T        over columns of x and of W       rows of x       times rows of W
    dx = dy W         over columns of dy, rows of W    rows of dy      times columns of W
    dW = dy^T x       over rows of dy and of x         columns of dy   times columns of x

So a matrix is read by its rows or by its columns, and an ``Operand`` holds it in the one or two layouts in which it
will be read. An unquantized matrix can be read in both ways as it is stored, by the products of ``ops.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs336_systems.blocks.ops import BlockOps
from cs336_systems.kernels.lora_reference import LowRank, Scaled
from cs336_systems.model.tensor_ranks import ALONE, EVERYTHING, Arriving, TensorRanks

GATHERED = ("normed1", "normed2", "dy", "dresidual")
"""Names of tensors that each tensor rank computes for its own rows, and of which products read all ranks' rows."""


@dataclass(frozen=True)
class Operand:
    """A matrix (R, K) as products read it: by rows, by columns, or both; None where they do not."""

    rows: Any = None
    columns: Any = None
    arriving: Arriving | None = None
    """How the rows arrive from other ranks, if they do."""
    transpose: Callable[[], Any] | None = None
    """Makes columns from rows that have arrived, if columns are not sent with them."""

    def parts(self) -> Iterator[tuple[slice, Any]]:
        """Yield slices of the rows, and the rows, which have arrived by then."""
        return iter(self.arriving or ((EVERYTHING, self.rows),))

    def wait(self) -> None:
        """Wait for all rows."""
        if self.arriving is not None:
            self.arriving.wait()

    def whole_columns(self) -> Any:
        """Wait for all rows and return the columns; None if ``read`` was told that columns will not be read.

        Columns that are made from rows are made again in each call.
        """
        if self.columns is None and self.transpose is None:
            return None
        self.wait()
        return self.columns if self.transpose is None else self.transpose()


class Maxima:
    """The largest magnitudes of operands, by name, for products that need them; unquantized ones do not."""

    def raised(self, name: str) -> dict[str, Tensor]:
        """The keyword argument that makes the operation that writes this tensor record its largest magnitude."""
        return {}

    def of(self, name: str, x: Any) -> Tensor | None:
        """The largest magnitude of x, recorded earlier or computed now."""
        return None

    def hand_on(self, dx: Tensor) -> None:
        """Attach its magnitude, if recorded, to dx (B, S, D), which is another block's dy."""

    def kept(self) -> dict[str, Tensor]:
        """The magnitudes that are kept for backward, by names of ``costs.kept.kept_names``."""
        return {}


class Products:
    """Products of matrices as they are stored. Quantized products override all methods and read other operands.

    Args:
        ranks: the ranks that share the block's matrices.
    """

    quantized = False
    """Whether operands are kept as ``costs/kept.py`` describes for quantized blocks."""

    adds_apart = False
    """Whether ``add_forward_`` gives other bits if ``out`` is ``base``; then it must not be called so."""

    ranks: TensorRanks = ALONE

    def __init__(self, ranks: TensorRanks = ALONE) -> None:
        self.ranks = ranks

    def gathers(self, name: str) -> bool:
        """Whether the operand of this name that ``read`` or ``read_gradient`` returns has the rows of several ranks."""
        return self.ranks.n_ranks > 1 and name in GATHERED

    def _read(self, name: str, x: Tensor, columns: bool) -> Operand:
        if not self.gathers(name):
            return Operand(x, x)
        arriving = self.ranks.arriving(x, whole=columns)
        return Operand(arriving.whole, arriving.whole if columns else None, arriving)

    def maxima(self, x: Tensor, kept: Mapping[str, Tensor] | None = None) -> Maxima:
        """The magnitudes of activations: to be computed in forward, on x's device, or those that forward kept."""
        return NONE

    def gradient_maxima(self, dy: Tensor) -> Maxima:
        """The magnitudes of gradients, to be computed in backward, except that of dy if it is attached to dy."""
        return NONE

    def norm(
        self,
        ops: BlockOps,
        x_RD: Tensor,
        gain_D: Tensor,
        eps: float,
        raised: Mapping[str, Tensor],
        rstd_R: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        """(RMSNorm of x as an operand, rstd).

        Args:
            raised: the keyword argument of ``Maxima`` for the norm.
            rstd_R: if it is known, and with it the largest magnitude of the result.
        """
        return ops.rms_norm_forward(x_RD, gain_D, eps, **raised)

    def add_norm(
        self, ops: BlockOps, x_RD: Tensor, branch_RD: Tensor, gain_D: Tensor, eps: float, raised: Mapping[str, Tensor]
    ) -> tuple[Tensor, Any, Tensor]:
        """(x + branch, its RMSNorm as an operand, rstd)."""
        return ops.add_rms_norm_forward(x_RD, branch_RD, gain_D, eps, **raised)

    def read(self, name: str, x_RK: Any, maxima: Maxima, *, rows: bool = True, columns: bool = True) -> Operand:
        """An activation by its name among ``maxima``, with the rows of all ranks if it is one of ``GATHERED``.

        ``rows`` and ``columns`` say how it will be read.
        """
        return self._read(name, x_RK, columns)

    def read_gradient(self, name: str, dy_RN: Tensor, maxima: Maxima, *, columns: bool = True) -> Operand:
        """A gradient of an activation, as ``read`` returns it, always read by its rows."""
        return self._read(name, dy_RN, columns)

    def read_weight(self, name: str, weight_NK: Tensor, *, rows: bool = False, columns: bool = False) -> Operand:
        """Read a weight by its name in ``BlockWeights``."""
        return Operand(weight_NK, weight_NK)

    def at(self, parameters: Sequence[Tensor]) -> None:
        """Set the parameters that hold the weights, before a pass reads weights; none if parameters move."""

    def forward_(self, ops: BlockOps, out: Tensor, x: Operand, weight: Any, bias: Tensor | None = None) -> None:
        """x W^T, and a bias for each column."""
        for part, rows in x.parts():
            if bias is None:
                ops.product_(out[part], rows, weight)
            else:
                torch.addmm(bias, rows, weight.T, out=out[part])

    def sum_forward(self, ops: BlockOps, x: Operand, weight: Any) -> Tensor:
        """Own rows of the ranks' sum of x W^T."""
        return self.ranks.sums(lambda out, part: ops.product_(out, x.rows[part], weight), x.rows, weight.shape[0])

    def add_forward_(self, ops: BlockOps, out: Tensor, base: Tensor, x: Operand, weight: Any) -> None:
        """base + own rows of the ranks' sum of x W^T; ``out`` may be ``base``."""
        if self.ranks.n_ranks == 1:
            ops.add_product_(out, base, x.rows, weight)
        else:
            torch.add(base, self.sum_forward(ops, x, weight), out=out)

    def swiglu_forward_(
        self, ops: BlockOps, gate_up: Tensor, x: Operand, weight: Any, maxima: Maxima, low: LowRank | None = None
    ) -> Tensor:
        """SwiGLU of gate | up = x W^T (+ low, if given); also writes gate | up."""
        product = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        assert low is None or x.arriving is None, "an adapter's part has all rows"
        for part, rows in x.parts():
            ops.swiglu_product_(gate_up[part], rows, weight, product[part], low)
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
        """(SwiGLU's product recomputed or None, the gradient of gate | up); both may overwrite the inputs.

        The product is read by its columns; ``columns`` says whether the gradient is, too. If low is given, it is first
        added to dproduct.
        """
        asked: dict[str, Any] = {"with_product": with_product} | gradient_maxima.raised("dgate_up")
        ops.swiglu_backward_(dproduct, gate_up, low=low, **asked)
        product = self.read("product", dproduct, maxima, rows=False) if with_product else None
        return product, self.read_gradient("dgate_up", gate_up, gradient_maxima, columns=columns)

    def backward(self, ops: BlockOps, dy: Operand, weight: Any) -> Tensor:
        """dy W, of rows of dy and columns of W."""
        dx = weight.new_empty(dy.rows.shape[0], weight.shape[1])
        for part, rows in dy.parts():
            ops.product_backward_(dx[part], rows, weight)
        return dx

    def sum_backward(self, ops: BlockOps, dy: Operand, weight: Any) -> Tensor:
        """Own rows of the ranks' sum of dy W."""
        return self.ranks.sums(
            lambda out, part: ops.product_backward_(out, dy.rows[part], weight), dy.rows, weight.shape[1]
        )

    def backward_weight_(self, ops: BlockOps, gradient: Tensor, dy: Any, x: Any, accumulate: bool) -> None:
        """dy^T x, from columns; written into ``gradient``, or added to it."""
        ops.weight_backward_(gradient, dy, x, accumulate)

    def by_rows(self, x: Operand) -> Scaled:
        """A matrix (R, K) for adapters, with the same values as the rows that products read."""
        x.wait()
        return Scaled(x.rows)

    def by_columns(self, x: Operand) -> Scaled:
        """A matrix (R, K) for adapters, with the same values as the columns that products read."""
        return Scaled(x.whole_columns())

    def kept(self, name: str, operand: Operand) -> dict[str, Tensor]:
        """The tensors to keep of one of ``costs.kept.OPERANDS``, by names in ``KEPT``."""
        if operand.columns is not None:  # else only this rank's rows will be read
            operand.wait()
        return {name: operand.rows}

    def recall(self, name: str, tensors: Mapping[str, Tensor]) -> Operand:
        """An operand from the kept tensors, to be read by its columns."""
        return Operand(tensors[name], tensors[name])


NONE = Maxima()
STORED = Products()


def stored(ranks: TensorRanks) -> Products:
    """Unquantized products of matrices that these ranks share."""
    return STORED if ranks.n_ranks == 1 else Products(ranks)
