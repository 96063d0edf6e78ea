"""A table on the device of the addresses and lengths of tensors, so that one launch serves any number of them.

    table = TensorTable(chunk=8192)
    table.describe([(x.numel(), x.data_ptr()) for x in tensors], device)     # copies to the device only what changed
    kernel[(table.n_chunks,)](table.rows, table.owners, ...)                 # a program per chunk

``rows`` (n_tensors, columns) int64 holds for each tensor its number of elements, its first chunk, and the columns that
the kernel needs; ``owners`` (n_chunks,) int32 holds each chunk's row. A chunk is ``chunk`` elements of one tensor, or
fewer at its end. A program finds its work like this:

    row = rows + tl.load(owners + program) * COLUMNS          # n = row[0], first = row[1]
    start = (program - first) * CHUNK

Addresses are read from memory, so Triton does not know their alignment. A column ``aligned`` gives it: a kernel reads
whole blocks of aligned tensors in 16-byte pieces (``tl.multiple_of``), and ends and other tensors element by element.
The copy does not wait for the device, and the host does not for the copy. AdamW's kernels have an ``UpdateTable``.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.host_memory import check_uncaptured, to_device
from cs336_systems.kernels.launching import ceil_div

ALIGNMENT_BYTES = 16
"""The widest load of a thread."""
ADAMW_CHUNK = 4096
"""Elements per program of AdamW: 64 KiB of traffic, compared with a microsecond or two to look up the row."""
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

HYPERPARAMETERS = tl.constexpr(5)
"""lr, beta1, beta2, eps, weight_decay of a tensor, fp64."""
COEFFICIENTS = tl.constexpr(8)
"""beta1, 1 - beta1, beta2, 1 - beta2, 1 / sqrt(1 - beta2^t), eps, 1 - lr weight_decay, lr / (1 - beta1^t), fp32."""


class TensorTable:
    """A table with a row for each tensor on one device, kept there from call to call.

    Args:
        chunk: elements per program.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.n_chunks = 0
        self._described: list[tuple[int, ...]] = []
        self._device: torch.device | None = None

    def describe(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Make the table hold ``rows``: for each tensor its number of elements and the kernel's columns.

        Raises:
            RuntimeError: the rows changed while a CUDA graph is captured.
        """
        rows = list(rows)
        if rows == self._described and device == self._device:
            return
        sizes = [row[0] for row in rows]
        chunks = [ceil_div(n, self.chunk) for n in sizes]
        first = [0, *accumulate(chunks)]
        table = [(n, start, *columns) for (n, *columns), start in zip(rows, first, strict=False)]
        self.rows = to_device(torch.tensor(table, dtype=torch.int64, device="cpu"), device)
        if sizes != [row[0] for row in self._described] or device != self._device:
            owners = torch.arange(len(rows), dtype=torch.int32, device="cpu")
            counts = torch.tensor(chunks, device="cpu")
            self.owners = to_device(owners.repeat_interleave(counts, output_size=first[-1]), device)
        self.n_chunks, self._described, self._device = first[-1], rows, device


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every tensor's address is aligned for a thread's widest load."""
    return all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one contiguous range of memory, with any order of its dimensions."""
    return tensor.layout == torch.strided and torch.ops.aten.is_non_overlapping_and_dense(tensor)


class Update(NamedTuple):
    """One parameter's update: parameter, gradient and moments, dense and of the same shape and layout."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """int64, one element: the steps taken so far."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    number: int = 0
    """The tensor's number among those that share a seed."""
    offset: int = 0
    """Offset of the first element in the whole tensor, of which this may be a shard."""
    seed: int = 0
    master: Tensor | None = None
    """The fp32 master weight of a bf16 parameter: it is updated, and the parameter becomes its rounded copy."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameter, gradient, moments and the master if there is one, by their names here."""
        names = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "master")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of ``tensors``, which all updates of one launch share."""
        return tuple(tensor.dtype for tensor in self.tensors.values())


def _row(update: Update) -> tuple[int, ...]:
    """The number of elements, and the columns that follow FIRST_CHUNK in ``adamw.py``."""
    addresses = [tensor.data_ptr() for tensor in update[:4]]
    aligned = is_aligned(*update.tensors.values()) and update.offset % 2 == 0  # random bits are drawn for pairs
    exact = (update.parameter if update.master is None else update.master).data_ptr()
    rest = (update.step.data_ptr(), update.number, update.offset, update.seed, int(aligned), 0, exact)
    return (update.parameter.numel(), *addresses, *rest)


class UpdateTable:
    """Tables that ``adamw_`` keeps on the device between calls for the same tensors.

    The first holds addresses and the counters of random bits; the second holds hyperparameters, which may change from
    step to step; the third is for the coefficients that the first launch computes from them.
    """

    def __init__(self) -> None:
        self.tensors = TensorTable(ADAMW_CHUNK)
        self._described: list[tuple[float, ...]] = []
        self._device: torch.device | None = None

    def describe(self, updates: Sequence[Update], device: torch.device) -> None:
        """Copy to the device what changed; raises RuntimeError while a CUDA graph is captured."""
        self.tensors.describe([_row(update) for update in updates], device)
        if len(updates) != len(self._described) or device != self._device:
            self.hyperparameters = torch.empty(len(updates), HYPERPARAMETERS.value, dtype=torch.float64, device=device)
            self.unit = torch.ones((), device=device)
            self.coefficients = torch.empty(len(updates), COEFFICIENTS.value, dtype=torch.float32, device=device)
            self._described, self._device = [], device
        self.set_hyperparameters([(u.lr, *u.betas, u.eps, u.weight_decay) for u in updates])

    def set_hyperparameters(self, rows: Sequence[tuple[float, ...]]) -> None:
        """Write each tensor's lr, betas, eps and weight_decay, if any changed, to the memory that kernels read.

        A value that all tensors share, usually the learning rate, is passed as a kernel argument: a copy to the device,
        however small, ends after the copies in flight, which takes 9 ms in a streamed step.

        Raises:
            RuntimeError: they changed while a CUDA graph is captured.
        """
        if list(rows) == self._described:
            return
        assert self._device is not None
        check_uncaptured(self._device)
        now, before = list(zip(*rows, strict=True)), list(zip(*self._described, strict=True))
        changed = [i for i, column in enumerate(now) if not before or column != before[i]]
        if before and all(len(set(now[i])) == 1 for i in changed):
            for i in changed:
                self.hyperparameters[:, i].fill_(now[i][0])
        else:
            host = torch.tensor(rows, dtype=torch.float64, device="cpu")
            self.hyperparameters.copy_(to_device(host, self._device))
        self._described = list(rows)


def check_updates(updates: Sequence[Update], device: torch.device, staged: Collection[str] = ()) -> None:
    """Raise ValueError as ``adamw_`` does for tensors; the fields named in ``staged`` may be on another device."""
    for update in updates:
        _check(update, updates[0].dtypes, device, staged)


def _check(update: Update, dtypes: tuple[torch.dtype, ...], device: torch.device, staged: Collection[str]) -> None:
    parameter = update.parameter
    if update.dtypes != dtypes or dtypes[2] != dtypes[3] or any(dtype not in TRITON_DTYPES for dtype in dtypes):
        raise ValueError(
            "parameters, gradients and moments must be bf16 or fp32, and each the same for all tensors of a launch; "
            f"tensor {update.number} has {', '.join(map(str, update.dtypes))}, the first {', '.join(map(str, dtypes))}"
        )
    if update.master is not None and dtypes[4:] != (torch.float32,):
        raise ValueError(f"the master of tensor {update.number} must be fp32, got {update.master.dtype}")
    for name, tensor in update.tensors.items():
        same = (tensor.is_contiguous() and parameter.is_contiguous()) or tensor.stride() == parameter.stride()
        there = tensor.device == device or name in staged
        if tensor.shape != parameter.shape or not (there and same and is_dense(tensor)):
            raise ValueError(
                f"{name} of tensor {update.number} must lie densely on {device} as its parameter does, "
                f"{tuple(parameter.shape)} with strides {parameter.stride()}, but is "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
    if update.step.dtype != torch.int64 or update.step.numel() != 1 or update.step.device != device:
        raise ValueError(f"step of tensor {update.number} must be one int64 element on {device}, got {update.step!r}")
