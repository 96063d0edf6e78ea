"""FSDP gathers matrices in fp8: half the bytes of bf16, and the same bits as quantizing after the gather.

    FSDP(model, units=is_block, quantized=lambda unit: QuantizedTravel(...) if ... else None)

A unit that only uses its matrices in quantized matmuls, with one scale each, does not need them in bf16. So the ranks
first agree on the largest magnitude of each whole matrix, then each rank quantizes its rows, and the fp8 bytes are
gathered. The bits equal those of the whole matrix, quantized. The transposed copy is made from the gathered bytes.

Rows of all units are quantized together when a forward or a backward begins, by a few launches and one collective
(``QuantizedRows``), and only if some rank's rows have changed, so that micro-batches share the bytes. A change is
detected by the shards' versions; code that writes shards must raise them (``torch.autograd.graph.increment_version``).
The unsharded parameters have a shape and a dtype but no memory; autograd attaches gradients to them.

Limits: ranks divide the rows of every parameter evenly, into shards of multiples of 16 elements; other parameters are
sent as stored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.buckets import alias
from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup
from cs336_systems.distributed.peer_memory import Turns

_QUANTUM = 16
"""The number of elements of a quantized shard is a multiple of this, which one instruction converts."""
_SCALE_STRIDE = 4
"""The stride between scales in fp32 numbers: cuBLAS refused scales at addresses that were no multiples of 16 bytes."""


Part = tuple[Tensor, Tensor, int, Tensor]
"""Rows of a parameter, the tensor for their bytes (uint8, as many elements), the number of their matrix, and the tensor
for its inverse scale, () in fp32."""


class PartsQuantizer(Protocol):
    """Quantizes the parts of matrices, and can be called repeatedly; ``kernels.quantize_reference`` has one."""

    def absmax(self) -> Tensor:
        """The largest magnitude of each matrix in these parts, (n_matrices,) fp32; a NaN has its sign bit cleared."""

    def quantize_(self, absmax: Tensor) -> None:
        """Write bytes and inverse scales, given the largest magnitudes of the whole matrices, (n_matrices,) fp32."""


@dataclass(frozen=True)
class QuantizedTravel:
    """How the matrices of a unit are quantized.

    Attributes:
        matrices: for each matrix, the names in the unit of the parameters that are its consecutive rows.
        dtype: an 8-bit dtype.
        make_quantizer: makes a quantizer from (parts, ``dtype``, the dtype that elements are rounded to first).
        transpose: maps a matrix (N, K) of ``dtype`` to (K, N), row-major.
        deliver: receives a function that maps a matrix's name and whether to transpose it to (values, inverse scale).
    """

    matrices: Mapping[str, Sequence[str]]
    dtype: torch.dtype
    make_quantizer: Callable[[Sequence[Part], torch.dtype, torch.dtype], PartsQuantizer]
    transpose: Callable[[Tensor], Tensor]
    deliver: Callable[[Callable[[str, bool], tuple[Tensor, Tensor]]], None]

    def serves(self, parameters: Sequence[Tensor], world_size: int) -> bool:
        """Whether each rank can quantize its rows of all these parameters."""
        n_parts = sum(map(len, self.matrices.values()))
        return len(parameters) == n_parts and all(
            p.shape[0] % world_size == 0 and p.numel() // world_size % _QUANTUM == 0 for p in parameters
        )


class QuantizedRows:
    """This rank's rows of all groups that are sent quantized, and ``turns`` of the ranks that share the groups."""

    def __init__(self, turns: Turns) -> None:
        self.groups: list[QuantizedGroup] = []
        self._turns = turns
        self._quantizers: list[PartsQuantizer] = []  # one quantizer for all groups that are quantized in the same way
        self._made_of: list[int] = []  # versions of the shards from which the bytes were made

    @property
    def stale(self) -> bool:
        """Whether this rank's rows have changed since they were quantized, or never were quantized."""
        return self._made_of != self._versions()

    def _versions(self) -> list[int]:
        return [p.sharded_param._version for group in self.groups for p in group.parameters]

    @torch.no_grad()
    def renew(self) -> None:
        """Quantize the rows; a collective."""
        self._quantizers = self._quantizers or self._make_quantizers()
        self._made_of = self._versions()
        with self._turns.on_stream():
            found = [quantizer.absmax() for quantizer in self._quantizers]
            maxima = torch.cat(found)
            # As integers, which have the order of the magnitudes and in which NaN is the largest.
            dist.all_reduce(maxima.view(torch.int32), dist.ReduceOp.MAX, group=self._turns.group)
            for quantizer, own in zip(self._quantizers, maxima.split([len(x) for x in found]), strict=True):
                quantizer.quantize_(own)

    def _make_quantizers(self) -> list[PartsQuantizer]:
        alike: dict[Any, list[QuantizedGroup]] = {}
        for group in self.groups:
            travel = group.travel
            alike.setdefault((travel.make_quantizer, travel.dtype, group.dtype, group.compute_dtype), []).append(group)
        quantizers = []
        for (make, dtype, _, rounded_to), own in alike.items():
            matrices = [(group, name) for group in own for name in group.travel.matrices]
            parts = [part for number, (group, name) in enumerate(matrices) for part in group.parts(name, number)]
            quantizers.append(make(parts, dtype, rounded_to))
        return quantizers


