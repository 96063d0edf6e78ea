"""Torch's own context parallelism: the peer of ``context.py``.

    with sharing_by_torch(mesh.devices["context"], length, "torch") as own:   # the positions of this rank's tokens
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)           # of these tokens, over whole sequences
        o.backward(do)                                                        # inside as well

A rank holds the tokens of ``zigzag``, which torch calls head and tail. It attends to its own keys while those of others
come: in order ``torch`` from the neighbour on a ring, in ``torch-gathered`` from all ranks at once. Gradients of keys
go round the ring in both, in fp32 and whole, also where a rank has used half of the keys. Query heads may share
key/value heads. Torch has kernels for this on CUDA alone, and changes an attention that is called as
``F.scaled_dot_product_attention`` anywhere in the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method

_ROTATE_METHODS = {"torch": "alltoall", "torch-gathered": "allgather"}


@contextmanager
def sharing_by_torch(ranks: DeviceMesh, length: int, order: str) -> Iterator[Tensor]:
    """Let torch's attention be over whole sequences that the ranks of a mesh of one dimension share; a collective.

    Args:
        length: tokens of a whole sequence.
        order: one of ``TORCH_CONTEXT_ORDERS``.

    Yields:
        The positions of the tokens that this rank holds: int64 (length / ranks,), on the mesh's device.
    """
    set_rotate_method(_ROTATE_METHODS[order])
    positions = torch.arange(length, device=ranks.device_type)
    sharing = context_parallel(ranks, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions})
    sharing.__enter__()  # which leaves torch's attention changed if an exception passes through it
    try:
        yield positions
    finally:
        sharing.__exit__(None, None, None)
