"""The largest magnitude of each operand of a quantized product, and the functions that compute it and quantize.

Kernels record the largest magnitude of their output; a tensor without a record is read once more to compute it. The
gradient that a block passes to the block below carries its magnitude as an attribute, which autograd keeps with the
tensor; if a hook replaces the tensor or writes to it, the attribute is not used. Tensor ranks agree on the largest
magnitude of all gathered rows before it is used, so that all rows have one scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cs336_systems.blocks.ops import swiglu
from cs336_systems.blocks.products import GATHERED, Maxima
from cs336_systems.kernels import quantize_reference as plain
from cs336_systems.model.tensor_ranks import ALONE, TensorRanks

_HANDED_ON = "_largest_magnitude"
"""An attribute of gradients: the magnitude, () in fp32, and the gradient's version to which it belongs."""


@dataclass(frozen=True)
class FusedQuantizers:
    """Kernels that quantize their result with one scale, and store it only quantized."""

    rms_norm_absmax: Callable[..., Tensor]
    add_rms_norm_absmax: Callable[..., tuple[Tensor, Tensor]]
    rms_norm_quantize: Callable[..., Any]
    empty_slopes: Callable[[Tensor], Tensor]
    """Memory for the slopes of SwiGLU, which ``swiglu_backward_quantize`` reads."""
    swiglu_backward_quantize: Callable[..., Any]


@dataclass(frozen=True)
class Quantizers:
    """The functions that compute magnitudes and quantize, and SwiGLU of gate | up: plain PyTorch or kernels."""

    absmax: Callable[[Tensor], Tensor] = plain.absmax
    row_and_column_absmax: Callable[[Tensor], tuple[Tensor, Tensor]] = plain.row_and_column_absmax
    quantize: Callable[..., Any] = plain.quantize
    quantize_blocks: Callable[..., Any] = plain.quantize_blocks
    transpose_bytes: Callable[[Tensor], Tensor] = plain.transpose_bytes
    parts_quantizer: Callable[..., Any] = plain.PartsQuantizer
    swiglu: Callable[..., Tensor] = swiglu
    raised: bool = False
    """Whether the block's operations record the largest magnitudes of their outputs."""
    fused: FusedQuantizers | None = None


class FoundMaxima(Maxima):
    """Largest magnitudes in fp32, (n,), in the order of the n ``names``.

    Args:
        known: whether the values are final, as ranks agreed on them.
        slopes: SwiGLU's slopes, if forward recorded them.
        ranks: the ranks that hold different rows and agree on the magnitudes of ``GATHERED``.
    """

    def __init__(
        self,
        values: Tensor,
        names: Sequence[str],
        quantizers: Quantizers,
        *,
        known: bool,
        slopes: Tensor | None = None,
        ranks: TensorRanks = ALONE,
    ) -> None:
        self._values, self._quantizers, self.slopes, self._ranks = values, quantizers, slopes, ranks
        self._each = dict(zip(names, values.unbind(), strict=True))
        self._known = set(names if known else ())
        self._of_own_rows = set(() if known else GATHERED)

    def raised(self, name: str) -> dict[str, Tensor]:
        if name in self._known or not self._quantizers.raised:
            return {}
        self._known.add(name)
        return {"absmax": self._each[name]}

    def of(self, name: str, x: Any) -> Tensor:
        if name not in self._known:
            self._known.add(name)
            self._each[name].copy_(self._quantizers.absmax(x))
        if name in self._of_own_rows:
            self._of_own_rows.remove(name)
            self._ranks.largest_(self._each[name])
        return self._each[name]

    def found(self, name: str) -> Tensor:
        """The magnitude that was recorded earlier."""
        assert name in self._known, name
        return self._each[name]

    def hand_on(self, dx: Tensor) -> None:
        if "dx" in self._known:
            setattr(dx, _HANDED_ON, (self._each["dx"], dx._version))

    def take_over(self, dy: Tensor) -> None:
        """Record the largest magnitude that is attached to dy (B, S, D), if there is one."""
        absmax, version = getattr(dy, _HANDED_ON, (None, None))
        if absmax is not None and version == dy._version:
            self._each["dy"] = absmax
            self._known.add("dy")

    def steepest(self, gate_up: Tensor) -> dict[str, Tensor]:
        """The keyword arguments that make SwiGLU record its slopes for backward."""
        if self._quantizers.fused is None:
            return {}
        self.slopes = self._quantizers.fused.empty_slopes(gate_up)
        return {"slopes": self.slopes}

    def kept(self) -> dict[str, Tensor]:
        return {"absmax": self._values} | ({} if self.slopes is None else {"slopes": self.slopes})
