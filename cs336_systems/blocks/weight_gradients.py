"""Writes the gradients of a block's weights in its backward, or defers those of matrices."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cs336_systems.blocks.products import Operand
from cs336_systems.blocks.saved import low_rank_name
from cs336_systems.blocks.stages import Stages
from cs336_systems.blocks.weights import BlockGradients
from cs336_systems.kernels.lora_reference import LowRank

Later = list[Callable[[BlockGradients, bool], None]]
"""Functions that compute gradients of matrices, given their memory and whether to accumulate into it."""


@dataclass(frozen=True)
class GradientWriter:
    """Writes gradients of weights, or adds to them."""

    gradients: BlockGradients
    stages: Stages
    accumulate: bool
    later: Later | None
    """Receives the matrices' gradients as functions; None if they are computed at once."""

    def product(self, name: str, dy_RN: Operand, x_RM: Operand) -> None:
        """Write the gradient of W in y = x W^T."""
        if getattr(self.gradients, name) is None:
            return
        products, ops, dy, x = self.stages.products, self.stages.ops, dy_RN.whole_columns(), x_RM.whole_columns()

        def write(gradients: BlockGradients, accumulate: bool) -> None:
            products.backward_weight_(ops, getattr(gradients, name), dy, x, accumulate)

        self._now_or_later(write)

    def wants(self, name: str) -> bool:
        """Whether the matrix or its adapter gets a gradient, for which the product's operand is read."""
        return any(getattr(self.gradients, each) is not None for each in (name, f"{name}_a", f"{name}_b"))

    def adapter(self, name: str, dy_RN: Operand, x_RM: Operand, low: LowRank | None) -> None:
        """Write the gradients of the matrix's adapter, if it has one; ``low`` is the result of
        ``Stages.addition_backward``."""
        adapter = self.stages.adapter(name)
        if adapter is None or low is None:
            return
        products, ops, h = self.stages.products, self.stages.ops, self.stages.low_rank.get(low_rank_name(name))
        if h is None:  # a streamed step keeps none
            h = adapter.forward(ops, products.by_columns(x_RM))
        read = products.by_columns(x_RM), products.by_rows(dy_RN), h, low.h, adapter.widths

        def write(gradients: BlockGradients, accumulate: bool) -> None:
            da, db = (getattr(gradients, f"{name}_{each}") for each in "ab")
            ops.lora_gradients_(da, db, *read, accumulate)

        self._now_or_later(write)

    def _now_or_later(self, write: Callable[[BlockGradients, bool], None]) -> None:
        # ``write`` must not refer to this writer, whose list it may join: the cycle would keep activations alive until
        # Python's collector runs.
        if self.later is None:
            write(self.gradients, self.accumulate)
        else:
            self.later.append(write)

    def vector(self, gradient: Tensor | None, value: Tensor) -> None:
        """Write the gradient of a gain or a bias."""
        if gradient is not None:
            (gradient.add_ if self.accumulate else gradient.copy_)(value)
