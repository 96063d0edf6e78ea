"""Torch's own context parallelism: the peer of ``context.py``.

    with sharing_by_torch(mesh.devices["context"], length, "torch") as own:   # the positions of this rank's tokens
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)           # of these tokens, over whole sequences
        o.backward(do)                                                        # inside the context, too

A rank holds the tokens of the order ``zigzag``, torch's "head-tail". It attends to its own keys while it receives
others: in order ``torch`` from its neighbour on a ring, in ``torch-gathered`` by an all-gather. In both, gradients of
all keys are sent around the ring in fp32, even if a rank has used only half of the keys. Query heads may share
key/value heads. Torch has kernels for this only on CUDA, and changes every call of
``F.scaled_dot_product_attention`` in the process.
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
    """Make torch's attention cover whole sequences divided over the ranks of a 1-D mesh; a collective.

    Args:
        length: tokens of a whole sequence.
        order: one of ``TORCH_CONTEXT_ORDERS``.

    Yields:
        The positions of the tokens that this rank holds: int64 (length / ranks,), on the mesh's device.
    """
    set_rotate_method(_ROTATE_METHODS[order])
    positions = torch.arange(length, device=ranks.device_type)
    sharing = context_parallel(ranks, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions})
    sharing.__enter__()  # not ``with``: an exception passing through torch's context leaves attention changed
    try:
        yield positions
    finally:
        sharing.__exit__(None, None, None)