class QuantizedGroup(ShardedGroup):
    """A group of the parameters of one unit, all sent quantized; ``rows`` are those of all such groups of a module."""

    _travels_as_stored = False

    def __init__(
        self,
        travel: QuantizedTravel,
        rows: QuantizedRows,
        names: Sequence[tuple[str, ...]],
        parameters: Sequence[nn.Parameter],
        **how: Any,
    ) -> None:
        super().__init__(names, parameters, **how)
        self.travel = travel
        self._parts = {name: [_number(names, part) for part in parts] for name, parts in travel.matrices.items()}
        self._arriving = torch.empty_like(self._unsharded, dtype=torch.uint8)
        self._unsharded_bytes = self._arriving.untyped_storage().nbytes()
        self._unsharded, named = self._arriving, self._unsharded
        assert not named.untyped_storage().nbytes()
        self._byte_outputs = [
            alias(self._unsharded, int(out.storage_offset()), out.shape) for out in self._gather_outputs
        ]
        kept = self._read_by_all(self._sharded.numel(), torch.uint8)
        self._plan_copies(self._byte_outputs)
        self._unsharded.untyped_storage().resize_(0)
        scales = torch.zeros(len(self._parts), _SCALE_STRIDE, device=self.device)[:, 0].unbind()
        self._inverse_scales = dict(zip(self._parts, scales, strict=True))
        self._kept = [kept[slot] for slot in self._slots]  # this rank's rows in bytes
        self._transposed: dict[str, Tensor] = {}
        rows.groups.append(self)
        travel.deliver(self.matrix)

    def parts(self, name: str, number: int) -> list[Part]:
        """This rank's rows of the matrix with this number among the matrices of all groups."""
        scale = self._inverse_scales[name]
        return [(self.parameters[i].memory, self._kept[i], number, scale) for i in self._parts[name]]

    def _exchanged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Flat tensors that receive the bytes of each parameter, and the bytes of this rank's rows."""
        return self._byte_outputs, self._kept

    def free(self) -> None:
        """Free the memory of the bytes and of their transposed copies."""
        super().free()
        self._transposed.clear()

    def matrix(self, name: str, transposed: bool) -> tuple[Tensor, Tensor]:
        """Return (values, inverse scale) of a gathered matrix by its name."""
        assert self.state is GroupState.UNSHARDED, f"{name} is read before it has arrived"
        scale = self._inverse_scales[name]
        own = [self.parameters[i] for i in self._parts[name]]
        first, width = self._byte_outputs[self._parts[name][0]], own[0].shape[1]
        n_rows = sum(parameter.shape[0] for parameter in own)
        values = first.as_strided((n_rows, width), (width, 1), first.storage_offset()).view(self.travel.dtype)
        if not transposed:
            return values, scale
        if name not in self._transposed:
            self._transposed[name] = self.travel.transpose(values)
        return self._transposed[name], scale


def _number(names: Sequence[tuple[str, ...]], part: str) -> int:
    """The number of the parameter that ends with this name."""
    (found,) = (i for i, own in enumerate(names) if any(f".{name}".endswith(f".{part}") for name in own))
    return found
