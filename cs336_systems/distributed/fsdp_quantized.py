"""Matrices that travel in eight bits: half the bytes of bf16, and what arrives is what their products would have made.

    FSDP(model, units=is_block, quantized=lambda unit: QuantizedTravel(...) if ... else None)

A unit that loads all its matrices quantized, with one scale each, for nothing but matmuls, has no use for them in
bf16. So each rank quantizes its rows, by the largest magnitudes of whole matrices, on which the ranks agree first, and
bytes are gathered. Rounding goes element by element, so the bits are those of the whole, quantized. The transposed copy
is made of the bytes that arrived, when it is first asked for.

Rows of all units are quantized together, as a forward or a backward begins, by a few launches and one collective
(``QuantizedRows``). A rank keeps its bytes until rows have changed on some rank, so that micro-batches share them,
forward and backward as well. A change is seen by the shards' versions when a forward or a backward begins or ends;
code that writes shards must raise them (``torch.autograd.graph.increment_version``).

The unsharded parameters have no memory then, only shape and dtype, and autograd hangs their gradients on them.
``deliver`` tells the unit where the bytes are.

Limits: ranks divide the rows of every parameter evenly, into shards of multiples of 16 elements; others travel as
stored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.fsdp_parameters import GroupState, ShardedGroup, on_stream
from cs336_systems.distributed.neighbours import alias

_QUANTUM = 16
"""The number of elements of a shard that is quantized is a multiple of this: what one instruction converts."""
_SCALE_STRIDE = 4
"""fp32 numbers from one scale to the next: cuBLAS refused those whose addresses were no multiples of 16 bytes."""


Part = tuple[Tensor, Tensor, int, Tensor]
"""Rows of a parameter, the place of their bytes (uint8, as many elements), the number of their matrix, and the place of
its inverse scale, () in fp32."""


class PartsQuantizer(Protocol):
    """Quantizes matrices in parts, as often as it is called; ``kernels.quantize_reference`` has one."""

    def absmax(self) -> Tensor:
        """The largest magnitude of each matrix in these parts, (n_matrices,) fp32, without sign where it is NaN."""

    def quantize_(self, absmax: Tensor) -> None:
        """Write bytes and inverse scales, by the largest magnitudes of the whole matrices, (n_matrices,) fp32."""


@dataclass(frozen=True)
class QuantizedTravel:
    """How the matrices of a unit are quantized.

    Attributes:
        matrices: by name the parameters of the unit that are its rows, one after the other, by their names in it.
        dtype: of eight bits.
        make_quantizer: makes one of (parts, ``dtype``, the dtype that elements are rounded to first).
        transpose: a matrix (N, K) of ``dtype`` to (K, N), row-major.
        deliver: takes the function from a matrix's name and whether it is to be transposed to (values, inverse scale).
    """

    matrices: Mapping[str, Sequence[str]]
    dtype: torch.dtype
    make_quantizer: Callable[[Sequence[Part], torch.dtype, torch.dtype], PartsQuantizer]
    transpose: Callable[[Tensor], Tensor]
    deliver: Callable[[Callable[[str, bool], tuple[Tensor, Tensor]]], None]

    def serves(self, parameters: Sequence[Tensor], world_size: int) -> bool:
        """Whether ranks can quantize their rows of all these parameters."""
        n_parts = sum(map(len, self.matrices.values()))
        return len(parameters) == n_parts and all(
            p.shape[0] % world_size == 0 and p.numel() // world_size % _QUANTUM == 0 for p in parameters
        )


class QuantizedRows:
    """This rank's rows of all groups that travel quantized; those that have changed are quantized together.

    Args:
        process_group: of the ranks that share the groups.
        stream: where rows are quantized, as those of ``ShardedGroup``.
    """

    def __init__(self, process_group: dist.ProcessGroup, stream: "torch.cuda.Stream | None") -> None:
        self.groups: list[QuantizedGroup] = []
        self._process_group, self._stream = process_group, stream
        self._quantized: list[QuantizedGroup] = []
        """The groups that ``_quantizers`` are for."""
        self._quantizers: list[PartsQuantizer] = []

    @torch.no_grad()
    def renew(self) -> None:
        """Quantize the rows of all groups without bytes, the same on all ranks; a collective if there are some.

        Raises:
            RuntimeError: the user has assigned to the ``data`` of a shard what is unlike it.
        """
        groups = [group for group in self.groups if not group.has_bytes]
        if not groups:
            return
        try:
            versions, found = self._read(groups)
        except Exception:  # the other ranks wait for this one in the exchange
            n_matrices = sum(len(group.travel.matrices) for group in groups)
            self._exchange(torch.zeros(n_matrices, dtype=torch.float32, device=groups[0].device))
            raise
        with on_stream(self._stream):
            self._exchange(maxima := torch.cat(found))
            for quantizer, own in zip(self._quantizers, maxima.split([len(x) for x in found]), strict=True):
                quantizer.quantize_(own)
        for group, made_of in zip(groups, versions, strict=True):
            group.note_bytes(made_of)

    def _read(self, groups: "list[QuantizedGroup]") -> tuple[list[list[int]], list[Tensor]]:
        """The versions of each group's shards, and each quantizer's largest magnitudes, (n_matrices,) fp32."""
        for group in groups:
            group.adopt_data()
        versions = [group.versions_now() for group in groups]
        if groups != self._quantized:
            self._quantizers = self._make_quantizers(groups)
            self._quantized = groups
        with on_stream(self._stream):
            return versions, [quantizer.absmax() for quantizer in self._quantizers]

    def _exchange(self, maxima: Tensor) -> None:
        """Take the largest of all ranks, (n_matrices,) fp32, in place, on the current stream."""
        # As integers, whose order is that of magnitudes, and in which NaN is the largest.
        dist.all_reduce(maxima.view(torch.int32), dist.ReduceOp.MAX, group=self._process_group)

    def _make_quantizers(self, groups: "list[QuantizedGroup]") -> list[PartsQuantizer]:
        """Make one quantizer for all groups that are quantized in the same way."""
        alike: dict[Any, list[QuantizedGroup]] = {}
        for group in groups:
            travel, stored = group.travel, group.parameters[0].memory.dtype
            alike.setdefault((travel.make_quantizer, travel.dtype, stored, group.compute_dtype), []).append(group)
        quantizers = []
        for (make, dtype, _, rounded_to), own in alike.items():
            parts: list[Part] = []
            n_matrices = 0
            for group in own:
                parts += group.parts(n_matrices)
                n_matrices += len(group.travel.matrices)
            quantizers.append(make(parts, dtype, rounded_to))
        return quantizers


class QuantizedGroup(ShardedGroup):
    """A group of the parameters of one unit, all of which travel quantized; arguments as ``ShardedGroup``.

    Args:
        travel: how.
        rows: all such groups of a module.
    """

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
        self.travel, self._rows = travel, rows
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
        self._inverse_scales = torch.zeros(len(self._parts), _SCALE_STRIDE, device=self.device)[:, 0].unbind()
        self._kept = [kept[slot] for slot in self._slots]
        """This rank's rows in bytes."""
        self._kept_of: list[int] | None = None
        """Versions of the shards that they were made of; None before that, and once they are stale."""
        self._transposed: dict[str, Tensor] = {}
        rows.groups.append(self)
        travel.deliver(self.matrix)

    @property
    def stale(self) -> bool:
        return self._kept_of is None or self._changed_since(self._kept_of)  # none on one rank, after an error, on all

    def drop_stale(self) -> None:
        super().drop_stale()
        self._kept_of = None

    @property
    def has_bytes(self) -> bool:
        """Whether this rank's rows are there in bytes; those of older values are given up once they are seen."""
        return self._kept_of is not None

    def note_bytes(self, made_of: list[int]) -> None:
        """Note that the bytes are there, made of the shards of these versions."""
        self._kept_of = made_of

    def parts(self, first_matrix: int) -> list[Part]:
        """This rank's rows; the group's matrices are numbered from ``first_matrix`` on."""
        return [
            (self.parameters[i].memory, self._kept[i], number, self._inverse_scales[number - first_matrix])
            for number, numbers in enumerate(self._parts.values(), first_matrix)
            for i in numbers
        ]

    def _exchanged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Flat tensors in which the bytes of each parameter arrive, and those of this rank's rows."""
        if not self.has_bytes:  # outside of a forward, or of rows that changed within
            self._rows.renew()
            if self._turns.reading:
                self._turns.meet()
        return self._byte_outputs, self._kept

    def free(self) -> None:
        """Give the memory of the bytes back, those of transposed copies too."""
        super().free()
        self._transposed.clear()

    def matrix(self, name: str, transposed: bool) -> tuple[Tensor, Tensor]:
        """Return (values, inverse scale) of a gathered matrix by its name."""
        assert self.state is GroupState.UNSHARDED, f"{name} is read before it has arrived"
        scale = self._inverse_scales[list(self._parts).index(name)]
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
