"""Matrices that travel in eight bits: half the bytes of bf16, and what arrives is what their products would have made.

    FSDP(model, units=is_block, quantized=lambda unit: QuantizedTravel(...) if ... else None)

A unit whose matrices are all read quantized, with one scale each, by nothing but products, has no use for them in bf16.
So each rank quantizes its rows, by the largest magnitude of the whole matrix, on which the ranks agree first (a
reduction of one number for each matrix), and bytes are gathered. Rounding element by element they are the same bits as
those of the whole, quantized. The transposed copy is made of the bytes that arrived, when it is first asked for.
Rows of all matrices of a unit are quantized together: in a step's first forward the host does little else than launch.

A rank keeps its bytes until rows of the group have changed on some rank, so that micro-batches share them, forward and
backward as well. A change is seen by the shards' versions when a forward or a backward begins or ends; who writes
shards without raising versions must raise them (``torch.autograd.graph.increment_version``).

The unsharded parameters are then names without memory: they have shape and dtype, autograd hangs their gradients on
them, and whoever reads their values reads nothing. ``deliver`` tells the unit where the bytes are.

Limits: ranks divide the rows of every parameter evenly, into shards of multiples of 16 elements; others travel as
stored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup
from cs336_systems.distributed.neighbours import alias

_QUANTUM = 16
"""What divides the elements of a shard that is quantized."""
_SCALE_STRIDE = 4
"""fp32 numbers from one scale to the next: cuBLAS refused those whose addresses were no multiples of 16 bytes."""


class RowsQuantizer(Protocol):
    """Quantizes a rank's rows of some matrices, as ``kernels.quantize_reference.PartsQuantizer``."""

    def absmax(self) -> Tensor:
        """The largest magnitude of each matrix in these rows, fp32, without sign where it is NaN."""

    def quantize_(self, absmax: Tensor) -> None:
        """Write bytes and inverse scales, by the largest magnitudes of the whole matrices."""


@dataclass(frozen=True)
class QuantizedTravel:
    """How the matrices of a unit are quantized.

    Attributes:
        matrices: by name the parameters of the unit that are its rows, one after the other, by their names in it.
        dtype: of eight bits.
        quantizer: makes one of (rows, bytes and number of a matrix for each parameter; inverse scales; ``dtype``; the
            dtype that rows are rounded to first).
        transpose: a matrix (N, K) of ``dtype`` to (K, N), row-major.
        deliver: takes the function from a matrix's name and whether it is to be transposed to (values, inverse scale).
    """

    matrices: Mapping[str, Sequence[str]]
    dtype: torch.dtype
    quantizer: Callable[[Sequence[tuple[Tensor, Tensor, int]], Tensor, torch.dtype, torch.dtype], RowsQuantizer]
    transpose: Callable[[Tensor], Tensor]
    deliver: Callable[[Callable[[str, bool], tuple[Tensor, Tensor]]], None]

    def serves(self, parameters: Sequence[Tensor], world_size: int) -> bool:
        """Whether ranks can quantize their rows of all these."""
        n_parts = sum(map(len, self.matrices.values()))
        return len(parameters) == n_parts and all(
            p.shape[0] % world_size == 0 and p.numel() // world_size % _QUANTUM == 0 for p in parameters
        )


class QuantizedGroup(ShardedGroup):
    """A group of the parameters of one unit, all of which travel quantized; arguments as ``ShardedGroup``."""

    _travels_as_stored = False

    def __init__(
        self, travel: QuantizedTravel, names: Sequence[tuple[str, ...]], parameters: Sequence[nn.Parameter], **how: Any
    ) -> None:
        super().__init__(names, parameters, **how)
        self._travel = travel
        self._parts = {name: [_number(names, part) for part in parts] for name, parts in travel.matrices.items()}
        self._arriving = torch.empty_like(self._unsharded, dtype=torch.uint8)
        self._unsharded_bytes = self._arriving.untyped_storage().nbytes()
        self._unsharded, named = self._arriving, self._unsharded
        assert not named.untyped_storage().nbytes()
        self._byte_outputs = [
            alias(self._unsharded, int(out.storage_offset()), out.shape) for out in self._gather_outputs
        ]
        kept = self._read_by_all(self._sharded.numel(), torch.uint8)
        self._copy_to(self._byte_outputs)
        self._unsharded.untyped_storage().resize_(0)
        self._inverse_scales = torch.zeros(len(self._parts), _SCALE_STRIDE, device=self.device)[:, 0]
        self._kept = [kept[slot] for slot in self._slots]
        """This rank's rows in bytes."""
        matrix_of = {i: number for number, parts in enumerate(self._parts.values()) for i in parts}
        pairs = enumerate(zip(self.parameters, self._kept, strict=True))
        rows = [(parameter.memory, own, matrix_of[i]) for i, (parameter, own) in pairs]
        self._quantizer = travel.quantizer(rows, self._inverse_scales, travel.dtype, self.compute_dtype)
        self._kept_of: list[int] | None = None
        """Versions of the shards that they were made of; None before that, and once they are stale."""
        self._transposed: dict[str, Tensor] = {}
        travel.deliver(self.matrix)

    @property
    def stale(self) -> bool:
        return self._kept_of is not None and self._changed_since(self._kept_of)

    def drop_stale(self) -> None:
        super().drop_stale()
        self._kept_of = None

    def _exchanged(self) -> tuple[list[Tensor], list[Tensor]]:
        """In bytes."""
        if self._kept_of is None:
            made_of = self._versions_now()
            self._quantize_rows()
            if self._turns is not None and self._turns.reading:
                self._turns.meet()
            self._kept_of = made_of
        return self._byte_outputs, self._kept

    def _quantize_rows(self) -> None:
        """Make this rank's rows in bytes, once ranks have agreed on the largest magnitudes."""
        maxima = self._quantizer.absmax()
        # As integers, whose order is that of magnitudes, and in which NaN is the largest.
        dist.all_reduce(maxima.view(torch.int32), dist.ReduceOp.MAX, group=self.process_group)
        self._quantizer.quantize_(maxima)

    def free(self) -> None:
        """Give the memory of the bytes back, those of transposed copies too."""
        super().free()
        self._transposed.clear()

    def matrix(self, name: str, transposed: bool) -> tuple[Tensor, Tensor]:
        """(values, inverse scale) of a matrix that is there, by its name."""
        assert self.state is GroupState.UNSHARDED, f"{name} is read before it has arrived"
        scale = self._inverse_scales[list(self._parts).index(name)]
        own = [self.parameters[i] for i in self._parts[name]]
        first, width = self._byte_outputs[self._parts[name][0]], own[0].shape[1]
        n_rows = sum(parameter.shape[0] for parameter in own)
        values = first.as_strided((n_rows, width), (width, 1), first.storage_offset()).view(self._travel.dtype)
        if not transposed:
            return values, scale
        if name not in self._transposed:
            self._transposed[name] = self._travel.transpose(values)
        return self._transposed[name], scale


def _number(names: Sequence[tuple[str, ...]], part: str) -> int:
    """Of the parameter that ends with this name."""
    (found,) = (i for i, own in enumerate(names) if any(f".{name}".endswith(f".{part}") for name in own))
    return found
