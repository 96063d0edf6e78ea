"""Tiles that Hopper's copy engine (TMA) moves: descriptors of tensors, and rings of tiles in shared memory.

A descriptor holds a tensor's address, up to five dimensions, strides of whole 16 bytes, and the box that one copy
moves. Parts of a box beyond the tensor's end are loaded as zeros and not stored, so no kernel checks rows or columns of
such copies.

A ``Ring`` passes tiles from the producer warp to the consumers. Each of its ``STAGES`` slots has two mbarriers:

    full     completed by the copy engine when the expected number of bytes has arrived
    empty    completed when every consumer that reads the slot has arrived, each once, after its last read

Both count steps: step s uses slot s % STAGES, in the (s // STAGES)-th turn of that slot. An mbarrier stores one parity
bit: waiting for parity p returns once the phase of that parity is complete, and a new barrier counts as having
completed parity 1. So consumers of turn t wait on ``full`` for parity t & 1, and the producer waits on ``empty`` for
parity (t & 1) ^ 1, which returns at once in turn 0.
"""

from typing import Any, dataclass_transform

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate, base_value

ALIGNMENT_BYTES = 16
"""The alignment that the copy engine needs of the first element and of every stride but the last."""
MAX_STRIDE_BYTES = 2**40

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def can_be_copied(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the copy engine can read an aligned tensor of this shape and these strides, in elements."""
    step = ALIGNMENT_BYTES // dtype.itemsize
    limit = MAX_STRIDE_BYTES // dtype.itemsize
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size != 1 and (stride <= 0 or stride % step or stride >= limit):
            return False
    return strides[-1] == 1


def example(dtype: torch.dtype) -> Tensor:
    """A tensor without memory that stands for an aligned one of that dtype while a launch is prepared."""
    return torch.empty(0, dtype=dtype, device="meta")


def descriptor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> TensorDescriptor:
    """A descriptor by which boxes of a tensor, two- or four-dimensional, move to and from swizzled shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _ELEMENT[dtype])
    # The stride of a dimension of one is never used, but must be aligned.
    used = [stride if size > 1 else ALIGNMENT_BYTES for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    return TensorDescriptor(example(dtype), list(shape), [*used, 1], list(box), layout)


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """Make a class a kernel's value: its fields are those that it and its bases annotate, in this order."""
    classes = reversed(cls.__mro__)
    cls.__annotations__ = {k: v for each in classes for k, v in vars(each).get("__annotations__", {}).items()}
    names = gl.constexpr(tuple(cls.__annotations__))  # Triton keys its cache by the constants of a closure only

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(names.value, values, strict=True):
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)


@aggregate
class Ring:
    """Tiles (STAGES, rows, columns) in shared memory, with the barriers of their slots."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def slot(self, step):
        # For powers of two, & is what % gives without its cases for negative steps.
        return step & (self.STAGES - 1) if self.STAGES & (self.STAGES - 1) == 0 else step % self.STAGES

    @gluon.jit
    def parity(self, step):
        if self.STAGES == 1:
            turn = step
        elif self.STAGES == 2:
            turn = step >> 1
        elif self.STAGES == 4:
            turn = step >> 2
        else:
            turn = step // self.STAGES
        return turn & 1

    @gluon.jit
    def begin(self, step, N_BYTES: gl.constexpr):
        """Producer: wait until the slot of this step is free; returns the barrier for copies of N_BYTES in total."""
        slot = self.slot(step)
        full = self.full.index(slot)
        mbarrier.wait(self.empty.index(slot), self.parity(step) ^ 1)
        mbarrier.expect(full, N_BYTES)
        return full

    @gluon.jit
    def load(self, step, descriptor, batch, head, row):
        """Producer: once the slot of this step is free, start copying one (rows, columns) tile of one head into it."""
        full = self.begin(step, descriptor.block_type.nbytes)
        tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], full, self.tiles.index(self.slot(step)))

    @gluon.jit
    def wait(self, step, pred=True):
        """Consumer: wait for the tile of this step, and return it."""
        slot = self.slot(step)
        mbarrier.wait(self.full.index(slot), self.parity(step), pred=pred)
        return self.tiles.index(slot)

    @gluon.jit
    def release(self, step):
        """Consumer: this step's tile has been read for the last time."""
        mbarrier.arrive(self.empty.index(self.slot(step)), count=1)


@gluon.jit
def make_ring(dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, STAGES: gl.constexpr, readers):
    """An empty ring that ``readers`` warpgroups release."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return add_barriers(gl.allocate_shared_memory(dtype, [STAGES, rows, columns], layout), STAGES, readers)


@gluon.jit
def add_barriers(tiles, STAGES: gl.constexpr, readers):
    """A ring whose slots are ``tiles``."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=readers)
    return Ring(tiles, full, empty, STAGES)
